"""Real peers on one PC with emulated devices, links by class, and a trace of who comes and goes."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.joining import Peers
from benchmarks.links import Links
from benchmarks.measure import say
from benchmarks.swarm import LinkSpeed
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    Notice,
    Recovered,
    RoundEnded,
    Trained,
    WorkLost,
)
from ravnest.ids import NodeId
from ravnest.plan.types import Node, Swarm
from ravnest.sim.churn import AnyChange, Change, ChangeKind, read_trace

LINKS = (LinkSpeed(1.25e6, 0.02), LinkSpeed(5e6, 0.01), LinkSpeed(12.5e6, 0.005))  # one class each
_SPEEDS = (2e7, 4e7, 8e7)  # FLOP/s
_MEMORY = (1.6e6, 2.3e6, 3.0e6)  # bytes: a stage of the model of this study fits
_BACK_AFTER = 15.0  # seconds, until a node that went joins again
_MOST_SECONDS = 1500.0  # a run that takes longer is ended
_SIGNALS = {ChangeKind.LEAVE: signal.SIGINT, ChangeKind.KILL: signal.SIGKILL}


@dataclass(slots=True)
class Run:
    """What was seen of a run; times are seconds since training began."""

    result: Any = None
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)  # of the trace
    notices: list[Notice] = field(default_factory=list)

    def count(self, *kinds: type) -> int:
        """Return how often people were told one of these."""
        return sum(isinstance(each, kinds) for each in self.notices)

    @property
    def num_given_back(self) -> int:
        """The samples that were trained again."""
        return sum(x.num_given_back for x in self.notices if isinstance(x, ClusterBroken | ClusterDissolved))

    def summarise(self) -> dict[str, object]:
        """Return the run in numbers."""
        committed = sum(x.is_committed for x in self.notices if isinstance(x, RoundEnded))
        return {
            "seconds": round(self.seconds, 1),
            "joined again, left, killed": ", ".join(str(self.done[kind]) for kind in ChangeKind),
            "recoveries": self.count(Recovered),
            "clusters dissolved": self.count(ClusterDissolved),
            "begun again": self.count(WorkLost),
            "rounds": f"{committed} of {self.count(RoundEnded)}",
            "samples trained again": self.num_given_back,
        }


def make_trace(names: Sequence[NodeId], seconds: float, every: float, seed: int) -> str:
    """Return a trace: all join at first; so often one of the others than the last goes, and is back soon."""
    draw = Random(seed)
    lines = [f"0,{name},join" for name in names]
    away: dict[NodeId, float] = {}
    now = every
    while now < seconds:
        here = [name for name in names if away.get(name, -1.0) < now]
        name = draw.choice(here)
        kind = draw.choice((ChangeKind.LEAVE, ChangeKind.KILL))
        away[name] = now + _BACK_AFTER
        lines += [f"{now:g},{name},{kind}", f"{away[name]:g},{name},{ChangeKind.JOIN}"]
        now += every
    return "\n".join(lines) + "\n"


def make_swarm(num_peers: int) -> Swarm:
    """Return unequal devices: every combination of speed, memory and link in turn."""
    nodes = []
    for number in range(num_peers):
        link = LINKS[number % len(LINKS)]
        rate, delay = link.bytes_per_second, link.delay_seconds / 2
        speed, memory = _SPEEDS[number // 3 % 3], _MEMORY[(number + number // 3) % 3]
        nodes.append(Node(NodeId(f"node{number}"), memory, speed, rate, rate, delay))
    return Swarm(tuple(nodes))


def train_really(job: Any, swarm: Swarm, trace: str, clusters: int) -> Run:
    """Train a job to its end while peers come and go as a trace says, from the first report on."""
    import ravnest as rv
    from ravnest.hub.service.server import HubParts
    from ravnest.requester.session import LOCAL_PLAN

    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, max_stages=4, clusters=clusters)
    changes = read_trace(trace, "the trace", swarm)
    driver = _Driver(swarm, changes)
    with tempfile.TemporaryDirectory() as folder, _links() as lead:
        parts = HubParts(map_addresses=lead)
        with rv.Hub(
            "127.0.0.1:0", plan=plan, tell=driver.hear, folder=Path(folder) / "run", parts=parts
        ) as hub:
            driver.peers = Peers(
                hub.invitation, Path(folder), flops_per_second=_SPEEDS[0], memory_bytes=_MEMORY[0]
            )
            acting = threading.Thread(target=driver.run, daemon=True)
            try:
                driver.start_all()
                acting.start()
                driver.seen.result = hub.fit(job, nodes=len(swarm.nodes))
            finally:
                driver.ended.set()
                acting.join()
                driver.peers.close()
    return driver.seen


@contextlib.contextmanager
def _links() -> Iterator[Any]:
    """Give what maps addresses of peers to those that lead there over the link of their class."""
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(Links(each.bytes_per_second, each.delay_seconds)) for each in LINKS]

        def lead(addresses: Sequence[str]) -> tuple[str, ...]:
            return tuple(programs[_class_of(address)].through(address) for address in addresses)

        yield lead


def door_of(number: int) -> str:
    """Return where a peer listens: the address says of which class its link is."""
    return f"127.0.0.{2 + number % len(LINKS)}:0"


def _class_of(address: str) -> int:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return int(host.rpartition(".")[2]) - 2


class _Driver:
    """Starts peers, and ends them or starts them again when the trace says so."""

    def __init__(self, swarm: Swarm, changes: Sequence[AnyChange]) -> None:
        self._nodes = {node.name: (number, node) for number, node in enumerate(swarm.nodes)}
        self._changes = [x for x in changes if isinstance(x, Change) and x.seconds > 0.0]
        self._began = threading.Event()
        self._began_at = 0.0
        self.ended = threading.Event()
        self.seen = Run()
        self.peers: Peers | None = None

    def hear(self, notice: Notice) -> None:
        """Note what the hub says."""
        if isinstance(notice, Trained):
            if not self._began.is_set():
                self._began_at = time.monotonic()
                self._began.set()
            self.seen.seconds = time.monotonic() - self._began_at
            return
        self.seen.notices.append(notice)
        if not isinstance(notice, RoundEnded):
            say(show_notice(notice))

    def start_all(self) -> None:
        """Start every peer."""
        for name in self._nodes:
            self._start(name)

    def _start(self, name: NodeId) -> None:
        assert self.peers is not None
        number, node = self._nodes[name]
        options = ("--emulate", f"{node.flops_per_second:g} FLOP/s", "--memory", f"{node.memory_bytes:g} B")
        link = (
            "--bandwidth",
            f"{node.upload_bytes_per_second:g} B/s",
            "--latency",
            f"{node.latency_seconds:g} s",
        )
        self.peers.start(name, door=door_of(number), options=(*options, *link))

    def run(self) -> None:
        """Follow the trace until training has ended."""
        assert self.peers is not None
        while not self._began.wait(1.0):
            if self.ended.is_set():
                return
        for change in self._changes:
            if self.ended.wait(max(0.0, self._began_at + change.seconds - time.monotonic())):
                return
            is_here = change.node in self.peers.alive
            if is_here != (change.kind is not ChangeKind.JOIN):
                continue
            self.seen.done[change.kind] += 1
            say(f"{change.seconds:g} s: {change.kind} {change.node}")
            if change.kind is ChangeKind.JOIN:
                self._start(change.node)
            else:
                self.peers.send(change.node, _SIGNALS[change.kind])
        if not self.ended.wait(_MOST_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: what was trained is kept
