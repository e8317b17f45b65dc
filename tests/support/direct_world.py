"""Robust rounds in one process: members and hub as they ship, messages in a drawn order, liars at will."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import torch

from ravnest.averaging.direct import DirectRound, SharedSegment
from ravnest.config import WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import TrainConfig
from ravnest.hub.coordinator.robust_rounds import (
    Dispute,
    RobustDecision,
    RobustRoster,
    Suspicions,
    compare_clusters,
)
from ravnest.ids import HUB, NodeId, RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, SegmentState
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Node
from ravnest.protocol.averaging import (
    DirectPart,
    PartStep,
    RoundAbort,
    RoundCall,
    RoundCheck,
    RoundCommit,
)
from ravnest.protocol.messages import Refusal
from tests.support.round_world import make_clusters

LENGTH = 300  # numbers at each position of the line
CHUNK = 100

# What a liar sends instead of a message: (sender, to, message) -> messages.
Lie = Callable[[NodeId, NodeId, object], list[object]]


@dataclass
class Told:
    """What became of a round."""

    is_committed: bool = False
    reason: str = ""
    disputes: list[Dispute] = field(default_factory=list)
    liars: dict[NodeId, str] = field(default_factory=dict)
    outliers: dict[str, str] = field(default_factory=dict)
    silent: set[NodeId] = field(default_factory=set)
    num_bytes: dict[str, int] = field(default_factory=dict)
    sent: set[tuple[NodeId, NodeId, SegmentId, PartStep]] = field(default_factory=set)  # between members


class DirectWorld:
    """Clusters given by their cuts of one line of four positions; node `c1.0` is the root of cluster 1."""

    def __init__(self, cuts, seed: int, wire_format=WireFormat.FP32, length: int = LENGTH, **options) -> None:
        self.random, self.length = Random(seed), length
        self.generator = torch.Generator().manual_seed(seed)
        self.chunk = options.pop("chunk", CHUNK)
        self.hidden: frozenset[NodeId] = frozenset()  # nobody can dial them
        clusters = make_clusters(cuts)
        self.clusters = {
            f"c{k}": tuple(stage.node for stage in each.stages) for k, each in enumerate(clusters)
        }
        nodes = {stage.node: Node(stage.node, 1e9, 1e9, 1e9, 1e9) for x in clusters for stage in x.stages}
        self.rings = dict(enumerate(form_rings(clusters, nodes)))
        training = TrainConfig(OptimizerSettings((), 0.1), 1, deltas=wire_format)
        self.start = {segment: self.draw(segment) for segment in self.rings}
        self.segments = {
            (name, segment): SegmentState(
                self.layout(segment), (), training, "cpu", {"w": self.start[segment].clone()}
            )
            for segment, ring in self.rings.items()
            for name in ring.owners
        }
        self.live = {key: self.start[key[1]].clone() for key in self.segments}
        self.weights = dict.fromkeys(self.clusters, 100.0)
        self.suspicions, self.left_out, self.number = Suspicions(), set(), 0

    def size(self, segment: int) -> int:
        ring = self.rings[segment]
        return (ring.stop - ring.start) * self.length

    def layout(self, segment: int) -> Layout:
        return Layout(0, 1, (FlatEntry("w", (self.size(segment),), "float32", 0, 0),))

    def draw(self, segment: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(self.size(segment), generator=self.generator) * scale

    def train(self, signal: float = 0.05, noise: float = 0.05) -> None:
        """Let all clusters learn something in common, and something that only their samples teach."""
        common = {segment: self.draw(segment, signal) for segment in self.rings}
        mean = sum(self.weights.values()) / len(self.weights)
        for name, segment in self.live:
            share = self.weights[self.cluster_of(name)] / mean
            own = self.draw(segment, noise)
            self.live[name, segment] += share * common[segment] + share**0.5 * own

    def cluster_of(self, name: NodeId) -> str:
        return name.partition(".")[0]

    def roster(self) -> RobustRoster:
        present = {key: nodes for key, nodes in self.clusters.items() if key not in self.left_out}
        names = {name for nodes in present.values() for name in nodes}
        rings = {k: tuple(x for x in ring.owners if x in names) for k, ring in self.rings.items()}
        resting = frozenset(x for key in self.suspicions.resting for x in present.get(key, ()))
        weights = {key: self.weights[key] for key in present}
        return RobustRoster(present, rings, weights, resting, self.hidden & names)

    def run(  # noqa: C901 - one case for each kind of happening
        self, lie: Lie | None = None, dies: Callable[[NodeId, object], bool] = lambda *_: False
    ) -> Told:
        """Run a round. `dies` says before which of its messages a member falls silent for good."""
        self.number += 1
        roster, number = self.roster(), RoundId(self.number)
        hub = RobustDecision(number, roster)
        members = {name: self.open(name, roster) for nodes in roster.clusters.values() for name in nodes}
        work = {name: [member.start()] for name, member in members.items()}
        under_way, dead, told = [], set(), Told()
        given_up: dict[NodeId, RoundAbort] = {}

        def send(sender: NodeId, found) -> None:
            for to, message in () if isinstance(found, Refusal) else found:
                if sender in dead or dies(sender, message):
                    dead.add(sender)
                    return
                if isinstance(message, DirectPart):
                    told.sent.add((sender, to, message.segment, message.step))
                for each in [message] if lie is None else lie(sender, to, message):
                    self.count(told, each)
                    under_way.append((sender, to, each))

        while hub.outcome is None and not any(x.is_lie for x in given_up.values()):
            busy = [name for name in work if work[name] and name not in dead]
            if not busy and not under_way:
                self.expire(members, dead, given_up, hub)
                break
            if busy and self.random.random() < 0.5:
                name = self.random.choice(busy)
                found = next(work[name][0], None)
                work[name] = work[name][1:] if found is None else work[name]
                send(name, found or ())
                continue
            if not under_way:
                continue
            sender, to, message = under_way.pop(self.random.randrange(len(under_way)))
            if to == HUB and isinstance(message, RoundAbort):
                given_up[sender] = message
            elif to == HUB:
                found = hub.receive(message)
                under_way += (
                    [] if isinstance(found, str) else [(HUB, each.to, each.message) for each in found]
                )
            elif to in members and to not in dead:
                self.deliver(members[to], work[to], sender, message, lambda found, to=to: send(to, found))
        return self.end(hub, roster, members, given_up, told)

    def open(self, name: NodeId, roster: RobustRoster) -> DirectRound:
        shared = {}
        for segment, owners in roster.rings.items():
            if name in owners:
                state = self.segments[name, segment]
                weight = roster.weights[roster.cluster_of(name)]
                assert state.open({"w": self.live[name, segment]}, {}, weight, len(owners)) is None
                weights = {x: roster.weights[roster.cluster_of(x)] for x in owners}
                apart = (roster.resting, roster.hidden)
                facts = (RoundId(self.number), segment, state, owners, weights, self.chunk)
                shared[segment] = SharedSegment(*facts, *apart)
        return DirectRound(RoundId(self.number), name, shared, deadline=1.0)

    def deliver(self, member: DirectRound, work: list, sender: NodeId, message, send) -> None:
        if isinstance(message, RoundCall):
            work.append(member.call(message))
        elif isinstance(message, RoundCheck):
            send(member.check(message))
        elif isinstance(message, DirectPart):
            value = message.value
            arrived = EncodedChunk(value.spec, bytearray(value.buffer), None)  # as from a socket
            send(member.receive(sender, replace(message, value=arrived)))

    def expire(self, members, dead, given_up, hub) -> None:
        """Let all come to their deadline, then the hub."""
        for name, member in members.items():
            if name not in dead and isinstance(abort := member.expire(2.0), RoundAbort):
                given_up[name] = abort
        if not given_up:
            hub.expire()

    def end(self, hub, roster, members, given_up, told: Told) -> Told:
        if hub.outcome is None:
            name, abort = next(iter(given_up.items()))
            told.silent = set(hub.missing) - set(given_up) if hub.awaits_pledges else set()
            told.silent |= {x.suspect for x in given_up.values() if not x.is_lie and x.suspect}
            for sender, each in given_up.items():
                if each.is_lie:
                    pair = (sender, each.suspect) if each.hops == 1 else (each.suspect, sender)
                    hub.disputes.append(Dispute(*pair, each.reason))
            hub.give_up(name, abort.reason, abort.suspect)
        else:
            told.silent = set(hub.suspects)
        told.is_committed = isinstance(hub.outcome, RoundCommit)
        told.reason = "" if told.is_committed else hub.outcome.reason
        told.disputes = hub.disputes
        told.liars = self.suspicions.record_disputes(hub.disputes, roster) | hub.liars
        if told.is_committed:
            told.outliers = self.suspicions.record_likeness(compare_clusters(hub.sights, roster))
        self.conclude(hub, members, told)
        return told

    def conclude(self, hub, members, told: Told) -> None:
        for name, member in members.items():
            member.conclude(hub.outcome)
            averages = member.pop_averages() or {}
            for segment in [key[1] for key in self.segments if key[0] == name]:
                state, live = self.segments[name, segment], {"w": self.live[name, segment]}
                if segment in averages:
                    changes = state.commit(averages[segment], 1.0, live, {}, True)
                    self.live[name, segment] += changes["w"]
                else:
                    state.abort()

    def count(self, told: Told, message) -> None:
        if isinstance(message, DirectPart):
            size = memoryview(message.value.buffer).nbytes
            told.num_bytes[message.step] = told.num_bytes.get(message.step, 0) + size

    def anchors(self, segment: int) -> set[bytes]:
        """Return the different anchors that owners of a segment have."""
        present = [x for x in self.rings[segment].owners if self.cluster_of(x) not in self.left_out]
        return {self.segments[x, segment].anchors["w"].numpy().tobytes() for x in present}

    def anchor(self, segment: int, cluster: int = 0) -> torch.Tensor:
        name = next(x for x in self.rings[segment].owners if self.cluster_of(x) == f"c{cluster}")
        return self.segments[name, segment].anchors["w"].clone()
