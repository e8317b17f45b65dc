"""A hub with scripted peers on a virtual clock: they answer at once or late, twice, never, or die.

Peers do no arithmetic. The world keeps its own books of what was counted and asserts, after every event, what
must hold in every history.
"""

import hashlib
import heapq
import struct
from collections import Counter, deque
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from itertools import count
from random import Random

from support.plan_world import FIRST_ANSWERS, SIMPLE, even_model, node

from ravnest.config import TIMEOUTS, Averaging
from ravnest.hub.coordinator.checks import NodeSketch, judge_sketches
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Abandon,
    Collect,
    Collected,
    Evict,
    Finish,
    InspectSamples,
    JobGiven,
    JobSettings,
    MakeParts,
    MakePlan,
    Notify,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    Probed,
    Received,
    Restarted,
    SamplesInspected,
    Send,
    SendFields,
    Stopped,
    Tick,
    WithdrawCollect,
)
from ravnest.hub.coordinator.leases import LeaseBook
from ravnest.hub.coordinator.notices import (
    FromCheckpoint,
    Joined,
    Left,
    RoundEnded,
    WorkLost,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.hub.monitors.monitors import MonitoredCoordinator
from ravnest.hub.service.event_log import read_event, write_event
from ravnest.ids import HUB
from ravnest.plan.formation import form_plan
from ravnest.protocol.averaging import RoundAbort, RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.membership import Fact, Leave, ProbeOrder
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import (
    BackupKept,
    BackupOrder,
    BlobRef,
    PlanOrder,
    RingOrder,
    SketchMade,
    SketchOrder,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageParts,
    StageReady,
)
from ravnest.protocol.training import (
    DroppedMicrobatch,
    LearningRate,
    LeaseBegin,
    LeaseDone,
    LeaseGrant,
    StepReport,
)

LONGEST = 100_000.0  # of a history; one that runs longer is stuck


@dataclass
class Trouble:
    """What goes wrong: shares of messages, and seconds."""

    seed: int = 0
    latency: float = 0.0  # at most, to and from the hub
    twice: float = 0.0
    dropped: float = 0.0  # of batches
    gives_up: float = 0.0  # of members of a round
    silent: float = 0.0  # of members of a round, and of those who are measured
    wrong: float = 0.0  # of members of a round, who hold another average than they should
    blames: float = 0.0  # of those who give up; they name any member
    guessed: tuple[Fact, ...] = ()  # by everybody who joins
    misses: float = 0.0  # of those who are to build a stage: a source does not give what it has
    no_room: float = 0.0  # of checkpoints
    detect_seconds: float = 1.0


@dataclass
class Peer:
    node: object
    is_alive: bool = True
    order: PlanOrder | None = None
    num_trained: int = 0  # batches of its cluster, kept at the leaf
    busy_until: float = 0.0  # of its cluster, kept at the root
    heard_at: float = 0.0
    said_at: float = 0.0
    held: frozenset = frozenset()  # positions whose state it has
    rings: tuple = ()
    is_leaving: bool = False
    slowness: float = 1.0  # times as long as at first
    link_slowness: float = 1.0  # times as long for what it sends
    blocked_by: int | None = None  # the round during which it trains nothing
    waiting: list = field(default_factory=list)  # what it would have said meanwhile
    average: int | None = None  # the round whose average its weights are
    ahead: dict = field(default_factory=dict)  # leases that it does not begin yet


# Many small clusters, as few samples as there are: what is tested is what a hub does with them.
MANY_CLUSTERS = replace(SIMPLE, clusters=99, averaging=Averaging.OVERLAPPED)


def job(**changes):
    settings = {
        "is_whole_batch": True,  # so that every cluster trains batches of its own
        "num_samples": 50,
        "num_validation": 23,
        "batch_size": 4,
        "epochs": 2,
        "rates": (0.1,),
        "chunk_batches": 2,
        "average_every": 3,
        "settle_seconds": 5.0,
        "most_snapshot_bytes": 10_000_000,
    }
    return JobGiven(even_model(6), MANY_CLUSTERS, JobSettings(**(settings | changes)), 0.0)


def blob(name, version=0):
    return BlobRef(hashlib.blake2b(repr((name, version)).encode(), digest_size=32).hexdigest(), 100)


def digest(*facts):
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


class HubWorld:
    """A hub and scripted peers; its planner and the facts of its nodes are arguments."""

    def __init__(self, given=None, trouble=None, planner=None, make_node=node, timeouts=TIMEOUTS.hub):
        self.given = given or job()
        self.trouble = trouble or Trouble()
        self.random = Random(self.trouble.seed)
        self.planner, self.make_node = planner or QUICK_PLANNER, make_node
        self.timeouts = timeouts
        self.log, self.answers, self.happened = [], [], []
        self.leases = {}  # all that were granted, by number
        self.counted_by = {}  # samples, by the root that said so
        self.recheck_seconds = 0.1  # that a peer takes to find the loss of another's microbatch
        self._begin()
        self.now = 0.0
        self.news, self.refusals, self.finish, self.results = [], [], None, []
        self.withdrawn = set()
        self.peers, self.known, self.told_epoch = {}, set(), {}
        self.queue, self.order_of = [], count()
        self.ledger = Counter()
        self.snapshots = {}  # by hash: the positions in it
        self.checkpoint, self.saved, self.books = 0, Counter(), None
        if self.given.books is not None:
            self.checkpoint, self.books = 1, self.given.books
            self.ledger = self.saved = counted(self.given.settings, self.books)
        self.session = 0
        self.away = set()  # clusters of before the last restart
        self.samples, self.batches = {}, set()
        self.updates = {}  # of each cluster: the microbatches of each update, by size
        self.is_stopped, self.abandoned = False, None
        self.in_round, self.knowing = {}, set()  # nodes asked; clusters that know what was trained
        self.bases = {}  # of nodes: the round whose average they have
        self.with_rings = {}
        self.has_wrong = False  # somebody in the open round
        self.vote = self.usual_vote  # a test may say otherwise: (seconds, message), or None
        self.loss = lambda batch: float(min(batch, 100))  # a test may say otherwise
        self.is_collecting = True  # a test may say Collected itself
        self.muted = set()
        self.given_sketch = self.sketch  # of what the requester collects; a test may say otherwise
        self.open_round = None
        self.rates = Counter()
        self.feed(self.given)

    def _begin(self):
        """Make a new hub, whose monitors know nothing yet."""
        self.hub = Coordinator(self.given, self.timeouts)
        self.monitored = MonitoredCoordinator(self.hub, watch=self.note)

    def note(self, event, orders):
        """Keep what happened, and apart what the coordinator was told: reports are no events."""
        self.happened.append((event, orders))
        is_refused = bool(orders) and isinstance(orders[0], Refusal)
        if isinstance(event, Received) and isinstance(event.message, LeaseDone) and not is_refused:
            lease = self.leases[event.message.lease]
            indices = [index for batch in self.samples[lease.number] for index in batch]
            self.ledger.update((lease.lease.epoch, index) for index in indices)
            counted = self.counted_by.setdefault(event.sender, [])
            counted += [(lease.lease.epoch, index) for index in indices]
            self.knowing.add(lease.cluster_id)
        is_report = isinstance(event, Received) and isinstance(event.message, StepReport)
        if not is_report and self.hub.concerns(event):
            self.log.append(event)
            self.answers.append(orders)

    # What a test does.

    def join(self, *names, memory_mb=150.0, at=None):
        for name in names:
            self.after((at or self.now) - self.now, self.join_now, name, memory_mb)

    def kill(self, name, at=None):
        self.after((at or self.now) - self.now, self._die, name)

    def leave(self, name, at=None):
        """Let a provider take its PC back politely."""
        self.after((at or self.now) - self.now, self._leave, name)

    def _leave(self, name):
        peer = self.peers.get(name)
        if peer is not None and peer.is_alive and not peer.is_leaving:
            peer.is_leaving = True
            self.say(name, Leave(peer.order.build_id if peer.order else 0, "Ctrl-C", can_hand_over=True))
            self.after(10.5, self._die, name)

    def slow(self, name, times, at=None):
        """Let a peer take so many times as long for its work as at first."""
        self.after((at or self.now) - self.now, self._slow, name, times)

    def _slow(self, name, times):
        if name in self.peers:
            self.peers[name].slowness = times

    def slow_link(self, name, times):
        """Let what a peer sends take so many times as long as at first."""
        self.peers[name].link_slowness = times

    def restart(self, at=None):
        """Kill the hub; one that has only its log and its checkpoint comes back, and all who live find it."""
        self.after((at or self.now) - self.now, self._restart)

    def _restart(self):
        if self.is_finished:
            return
        self.session += 1
        self._begin()
        for event, orders in zip(self.log, self.answers, strict=True):
            if not isinstance(orders[0] if orders else None, Refusal):
                self.hub.apply(read_event(*write_event(event)))
        self.bases = {}
        self.feed(Restarted(self.books, self.now))
        assert self.open_round is None
        for peer in self.peers.values():  # roots go on with what they have
            ahead, peer.ahead = peer.ahead, {}
            for grant in ahead.values() if peer.is_alive else ():
                self.work(peer.order, grant)
        for name in [name for name, peer in self.peers.items() if peer.is_alive]:
            self.after(self.random.choice([0.5, 3.0, 25.0]), self._in_session(), self._return, name)

    def _return(self, name):
        """Let a peer find the hub again: it goes on under its name, or joins anew."""
        peer = self.peers[name]
        if not peer.is_alive or (name in self.known and not self._is_missing(name)):
            return
        epoch = peer.order.build_id if peer.order and peer.held else 0
        if self.hub.find_missing(f"key of {name}", epoch) == name:
            self.feed(PeerReturned(name, (f"tcp://{name}",), self.now))
        else:
            self.join_now(name, peer.node.memory_bytes / 1e6)

    def _is_missing(self, name):
        return any(member.node.name == name for member in self.hub.membership.missing)

    def _in_session(self):
        """What was under way when a hub died never comes."""
        session = self.session

        def act(action, *arguments):
            if session == self.session:
                action(*arguments)

        return act

    def stop(self, reason="enough"):
        return self.feed(Stopped(reason, self.now))

    def run(self, until=LONGEST):
        while self._step(until):
            pass
        return self

    def run_until(self, condition):
        while not condition():
            assert self._step(LONGEST), f"it never came to that: {self.news}"
        return self

    def _step(self, until):
        """Let the next thing happen; False when there is none before `until`."""
        due, first = self.monitored.due, self.queue[0][0] if self.queue else None
        nexts = [time for time in (due, first) if time is not None]
        if not nexts or min(nexts) > until:
            return False
        self.now = max(self.now, min(nexts))
        if due is not None and due <= self.now:
            self.feed(Tick(self.now))
            assert self.monitored.due != due, "a tick that changes nothing would come again for ever"
        else:
            _, _, action, arguments = heapq.heappop(self.queue)
            action(*arguments)
        return True

    def told(self, kind):
        return [news for news in self.news if isinstance(news, kind)]

    @property
    def open_leases(self):
        return self.hub.ledger.open_leases if self.hub.ledger else ()

    @property
    def is_finished(self):
        return self.hub.phase is JobPhase.FINISHED

    def after(self, seconds, action, *arguments):
        self.at(self.now + seconds, action, *arguments)

    def at(self, time, action, *arguments):
        heapq.heappush(self.queue, (time, next(self.order_of), action, arguments))

    # The hub's side.

    def feed(self, event):
        ahead = self.hub.ledger.leases_ahead if self.hub.ledger else ()
        self.leases |= {lease.number: lease for lease in (*self.open_leases, *ahead)}
        self.running = {x.cluster_id: x.nodes for x in self.hub.clusters if x.is_running}
        self.away |= {*self.running} if isinstance(event, Restarted) else set()
        orders = self.monitored.apply(event)
        refused = [order for order in orders if isinstance(order, Refusal)]
        if refused:
            assert len(orders) == 1
            self.refusals += refused
            return orders
        self._know(event)
        for order in orders:
            self._carry_out(order)
        if self.abandoned in orders and not self.abandoned.is_guarded:
            self._check_abandoned(event)
        self.check()
        return orders

    def _check_abandoned(self, event):
        """Nobody could have kept what was trained, but for those who went with this event."""
        gone = {PeerLeft: lambda: event.node, PeerJoined: lambda: event.node.name, Stopped: lambda: None}
        name = gone.get(type(event), lambda: getattr(event, "sender", None))()
        left = {holder for holder, nodes in self.running.items() if name not in nodes}
        assert not left & self.knowing
        assert not left or self.ledger

    def _know(self, event):
        match event:
            case PeerJoined():
                self.known.add(event.node.name)
            case PeerLeft():
                self.known.discard(event.node)
            case Stopped():
                self.is_stopped = True

    def _carry_out(self, order):  # noqa: C901, PLR0915 - one short case for each
        match order:
            case Send():
                self._check_sent(order)
                peer = self.peers[order.to]
                peer.heard_at = max(peer.heard_at, self.now + self._delay())  # a link keeps the order
                self.at(peer.heard_at, self._in_session(), self.deliver, peer, order.message)
            case MakePlan():
                made = lambda: self.feed(self.planner.make_plan(self.given, order, self.now))  # noqa: E731
                self.after(self._delay(), self._in_session(), made)
            case Evict():
                if order.to in self.peers:
                    self.peers[order.to].is_alive = False
            case MakeParts():
                weights = blob(("hub", order.start, order.stop), self.checkpoint)
                self.snapshots[weights.blob] = frozenset(range(order.start, order.stop))
                made = PartsMade(
                    order.start,
                    order.stop,
                    blob((order.start, order.stop)),
                    weights,
                    ("x",) * (order.start == 0) + ("y",) * (order.stop == 6),
                    ("x",) * (order.start == 0) + ("y", "mask") * (order.stop == 6),
                    0.0,
                )
                self.after(self._delay(), self._in_session(), lambda: self.feed(replace(made, now=self.now)))
            case SendFields():
                assert order.lease not in self.samples
                self.samples[order.lease] = order.samples
                fields = [each for _, names in order.consumers for each in names]
                assert fields == (["x", "y", "mask"] if order.is_evaluation else ["x", "y"])
                assert {name for name, _ in order.consumers} <= self.known
            case InspectSamples():
                self.after(0.5, self._in_session(), self._inspect, order)
            case Collect():
                self._collect(order)
            case WithdrawCollect(number):
                self.withdrawn.add(number)
            case Notify():
                self._hear(order.notice)
            case Finish():
                assert self.finish is None
                assert self.abandoned is None
                self.finish = order
                books = [each.books for each in self.results if each.parts == order.parts] or [self.books]
                self.ledger = counted(self.given.settings, books[0])
            case Abandon():
                assert self.is_stopped or order.is_guarded
                assert self.finish is None
                self.abandoned = order

    def _inspect(self, order):
        """Find no sample at fault: microbatches are dropped by chance here."""
        self.feed(SamplesInspected(order.is_evaluation, order.samples, (), self.now))

    def _collect(self, order):
        if not order.is_result:
            self.after(self._delay(), self._in_session(), self.keep_checkpoint, order)
            return
        self.results.append(order)
        if self.is_collecting:
            found = self._judge(order)
            collected = lambda: self.feed(Collected(order.number, self.now, *found))  # noqa: E731
            self.after(self._delay(), self._in_session(), collected)

    def keep_checkpoint(self, order):
        fault = "the disk is full" if self._happens(self.trouble.no_room) else ""
        fault = "training went back" if order.number in self.withdrawn else fault
        unlike, verdict = self._judge(order)
        if not (unlike or fault):  # it is on disk, whatever became of its cluster meanwhile
            self.checkpoint, self.books = order.number, order.books
            self.saved = counted(self.given.settings, order.books)
        self.feed(Collected(order.number, self.now, unlike or fault, verdict))

    def _check_sent(self, order):  # noqa: C901 - one short case for each
        assert order.to in self.known
        match order.message:
            case PlanOrder():
                assert order.message.build_id > self.told_epoch.get(order.to, 0)
                self.with_rings[order.to] = bool(order.message.rings)
                if not order.message.rings:
                    self.bases.pop(order.to, None)
                self.told_epoch[order.to] = order.message.build_id
            case LeaseGrant() as grant:
                new = set(range(grant.first_microbatch, grant.first_microbatch + len(grant.num_samples)))
                assert not new & self.batches
                assert min(grant.num_samples) >= 1
                assert len(grant.num_samples) <= 1024
                assert not (self.is_stopped and not grant.is_evaluation), "nothing is leased after the stop"
                self.batches |= new
                assert grant.build_id == self.told_epoch[order.to]
            case LeaseBegin():
                assert order.message.build_id == self.told_epoch[order.to]
            case RoundOpen() as opened:
                assert self.open_round in (None, opened.round_id), "never two rounds at once"
                self.open_round = opened.round_id
                assert order.to not in opened.left_out
                self.in_round[order.to] = opened
                assert opened.is_blocking or not self.is_stopped, "only the last round comes after the stop"
                assert opened.build_id == self.told_epoch[order.to]
            case RingOrder() as rings:
                self.with_rings[order.to] = bool(rings.rings)
                if not rings.rings:
                    self.bases.pop(order.to, None)
            case StageParts() as parts:
                if self.with_rings[order.to] and (parts.anchor_round is not None or parts.sources):
                    self.bases[order.to] = parts.anchor_round
                for source in parts.sources:
                    if source.node == HUB and self.ledger:
                        assert self.checkpoint, "first weights where others have learned"
            case LearningRate() as rate:
                assert rate.build_id == self.told_epoch[order.to]
                self.rates[order.to] += 1

    def _hear(self, news):
        self.news.append(news)
        if isinstance(news, Left):
            self.known.discard(news.node)
        if isinstance(news, Joined):
            self.known.add(news.node)
        if isinstance(news, RoundEnded):
            assert news.round_id == self.open_round
            took_part = {holder for holder, nodes in self.running.items() if nodes[0] in self.in_round}
            if news.is_committed:
                assert not self.has_wrong, "averages that differ do not commit"
                self.knowing |= took_part
                self.bases |= dict.fromkeys(self.in_round, news.round_id)
            self.open_round, self.in_round, self.has_wrong = None, {}, False
        if isinstance(news, WorkUndone):
            counted = [each for each in self.counted_by.get(news.node, ()) if each in self.ledger]
            undone = counted[-news.num_samples :]  # no more than since it was last found to train
            assert len(undone) == news.num_samples
            self.counted_by[news.node] = counted[: -news.num_samples]
            self.ledger -= Counter(undone)
        if isinstance(news, FromCheckpoint):
            self.ledger = Counter(self.saved)
        if isinstance(news, WorkLost):
            assert news.num_samples == sum(self.ledger.values()) - sum(self.saved.values())
            self.ledger = Counter(self.saved)

    def check(self):
        running = {each.cluster_id: each for each in self.hub.clusters if each.is_running}
        held = {}
        for lease in self.open_leases:
            held.setdefault(lease.cluster_id, []).append(lease)
        resting = {each.cluster_id: each for each in self.hub.clusters if each.is_broken}
        resting = {key: each for key, each in resting.items() if key in self.away}  # until there is a plan
        ahead = {lease.cluster_id for lease in self.hub.ledger.leases_ahead}
        assert {*held, *ahead} <= {*running, *resting}, "no lease is held by a dead cluster"
        for key, leases in held.items():  # two, or as many as cover twice what is in flight
            window = (running | resting)[key].cluster.stages[0].window
            assert len(leases) <= 2 or sum(len(each.num_samples) for each in leases[:-1]) < 2 * window
        kinds = {(lease.cluster_id, lease.lease is None) for lease in self.open_leases}
        assert len(kinds) == len(held), "weights stand still while they are evaluated"
        if any(is_evaluation for _, is_evaluation in kinds) and not self.is_stopped:
            settings = self.given.settings
            least = settings.samples_of(settings.evaluate_updates) or settings.num_samples
            assert len(self.ledger) >= min(least, settings.num_total)
        for cluster in self.hub.clusters:
            assert cluster.is_broken or self.is_finished or set(cluster.nodes) <= self.known
        self._check_round(running.values())
        assert max(self.ledger.values(), default=1) == 1, "no sample is counted twice in an epoch"
        if self.is_finished:
            settings = self.given.settings
            expected = {(e, s) for e in range(settings.epochs) for s in range(settings.num_samples)}
            is_best = self.finish is not None and self.finish.is_best  # an older state, on purpose
            is_whole = not self.is_stopped and self.abandoned is None and not is_best
            assert set(self.ledger) == expected if is_whole else set(self.ledger) <= expected
            assert not self.open_leases
            assert (self.finish is None) != (self.abandoned is None)
            has_parts = self.finish is not None and bool(self.finish.parts)
            assert not has_parts or self.finish.parts[0].start == 0
            assert has_parts or self.finish is None or self.books is not None, "a checkpoint is the result"

    def _check_round(self, running):
        """Whole clusters take part, two or more; what they begin from, one of them has, and nothing newer."""
        if self.open_round is None:
            return
        took_part = [each for each in running if each.root in self.in_round]
        assert {name for each in took_part for name in each.nodes} == set(self.in_round)
        assert len(took_part) > 1
        own = {"build_id": 0, "is_anchor": False, "left_out": (), "weights": (), "resting": (), "hidden": ()}
        assert len({replace(each, **own) for each in self.in_round.values()}) == 1
        opened = self.in_round[took_part[0].root]
        bases = [{self.bases.get(name) for name in each.nodes} for each in took_part]
        known = [base for found in bases for base in found if len(found) == 1 and base is not None]
        assert opened.anchor_round == max(known, default=opened.round_id), (
            "what one cluster has, and nothing newer"
        )
        anchors = {name for name, each in self.in_round.items() if each.is_anchor}
        assert not anchors if known else anchors in [set(each.nodes) for each in took_part]
        for name, each in self.in_round.items():
            owners = {x for ring in self.hub.placement.rings if name in ring.owners for x in ring.owners}
            assert set(each.left_out) == owners - set(self.in_round), "of its own rings, and no others"

    # The peers' side.

    def _delay(self):
        return self.random.uniform(0.0, self.trouble.latency) if self.trouble.latency else 0.0

    def _happens(self, share):
        return share > 0 and self.random.random() < share

    def join_now(self, name, memory_mb):
        peer = self.peers[name] = Peer(self.make_node(name, memory_mb))
        self.told_epoch.pop(name, None)
        addresses, guessed = (f"tcp://{name}",), self.trouble.guessed
        self.feed(PeerJoined(peer.node, f"key of {name}", addresses, self.now, guessed))

    def _die(self, name):
        peer = self.peers.get(name)
        if peer is None or not peer.is_alive:
            return
        peer.is_alive = False
        self.after(self.trouble.detect_seconds, self._notice, name, peer)

    def _notice(self, name, peer):
        if self.peers[name] is peer:
            self.feed(PeerLeft(name, "silent", self.now))

    def say(self, name, message, seconds=0.0):
        """Let a peer send to the hub, if it then still lives."""
        self.after(seconds, self.speak, name, self.peers[name], message)

    def speak(self, name, peer, message):
        if not peer.is_alive or self.peers[name] is not peer or name in self.muted:
            return
        copies = 2 if self._happens(self.trouble.twice) else 1
        for _ in range(copies):
            peer.said_at = max(peer.said_at, self.now + self._delay())  # a link keeps the order
            self.at(peer.said_at, self._in_session(), self._arrive, name, peer, message)

    def _arrive(self, name, peer, message):
        if self.peers[name] is peer:  # another with its name has another key
            self.feed(Received(name, message, self.now))

    def deliver(self, peer, message):  # noqa: C901, PLR0912 - one short case for each
        name = peer.node.name
        if not peer.is_alive or self.peers[name] is not peer:
            return
        if isinstance(message, PlanOrder):
            if peer.order is None or message.build_id > peer.order.build_id:
                peer.order, peer.num_trained, peer.busy_until = message, 0, self.now
                peer.rings, peer.ahead = message.rings, {}
                peer.held = peer.held if message.stage else frozenset()
            return
        if getattr(message, "build_id", None) not in (None, peer.order and peer.order.build_id):
            return
        match message:
            case ProbeOrder():
                self._report(name, peer)
            case RingOrder():
                peer.rings = message.rings
            case StageParts():
                self.after(self._delay(), self.build_stage, name, peer, message)
            case BackupOrder():
                self.say(name, BackupKept(message.plan_id, message.number), seconds=0.5)
            case SnapshotOrder():
                weights = blob(name, message.number)
                assert peer.held, "a snapshot of nothing"
                self.snapshots[weights.blob] = peer.held
                facts = (message.build_id, message.number, 1000, weights, message.anchor_round)
                self.say(name, SnapshotMade(*facts), seconds=0.5)
            case SketchOrder():
                rows = tuple((x.start, x.stop, self.sketch(name, message.key)) for _, x in peer.rings)
                self.say(name, SketchMade(message.build_id, message.number, rows), seconds=0.5)
            case LeaseGrant() if message.recheck is not None:
                self._recheck(name, message)
            case LeaseGrant() if message.is_ahead:
                peer.ahead[message.lease] = message
            case LeaseBegin():
                self.work(peer.order, peer.ahead.pop(message.lease))
            case LeaseGrant():
                self.work(peer.order, message)
            case RoundOpen():
                peer.blocked_by = message.round_id if message.is_blocking else None
                self._answer_round(name, message)
            case RoundCommit() | RoundAbort():
                self._end_round(peer, message)

    def sketch(self, name, key):
        """What a peer says of its weights: all that is trained is the same, unless a test says otherwise."""
        return struct.pack("<4f", 1.0, *([0.5] * 3))

    def _judge(self, order):
        """What the requester finds when it compares what it collected with what others say."""
        segments = {(start, stop) for other in order.others for start, stop, _ in other.rows}
        given = [
            NodeSketch(
                part.node,
                tuple(
                    (*each, self.given_sketch(part.node, order.key))
                    for each in sorted(segments)
                    if part.start <= each[0] and each[1] <= part.stop
                ),
            )
            for part in order.parts
        ]
        verdict = judge_sketches(given, order.others)
        givers = {part.node for part in order.parts}
        return verdict.describe() if verdict.disputed or givers & set(verdict.unlike) else "", verdict

    def build_stage(self, name, peer, parts):
        """Build a stage of what is kept and what sources have; who gave nothing is named."""
        if peer.order.build_id != parts.build_id or self.peers[name] is not peer:
            return
        sources = [source.node for source in parts.sources if source.node != HUB]
        if sources and self._happens(self.trouble.misses):
            missing = StageMissing(parts.build_id, self.random.choice(sources), "it refuses")
            self.say(name, missing, seconds=0.2)
            return
        if any(not self.peers[source].is_alive for source in sources):
            return  # it waits for ever; there will be another plan
        found = peer.held if parts.is_kept else frozenset()
        found = found.union(*(self.snapshots[source.weights.blob] for source in parts.sources))
        needed = frozenset(range(peer.order.stage.start, peer.order.stage.stop))
        assert needed <= found, f"{name} lacks {needed - found}"
        peer.held = needed
        self.say(name, StageReady(parts.build_id), seconds=1.0)

    def _end_round(self, peer, outcome):
        """Let a cluster that stood still go on: with the average, if there is one."""
        if peer.blocked_by == outcome.round_id:
            is_committed = isinstance(outcome, RoundCommit)
            peer.average = outcome.round_id if is_committed else peer.average
            peer.blocked_by, waiting, peer.waiting = None, peer.waiting, []
            for each in waiting:
                self.from_cluster(*each)

    def _answer_round(self, name, opened):
        said = self.vote(name, opened)
        if said is not None:
            self.say(name, said[1], seconds=said[0])

    def usual_vote(self, name, opened):
        if self._happens(self.trouble.silent):
            return None
        if self._happens(self.trouble.gives_up):
            suspect = self.random.choice([*self.peers, None]) if self._happens(self.trouble.blames) else None
            seconds = opened.deadline_seconds if self._happens(self.trouble.blames) else 0.7
            return seconds, RoundAbort(opened.round_id, "no room", suspect)
        is_wrong = self._happens(self.trouble.wrong) and opened.round_id == self.open_round
        self.has_wrong |= is_wrong
        return 0.7, self.ready(name, opened.round_id, is_wrong)

    def ready(self, name, round_id, is_wrong=False):
        """The vote of a peer that holds what it should, or something of its own."""
        hashes = tuple(
            (segment, digest(round_id, segment, name if is_wrong else ""))
            for segment, _ in self.peers[name].rings
        )
        return RoundReady(round_id, name, hashes)

    def _report(self, name, peer):
        """Let the hub know what it and a peer have measured: half of what the peer says of itself."""

        def report():
            if peer.is_alive and self.peers[name] is peer:
                facts = peer.node.flops_per_second / 2, 5e8 / peer.link_slowness, 6e8, 1e-6
                self.feed(Probed(name, *facts, self.now))

        if not self._happens(self.trouble.silent):
            self.after(self._delay() + 1.0, report)

    def _recheck(self, name, grant):
        """Find the loss of another cluster's microbatch again."""
        loss = self.found_again(name, grant.recheck.microbatch)
        facts = (grant.build_id, grant.first_microbatch, 0, 0, grant.num_samples[0], 0.0, 0.0, 0.0, 0.0)
        report = StepReport(*facts, loss, (), None, grant.recheck.anchor_round)
        self.say(name, report, seconds=self.recheck_seconds)

    def found_again(self, name, microbatch):
        """What a peer says of the loss of another's microbatch; a test may say otherwise."""
        return self.loss(microbatch)

    def work(self, order, grant):
        """Train or evaluate batch after batch, as long as all nodes of the cluster live."""
        pipeline, accumulate = order.pipeline, order.accumulate
        num_trained, leaf, root = 0, self.peers[pipeline[-1]], self.peers[pipeline[0]]
        start = max(self.now, root.busy_until)
        pace = 0.3 * max(self.peers[name].slowness * self.peers[name].link_slowness for name in pipeline)
        root.busy_until = start + pace * len(grant.num_samples)
        for index, num_samples in enumerate(grant.num_samples):
            batch = grant.first_microbatch + index
            seconds = start - self.now + pace * (index + 1)
            if self._happens(self.trouble.dropped):
                dropped = DroppedMicrobatch(grant.build_id, batch, "not a number")
                self.after(seconds, self.from_cluster, pipeline, self.random.choice(pipeline), dropped)
                continue
            num_trained += num_samples
            if not grant.is_evaluation:
                update = leaf.num_trained // accumulate
                self.updates.setdefault((pipeline, grant.build_id), {}).setdefault(update, []).append(
                    num_samples
                )
                leaf.num_trained += 1
            metrics = (("acc", 0.5),)
            for name in pipeline:
                loss = self.loss(batch) if name == pipeline[-1] else None
                report = StepReport(
                    grant.build_id,
                    batch,
                    leaf.num_trained // accumulate,
                    0,
                    num_samples,
                    0.0 if grant.is_evaluation else 0.1 * self.peers[name].slowness,
                    0.0 if grant.is_evaluation else 0.1 * self.peers[name].slowness,
                    0.0,
                    0.0,
                    loss,
                    metrics,
                )
                if not grant.is_evaluation or name == pipeline[-1]:
                    self.after(seconds, self.from_cluster, pipeline, name, report)
        if not grant.is_evaluation:
            done = LeaseDone(grant.build_id, grant.lease, num_trained)
            seconds = root.busy_until - self.now
            self.after(seconds, self.from_cluster, pipeline, pipeline[0], done)

    def from_cluster(self, pipeline, name, message):
        peers = [self.peers[each] for each in pipeline]
        if all(peer.is_alive and peer.order and peer.order.build_id == message.build_id for peer in peers):
            if len(pipeline) == 1 and peers[0].blocked_by is not None:
                peers[0].waiting.append((pipeline, name, message))
                return
            is_training = isinstance(message, StepReport) and message.forward_seconds > 0
            if is_training and len(pipeline) == 1 and peers[0].average is not None:
                message = replace(message, anchor_round=peers[0].average)
                peers[0].average = None
            self.say(name, message)


def counted(settings, books):
    """The samples that a checkpoint's books count, by what they would still hand out."""
    book, left = LeaseBook.restore(books.leases), set()
    while lease := book.lease("anybody", settings.num_samples):
        left |= {(lease.epoch, int(index)) for index in book.samples(lease)}
    whole = ((epoch, sample) for epoch in range(settings.epochs) for sample in range(settings.num_samples))
    return Counter(each for each in whole if each not in left)


@cache
def _found(profile, swarm, config, seed):
    try:
        return form_plan(profile, swarm, config, seed, budget=FIRST_ANSWERS)
    except Exception as shortage:
        return shortage


def _form_quickly(profile, swarm, config, seed, plan_id):
    """Form the plan that the search finds first; each is found once."""
    found = _found(profile, swarm, config, seed)
    if isinstance(found, Exception):
        raise found
    return replace(found, plan_id=plan_id)


QUICK_PLANNER = SearchPlanner(form=_form_quickly)


def check_replay(world):
    """The log alone gives the same orders and the same state, also after it was plain data."""
    state = remembered(world.hub)
    hub = Coordinator(world.given, world.timeouts)
    assert [hub.apply(event) for event in world.log] == world.answers
    assert remembered(hub) == state
    hub = Coordinator(world.given, world.timeouts)
    for event, orders in zip(world.log, world.answers, strict=True):
        if not isinstance(orders[0] if orders else None, Refusal):  # what is refused need not be logged
            assert hub.apply(read_event(*write_event(event))) == orders
    assert remembered(hub) == state


def remembered(hub):
    """All that a hub remembers; what it only has not looked up yet is no difference."""
    assert hub.placement.running is hub.placement.running
    return freeze(hub)


def freeze(thing, known=None):
    """Everything a state machine remembers, as values that compare; what is reached on many ways, once."""
    known = {} if known is None else known
    if id(thing) not in known:
        known[id(thing)] = thing, _freeze(thing, known)  # the thing too: an id is free again when it is gone
    return known[id(thing)][1]


def _freeze(thing, known):
    if isinstance(thing, dict):
        return [(key, freeze(value, known)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, list | tuple | deque):
        return [freeze(each, known) for each in thing]
    if is_dataclass(thing):
        values = [freeze(getattr(thing, each), known) for each in thing.__dataclass_fields__]
        return type(thing).__name__, values
    if hasattr(thing, "__dict__"):
        return type(thing).__name__, freeze(vars(thing), known)
    return thing
