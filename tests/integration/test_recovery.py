"""Real peers die, freeze and leave at named moments; the run finishes, and each sample is counted once."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ravnest.config import HubTimeouts, Timeouts
from ravnest.hub.coordinator.events import Collect, Received, Send
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    EpochDone,
    Joined,
    Leaving,
    Left,
    Missing,
    Recovered,
    RoundEnded,
    Trained,
    WorkLost,
)
from ravnest.protocol.averaging import RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.placement import PlanOrder
from ravnest.requester.result import Result
from tests.support.as_root import call, networks
from tests.support.faults import EPOCHS, NUM_SAMPLES, Step, Story, check, is_news, make_job, swarm

NUM_PEERS = 7  # two clusters of three, and a spare
LOSS_RATIO = 1.5  # over an undisturbed run

SHORT_GRACE = Timeouts(HubTimeouts(grace_seconds=1.0))

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run without a fault."""
    story = Story([])
    result = train(story, tmp_path_factory.mktemp("undisturbed"))
    assert story.of(Left, ClusterBroken, WorkLost) == []
    return check(story, result)


def train(story: Story, folder: Path, **options: Any) -> Result:
    with swarm(story, folder, NUM_PEERS, timeouts=SHORT_GRACE) as hub:
        return hub.fit(make_job(**options), nodes=NUM_PEERS)


def finish(story: Story, folder: Path, undisturbed: float, epochs: int = EPOCHS) -> None:
    judge(story, train(story, folder, epochs=epochs), undisturbed, epochs)
    assert story.of(WorkLost) == []


def judge(story: Story, result: Result, undisturbed: float, epochs: int = EPOCHS) -> None:
    """Check what must hold whatever happened."""
    assert check(story, result, epochs) < LOSS_RATIO * undisturbed
    for what, seconds in story.recovery_seconds():
        sys.stderr.write(f"{what}: whole again after {seconds:.2f} s\n")
        assert seconds < 30


def kill(role: int, cluster: int = 0) -> Callable[[Story], None]:
    return lambda story: story.send(story.node(role, cluster), signal.SIGKILL)


def has_begun(thing: Any) -> bool:
    return isinstance(thing, Trained) and thing.num_samples >= 0.1 * thing.num_total


def is_sent(kind: type) -> Callable[[Any], bool]:
    return lambda thing: isinstance(thing, Send) and isinstance(thing.message, kind)


def is_committed(thing: Any) -> bool:
    return isinstance(thing, RoundEnded) and thing.is_committed


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


def test_root_and_leaf_of_two_clusters_die_at_once_and_a_third_builds_its_stage(
    tmp_path: Path, undisturbed: float
) -> None:
    building: list[str] = []

    def kill_two(story: Story) -> None:
        kill(0)(story)
        kill(-1, -1)(story)

    def is_ordered(thing: Any) -> bool:
        return isinstance(thing, Send) and isinstance(thing.message, PlanOrder) and bool(thing.message.stage)

    def kill_builder(story: Story) -> None:
        building.extend(name for each in story.clusters if not each.is_running for name in each.nodes)
        story.send(building[0], signal.SIGKILL)

    story = Story(
        [
            Step(has_begun, kill_two),
            Step(is_news(ClusterBroken, 2), lambda _: None),
            Step(is_ordered, kill_builder),
        ]
    )
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
    finish(story, tmp_path, undisturbed, epochs=6)  # rounds and checkpoints are waited for
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

        def slow_down(_: Story) -> None:
            call(f"tc qdisc add dev {far[0]} {bucket}")
            call(f"tc -netns {far[0]} qdisc add dev inside {bucket}")

        def cut(story: Story) -> None:
            assert story.of(Missing, Left, ClusterBroken) == []  # who is slow is not taken for dead
            call(f"ip link set {far[0]} down")
            story.note("the cable is cut")

        story = Story(
            [
                Step(has_begun, slow_down),
                Step(is_committed, lambda _: None),
                Step(is_news(EpochDone), cut),
                Step(is_far(Left), lambda _: call(f"ip link set {far[0]} up")),
                Step(is_far(Joined), lambda _: None),
            ]
        )
        with swarm(story, tmp_path, 5, far, timeouts=SHORT_GRACE) as hub:  # with six nobody is spare
            result = hub.fit(make_job(), nodes=6)
    judge(story, result, undisturbed)
    assert [news.node for news in story.of(Left)] == ["far"]
    assert story.of(Recovered)


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

    story = Story([Step(has_learned, kill_all), Step(is_news(ClusterStarted), lambda _: None)])
    with swarm(
        story, tmp_path, 5, memory_bytes=1.9e6, timeouts=SHORT_GRACE
    ) as hub:  # two have no room for it
        result = hub.fit(make_job(), nodes=5)
    judge(story, result, undisturbed)
    ((_, seconds), *_) = story.recovery_seconds()
    again = story.faults[0][0] + seconds
    first = next(news.loss for at, news in story.told if isinstance(news, Trained) and at > again)
    assert first < (losses[0] + losses[-1]) / 2  # not that of the weights it once began with
