"""The hub is killed while clusters train, on virtual time: they train on, and what they did counts once."""

from dataclasses import replace

import pytest

from ravnest.config import Averaging
from ravnest.hub.coordinator.notices import Left, Notice, Resumed, RoundEnded, Trained, WorkLost
from ravnest.ids import NodeId
from ravnest.peer.compute_protocol import ToCompute
from ravnest.peer.stage_host import StageHost
from ravnest.protocol.averaging import RoundReady
from ravnest.protocol.messages import Message
from tests.support.memory_store import MemoryStore
from tests.support.system_world import PLAN, Ended, Pc, World, make_job
from tests.system.test_round_faults import form_three

NUM_SAMPLES, AWAY_SECONDS = 1200, 20.0


class Outage:
    """Sees what each stage has trained when the hub dies, and when it is back."""

    def __init__(self) -> None:
        self.trained: dict[NodeId, int] = {}  # samples, in the build under way
        self.at_death: dict[NodeId, int] = {}
        self.at_return: dict[NodeId, int] = {}
        self.counted_before = self.counted_first = 0

    def before(self, name: NodeId, item: ToCompute | None, host: StageHost) -> None:
        self.trained[name] = 0 if host.stage is None else host.stage.worker.num_trained

    def die(self, world: World) -> None:
        self.at_death = dict(self.trained)
        world.kill_hub(AWAY_SECONDS)

    def hear(self, world: World, news: Notice) -> None:
        if isinstance(news, Resumed):
            self.at_return, self.counted_before = dict(self.trained), news.num_samples

    def gained(self) -> list[int]:
        """Return how many samples each stage has trained meanwhile."""
        return [self.at_return[name] - count for name, count in self.at_death.items()]


def run(outage: Outage, world: World) -> Ended:
    ended = world.run()
    assert ended.result is not None
    assert not [*ended.of(Left), *ended.of(WorkLost)]
    assert set(ended.counts.values()) == {1}, "each sample counts once"
    assert sum(ended.counts.values()) == NUM_SAMPLES
    assert outage.counted_before < NUM_SAMPLES
    return ended


def make_world(outage: Outage, averaging: Averaging, **options: object) -> World:
    job = make_job("tiny", num_samples=NUM_SAMPLES, epochs=1, average_every=4, validates=False)
    facts = {"plan": replace(PLAN, averaging=averaging), "form_plan": form_three, "store": MemoryStore()}
    pcs, watched = [Pc(1e6, 0.01)] * 5, {"before": outage.before, "hear": outage.hear}
    return World(job, pcs, reserve_seconds=60.0, **facts, **watched, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("averaging", [Averaging.OVERLAPPED, Averaging.BLOCKING])
def test_clusters_train_on_without_the_hub_and_that_counts(averaging: Averaging) -> None:
    outage, seen = Outage(), []

    def hear(world: World, news: Notice) -> None:
        outage.hear(world, news)
        if isinstance(news, Trained) and news.num_samples >= NUM_SAMPLES // 4 and not seen:
            seen.append(news)
            outage.die(world)

    world = make_world(outage, averaging)
    world.hear = hear
    run(outage, world)
    assert all(outage.gained())


def test_a_blocking_round_whose_votes_nobody_counts_holds_nobody_up_and_ends_alike_in_all() -> None:
    outage, votes = Outage(), []

    def leaving(world: World, sender: NodeId, to: NodeId, message: Message) -> tuple[float, ...]:
        if isinstance(message, RoundReady) and message.round_id == 2 and not outage.at_death:
            votes.append(sender)
            if len(votes) == 5:
                outage.die(world)
                return ()
        return (0.0,)

    world = make_world(outage, Averaging.BLOCKING, leaving=leaving)
    ended = run(outage, world)
    assert all(outage.gained())
    rounds = ended.of(RoundEnded)
    assert [news.is_committed for news in rounds[:3]] == [True, False, True]
