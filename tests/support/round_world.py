"""A whole round in one process: drawn delivery order, lost messages, crashes at any action.

Every start, delivery, send and log write of a process is one action; `crash_at` names the action before
which a process dies. The coordinator can come back, knowing nothing but its log.
"""

from dataclasses import dataclass, field
from random import Random

import numpy as np
from support.ring_world import Plain

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.averaging.round import Round, RoundDecision, RoundPhase
from ravnest.protocol.averaging import RingPart, RoundAbort, RoundCommit, RoundQuery, RoundReady
from ravnest.protocol.messages import Refusal

HUB = "hub"
ROUND = 5
DEADLINE = 100.0
LENGTH = 11
FINAL = {RoundPhase.COMMITTED, RoundPhase.ABORTED}


@dataclass
class Trouble:
    """What goes wrong in one history."""

    crash_at: dict[str, int] = field(default_factory=dict)
    hub_returns: bool = True
    loss: float = 0.0  # share of the messages that never arrive before the deadline
    haste: float = 0.0  # chance per step that a clock, a watcher or a restart comes early
    slow_disk: bool = False  # the deadline passes and all ask before a decision is on disk


class RoundWorld:
    """Clusters given by their cuts of one line; node `c1.2` is the third stage of cluster 1."""

    def __init__(self, cuts: list[tuple[int, ...]], seed: int, trouble: Trouble) -> None:
        self.random = Random(seed)
        self.trouble = trouble
        self.rings = make_rings(cuts)
        self.members = tuple(sorted({name for ring in self.rings.values() for name in ring}))
        self.weights = {cluster: 1.0 + cluster for cluster in range(len(cuts))}
        self.vectors = self._draw_vectors(seed)
        self.rounds = {name: self._make_round(name) for name in self.members}
        self.decision = RoundDecision(ROUND, self.members, DEADLINE)
        self.log = None
        self.under_way = [(HUB, name, "start") for name in self.members]
        self.now = 0.0
        self.num_actions = dict.fromkeys((HUB, *self.members), 0)
        self.dead = set()
        self.averages = {}
        self.num_hasty = 10  # questions breed questions: without an end they would never run out

    def run(self) -> None:
        """Let everything happen, then let the clock run out and the coordinator return."""
        self._deliver_all()
        self.trouble.loss = self.trouble.haste = 0.0
        self.now = DEADLINE
        for _ in range(3):
            self._watch()
            if self.trouble.hub_returns:
                self._restart_hub()
            self._expire()
            self._deliver_all()

    @property
    def survivors(self) -> list[str]:
        return [name for name in self.members if name not in self.dead]

    def phases(self, names) -> set[RoundPhase]:
        return {self.rounds[name].phase for name in names}

    def expected(self, segment: int) -> np.ndarray:
        ring = self.rings[segment]
        weights = [self.weights[cluster_of(name)] for name in ring]
        return np.average([self.vectors[segment, x] for x in ring], axis=0, weights=weights)

    def _draw_vectors(self, seed: int) -> dict[tuple[int, str], np.ndarray]:
        generator = np.random.default_rng(seed)
        return {
            (segment, name): generator.normal(size=LENGTH - 3 * segment)
            for segment, ring in self.rings.items()
            for name in ring
        }

    def _make_round(self, name: str) -> Round:
        weight = self.weights[cluster_of(name)]
        rings = {
            segment: RingReduce(
                RingPosition(ROUND, segment, ring.index(name), len(ring)),
                Plain(self.vectors[segment, name]),
                weight,
                4,
            )
            for segment, ring in self.rings.items()
            if name in ring
        }
        return Round(ROUND, name, rings, DEADLINE)

    def _acts(self, process: str) -> bool:
        """Count one action; False when the process is dead or dies right now."""
        if self.num_actions[process] == self.trouble.crash_at.get(process):
            self.dead.add(process)
        if process in self.dead:
            return False
        self.num_actions[process] += 1
        return True

    def _send(self, sender: str, receiver: str, message) -> None:
        if self._acts(sender) and self.random.random() >= self.trouble.loss:
            self.under_way.append((sender, receiver, message))

    def _deliver_all(self) -> None:
        while self.under_way:
            if self.num_hasty and self.random.random() < self.trouble.haste:
                self.num_hasty -= 1
                self._be_hasty()
            sender, receiver, message = self.under_way.pop(self._pick())
            if not self._acts(receiver):
                continue
            if receiver == HUB:
                self._hub_takes(sender, message)
            else:
                self._member_takes(receiver, message)

    def _pick(self) -> int:
        places = range(len(self.under_way))
        if self.trouble.slow_disk:
            quick = [x for x in places if not isinstance(self.under_way[x][2], RoundDecision)]
            places = quick or places
        return self.random.choice(places)

    def _be_hasty(self) -> None:
        event = self.random.choice([self._watch, self._restart_hub, self._expire, self._pass_time])
        if event != self._restart_hub or self.trouble.hub_returns:
            event()

    def _pass_time(self) -> None:
        self.now += self.random.choice([1.0, DEADLINE])

    def _watch(self) -> None:
        """The hub notices who is dead."""
        for name in self.members:
            if name in self.dead and self._acts(HUB):
                self._settle(self.decision.give_up(name, "died"))

    def _expire(self) -> None:
        if self._acts(HUB):
            self._settle(self.decision.expire(self.now))
        for name in self.survivors:
            if not self._acts(name):
                continue
            match self.rounds[name].expire(self.now):
                case RoundAbort() as abort:
                    self._send(name, HUB, abort)
                case RoundQuery() as query:
                    for other in (HUB, *self.members):
                        self._send(name, other, query)

    def _restart_hub(self) -> None:
        if HUB not in self.dead:
            return
        self.dead.remove(HUB)
        self.trouble.crash_at.pop(HUB, None)
        self.decision = RoundDecision.recover(ROUND, self.members, self.log)
        if self.decision.pending is None:
            self._announce(self.decision.outcome)
        self._settle(self.decision.pending)

    def _settle(self, decision) -> None:
        """Write a decision to the log; other messages may come before the disk has it."""
        if decision is not None and not isinstance(decision, Refusal):
            self.under_way.append((HUB, HUB, self.decision))
            if self.trouble.slow_disk:
                self.now = DEADLINE
                self._expire()

    def _finish_write(self, decision: RoundDecision) -> None:
        if decision is not self.decision:
            return  # that coordinator died before the disk had it
        assert self.log is None, "a decision is final"
        self.log = decision.pending
        if self._acts(HUB):
            self._announce(decision.logged())

    def _announce(self, outcome) -> None:
        for name in self.random.sample(self.members, len(self.members)):
            self._send(HUB, name, outcome)

    def _hub_takes(self, sender: str, message) -> None:
        match message:
            case RoundReady():
                self._settle(self.decision.vote(message))
            case RoundAbort():
                self._settle(self.decision.give_up(sender, message.reason))
            case RoundQuery():
                self._reply(HUB, message)
            case RoundDecision():
                self._finish_write(message)

    def _member_takes(self, name: str, message) -> None:
        member = self.rounds[name]
        if isinstance(message, RoundQuery):
            self._reply(name, message)
            return
        if message == "start":
            sent = tuple(member.start())
        elif isinstance(message, RingPart):
            sent = member.receive(message)
        else:
            sent = member.conclude(message) or ()
        averages = member.take_averages()
        if averages is not None:
            assert name not in self.averages, "averages are given out once"
            self.averages[name] = averages
        for reply in () if isinstance(sent, Refusal) else sent:
            self._send(name, self._address(name, reply), reply)

    def _reply(self, name: str, query: RoundQuery) -> None:
        machine = self.decision if name == HUB else self.rounds[name]
        answer = machine.answer(query)
        if isinstance(answer, RoundCommit | RoundAbort):
            self._send(name, query.member, answer)

    def _address(self, name: str, message) -> str:
        if not isinstance(message, RingPart):
            return HUB
        ring = self.rings[message.segment]
        return ring[(ring.index(name) + 1) % len(ring)]


def make_rings(cuts: list[tuple[int, ...]]) -> dict[int, list[str]]:
    """Return the ring of every segment; a segment begins at 0 and wherever some cluster cuts."""
    starts = sorted({0}.union(*cuts))
    return {
        segment: [
            f"c{cluster}.{sum(cut <= start for cut in cluster_cuts)}"
            for cluster, cluster_cuts in enumerate(cuts)
        ]
        for segment, start in enumerate(starts)
    }


def cluster_of(name: str) -> int:
    return int(name[1:].split(".")[0])
