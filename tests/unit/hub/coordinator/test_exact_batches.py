"""Exact mode in the hub: shares count when their batch is summed, whoever dies, leaves or was away."""

from dataclasses import dataclass, field

import pytest
from support.hub_scene import HALVES, HubScene
from support.plan_world import SIMPLE, even_model, node

from ravnest.config import Averaging
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    JobGiven,
    JobSettings,
    MakeParts,
    MakePlan,
    Notify,
    PartsMade,
    PauseAsked,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Received,
    Restarted,
    Send,
    Tick,
)
from ravnest.hub.coordinator.notices import EpochDone
from ravnest.ids import HUB
from ravnest.plan.assembly import form_rings
from ravnest.plan.sharing import ALONE, Sharing
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.membership import Leave
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import (
    BlobRef,
    PlanOrder,
    RingOrder,
    SnapshotMade,
    SnapshotOrder,
    StageParts,
    StageReady,
)
from ravnest.protocol.training import LeaseDone, LeaseGrant

BLOB = BlobRef("0" * 64, 100)
NUM_SAMPLES, BATCH = 24, 6


@dataclass
class ExactHub:
    """A hub whose plans are clusters of one stage, one for each node that is here."""

    hub: Coordinator = field(init=False)
    orders: dict = field(default_factory=dict)  # the newest of each kind, by node
    actions: list = field(default_factory=list)  # all
    now: float = 0.0

    def __post_init__(self):
        settings = JobSettings(NUM_SAMPLES, 0, BATCH, 1, (0.1, 0.2, 0.3, 0.4), expected_nodes=3)
        given = JobGiven(even_model(4), SIMPLE, settings, 0.0)
        self.hub = Coordinator(given)
        self.apply(given)
        for name in "abc":
            self.apply(PeerJoined(node(name), f"key of {name}", (), 0.0))

    def apply(self, event):
        """Apply an event, and do at once what it asks of the planner and of builders."""
        actions = self.hub.apply(event)
        self.actions += actions
        for action in actions:
            match action:
                case MakePlan():
                    self.apply(self.plan(action))
                case MakeParts():
                    self.apply(PartsMade(action.start, action.stop, BLOB, BLOB, ("x",), ("x",), self.now))
                case Send(to, message):
                    self.orders[to, type(message)] = message
        return actions

    def plan(self, asked):
        names = sorted(each.name for each in asked.nodes)
        clusters = tuple(Cluster((Stage(name, 0, 4),)) for name in names)
        rings = form_rings(clusters, {each.name: each for each in asked.nodes})
        sharing = Sharing(Averaging.EXACT, True, len(names)) if len(names) > 1 else ALONE
        return PlanMade(
            asked.plan_id, Plan(asked.plan_id, 0, clusters, rings, ()), 1, "", self.now, "", sharing
        )

    def say(self, name, message):
        found = self.apply(Received(name, message, self.now))
        assert not any(isinstance(each, Refusal) for each in found), found
        return found

    def build(self, *names):
        """Let nodes give snapshots and build what they are ordered to."""
        for name in list(self.hub.membership):
            if order := self.orders.pop((name, SnapshotOrder), None):
                self.say(name, SnapshotMade(order.build_id, order.number, 7, BLOB))
        for name in names:
            self.say(name, StageReady(self.orders.pop((name, StageParts)).build_id))

    def train(self, name):
        """Let a cluster report its oldest lease; return how many samples it has."""
        grant = next(each for each in self.granted(name) if each.lease in self.open_leases)
        self.say(name, LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples)))
        return sum(grant.num_samples)

    def granted(self, name):
        sends = [each for each in self.actions if isinstance(each, Send)]
        return [each.message for each in sends if each.to == name and isinstance(each.message, LeaseGrant)]

    @property
    def open_leases(self):
        return {each.number for each in self.hub.ledger.open_leases}

    def vote(self, *names):
        """Let members vote in the round that is open; return what follows from the last vote."""
        for name in names:
            opened = self.orders[name, RoundOpen]
            hashes = tuple((segment, bytes(16)) for segment, _ in self.rings(name))
            found = self.say(name, RoundReady(opened.round_id, name, hashes))
        return found

    def rings(self, name):
        found = [self.orders.get((name, kind)) for kind in (PlanOrder, RingOrder)]
        return max((each for each in found if each is not None), key=lambda each: each.plan_id).rings

    def opened(self, name):
        return self.orders[name, RoundOpen]


@pytest.fixture
def three():
    """Three clusters that have their shares of two batches."""
    hub = ExactHub()
    hub.build("a", "b", "c")
    assert all(hub.orders[name, PlanOrder].is_exact for name in "abc")
    assert all(len(hub.granted(name)) == 2 for name in "abc")
    return hub


def test_a_pause_grants_no_further_batch_until_it_ends(three):
    three.apply(PauseAsked(True, three.now))
    for name in "abc":
        three.train(name)
    three.vote(*"abc")
    assert [len(three.granted(name)) for name in "abc"] == [2, 2, 2]
    three.apply(PauseAsked(False, three.now))
    assert [len(three.granted(name)) for name in "abc"] == [3, 3, 3]


def test_shares_count_when_their_batch_is_summed(three):
    sizes = [three.train(name) for name in "abc"]
    assert sum(sizes) == BATCH
    assert three.hub.ledger.num_counted == 0
    three.vote("a", "b")
    assert three.hub.ledger.num_counted == 0
    three.vote("c")
    assert three.hub.ledger.num_counted == BATCH
    assert {three.hub.ledger.progress.version(each) for each in three.hub.clusters} == {1}
    assert three.hub.ledger.num_updates == 3


def test_an_epoch_ends_with_its_last_sum(three):
    for _ in range(NUM_SAMPLES // BATCH):
        for name in "abc":
            three.train(name)
        found = three.vote("a", "b", "c")
    (ended,) = [
        each.notice for each in found if isinstance(each, Notify) and isinstance(each.notice, EpochDone)
    ]
    assert (ended.num_samples, ended.num_dropped) == (NUM_SAMPLES, 0)
    assert three.hub.ledger.history == [ended]


def test_rates_follow_the_batches(three):
    rates = []
    for _ in range(4):
        rates.append({three.opened(name).rate for name in "abc"})
        for name in "abc":
            three.train(name)
        three.vote("a", "b", "c")
    assert rates == [{0.1}, {0.2}, {0.3}, {0.4}]


def test_a_share_that_is_reported_late_counts_nevertheless(three):
    three.train("a")
    three.train("b")
    three.vote("a", "b", "c")
    counted = three.hub.ledger.num_counted
    assert 0 < counted < BATCH
    three.train("c")
    assert three.hub.ledger.num_counted == BATCH


def test_what_a_dead_cluster_had_done_of_a_batch_is_trained_again(three):
    sizes = {name: three.train(name) for name in "abc"}
    three.apply(PeerLeft("b", "it died", 0.0))  # the plan goes on without it
    assert three.hub.ledger.num_counted == 0
    assert {each.num_microbatches for each in map(three.opened, "ac")} == {1}
    three.vote("a", "c")
    assert three.hub.ledger.num_counted == sizes["a"] + sizes["c"]
    for _ in range(20):
        for name in "ac":
            while any(each.lease in three.open_leases for each in three.granted(name)):
                three.train(name)
        if three.hub.ledger.num_counted == NUM_SAMPLES:
            break
        three.vote("a", "c")
    assert three.hub.ledger.num_counted == NUM_SAMPLES


def test_the_last_cluster_counts_what_it_makes_alone(three):
    size = three.train("a")
    for name in "bc":
        three.apply(PeerLeft(name, "it died", 0.0))
    assert not three.orders["a", RingOrder].is_exact
    assert three.hub.ledger.num_counted == size
    assert three.hub.ledger.exact.first is None
    for _ in range(20):
        if three.hub.ledger.num_counted == NUM_SAMPLES:
            break
        three.train("a")
    assert three.hub.ledger.num_counted == NUM_SAMPLES


def test_no_round_and_no_share_until_a_newcomer_has_the_weights_of_the_others(three):
    for name in "abc":
        three.train(name)
    three.apply(PeerJoined(node("d"), "key of d", (), three.now))
    three.now += 20.0
    three.apply(Tick(three.now))
    three.apply(Tick(three.now + 20.0))
    assert three.orders["d", PlanOrder].is_exact
    (aborted,) = {three.orders[name, RoundAbort].round_id for name in "abc"}
    assert three.opened("a").round_id == aborted
    num_granted = len(three.granted("a"))
    three.build()
    assert {source.node for source in three.orders["d", StageParts].sources} == {"a"}
    assert len(three.granted("a")) == num_granted
    assert three.opened("a").round_id == aborted
    three.build("d")
    assert three.opened("a").round_id > aborted
    assert [three.opened(name).num_microbatches for name in "abcd"] == [1, 1, 1, 0]


def test_a_cluster_that_drains_gets_its_gradient_rounds(three):
    for name in "abc":
        three.train(name)
    before = three.opened("a").round_id
    three.say("b", Leave(three.orders["b", PlanOrder].build_id, "the PC is needed", can_hand_over=True))
    three.vote("a", "b", "c")
    assert three.hub.ledger.num_counted == BATCH
    assert three.opened("b").round_id > before


def test_a_cluster_that_holds_up_one_round_after_another_begins_again_with_what_others_have(three):
    build_id = three.orders["c", PlanOrder].build_id
    for _ in range(3):
        assert three.orders["c", PlanOrder].build_id == build_id
        round_id = three.opened("a").round_id
        three.say("a", RoundAbort(round_id, "what came is not finite", "c"))
    assert three.orders["c", PlanOrder].build_id > build_id
    assert three.orders["a", PlanOrder].build_id == build_id
    three.build("c")
    assert three.opened("c").round_id > round_id


def test_who_waits_for_others_is_not_busy_but_not_finished_either(three):
    a, b, _ = three.hub.clusters
    three.train("a")
    assert [three.hub.ledger.is_busy(each) for each in (a, b)] == [False, True]
    assert [three.hub.ledger.is_unfinished(each) for each in (a, b)] == [True, True]
    three.train("b")
    three.train("c")
    three.vote("a", "b", "c")
    assert three.hub.ledger.is_busy(a)


def test_who_was_away_hears_how_rounds_ended(three):
    for name in "abc":
        three.train(name)
    first = three.opened("a").round_id
    three.vote("a", "b", "c")
    second = three.opened("a").round_id
    three.apply(Restarted(None, three.now))
    found = three.apply(PeerReturned("b", (), three.now))
    told = [each.message for each in found if isinstance(each, Send) and each.to == "b"]
    assert told[:2] == [RoundCommit(first), RoundAbort(second, told[1].reason)]


def test_a_rebuilt_cluster_has_nothing_of_its_own():
    scene = HubScene("abcds", ("ab", HALVES), ("cd", HALVES))
    scene.lose("a")
    scene.sharing = Sharing(Averaging.EXACT, True, 2)
    (origin,) = scene.change(("sb", HALVES), ("cd", HALVES), known={"c": 1}, kept=100)
    for number, name in scene.ask().items():
        scene.answer(name, number)
    parts = scene.order()
    assert {name: [each.node for each in x.sources] for name, x in parts.items()} == {"s": ["c"], "b": ["d"]}
    assert not any(each.is_kept for each in parts.values())
    assert (origin.cluster_id, origin.is_whole) == ("B1", False)
    assert HUB not in {node for x in parts.values() for node in x.sources}


def test_when_no_cluster_trains_each_keeps_what_it_has():
    scene = HubScene("abcds", ("ab", HALVES), ("cd", HALVES))
    scene.lose("a")
    scene.lose("d")
    scene.sharing = Sharing(Averaging.EXACT, True, 2)
    scene.change(("sb", HALVES), ("c", ((0, 6),)), kept=0)
    assert scene.build() == {"s": ["c"], "b": [], "c": ["b"]}
