"""A cluster at work on a virtual clock: real schedules, one device and one link each way per node.

Messages travel in chunks: through the sender's upload, the hub's relay where nobody can dial, the hop's
latency and the receiver's download, each serving one chunk at a time. Answers how fast a cluster really runs,
to hold the forecast to it.
"""

import heapq
from itertools import count

from ravnest.engine.schedule import StageSchedule, Work
from ravnest.plan.line import LineCost

_CHUNKS = 8


class Pipe:
    """Something that serves one chunk after the other at a fixed rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self.rate = bytes_per_second
        self.free_at = 0.0

    def serve(self, now: float, size: float) -> float:
        self.free_at = max(self.free_at, now) + size / self.rate
        return self.free_at


class PipelineWorld:
    def __init__(self, cluster, line: LineCost, swarm) -> None:
        by_name = {node.name: node for node in swarm.nodes}
        self.line, self.cluster = line, cluster
        self.nodes = [by_name[stage.node] for stage in cluster.stages]
        self.schedules = [StageSchedule(s.window, cluster.accumulate) for s in cluster.stages]
        share = line.link_share
        self.up = [Pipe(share * node.upload_bytes_per_second) for node in self.nodes]
        self.down = [Pipe(share * node.download_bytes_per_second) for node in self.nodes]
        self.relay = {}
        self.regions = {frozenset(pair[:2]): pair[2] for pair in swarm.region_latency}
        self.busy = [False] * len(self.nodes)
        self.finished: list[float] = []
        self.lags: list[int] = []
        self.events: list[tuple[float, int, tuple]] = []
        self.tick = count()

    def run(self, num_batches: int) -> float:
        """Return the seconds between two batches in the second half of the run."""
        for batch in range(num_batches):
            assert self.schedules[0].offer_input(batch) is None
        self.start(0, 0.0)
        while self.events:
            now, _, (what, stage, batch) = heapq.heappop(self.events)
            getattr(self, what)(stage, batch, now)
        assert len(self.finished) == num_batches
        half = num_batches // 2
        return (self.finished[-1] - self.finished[half]) / (num_batches - 1 - half)

    def at(self, when: float, what: str, place, subject) -> None:
        heapq.heappush(self.events, (when, next(self.tick), (what, place, subject)))

    def start(self, stage: int, now: float) -> None:
        if self.busy[stage] or (task := self.schedules[stage].next()) is None:
            return
        self.busy[stage] = True
        forward, backward = self.seconds(stage)
        if task.work is Work.FORWARD:
            self.at(now + forward, "forward_done", stage, task.microbatch)
        else:
            self.lags.append(task.lag)
            self.at(now + backward, "backward_done", stage, task.microbatch)

    def seconds(self, stage: int) -> tuple[float, float]:
        part, profile = self.cluster.stages[stage], self.line.profile
        forward = sum(profile.forward_flops[part.start : part.stop])
        backward = sum(profile.backward_flops[part.start : part.stop]) + forward * part.recompute
        speed = self.nodes[stage].flops_per_second
        return forward / speed, backward / speed

    def forward_done(self, stage: int, batch: int, now: float) -> None:
        self.busy[stage] = False
        if stage + 1 == len(self.nodes):
            assert self.schedules[stage].offer_gradient(batch) is None
        else:
            part = self.cluster.stages[stage]
            size = part.activations.ratio * self.line.crossing[part.stop]
            self.send(stage, stage + 1, size, "input_here", batch, now)
        self.start(stage, now)

    def backward_done(self, stage: int, batch: int, now: float) -> None:
        self.busy[stage] = False
        if stage == 0:
            self.finished.append(now)
        else:
            part = self.cluster.stages[stage]
            size = part.gradients.ratio * self.line.crossing[part.start]
            self.send(stage, stage - 1, size, "gradient_here", batch, now)
        self.start(stage, now)

    def send(self, one: int, other: int, size: float, what: str, batch: int, now: float) -> None:
        for chunk in range(_CHUNKS):
            left = self.up[one].serve(now, size / _CHUNKS)
            then = (what if chunk == _CHUNKS - 1 else "", size / _CHUNKS, batch)
            is_direct = self.nodes[one].is_reachable or self.nodes[other].is_reachable
            if is_direct:
                self.sent((one, other), then, left)
            else:
                self.at(left, "at_relay", (one, other), then)

    def at_relay(self, way: tuple[int, int], chunk: tuple, now: float) -> None:
        pipe = self.relay.setdefault(way, Pipe(self.line.config.relay_bytes_per_second))
        self.at(pipe.serve(now, chunk[1]), "sent", way, chunk)

    def sent(self, way: tuple[int, int], chunk: tuple, now: float) -> None:
        self.at(now + self.latency(*way), "arrived", way, chunk)

    def arrived(self, way: tuple[int, int], chunk: tuple, now: float) -> None:
        """A download serves chunks in the order they arrive, whoever sent them."""
        what, size, batch = chunk
        done = self.down[way[1]].serve(now, size)
        if what:
            self.at(done, what, way[1], batch)

    def latency(self, one: int, other: int) -> float:
        a, b = self.nodes[one], self.nodes[other]
        between = self.regions.get(frozenset((a.region, b.region)), 0.0)
        return a.latency_seconds + b.latency_seconds + between

    def input_here(self, stage: int, batch: int, now: float) -> None:
        assert self.schedules[stage].offer_input(batch) is None
        self.start(stage, now)

    def gradient_here(self, stage: int, batch: int, now: float) -> None:
        assert self.schedules[stage].offer_gradient(batch) is None
        self.start(stage, now)
