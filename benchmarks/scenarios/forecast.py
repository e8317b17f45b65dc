"""Does a real swarm do what its plan foresees? Six PCs at 20 to 100 Mbit/s train a GPT, in four formats.

Each PC is `ravnest join` in a network namespace with a link of its own (`tc tbf`). Its device is emulated:
it computes for real, then waits until a PC of that speed would be done. The hub plans as it always does; only
the formats are given. Measured is the rate at the last stage, against what the hub foresaw.
"""

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.joining import PRELOADED, Peers
from benchmarks.measure import say, table
from benchmarks.namespaces import Namespaces, Rate, enter, may_be_used
from benchmarks.swarm import process_seconds
from ravnest.hub.coordinator.events import Action, Event, Notify, Received
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import PlanFormed, Trained
from ravnest.plan.types import Stage
from ravnest.protocol.training import StepReport

Figures = dict[str, Any]

FORMATS = ("bf16", "int8", "int4", "auto")
WITHIN = 0.10
MOST_ABOVE = 1.25  # a quick run is too short for more: buckets and pipelines begin full
NUM_TOKENS = 256  # of a sample, which is a microbatch
NUM_MICROBATCHES = 12  # of a batch
PORT = 7700
_MBIT = 125e3
_JOB = "from benchmarks.scenarios.forecast import make_job\njob = make_job({quick})\n"
_LATENCY = "100 us"


@dataclass(frozen=True, slots=True)
class Home:
    """A PC: what it computes and what its link carries."""

    gflops: float
    mbit: float


HOMES = (Home(2, 40), Home(2, 100), Home(3, 20), Home(3, 40), Home(4, 20), Home(4, 20))
QUICK_HOMES = (Home(1, 40), Home(1, 20), Home(1, 100))
HUB = Rate(100 * _MBIT, 100 * _MBIT)
MEMORY_BYTES = 900e6  # the program's own is half of it


@dataclass
class Seen:
    """What the hub wrote down; times are of one clock."""

    predicted: float = 0.0  # samples per second
    stages: list[Figures] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # a microbatch was through the last stage
    told: list[str] = field(default_factory=list)
    cores: float = 0.0  # that the peers took in the mean, from the first microbatch on

    @property
    def measured(self) -> float:
        """Samples per second, from when the pipeline has settled until it runs dry."""
        first, last = self._places
        return (last - first) / (self.times[last] - self.times[first])

    @property
    def settled(self) -> tuple[float, float]:
        """From when until when that is."""
        first, last = self._places
        return self.times[first], self.times[last]

    @property
    def _places(self) -> tuple[int, int]:
        first = max(NUM_MICROBATCHES, len(self.times) // 3)  # the first update may be a synchronous one
        return first, len(self.times) - 1 - self.stages[0]["window"]


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if not may_be_used():
        return {}, "", ["namespaces cannot be made here: run this as root"]
    figures: Figures = {}
    for name in ("auto",) if quick else FORMATS:
        seen = play(name, quick)
        figures[name] = _summarise(seen)
        say(f"{name}: {figures[name]}")
    if quick:
        ratio = figures["auto"]["ratio"]
        assert 0 < ratio < MOST_ABOVE, figures  # links and devices cannot be faster than they are
        return figures, "", []
    missed = [
        f"{name}: {each['ratio']:.3f} of the forecast"
        for name, each in figures.items()
        if abs(each["ratio"] - 1) > WITHIN
    ]
    rows = [[name, *(each[key] for key in _COLUMNS)] for name, each in figures.items()]
    return figures, _METHOD + table(["formats", *_COLUMNS], rows), missed


def make_job(is_quick: bool) -> Any:
    """Return the training of a GPT whose matrices are frozen, on tokens that mean nothing."""
    import torch

    import ravnest as rv
    from benchmarks.models import Gpt, GptShape, token_loss

    width, num_updates = (128, 4) if is_quick else (1024, 7)
    shape = GptShape(1, 8, width, length=4096, num_tokens=2048, is_tied=False)
    torch.manual_seed(0)
    model = Gpt(shape)
    for parameter in model.parameters():  # without their gradients two cores can follow
        parameter.requires_grad_(parameter.dim() == 1)
    ids = torch.randint(shape.num_tokens, (NUM_MICROBATCHES, NUM_TOKENS + 1))
    return rv.Job(
        model,
        {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()},
        batch_size=NUM_MICROBATCHES,
        microbatches=NUM_MICROBATCHES,
        epochs=num_updates,
        loss=lambda out, batch: token_loss(out, batch["labels"]),
        optimizer=torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-4),
        inputs=["ids"],
    )


def play(formats: str, quick: bool) -> Seen:
    """Train once with these formats; return what the hub saw."""
    homes = {f"p{number}": home for number, home in enumerate(QUICK_HOMES if quick else HOMES)}
    rates = {name: Rate(home.mbit * _MBIT, home.mbit * _MBIT) for name, home in homes.items()}
    with tempfile.TemporaryDirectory() as folder, Namespaces({"hub": HUB, **rates}) as spaces:
        where = Path(folder)
        (where / "job.py").write_text(_JOB.format(quick=quick))
        address = f"{spaces.address('hub')}:{PORT}"
        peers = Peers(_invite(where, address), where, flops_per_second=1e9, memory_bytes=MEMORY_BYTES)
        hub = _start_hub(where, address, spaces.path("hub"), formats, len(homes))
        try:
            for name, home in homes.items():
                device = ("--emulate", f"{home.gflops} GFLOP/s")
                link = ("--bandwidth", f"{home.mbit} Mbit/s", "--latency", _LATENCY)
                door = f"{spaces.address(name)}:0"
                peers.start(name, space=spaces.path(name), door=door, options=(*device, *link))
            spent = _wait(hub, peers)
        finally:
            peers.close()
            hub.kill()
            hub.join()
        assert hub.exitcode == 0, (where / "hub.txt").read_text()[-2000:]
        seen = _read(where / "seen.txt")
        seen.cores = _cores(spent, *seen.settled)
        return seen


def _wait(hub: Any, peers: Peers) -> list[tuple[float, float]]:
    """Wait for the end of the hub; return the CPU seconds of all peers, second by second."""
    spent = []
    while hub.is_alive():
        hub.join(1.0)
        with contextlib.suppress(psutil.Error):  # one that just ended
            total = sum(process_seconds(pid) for pid in peers.alive.values())
            spent.append((time.monotonic(), total))
    return spent


def _cores(spent: Sequence[tuple[float, float]], first: float, last: float) -> float:
    inside = [each for each in spent if first <= each[0] <= last]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]) if len(inside) > 1 else 0.0


def _invite(folder: Path, address: str) -> str:
    from ravnest.requester.run_folder import open_run

    found = open_run(folder / "run")
    return msgspec.structs.replace(found, addresses=(f"tcp://{address}",)).invitation


def _start_hub(folder: Path, address: str, space: str, formats: str, num_nodes: int) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    place = ("--listen", address, "--nodes", str(num_nodes), "--folder", str(folder / "run"))
    wishes = [f"activations={formats}", f"gradients={formats}", "clusters=1"]
    words = ["hub", f"{folder / 'job.py'}:job", *place, "--json"]
    words += [word for wish in wishes for word in ("--set", wish)]
    given = (words, str(folder / "hub.txt"), str(folder / "seen.txt"), space)
    process = context.Process(target=_run_hub, args=given, daemon=True)
    process.start()
    return process


def _run_hub(words: Sequence[str], said: str, seen: str, space: str) -> None:
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    enter(space)
    from ravnest.cli.common import CommandParts
    from ravnest.cli.main import program
    from ravnest.hub.service.server import HubParts

    def write(kind: str, value: object) -> None:
        with open(seen, "a") as lines:
            lines.write(json.dumps([kind, value]) + "\n")

    def watch(event: Event, orders: tuple[Action, ...]) -> None:
        report = event.message if isinstance(event, Received) else None
        if isinstance(report, StepReport) and report.loss is not None:
            write("through", time.monotonic())
        for news in (each.notice for each in orders if isinstance(each, Notify)):
            if isinstance(news, PlanFormed):
                cluster = news.plan.clusters[0]
                write("plan", [news.samples_per_second, [_describe(stage) for stage in cluster.stages]])
            if not isinstance(news, Trained):
                write("told", show_notice(news))

    program(words, prog_name="ravnest", obj=CommandParts(hub=HubParts(watch=watch)))


def _describe(stage: Stage) -> Figures:
    return {
        "node": stage.node,
        "positions": stage.stop - stage.start,
        "window": stage.window,
        "activations": stage.activations,
        "gradients": stage.gradients,
    }


def _read(path: Path) -> Seen:
    seen = Seen()
    for line in path.read_text().splitlines():
        kind, value = json.loads(line)
        if kind == "plan":
            seen.predicted, seen.stages = value
        elif kind == "through":
            seen.times.append(value)
        else:
            seen.told.append(value)
    return seen


def _summarise(seen: Seen) -> Figures:
    used = ["/".join((each["activations"], each["gradients"])) for each in seen.stages]
    measured = seen.measured
    return {
        "stages": len(seen.stages),
        "predicted": float(f"{seen.predicted:.4g}"),
        "measured": float(f"{measured:.4g}"),
        "ratio": float(f"{measured / seen.predicted:.4g}"),
        "cores": round(seen.cores, 2),
        "microbatches": len(seen.times),
        "wire": ", ".join(sorted(set(used))),
        "repairs": sum("repair" in each for each in seen.told),
    }


_COLUMNS = ("stages", "predicted", "measured", "ratio", "cores", "microbatches", "wire")
_METHOD = f"""## Six PCs in namespaces

A GPT of 21 M parameters (one block of width 1,024, 2,048 tokens, 4,096 places) in microbatches of
{NUM_TOKENS} tokens, {NUM_MICROBATCHES} of them in a batch. Its matrices are frozen: gradients cross every
cut, but a PC with two cores has time to compute them for six. PCs of 2 to 4 GFLOP/s with links of 20 to
100 Mbit/s each way, and a hub of 100 Mbit/s. The hub forms the plan by its usual search; `activations` and
`gradients` are given. Rates are microbatches per second at the last stage, after a third of the run and
until the pipeline runs dry. `cores` is what all peers took of this PC, two at most.

"""
