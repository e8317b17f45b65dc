"""Whole rounds in one process, with the hub that ships: drawn order, lost messages, crashes at any action.

Members run `averaging.round.Round`; the hub is a `Coordinator`, fed through `apply_logged`. Every
arrival, log write and send is one action of a process; `crash_at` names the action before which it dies. A
hub comes back with nothing but its log. As in `net`, nothing overtakes between the hub and a member.
"""

from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
from support.plan_world import SIMPLE, even_model, node
from support.ring_world import Plain

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.averaging.round import Round, RoundPhase
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Evict,
    JobGiven,
    JobSettings,
    MakeParts,
    MakePlan,
    Notify,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Received,
    Restarted,
    Send,
    Tick,
)
from ravnest.hub.coordinator.notices import RoundEnded
from ravnest.hub.monitors.monitors import MonitoredCoordinator, apply_logged
from ravnest.hub.service.event_log import read_event, write_event
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, Plan, Stage
from ravnest.protocol.averaging import RingPart, RoundAbort, RoundCommit, RoundOpen
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BlobRef, PlanOrder, StageParts, StageReady
from ravnest.protocol.training import LeaseDone, LeaseGrant, StepReport

HUB = "hub"
NUM_POSITIONS = 4
LENGTH = 11
FINAL = {RoundPhase.COMMITTED, RoundPhase.ABORTED}
MOST_WAITS = 200  # of the clock; a history that needs more is stuck
_BLOB = BlobRef("0" * 64, 100)


class CrashError(Exception):
    """The hub dies between two of its actions."""


@dataclass
class Trouble:
    """What goes wrong in one history."""

    crash_at: dict[str, int] = field(default_factory=dict)
    again_at: int | None = None  # the action before which the hub that came back dies, too
    hub_returns: bool = True
    loss: float = 0.0  # share of the messages that never arrive
    haste: float = 0.0  # chance per step that a clock, a watcher or a restart comes early
    has_slow_link: bool = False  # the hub hears one member only when all others have asked what became of it


class MemoryLog:
    """The rows that a hub's log on disk would have."""

    def __init__(self) -> None:
        self.rows = []

    def append(self, event) -> None:
        self.rows.append(write_event(event))

    def events(self):
        return [read_event(*row) for row in self.rows]


@dataclass
class Member:
    """What a peer keeps of its part in rounds: its place by the hub's orders, and the newest round."""

    name: str
    order: PlanOrder
    opened: RoundOpen | None = None
    round: Round | None = None
    due: float = 0.0
    early: list = field(default_factory=list)

    @property
    def is_undecided(self) -> bool:
        return self.round is not None and self.round.phase not in FINAL


class RoundWorld:
    """Clusters given by their cuts of one line; node `c1.2` is the third stage of cluster 1."""

    def __init__(self, cuts, seed: int, trouble: Trouble, is_final=False, log=None) -> None:
        self.random = Random(seed)
        self.trouble = trouble
        self.log = MemoryLog() if log is None else log
        events, orders, self.first = begin(tuple(cuts), is_final)
        self.job = events[0]
        self.hub = Coordinator(self.job)
        for event in events:
            apply_logged(self.hub, event, self.log.append)
        self.num_before = len(events)
        self.members = {name: Member(name, order) for name, order in orders.items()}
        self.rings = {segment: ring for order in orders.values() for segment, ring in order.rings}
        self.linked = set(self.members)  # those whom the hub that runs has met
        self.vectors = self._draw_vectors(seed)
        self.rounds = {}  # by number, then by name: whatever came of it, also in the dead
        self.averages = {}
        self.opened = {}  # by number: what members were told
        self.told = {}  # by number: the outcomes that ever left a hub
        self.passed_over = {}  # by number: who began the next round without having heard
        self.released = set()  # those who have no stage any more, or went
        self.under_way, self.outbox = [], []
        self.now = events[-1].now
        self.num_actions = dict.fromkeys((HUB, *self.members), 0)
        self.dead = set()
        self.is_open = False
        self.num_hasty = 10  # questions breed questions: without an end they would never run out
        self.slow = self.random.choice(sorted(self.members)) if trouble.has_slow_link else None
        self.has_asked = False

    def run(self) -> None:
        """Let everything happen, then let the clock run and the hub return, until nothing is open."""
        self._feed(self.first)
        self._deliver_all()
        self.trouble.loss = self.trouble.haste = 0.0
        for _ in range(MOST_WAITS):
            self._watch()
            self._restart_hub()
            self._deliver_all()
            if HUB in self.dead and self.trouble.hub_returns:
                continue
            if self.is_settled:
                return
            self._wait()
            self._deliver_all()
        raise AssertionError("rounds without end")

    @property
    def survivors(self) -> list[str]:
        """Those who live and still have their stage."""
        return [name for name in self.members if name not in self.dead | self.released]

    @property
    def is_settled(self) -> bool:
        if HUB in self.dead:  # for good
            return not any(self._phase(name) is RoundPhase.RUNNING for name in self.survivors)
        return not self.is_open and not any(self.members[name].is_undecided for name in self.survivors)

    def phases(self, number=None, names=None) -> set[RoundPhase]:
        """Where these members stand in a round, or in any."""
        rounds = self.rounds.values() if number is None else [self.rounds[number]]
        return {
            each.phase for found in rounds for name, each in found.items() if names is None or name in names
        }

    def decisions(self) -> dict[int, bool]:
        """Which rounds the log alone commits, and which it aborts."""
        hub, found = Coordinator(self.job), {}
        for event in self.log.events():
            for order in hub.apply(event):
                if isinstance(order, Notify) and isinstance(order.notice, RoundEnded):
                    assert order.notice.round_id not in found, "a decision is final"
                    found[order.notice.round_id] = order.notice.is_committed
        return found

    def owners(self, number: int, segment: int) -> list[str]:
        return [owner for owner in self.rings[segment].owners if owner not in self.opened[number].left_out]

    def expected(self, number: int, segment: int) -> np.ndarray:
        owners = self.owners(number, segment)
        weights = [weight_of(name) for name in owners]
        return np.average([self.vectors[segment, x] for x in owners], axis=0, weights=weights)

    def _draw_vectors(self, seed: int) -> dict[tuple[int, str], np.ndarray]:
        generator = np.random.default_rng(seed)
        return {
            (segment, name): generator.normal(size=LENGTH - 2 * segment)
            for name, member in self.members.items()
            for segment, _ in member.order.rings
        }

    # Actions.

    def _acts(self, process: str) -> bool:
        """Count one action; False when the process is dead or dies right now."""
        if process not in self.dead and self.num_actions[process] == self.trouble.crash_at.get(process):
            self.dead.add(process)
            if process == HUB:
                self._lose_hub()
        if process in self.dead:
            return False
        self.num_actions[process] += 1
        return True

    def _lose_hub(self) -> None:
        """What was on its way to or from the hub never comes."""
        self.outbox, self.linked = [], set()
        self.under_way = [each for each in self.under_way if HUB not in each[:2]]

    def _send(self, sender: str, receiver: str, message) -> None:
        if not self._acts(sender):
            return
        if receiver not in self.dead and self.random.random() >= self.trouble.loss:
            self.under_way.append((sender, receiver, message))

    def _deliver_all(self) -> None:
        while self.under_way or self.outbox:
            if self.num_hasty and self.random.random() < self.trouble.haste:
                self.num_hasty -= 1
                self._be_hasty()
            places = self._find_next()
            if not places:
                self._hear_slow()
                continue
            queue, place = self.random.choice(places)
            taken = queue.pop(place)
            if queue is self.outbox:
                self._post(*taken)
            elif taken[1] == HUB:
                self._hub_takes(*taken[::2])
            elif self._acts(taken[1]):
                self._member_takes(self.members[taken[1]], taken[2])

    def _find_next(self) -> list:
        """What may happen next: the first from or to the hub on each link, and any part of a ring."""
        found, seen = [], set()
        for place, (receiver, _) in enumerate(self.outbox):
            if receiver not in seen:
                seen.add(receiver)
                found.append((self.outbox, place))
        seen.clear()
        for place, (sender, receiver, _) in enumerate(self.under_way):
            link = (sender, receiver)
            if link != (self.slow, HUB) and (HUB not in link or link not in seen):
                seen.add(link)
                found.append((self.under_way, place))
        return found

    def _hear_slow(self) -> None:
        """Let all others come to their deadline and ask; only then the slow one is heard."""
        if self.has_asked:
            self.slow = None
            return
        self.has_asked = True
        self.now = max([self.now, *(each.due for each in self.members.values() if each.is_undecided)])
        self._expire()

    def _be_hasty(self) -> None:
        self.random.choice([self._watch, self._restart_hub, self._expire, self._pass_time])()

    def _pass_time(self) -> None:
        self.now += self.random.choice([1.0, 12.0])

    def _wait(self) -> None:
        """Let the clock go on to the next deadline of anybody."""
        dues = [self.members[name].due for name in self.survivors if self.members[name].is_undecided]
        if HUB not in self.dead and self.hub.due is not None:
            dues.append(self.hub.due)
        assert dues, "somebody waits, and nothing is due"
        self.now = max(self.now, min(dues))
        self._expire()

    def _expire(self) -> None:
        for name in self.survivors:
            member = self.members[name]
            if not member.is_undecided or self.now < member.due or not self._acts(name):
                continue
            said = member.round.expire(self.now)
            member.due = self.now + 1.0
            if said is not None:
                self._send(name, HUB, said)
        if HUB not in self.dead and self.hub.due is not None and self.hub.due <= self.now:
            self._feed(Tick(self.now))

    # The hub and its program.

    def _watch(self) -> None:
        """The hub notices who of those it has met is dead."""
        for name in sorted(self.linked & self.dead):
            self.linked.discard(name)
            self._feed(PeerLeft(name, "died", self.now))

    def _restart_hub(self) -> None:
        if HUB not in self.dead or not self.trouble.hub_returns:
            return
        self.dead.remove(HUB)
        self.num_actions[HUB] = 0
        self.trouble.crash_at.pop(HUB, None)
        if self.trouble.again_at is not None:
            self.trouble.crash_at[HUB], self.trouble.again_at = self.trouble.again_at, None
        self.hub = Coordinator(self.job)
        for event in self.log.events():
            self.hub.apply(event)
        self.is_open = False
        self._feed(Restarted(None, self.now))
        if HUB not in self.dead:
            self.linked = set()
            self.under_way += [(name, HUB, "return") for name in self.survivors]

    def _feed(self, event):
        """Let the hub decide and log, unless it dies before, between or after; its orders wait to be sent."""
        if not self._acts(HUB):
            return
        try:
            orders = apply_logged(self.hub, event, self._log)
        except CrashError:
            return
        for order in orders:
            if isinstance(order, Send) and order.to in self.members:
                self.outbox.append((order.to, order.message))
                if isinstance(order.message, RoundOpen):
                    self.is_open = True
                    self.opened[order.message.round_id] = order.message
            elif isinstance(order, Evict):
                self.released.add(order.to)
                self.linked.discard(order.to)
            elif isinstance(order, Notify) and isinstance(order.notice, RoundEnded):
                self.is_open = False

    def _log(self, event) -> None:
        if not self._acts(HUB):
            raise CrashError
        self.log.append(event)

    def _post(self, receiver: str, message) -> None:
        """Send one message, if the hub lives that long and has met who it is for."""
        if receiver not in self.linked or not self._acts(HUB):
            return
        if isinstance(message, RoundCommit | RoundAbort):
            self.told.setdefault(message.round_id, set()).add(type(message))
        if receiver not in self.dead and self.random.random() >= self.trouble.loss:
            self.under_way.append((HUB, receiver, message))

    def _hub_takes(self, sender: str, message) -> None:
        if message == "return":
            self._record_return(sender)
        elif sender in self.linked:
            self._feed(Received(sender, message, self.now))

    def _record_return(self, name: str) -> None:
        member = self.members[name]
        if self.hub.find_missing(f"key of {name}", member.order.build_id) == name:
            self.linked.add(name)
            self._feed(PeerReturned(name, (), self.now))
        else:
            self.released.add(name)  # it joins anew, and what it had is of no use

    # The members.

    def _member_takes(self, member: Member, message) -> None:
        if isinstance(message, PlanOrder):
            member.order, member.round = message, None
            self.released.add(member.name)
        elif isinstance(message, RoundOpen):
            if message.build_id == member.order.build_id:
                self._open(member, message)
        elif isinstance(message, RingPart) and message.round_id > (
            member.opened.round_id if member.opened else 0
        ):
            member.early.append(message)
        elif isinstance(message, RingPart) and member.round is not None:
            self._pass_on(member, member.round.receive(message))
        elif isinstance(message, RoundCommit | RoundAbort) and member.round is not None:
            self._pass_on(member, member.round.conclude(message) or ())

    def _open(self, member: Member, opened: RoundOpen) -> None:
        if member.opened is not None and opened.round_id <= member.opened.round_id:
            return
        if member.is_undecided:
            self.passed_over.setdefault(member.opened.round_id, set()).add(member.name)
        member.opened, member.due = opened, self.now + opened.deadline_seconds
        reduces, before = {}, {}
        for segment, _ in member.order.rings:
            owners = self.owners(opened.round_id, segment)
            place = owners.index(member.name)
            before[segment] = owners[place - 1]
            seat = RingPosition(opened.round_id, segment, place, len(owners))
            reduces[segment] = RingReduce(
                seat, Plain(self.vectors[segment, member.name]), weight_of(member.name), 4
            )
        member.round = Round(opened.round_id, member.name, reduces, member.due, before)
        self.rounds.setdefault(opened.round_id, {})[member.name] = member.round
        self._pass_on(member, tuple(member.round.start()))
        early, member.early = member.early, []
        for part in early:
            if part.round_id == opened.round_id:
                self._pass_on(member, member.round.receive(part))

    def _pass_on(self, member: Member, found) -> None:
        """Send what a round says, and keep what it gives out once it is committed."""
        averages, number = member.round.pop_averages(), member.opened.round_id
        if averages is not None:
            assert (number, member.name) not in self.averages, "averages are given out once"
            self.averages[number, member.name] = averages
        for said in () if isinstance(found, Refusal) else found:
            self._send(member.name, self._address(member, said), said)

    def _address(self, member: Member, message) -> str:
        if not isinstance(message, RingPart):
            return HUB
        owners = self.owners(message.round_id, message.segment)
        return owners[(owners.index(member.name) + 1) % len(owners)]

    def _phase(self, name: str) -> RoundPhase | None:
        found = self.members[name].round
        return None if found is None else found.phase


@cache
def begin(cuts, is_final: bool):
    """The history of a hub until it opens a round: the events before, who follows what, the last event."""
    clusters = make_clusters(cuts)
    nodes = {stage.node: node(stage.node) for cluster in clusters for stage in cluster.stages}
    settings = JobSettings(
        num_samples=64 if is_final else 10**6,
        num_validation=0,
        batch_size=4,
        epochs=1,
        rates=(0.1,),
        chunk_batches=2,
        average_every=1,
        expected_nodes=len(nodes),
    )
    script = _Script(clusters, nodes, is_final)
    waiting = [JobGiven(even_model(NUM_POSITIONS), SIMPLE, settings, 0.0)]
    waiting += [PeerJoined(each, f"key of {name}", (), 0.0) for name, each in nodes.items()]
    events, orders = [], {}
    monitored = MonitoredCoordinator(Coordinator(waiting[0]), log=events.append)
    for event in waiting:  # it grows by what scripted peers say
        made = monitored.apply(event)
        sends = [order for order in made if isinstance(order, Send)]
        if any(isinstance(send.message, RoundOpen) for send in sends):
            first = events.pop()  # it opens the round
            return tuple(events), orders, first
        orders |= {send.to: send.message for send in sends if isinstance(send.message, PlanOrder)}
        for order in made:
            waiting += script.answer(order)
    raise AssertionError("no round came")


class _Script:
    """Peers and a planner that do as they are told until a round opens."""

    def __init__(self, clusters, nodes, is_final: bool) -> None:
        self._clusters, self._nodes, self._is_final = clusters, nodes, is_final
        self._trained = set()

    def answer(self, order) -> list:
        match order:
            case MakePlan():
                rings = form_rings(self._clusters, self._nodes)
                plan = Plan(order.plan_id, 0, self._clusters, rings, ())
                return [PlanMade(order.plan_id, plan, 1, "", 0.0)]
            case MakeParts():
                return [PartsMade(order.start, order.stop, _BLOB, _BLOB, ("x",), ("x",), 0.0)]
            case Send(name, StageParts() as parts):
                return [Received(name, StageReady(parts.build_id), 0.0)]
            case Send(name, LeaseGrant() as grant):
                return self._train(name, grant)
        return []

    def _train(self, root: str, grant: LeaseGrant) -> list:
        leaf = next(each for each in self._clusters if each.stages[0].node == root).stages[-1].node
        # A lease counts with a report of every microbatch. Without an update no round comes before the last.
        if self._is_final:
            reports = [self._report(grant, index, version=0) for index in range(len(grant.num_samples))]
            done = LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples))
            return [*(Received(leaf, each, 0.0) for each in reports), Received(root, done, 0.0)]
        if root in self._trained:
            return []
        self._trained.add(root)
        return [Received(leaf, self._report(grant, 0, version=1), 0.0)]

    def _report(self, grant: LeaseGrant, index: int, version: int) -> StepReport:
        facts = (grant.build_id, grant.first_microbatch + index, version, 0, grant.num_samples[index])
        return StepReport(*facts, 0.1, 0.1, 0.0, 0.0, 1.0, ())


def make_clusters(cuts) -> tuple[Cluster, ...]:
    return tuple(
        Cluster(
            tuple(
                Stage(f"c{number}.{index}", start, stop)
                for index, (start, stop) in enumerate(zip((0, *each), (*each, NUM_POSITIONS), strict=True))
            )
        )
        for number, each in enumerate(cuts)
    )


def weight_of(name: str) -> float:
    """How much a member's cluster has trained."""
    return 1.0 + int(name[1:].split(".")[0])
