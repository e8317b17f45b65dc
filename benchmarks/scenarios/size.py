"""A model that nobody holds whole: first weights from disk, stages on local peers, shards as the result."""

import contextlib
import math
import resource
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import in_fresh_process, memory_of, peak_of_peer, say, table

Figures = dict[str, Any]

REQUESTER_BYTES = 2e9  # besides the largest tensor
OVER_PLAN = 0.10
MACHINE_BYTES = 24e9


@dataclass(frozen=True)
class Shape:
    """A GPT, and how it is trained: peers, what each lends, batches."""

    width: int
    num_layers: int
    num_words: int
    num_peers: int
    lent_bytes: float
    num_updates: int
    batch_size: int = 4
    length: int = 32
    optimizer: str = "adamw"


FULL = Shape(2048, 22, 8_192, num_peers=4, lent_bytes=4.5e9, num_updates=3)
QUICK = Shape(512, 8, 4_096, num_peers=3, lent_bytes=2.2e8, num_updates=3)  # 29 M: 124 M takes CI too long
ALMOST_NOTHING = Shape(64, 4, 256, num_peers=2, lent_bytes=1e7, num_updates=3)


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        size, length, width = x.shape
        parts = self.attend(self.first(x)).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A GPT with a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.num_words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.num_layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.num_words, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next words."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if quick:
        figures = _measure(QUICK, None)
        missed = [
            each for each in _missed(figures) if "over its plan" not in each
        ]  # most of it is torch here
        assert not missed, missed
        return figures, "", []
    small = _measure(ALMOST_NOTHING, None)
    figures = _measure(FULL, max(peer["peak_bytes"] for peer in small["peers"]))
    return figures, _report(figures), _missed(figures)


def _measure(shape: Shape, program_bytes: int | None) -> Figures:
    """Train in a process of its own; a program takes so many bytes, or what it took before its stage."""
    with tempfile.TemporaryDirectory(prefix="ravnest-size-") as folder:
        figures, _ = in_fresh_process(_train, shape, folder)
    for peer in figures["peers"]:
        peer["program_bytes"] = peer["program_bytes"] if program_bytes is None else program_bytes
        held = peer["peak_bytes"] - peer["program_bytes"]
        peer["over_plan"] = float(f"{held / peer['planned_bytes'] - 1:.3g}")
        say(str(peer))
    return figures


def make_job(shape: Shape) -> Any:
    """Return the job: a model without values, random words."""
    import ravnest as rv

    with rv.empty_weights():
        model = Gpt(shape)
    num_samples = shape.batch_size * shape.num_updates
    words = torch.randint(shape.num_words, (num_samples, shape.length + 1), generator=_generator())
    return rv.Job(
        model,
        {"words": words[:, :-1].contiguous(), "next": words[:, 1:].contiguous()},
        batch_size=shape.batch_size,
        epochs=1,
        inputs=["words"],
        loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["next"].flatten()),
        optimizer=shape.optimizer,
        learning_rate=1e-3,
        microbatches=1,  # sums of gradients would take 4 bytes per parameter more
        checkpoint_every=None,
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _train(shape: Shape, folder: str) -> Figures:
    """Train in this process as the requester; return what was seen."""
    from ravnest.config import StateFormat, WeightFormat
    from ravnest.hub.service.server import HubParts
    from ravnest.plan.assembly import stage_bytes
    from ravnest.plan.line import LineCost
    from ravnest.requester.local_peers import Hardware
    from ravnest.requester.session import LOCAL_PLAN, local

    started = time.perf_counter()
    job, seen = make_job(shape), _Seen(started)
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    say(f"{num_parameters / 1e6:.0f} M parameters")
    small = {"versions": WeightFormat.BF16, "states": StateFormat.INT8}  # 13 bytes per parameter
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=1, max_lag=1, **small)
    peers = [Hardware(shape.lent_bytes, flops_per_second=5e10)] * shape.num_peers
    hub = local(
        peers, folder=Path(folder, "run"), plan=plan, tell=seen.hear, parts=HubParts(watch=seen.watch)
    )
    with hub, seen.looking(hub):
        result = hub.fit(job)
    requester_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Reading it back, as a user would: one tensor at a time.
    state = result.state
    assert all(bool(state[name].isfinite().all()) for name in state)
    files = sorted(each.name for each in Path(folder, "run").glob("model*"))
    assert seen.formed is not None
    assert seen.job is not None
    line = LineCost(seen.job.profile, seen.job.config, is_averaged=False)
    rows = []
    for stage in seen.formed.plan.clusters[0].stages:
        planned = stage_bytes(line, stage, seen.formed.plan.clusters[0])
        rows.append(
            {
                "node": stage.node,
                "positions": [stage.start, stage.stop],
                "planned_bytes": round(planned),
                "program_bytes": seen.before[stage.node],
                "built_bytes": seen.built[stage.node],
                "trained_bytes": seen.trained[stage.node],
                "peak_bytes": max(seen.peaks[stage.node]),
            }
        )
    return {
        "num_parameters": num_parameters,
        "largest_tensor_bytes": max(each.numel() * each.itemsize for each in job.model.parameters()),
        "weights_bytes": 4 * num_parameters,
        "seconds_to_first_update": round(seen.first_update - started, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "delivered_bytes": seen.delivered_bytes,
        "collected_bytes": seen.collected_bytes,
        "requester_peak_bytes": requester_bytes,
        "loss": result.metrics["loss"],
        "expected_first_loss": round(math.log(shape.num_words), 3),
        "files": files,
        "peers": rows,
    }


class _Seen:
    """What is seen of a run."""

    def __init__(self, started: float) -> None:
        self.started, self.first_update = started, math.nan
        self.formed: Any = None
        self.job: Any = None
        self.before: dict[Any, int] = {}  # the peak of a peer's program, before it had a stage
        self.built: dict[Any, int] = {}  # when it had built its stage
        self.trained: dict[Any, int] = {}  # when it had trained, before the result was collected
        self.peaks: dict[Any, list[int]] = defaultdict(list)
        self.delivered_bytes = self.collected_bytes = 0
        self._processes: Any = dict

    def hear(self, news: Any) -> None:
        from ravnest.hub.coordinator.notices import ClusterStarted, EpochDone, PlanFormed

        own = memory_of("self")
        held = f"{own['VmRSS'] / 1e6:.0f} MB now, {own['VmHWM'] / 1e6:.0f} MB at most"
        say(f"{time.perf_counter() - self.started:6.1f} s  {type(news).__name__}; the requester holds {held}")
        if isinstance(news, PlanFormed) and self.formed is None:
            self.formed = news
        for kind, held in (
            (PlanFormed, self.before),
            (ClusterStarted, self.built),
            (EpochDone, self.trained),
        ):
            if isinstance(news, kind):
                held.update({node: peak_of_peer(pid) for node, pid in self._processes().items()})

    def watch(self, event: Any, actions: Any) -> None:
        from ravnest.hub.coordinator.events import Collect, JobGiven, Received, Send
        from ravnest.protocol.placement import StageParts
        from ravnest.protocol.training import StepReport

        if isinstance(event, JobGiven):
            self.job = event
        is_report = isinstance(event, Received) and isinstance(event.message, StepReport)
        if is_report and math.isnan(self.first_update) and event.message.version > 0:
            self.first_update = time.perf_counter()
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, StageParts):
                self.delivered_bytes += sum(each.weights.size_bytes for each in action.message.sources)
            if isinstance(action, Collect):
                self.collected_bytes += sum(part.weights.size_bytes for part in action.parts)

    @contextlib.contextmanager
    def looking(self, hub: Any) -> Iterator[None]:
        """Look at the peaks of the peers until they end."""
        ended = threading.Event()
        self._processes = lambda: dict(hub.processes)

        def look() -> None:
            while not ended.wait(0.1):
                for node, pid in self._processes().items():
                    with contextlib.suppress(OSError, KeyError, psutil.Error):  # it may have ended
                        self.peaks[node].append(peak_of_peer(pid))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()


def _missed(figures: Figures) -> list[str]:
    missed = []
    limit = REQUESTER_BYTES + figures["largest_tensor_bytes"]
    if figures["requester_peak_bytes"] > limit:
        missed.append(f"the requester held {figures['requester_peak_bytes'] / 1e9:.2f} GB")
    missed += [
        f"{peer['node']} held {peer['over_plan']:+.0%} over its plan"
        for peer in figures["peers"]
        if peer["over_plan"] > OVER_PLAN
    ]
    total = figures["requester_peak_bytes"] + sum(peer["peak_bytes"] for peer in figures["peers"])
    if total > MACHINE_BYTES:
        missed.append(f"all processes together held {total / 1e9:.1f} GB")
    if not abs(figures["loss"] - figures["expected_first_loss"]) < 1:
        missed.append(f"the loss is {figures['loss']}, far from that of a guess")
    return missed


def _report(figures: Figures) -> str:
    rows = [
        [
            peer["node"],
            f"{peer['positions'][0]}-{peer['positions'][1]}",
            *(round(peer[key] / 1e6) for key in ("planned_bytes", "program_bytes")),
            *(round(peer[key] / 1e6) for key in ("built_bytes", "trained_bytes", "peak_bytes")),
            f"{peer['over_plan']:+.1%}",
        ]
        for peer in figures["peers"]
    ]
    peaks = ["peak when built MB", "when trained MB", "in the end MB"]
    head = ["peer", "positions", "planned MB", "program MB", *peaks, "over plan"]
    return _METHOD.format(
        millions=round(figures["num_parameters"] / 1e6),
        first=figures["seconds_to_first_update"],
        seconds=figures["seconds"],
        delivered=round(figures["delivered_bytes"] / 1e6),
        collected=round(figures["collected_bytes"] / 1e6),
        requester=round(figures["requester_peak_bytes"] / 1e6),
        loss=figures["loss"],
        guess=figures["expected_first_loss"],
        files=", ".join(figures["files"]),
        program=round(figures["peers"][0]["program_bytes"] / 1e6),
        peers=table(head, rows),
    )


_METHOD = """\
A GPT of {millions} M parameters is made under `rv.empty_weights()` and trains some updates on peers of
this PC, real processes. Its first weights are drawn layer by layer into shards, cut into stages and sent
tensor by tensor; the result comes back as shards. The peak of a peer (VmHWM) is counted without its
program, {program} MB: that of a peer with a stage of almost nothing.

{peers}

The requester's process, hub included, held {requester} MB at most. The first update was made after {first} s,
the run took {seconds} s. Weights sent to peers: {delivered} MB, collected at the end: {collected} MB.
Loss {loss:.4f}; a guess has {guess}. Files: {files}.
"""
