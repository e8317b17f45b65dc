"""A real swarm with given stages: `ravnest join` processes and a hub here that notes what it hears.

The planner would choose the cuts; a comparison needs the same ones everywhere. So the plan is made here, by
the planner's own functions for windows and accumulation, and peers may be made to meet over slow links.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from benchmarks.links import Links
from ravnest.config import TIMEOUTS, Averaging, PlanConfig, Timeouts
from ravnest.errors import PlanError
from ravnest.hub.coordinator.events import Action, Event, Received
from ravnest.hub.coordinator.notices import PlanFormed
from ravnest.hub.coordinator.planner import FormPlan, SearchPlanner
from ravnest.hub.service.server import HubParts
from ravnest.hub.service.status import StatusTracker
from ravnest.ids import NodeId
from ravnest.plan.assembly import assemble_plan, build_clusters
from ravnest.plan.cost import NodeTable
from ravnest.plan.line import LineCost
from ravnest.plan.types import Cluster, ModelProfile, Node, Plan, Swarm
from ravnest.protocol.training import StepReport

MapAddresses = Callable[[Sequence[str]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What connects two peers."""

    bytes_per_second: float
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """How a job is spread: claimed or emulated speed by stage, where to cut, over what."""

    flops_per_second: Sequence[float | None]  # None: measured
    cuts: Sequence[int]  # inner ones, as positions of the line
    is_emulated: bool = False
    link: LinkSpeed | None = None
    counts_bytes: bool = False
    memory_bytes: float = 2e9
    num_clusters: int = 1  # all cut alike
    averaging: Averaging = Averaging.OVERLAPPED
    is_fenced: bool = True  # compute is a process of its own
    timeouts: Timeouts = TIMEOUTS


@dataclass(slots=True)
class Record:
    """What was seen of a run; times are of time.perf_counter."""

    reports: list[tuple[float, NodeId, StepReport]] = field(default_factory=list)
    news: list[tuple[float, Any]] = field(default_factory=list)
    num_bytes: list[tuple[float, int]] = field(default_factory=list)  # between peers, both ways
    profile: ModelProfile | None = None  # of a microbatch
    config: PlanConfig | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the result

    @property
    def leaf_times(self) -> list[tuple[float, int]]:
        """When each microbatch had gone through the last stage, and its samples."""
        return [(at, report.num_samples) for at, _, report in self.reports if report.loss is not None]

    def samples_per_second(self, skip_share: float) -> float:
        """Return the rate after a share of all batches, until the pipeline begins to run dry."""
        times = self.leaf_times
        first, last = int(len(times) * skip_share), len(times) - 1 - self._tail
        num_samples = sum(size for _, size in times[first + 1 : last + 1])
        return num_samples / (times[last][0] - times[first][0])

    @property
    def _tail(self) -> int:
        return max(stage.window for stage in self.cluster.stages)

    @property
    def formed(self) -> PlanFormed:
        """The plan, and what it was said to do."""
        return next(news for _, news in self.news if isinstance(news, PlanFormed))

    @property
    def cluster(self) -> Cluster:
        """The first cluster of the plan."""
        return self.formed.plan.clusters[0]


def train(
    job: Any,
    setting: Setting,
    plan: PlanConfig | None = None,
    watch: Callable[[dict[NodeId, int], Record], None] | None = None,
    on_event: Callable[[Event, tuple[Action, ...]], None] | None = None,
    look: Callable[[StatusTracker], None] | None = None,
    form: Callable[[Record, Setting], FormPlan] | None = None,
    follow: Callable[[Any, Record], None] | None = None,
) -> Record:
    """Train a job over the stages of a setting; `watch` gets the peers' processes every 0.1 s and at news.

    `on_event` sees what happens to the hub and what it orders, `look` the hub itself after that; `form` cuts
    in another way than the setting. `follow` gets the hub, with a dashboard, in a thread of its own.
    """
    from ravnest.requester.local_peers import Hardware
    from ravnest.requester.session import LOCAL_PLAN, local

    record, ended = Record(), threading.Event()
    hardware = [
        Hardware(
            setting.memory_bytes,
            speed,
            speed if setting.is_emulated else None,
            is_fenced=setting.is_fenced,
        )
        for speed in setting.flops_per_second
    ]
    config = plan or replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=99, averaging=setting.averaging)

    def hear(news: Any) -> None:
        record.news.append((time.perf_counter(), news))
        if watch is not None:
            watch(dict(swarm.processes), record)

    def keep_watching() -> None:
        while watch is not None and not ended.wait(0.1):
            watch(dict(swarm.processes), record)

    def note(event: Event, orders: tuple[Action, ...]) -> None:
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            record.reports.append((time.perf_counter(), event.sender, event.message))
        if on_event is not None:
            on_event(event, orders)

    parts = HubParts(SearchPlanner(form=(form or fix_plan)(record, setting)), setting.timeouts, note)
    looking = threading.Thread(target=keep_watching, daemon=True)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(environment))
        if setting.link is not None or setting.counts_bytes:
            map_addresses = stack.enter_context(_over_links(record, setting.link))
            parts = replace(parts, map_addresses=map_addresses)
        page = follow is not None and "127.0.0.1:0"
        swarm = local(hardware, plan=config, tell=hear, look=look, parts=parts, dashboard=page)
        stack.callback(ended.set)
        looking.start()
        stack.enter_context(swarm)
        if follow is not None:
            threading.Thread(target=follow, args=(swarm, record), daemon=True).start()
        record.metrics.update(swarm.fit(job).metrics)
    return record


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far, to 10 ms."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(float(each.user + each.system) for each in times)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Let processes that are started here have these variables."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fix_plan(record: Record, setting: Setting) -> FormPlan:
    """Cut where the setting says, stages in the order of the peers' names."""

    def form(profile: ModelProfile, swarm: Swarm, config: PlanConfig, seed: int, plan_id: int) -> Plan:
        nodes = sorted(swarm.nodes, key=lambda node: node.name)
        if setting.link is not None:
            nodes = [place_behind(node, setting.link) for node in nodes]
        swarm = Swarm(tuple(nodes))
        line = LineCost(profile, config, is_averaged=setting.num_clusters > 1)
        num_stages = len(setting.cuts) + 1
        if len(nodes) < setting.num_clusters * num_stages:  # some are still to come, or one has left
            needed = setting.num_clusters * num_stages
            raise PlanError(f"{len(nodes)} peers are here, the stages that were given need {needed}")
        firsts = range(0, setting.num_clusters * num_stages, num_stages)
        order = [list(reversed(range(first, first + num_stages))) for first in firsts]  # others are spares
        cuts = np.array([[profile.num_positions, *reversed(setting.cuts), 0]] * setting.num_clusters)
        clusters = build_clusters(line, NodeTable.of(swarm, config), swarm, order, cuts)
        record.profile, record.config = profile, config
        return assemble_plan(tuple(clusters), profile, swarm, config, seed, plan_id)

    return form


def place_behind(node: Node, link: LinkSpeed) -> Node:
    """Return a node with the link that it has here; it claimed to be on one PC."""
    rate = link.bytes_per_second
    return replace(
        node,
        upload_bytes_per_second=rate,
        download_bytes_per_second=rate,
        latency_seconds=link.delay_seconds / 2,  # each end has its half
    )


@contextlib.contextmanager
def _over_links(record: Record, link: LinkSpeed | None) -> Iterator[MapAddresses]:
    """Give what maps addresses of peers to addresses that lead there over slow links."""
    addresses: list[str] = []
    with Links(*(link and (link.bytes_per_second, link.delay_seconds)) or ()) as links:
        ended = threading.Event()

        def lead(given: Sequence[str]) -> tuple[str, ...]:
            addresses.extend(given)
            return tuple(map(links.through, given))

        def count() -> None:
            while not ended.wait(0.25):
                note()

        def note() -> None:
            now, total = time.perf_counter(), sum(map(links.num_bytes, tuple(addresses)))
            record.num_bytes.append((now, total))

        counting = threading.Thread(target=count, daemon=True)
        counting.start()
        try:
            yield lead
        finally:
            ended.set()
            counting.join()
            note()  # what crossed since, however late the last look was
