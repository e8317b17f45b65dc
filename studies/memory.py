"""Two equal nodes against one process: what each holds, how fast they are, and how long they stand idle."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import torch

from benchmarks.measure import in_fresh_process, memory_of, peak_of_peer, say, spread, table
from benchmarks.models import Made, build, find_cuts, make_job
from benchmarks.swarm import Record, Setting, train
from ravnest.config import OptimizerKind
from ravnest.engine.recipe import make_settings
from ravnest.model.stage.profile import find_matrices, measure
from studies.late_stages import LateStages, Rules, captured_gpt, draw_batches, make_stages
from studies.study import Study, draw, show_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL, SMALL_MODEL = "mlp-512x8-b64", "mlp-64x4-b32"
NUM_MICROBATCHES, NUM_UPDATES = 8, 3
LENT_BYTES = 2.4e8
REPEATS = 3
CLAIMED = (0.56, 0.67)  # less memory in each node, as the paper says
SCHEDULES = {
    "GPipe": Rules((8, 8), 8, flushes=True, holds=True, splits=False),
    "1F1B": Rules((2, 1), 8, flushes=True, splits=False),
    "1F1B, backward in two": Rules((2, 1), 8, flushes=True),
    "ours": Rules((3, 1), 8),
}
QUESTION = "How much less memory do two equal nodes need than one process, and how long do they stand idle?"


def run(quick: bool, folder: Path) -> Study:
    torch.set_num_threads(1)
    schedules = {name: run_schedule(rules, 6 if quick else 24) for name, rules in SCHEDULES.items()}
    if quick:
        return _check(schedules)
    program_bytes = max(peak for peak, _ in _peaks(SMALL_MODEL, 2))
    say(f"a peer with a stage of almost nothing: {program_bytes / 1e6:.0f} MB")
    turns = [_peaks(MODEL, NUM_UPDATES) for _ in range(REPEATS)]
    say(f"peers: {turns}")
    alone = {
        words: in_fresh_process(train_alone, MODEL, parts)[0]
        for words, parts in (("whole batches", 1), ("accumulated microbatches", NUM_MICROBATCHES))
    }
    say(f"one process: {alone}")
    draw(folder / "memory.svg", lambda axes: _plot(axes, turns, program_bytes, alone))
    return conclude(schedules, program_bytes, turns, alone)


def run_schedule(rules: Rules, num_updates: int) -> dict[str, float]:
    """Train two equal stages on a virtual clock."""
    whole = captured_gpt().blueprint
    shapes = {entry.name: entry.shape for entry in whole.state if entry.is_trainable}
    settings = make_settings(OptimizerKind.ADAMW, 1e-3, shapes, find_matrices(whole))
    line = LateStages(make_stages(0, 2, settings), rules)
    seen = line.train(draw_batches(num_updates * rules.accumulate, 2, seed=0), lambda _: 1e-3)
    return {
        "idle": seen.idle_share,
        "in_flight": seen.most_in_flight[0],
        "versions": seen.most_versions[0],
        "lag": max(map(max, seen.lags)),
    }


def _check(schedules: dict[str, dict[str, float]]) -> Study:
    """What never waits is idle least and holds few microbatches; what flushes has no lag."""
    gpipe, plain, split, ours = schedules.values()
    assert ours["idle"] < split["idle"] <= plain["idle"] <= gpipe["idle"], schedules
    assert gpipe["in_flight"] == 8, schedules
    assert plain["in_flight"] == split["in_flight"] == 2, schedules
    assert gpipe["lag"] == plain["lag"] == split["lag"] == 0
    assert ours["lag"] == 1, schedules
    return Study(QUESTION, "", "", "", {"schedules": schedules}, "")


def _peaks(name: str, num_updates: int) -> list[tuple[int, int]]:
    """Train over two real peers, half the blocks each; return each peak in bytes, and the stage's window."""
    made, job = build(name), make_job(name, NUM_MICROBATCHES, num_updates, num_batches_kept=4)
    profile = measure(job.capture().blueprint, made.microbatch_size)
    cuts = find_cuts(made, profile, [len(made.blocks) // 2])
    peaks: dict[Any, int] = {}

    def watch(processes: dict[Any, int], record: Record) -> None:
        for node, pid in processes.items():
            with contextlib.suppress(OSError, KeyError, psutil.Error):  # it may have ended
                peaks[node] = max(peaks.get(node, 0), peak_of_peer(pid))

    record = train(job, Setting([3e10] * 2, cuts, memory_bytes=LENT_BYTES), watch=watch)
    return [(peaks[stage.node], stage.window) for stage in record.cluster.stages]


def train_alone(name: str, num_parts: int) -> dict[str, int]:
    """Train in this process, each batch in so many parts; return the peak and what was there before."""
    torch.set_num_threads(1)
    small = build("mlp-8x1-b8")
    _update(small, 1, 2, small.microbatch_size)  # loads what torch loads on first use
    before = memory_of("self")["VmRSS"]
    made = build(name)
    _update(made, num_parts, 2, NUM_MICROBATCHES * made.microbatch_size)
    return {"before": before, "bytes": memory_of("self")["VmHWM"] - before}


def _update(made: Made, num_parts: int, num_updates: int, batch_size: int) -> None:
    optimizer = torch.optim.AdamW(made.blocks.parameters(), lr=1e-4)
    inputs, targets = made.data(batch_size)
    for _ in range(num_updates):
        optimizer.zero_grad()
        for given, wanted in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
            (made.loss(made.blocks(given), wanted) / num_parts).backward()
        optimizer.step()


def saving(node_bytes: float, alone_bytes: float) -> float:
    """Return by which share a node has less than one process."""
    return 1 - node_bytes / alone_bytes


def conclude(
    schedules: dict[str, dict[str, float]],
    program_bytes: int,
    turns: Sequence[Sequence[tuple[int, int]]],
    alone: dict[str, dict[str, int]],
) -> Study:
    """Compare the larger of two peers with one process, with and without what any process has."""
    larger = [max(peak for peak, _ in turn) for turn in turns]
    training = [peak - program_bytes for peak in larger]
    whole, parts = (
        {
            "training": spread([saving(each, one["bytes"]) for each in training]),
            "process": spread([saving(each, one["bytes"] + one["before"]) for each in larger]),
        }
        for one in alone.values()
    )
    least, most = CLAIMED
    found = whole["training"]["median"]
    verdict = "within" if least <= found <= most else "below" if found < least else "above"
    idle, of_parts = schedules["ours"]["idle"], parts["training"]["median"]
    answer = (
        f"Training takes {found:.0%} less memory in the larger of two equal nodes than in one process that "
        f"trains whole batches, which is {verdict} the paper's 56 to 67 %, and {of_parts:.0%} less than in "
        f"one that accumulates microbatches; by its schedule the slowest of two equal stages is idle "
        f"{idle:.1%} of the time, so with free links two nodes are {2 * (1 - idle):.2f} times as fast as one."
    )
    body = f"""\
![Peak memory of training in each of two nodes and in one process](memory.svg)

Peaks of real peers, agent and compute together, of {REPEATS} runs; a peer with a stage of almost nothing has
{program_bytes / 1e6:.0f} MB (Python, torch and its libraries), which the last column is without:

{_show_nodes(turns, program_bytes)}

{_show_alone(alone)}

{_show_savings({"whole batches": whole, "accumulated microbatches": parts})}

Schedules, on a virtual clock with eight microbatches an update, with the line filled and emptied:

{_show_schedules(schedules)}"""
    figures: dict[str, object] = {
        "program_bytes": program_bytes,
        "peaks": [list(turn) for turn in turns],
        "one_process": alone,
        "saving": {"whole batches": whole, "accumulated microbatches": parts},
        "schedules": schedules,
    }
    return Study(QUESTION, answer, METHOD, body, figures, NOT_SHOWN)


def _show_nodes(turns: Sequence[Sequence[tuple[int, int]]], program_bytes: int) -> str:
    rows = []
    for place in range(2):
        peaks = [turn[place][0] / 1e6 for turn in turns]
        of_training = f"{median(peaks) - program_bytes / 1e6:.0f}"
        rows.append([place + 1, turns[0][place][1], *show_spread(peaks, ".0f"), of_training])
    return table(["node", "window", "peak MB, median", "smallest", "largest", "of training MB"], rows)


def _show_alone(alone: dict[str, dict[str, int]]) -> str:
    rows = [
        [words, f"{found['bytes'] / 1e6:.0f}", f"{found['before'] / 1e6:.0f}"]
        for words, found in alone.items()
    ]
    return table(["one process", "of training MB", "before MB"], rows)


def _show_savings(savings: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [
            words,
            *(f"{each['training'][key]:.1%}" for key in ("median", "min", "max")),
            f"{each['process']['median']:.1%}",
        ]
        for words, each in savings.items()
    ]
    head = ["less in the larger node than in one process of", "of training, median", "smallest", "largest"]
    return table([*head, "of all, median"], rows)


def _show_schedules(schedules: dict[str, dict[str, float]]) -> str:
    rows = [
        [name, f"{each['idle']:.1%}", each["in_flight"], each["versions"], each["lag"]]
        for name, each in schedules.items()
    ]
    head = ["schedule", "idle", "microbatches held by the first stage", "copies of its weights"]
    return table([*head, "most lag, updates"], rows)


def _plot(
    axes: "Axes",
    turns: Sequence[Sequence[tuple[int, int]]],
    program_bytes: int,
    alone: dict[str, dict[str, int]],
) -> None:
    bars = {
        f"node {place + 1} of 2": [turn[place][0] - program_bytes for turn in turns] for place in range(2)
    }
    bars |= {f"one process,\n{words}": [found["bytes"]] for words, found in alone.items()}
    middle = [median(each) / 1e6 for each in bars.values()]
    below = [value - min(each) / 1e6 for value, each in zip(middle, bars.values(), strict=True)]
    above = [max(each) / 1e6 - value for value, each in zip(middle, bars.values(), strict=True)]
    axes.bar(list(bars), middle, yerr=[below, above], color=["tab:blue"] * 2 + ["tab:gray"] * 2)
    axes.set_ylabel("peak memory of training, MB")


METHOD = f"""\
Memory: eight blocks (LayerNorm and an MLP, width 512; 67 MB of parameters), AdamW, batches of 512 samples
that travel as {NUM_MICROBATCHES} microbatches, half of the blocks in each of two real peers (`ravnest
join`) that lend {LENT_BYTES / 1e6:.0f} MB each. A peak is the largest resident size (VmHWM) of a peer's two
processes together, which is a bound. One process is a plain loop of the same model and batches in a process
of its own, as anyone would write it. Schedules: the small GPT of [the study of staleness](staleness.md) in
two equal stages with real engines and schedules on a virtual clock, on which links are free; a forward
takes one tick and a backward two. GPipe and 1F1B wait for each update. *Ours* never does, so gradients are
late."""
NOT_SHOWN = f"""\
One model and one share of activations: where activations are small the saving comes from weights alone,
which two nodes halve. A node that lends more gets a wider window and uses more. Accumulated microbatches
need no second node, so that row is what the second one saves. How busy real peers are is in [the pipeline
benchmark](../../benchmarks/reports/pipeline.md): 0.966 to 0.976 of the time for four and eight stages,
which also has real compute against gloo's GPipe and 1F1B. More formats of weights and moments are in [the
memory benchmark](../../benchmarks/reports/memory.md). Two nodes trained {REPEATS} times, one process once
in each way, on one PC."""
