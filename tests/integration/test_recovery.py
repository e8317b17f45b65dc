"""Real peers die, freeze and leave at named moments; the run finishes, and each sample is counted once."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.joining import Peers
from ravnest.hub.events import Collect, Received, Send
from ravnest.hub.news import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    Joined,
    Leaving,
    Left,
    NotCheckpointed,
    Recovered,
    Trained,
    WorkLost,
)
from ravnest.job.result import Result
from ravnest.protocol import RoundCommit, RoundOpen, RoundReady
from tests.support.as_root import call, fill, networks, small_disk
from tests.support.faults import (
    EPOCHS,
    FLOPS_PER_SECOND,
    NUM_SAMPLES,
    Step,
    Story,
    check,
    is_news,
    make_job,
    swarm,
)
from tests.support.small_swarm import BARE_JOIN, ROOT

NUM_PEERS = 7  # two clusters of three, and a spare
LOSS_RATIO = 1.5  # over the worst of two undisturbed runs

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.hub.server.GRACE_SECONDS", 1.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The worst loss of runs without a fault."""
    losses = []
    for seed in range(2):
        story = Story([])
        result = train(story, tmp_path_factory.mktemp("undisturbed"), seed=seed)
        assert story.of(Left, ClusterBroken, WorkLost) == []
        losses.append(check(story, result))
    return max(losses)


def train(story: Story, folder: Path, **options: Any) -> Result:
    with swarm(story, folder, NUM_PEERS) as hub:
        return hub.fit(make_job(**options), nodes=NUM_PEERS)


def finish(story: Story, folder: Path, undisturbed: float, epochs: int = EPOCHS) -> None:
    """Train, and check what must hold whatever happened."""
    result = train(story, folder, epochs=epochs)
    assert check(story, result, epochs) < LOSS_RATIO * undisturbed
    for what, seconds in story.recovery_seconds():
        sys.stderr.write(f"{what}: whole again after {seconds:.2f} s\n")
        assert seconds < 30
    assert story.of(WorkLost) == []


def kill(role: int, cluster: int = 0) -> Callable[[Story], None]:
    return lambda story: story.send(story.node(role, cluster), signal.SIGKILL)


def has_begun(thing: Any) -> bool:
    return isinstance(thing, Trained) and thing.num_samples >= 0.1 * thing.num_total


def is_sent(kind: type) -> Callable[[Any], bool]:
    return lambda thing: isinstance(thing, Send) and isinstance(thing.message, kind)


is_whole = (Recovered, ClusterDissolved)


def test_spare_root_middle_and_leaf_die_one_after_the_other(tmp_path: Path, undisturbed: float) -> None:
    story = Story(
        [
            Step(has_begun, lambda story: story.send(story.spare(), signal.SIGKILL)),
            Step(is_news(Left), lambda _: None),
            Step(is_sent(RoundCommit), kill(0)),
            Step(is_news(is_whole), kill(1, -1)),
            Step(is_news(is_whole), kill(-1)),
            Step(is_news(is_whole), lambda _: None),
        ]
    )
    finish(story, tmp_path, undisturbed)
    assert len(story.of(Left)) == 4
    assert len(story.of(ClusterBroken)) == 3  # nobody misses the spare
    assert story.of(Recovered)


def test_two_die_at_once_and_a_third_while_that_is_mended(tmp_path: Path, undisturbed: float) -> None:
    def kill_two(story: Story) -> None:
        kill(0)(story)
        kill(-1)(story)

    story = Story([Step(has_begun, kill_two), Step(is_news(ClusterBroken), kill(1, -1))])
    finish(story, tmp_path, undisturbed)
    assert len(story.of(Left)) == 3


def test_deaths_in_a_round_at_a_vote_and_while_a_checkpoint_is_fetched(
    tmp_path: Path, undisturbed: float
) -> None:
    def is_vote(thing: Any) -> bool:
        return isinstance(thing, Received) and isinstance(thing.message, RoundReady)

    story = Story(
        [
            Step(has_begun, lambda _: None),
            Step(is_sent(RoundOpen), kill(-1)),
            Step(is_news(is_whole), lambda _: None),
            Step(is_vote, kill(0)),
            Step(is_news(is_whole), lambda _: None),
            Step(is_news(Collect), kill(1)),
            Step(is_news(is_whole), lambda _: None),
        ]
    )
    finish(story, tmp_path, undisturbed, epochs=8)  # rounds and checkpoints are waited for
    assert len(story.of(Left)) == 3


def test_who_leaves_politely_loses_nothing_and_who_thaws_joins_anew(
    tmp_path: Path, undisturbed: float
) -> None:
    gone: list[str] = []

    def leave(story: Story) -> None:
        gone.append(story.node(0))
        story.send(gone[0], signal.SIGINT)

    def freeze(story: Story) -> None:
        assert story.of(ClusterBroken, ClusterDissolved) == []  # nothing is trained again
        gone.append(story.node(-1, -1))
        story.send(gone[1], signal.SIGSTOP)

    def is_gone(thing: Any) -> bool:
        return isinstance(thing, Left) and thing.node == gone[1]

    def is_back(thing: Any) -> bool:
        return isinstance(thing, Joined) and thing.node == gone[1]

    story = Story(
        [
            Step(has_begun, leave),
            Step(is_news(Left), lambda _: None),
            Step(is_news(Trained), freeze),
            Step(is_gone, lambda story: story.send(gone[1], signal.SIGCONT)),
            Step(is_back, lambda _: None),
        ]
    )
    finish(story, tmp_path, undisturbed)
    assert [news.node for news in story.of(Leaving)] == gone[:1]
    assert [news.node for news in story.of(Left)] == gone
    assert story.peers is not None
    assert story.peers.end(gone[0]) == 130
    assert story.peers.end(gone[1]) == 0


@pytest.mark.needs_root
def test_a_link_gets_slow_and_then_its_cable_is_cut_and_healed_after_the_grace(
    tmp_path: Path, undisturbed: float
) -> None:
    def is_far(kind: type) -> Callable[[Any], bool]:
        return lambda thing: isinstance(thing, kind) and thing.node == "far"

    with networks(1) as (far,):
        bucket = "root tbf rate 2mbit burst 32kb latency 50ms"
        story = Story(
            [
                Step(has_begun, lambda _: call(f"tc qdisc add dev {far[0]} {bucket}")),
                Step(is_news(Trained, 4), lambda _: call(f"ip link set {far[0]} down")),
                Step(is_far(Left), lambda _: call(f"ip link set {far[0]} up")),
                Step(is_far(Joined), lambda _: None),
            ]
        )
        with swarm(story, tmp_path, 5, far) as hub:  # with six nobody is spare
            result = hub.fit(make_job(), nodes=6)
    assert check(story, result) < LOSS_RATIO * undisturbed
    assert [news.node for news in story.of(Left)] == ["far"]
    assert story.of(Recovered)


@pytest.mark.needs_root
def test_a_full_disk_costs_checkpoints_but_not_the_run(tmp_path: Path, undisturbed: float) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        story = Story(
            [
                Step(is_news(Checkpointed), lambda _: fill(disk)),
                Step(is_news(NotCheckpointed), lambda _: (disk / "full").unlink()),
                Step(is_news(Checkpointed), lambda _: None),
            ]
        )
        with swarm(story, tmp_path, 3) as hub:
            result = hub.fit(make_job(epochs=3), nodes=3, out=disk)
        assert check(story, result, epochs=3) < LOSS_RATIO * undisturbed
        assert "is full; make room" in story.of(NotCheckpointed)[0].reason
        assert (disk / "model.safetensors").is_file()


JOB = """
from tests.support.faults import make_job
job = make_job(epochs=3)
"""


def test_a_hub_that_is_killed_goes_on_from_its_folder(tmp_path: Path, undisturbed: float) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    (tmp_path / "job.py").write_text(JOB)
    options = ("--listen", f"127.0.0.1:{port}", "--nodes", "3", "--folder", "run", "--json")
    command = [*BARE_JOIN[:3], "hub", "job.py:job", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said: list[str] = []
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as hub:
        invitation = json.loads(hub.stdout.readline())["invitation"]
        peers = Peers(invitation, tmp_path, flops_per_second=FLOPS_PER_SECOND, memory_bytes=1e9)
        for number in range(3):
            peers.start(f"node{number}")
        for line in hub.stderr:
            said.append(line)
            if "checkpoint kept" in line and any("epoch 1:" in each for each in said):
                break
        hub.kill()
    try:
        with subprocess.Popen([*command, "--resume"], cwd=tmp_path, env=environment, **pipes) as hub:
            out, rest = hub.communicate()
            assert hub.returncode == 0, rest
    finally:
        peers.close()
    sys.stderr.write("".join(said) + "--- killed and started again\n" + rest)
    ended = json.loads(out.splitlines()[-1])
    assert ended["metrics"]["epoch"] == 3
    assert ended["metrics"]["val_loss"] < LOSS_RATIO * undisturbed
    first, second = (
        re.findall(r"^epoch (\d+): (\d+) samples,", text, re.M) for text in ("".join(said), rest)
    )
    assert {count for _, count in [*first, *second]} == {str(NUM_SAMPLES)}
    assert {int(epoch) for epoch, _ in [*first, *second]} == {1, 2, 3}
    assert len(second) < 3  # it did not begin anew
