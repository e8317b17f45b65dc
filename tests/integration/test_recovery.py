"""Real peers die, freeze and leave at named moments; the run finishes, and each sample is counted once.

Deaths at every step of a round and while state is fetched are tried on virtual time: tests/system.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ravnest.config import HubTimeouts, Timeouts
from ravnest.hub.coordinator.events import Received, Send
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Joined,
    Leaving,
    Left,
    Recovered,
    RoundEnded,
    Trained,
    WorkLost,
)
from ravnest.protocol.averaging import RoundCommit
from ravnest.protocol.placement import PlanOrder
from ravnest.protocol.training import StepReport
from ravnest.requester.result import Result
from tests.support.as_root import call, networks
from tests.support.faults import NUM_SAMPLES, Step, Story, check, is_news, make_job, swarm

NUM_PEERS = 7  # two clusters of three, and a spare
LOSS_RATIO = 1.5  # over an undisturbed run

SHORT_GRACE = Timeouts(HubTimeouts(grace_seconds=1.0))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run without a fault, or with those that a busy PC is to blame for."""
    story = Story([])
    return check(story, train(story, tmp_path_factory.mktemp("undisturbed")))


def train(story: Story, folder: Path) -> Result:
    with swarm(story, folder, NUM_PEERS, timeouts=SHORT_GRACE) as hub:
        return hub.fit(make_job(), nodes=NUM_PEERS)


def finish(story: Story, folder: Path, undisturbed: float) -> None:
    judge(story, train(story, folder), undisturbed)
    assert story.of(WorkLost) == []


def judge(story: Story, result: Result, undisturbed: float) -> None:
    """Check what must hold whatever happened."""
    assert check(story, result) < LOSS_RATIO * undisturbed
    for what, seconds in story.recovery_seconds():
        sys.stderr.write(f"{what}: whole again after {seconds:.2f} s\n")


def check_left(story: Story, num_victims: int) -> None:
    """All victims left; on a busy PC others may have been silent for so long, too, and come back."""
    victims = {what.rpartition(" ")[2] for _, what in story.faults}
    assert len(victims) == num_victims
    assert victims <= {news.node for news in story.of(Left)}


def kill(role: int, cluster: int = 0) -> Callable[[Story], None]:
    return lambda story: story.send(story.node(role, cluster), signal.SIGKILL)


def has_begun(thing: Any) -> bool:
    return isinstance(thing, Trained) and thing.num_samples >= NUM_SAMPLES // 2


def runs_ahead(thing: Any) -> bool:
    """Return whether a stage was late: a long job begins with updates that wait for each other."""
    report = thing.message if isinstance(thing, Received) else None
    return isinstance(report, StepReport) and report.lag > 0


def nothing(_: Story) -> None: ...


def is_sent(kind: type) -> Callable[[Any], bool]:
    return lambda thing: isinstance(thing, Send) and isinstance(thing.message, kind)


def is_committed(thing: Any) -> bool:
    return isinstance(thing, RoundEnded) and thing.is_committed


is_whole = is_news((Recovered, ClusterDissolved))
is_training = is_news(Trained)


def test_spare_root_middle_and_leaf_die_one_after_the_other(tmp_path: Path, undisturbed: float) -> None:
    story = Story(
        [
            Step(runs_ahead, lambda story: story.send(story.spare(), signal.SIGKILL)),
            Step(is_news(Left), nothing),
            Step(is_sent(RoundCommit), kill(0)),
            Step(is_whole, nothing),
            Step(is_training, kill(1, -1)),
            Step(is_whole, nothing),
            Step(is_training, kill(-1)),
            Step(is_whole, nothing),
        ]
    )
    finish(story, tmp_path, undisturbed)
    check_left(story, 4)
    spare = story.faults[0][1].rpartition(" ")[2]
    broken = story.of(ClusterBroken)
    assert len(broken) >= 3
    assert not any(spare in news.reason for news in broken)  # nobody misses it
    assert story.of(Recovered)


def kill_compute(role: int, number: signal.Signals) -> Callable[[Story], None]:
    """Hit the process that computes, and not its agent."""

    def hit(story: Story) -> None:
        assert story.peers is not None
        name = story.node(role)
        (compute,) = psutil.Process(story.peers.alive[name]).children()
        story.note(f"{number.name} to compute of {name}")
        compute.send_signal(number)

    return hit


def test_compute_that_dies_costs_its_stage_and_not_its_peer(tmp_path: Path, undisturbed: float) -> None:
    agents: dict[str, int] = {}

    def remember(story: Story) -> None:
        assert story.peers is not None
        agents.update(story.peers.alive)
        kill_compute(1, signal.SIGKILL)(story)

    def compare(story: Story) -> None:
        assert story.peers is not None
        assert dict(story.peers.alive) == agents  # all of them live on

    story = Story(
        [
            Step(runs_ahead, remember),
            Step(is_whole, nothing),
            Step(is_training, kill_compute(-1, signal.SIGSEGV)),
            Step(is_whole, compare),
        ]
    )
    finish(story, tmp_path, undisturbed)
    victims = [what.rpartition(" ")[2] for _, what in story.faults]
    lost = {news.node: news.reason for news in story.of(Left) if "the process that computes" in news.reason}
    assert set(victims) <= lost.keys()
    joined = [news.node for news in story.of(Joined)]
    assert all(joined.count(each) >= 2 for each in victims)


def test_root_and_leaf_of_two_clusters_die_at_once_and_a_third_builds_its_stage(
    tmp_path: Path, undisturbed: float
) -> None:
    def kill_two(story: Story) -> None:
        kill(0)(story)
        kill(-1, -1)(story)

    def is_ordered_or_whole(thing: Any) -> bool:
        message = thing.message if isinstance(thing, Send) else None
        return is_whole(thing) or (isinstance(message, PlanOrder) and bool(message.stage))

    def kill_builder(story: Story) -> None:
        building = [name for each in story.clusters if not each.is_running for name in each.nodes]
        if building:
            story.send(building[0], signal.SIGKILL)
        else:  # all were whole before the second death was known
            story.steps.clear()

    story = Story(
        [
            Step(has_begun, kill_two),
            Step(is_news(ClusterBroken, 2), nothing),
            Step(is_ordered_or_whole, kill_builder),
            Step(is_whole, nothing),
        ]
    )
    finish(story, tmp_path, undisturbed)
    check_left(story, len(story.faults))


def test_who_leaves_politely_loses_nothing_and_who_thaws_joins_anew(
    tmp_path: Path, undisturbed: float
) -> None:
    gone: list[str] = []

    def leave(story: Story) -> None:
        gone.append(story.node(0))
        story.send(gone[0], signal.SIGINT)

    def freeze(story: Story) -> None:
        broken = story.of(ClusterBroken, ClusterDissolved)
        assert not any(gone[0] in news.reason for news in broken)  # nothing is trained again
        gone.append(story.node(-1, -1))
        story.send(gone[1], signal.SIGSTOP)

    def is_of(kind: type, number: int) -> Callable[[Any], bool]:
        return lambda thing: isinstance(thing, kind) and thing.node == gone[number]

    story = Story(
        [
            Step(has_begun, leave),
            Step(is_of(Left, 0), nothing),
            Step(is_training, freeze),
            Step(is_of(Left, 1), lambda story: story.send(gone[1], signal.SIGCONT)),
            Step(is_of(Joined, 1), nothing),
        ]
    )
    finish(story, tmp_path, undisturbed)
    assert [news.node for news in story.of(Leaving)] == gone[:1]
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

        def slow_down(_: Story) -> None:
            call(f"tc qdisc add dev {far[0]} {bucket}")
            call(f"tc -netns {far[0]} qdisc add dev inside {bucket}")

        def cut(story: Story) -> None:
            assert "far" not in [news.node for news in story.of(Left)]  # who is slow is not taken for dead
            call(f"ip link set {far[0]} down")
            story.note("the cable is cut")

        story = Story(
            [
                Step(has_begun, slow_down),
                Step(is_committed, nothing),
                Step(is_news(EpochDone), cut),
                Step(is_far(Left), lambda _: call(f"ip link set {far[0]} up")),
                Step(is_far(Joined), nothing),
                Step(lambda _: bool(story.of(Recovered)), nothing),
            ]
        )
        with swarm(story, tmp_path, 5, far, timeouts=SHORT_GRACE) as hub:  # with six nobody is spare
            result = hub.fit(make_job(), nodes=6)
    judge(story, result, undisturbed)


def test_spares_who_follow_a_cluster_that_died_whole_begin_with_its_last_checkpoint(
    tmp_path: Path, undisturbed: float
) -> None:
    losses: list[float] = []

    def has_learned(thing: Any) -> bool:
        return isinstance(thing, Checkpointed) and thing.num_samples >= 2 * NUM_SAMPLES

    def kill_all(story: Story) -> None:
        losses.extend(news.loss for news in story.of(Trained))
        for name in story.clusters[0].nodes:
            story.send(name, signal.SIGKILL)
        assert story.peers is not None
        story.peers.start("late")  # with it the two spares can hold the model, cut as it was

    story = Story([Step(has_learned, kill_all), Step(is_news(ClusterStarted), nothing)])
    # Two of the five have no room for it.
    with swarm(story, tmp_path, 5, memory_bytes=1.05e6, timeouts=SHORT_GRACE) as hub:
        result = hub.fit(make_job(), nodes=5)
    judge(story, result, undisturbed)
    ((_, seconds), *_) = story.recovery_seconds()
    again = story.faults[0][0] + seconds
    first = next(news.loss for at, news in story.told if isinstance(news, Trained) and at > again)
    assert first < (losses[0] + losses[-1]) / 2  # not that of the weights it once began with
