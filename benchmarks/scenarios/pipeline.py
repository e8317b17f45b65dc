"""The pipeline against its own limit, against GPipe and 1F1B, against one process; idle cost and bytes."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulation import MICROBATCH_SECONDS, emulate, name_model
from benchmarks.measure import say, spread, table
from benchmarks.swarm import LinkSpeed, Record, Setting, process_seconds, train
from ravnest.hub.coordinator.notices import ClusterBroken

Figures = dict[str, Any]

BUSY_TARGET = 0.95
FASTER_TARGET, NEVER_BELOW = 1.2, 1.0
SINGLE_TARGET = 0.5
IDLE_TARGET = 0.01
BYTES_TARGET = 0.02
PROCESS_TARGET = 0.98

SLOW_LINK = LinkSpeed(bytes_per_second=12.5e6, delay_seconds=0.010)
EMULATED = {  # seconds of the stages, relative
    "4 equal": (1.0,) * 4,
    "4 unequal": (0.5, 1.0, 0.7, 0.4),
    "8 equal": (1.0,) * 8,
}
COMPARED = {  # blocks of the stages, of 12; microbatches per update
    "2 equal": ((6, 6), 2),
    "2 unequal": ((4, 8), 2),
    "3 equal": ((4, 4, 4), 3),
    "3 unequal": ((2, 4, 6), 3),
    "4 equal": ((3, 3, 3, 3), 4),
    "4 unequal": ((2, 2, 6, 2), 4),
}
MODEL = "mlp-256x12-b128"
BYTES_PER_SAMPLE = 128 * 4 * 2  # of the emulated stages at a cut: an activation there, a gradient back
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model.py"


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    if quick:
        return _check(), "", []
    figures: Figures = {
        "emulated": _emulated(),
        "wire": _wire(),
        "against_gloo": _against_gloo(),
        "against_emulated_gloo": _against_emulated_gloo(),
        "digits": _digits(),
        "idle_peer_cpu_share": _idle(),
        "process": compare_process(num_turns=5, num_updates=20),
    }
    return figures, _report(figures), _missed(figures)


def _check() -> Figures:
    """Run every part for a few steps: all samples arrive once, over slow links too, beside a spare."""
    from benchmarks.baselines.gloo_pipeline import samples_per_second

    num_updates = 2
    record, _ = emulate((1.0, 0.5), SLOW_LINK, num_updates, num_spares=1)
    assert record.formed.plan.spares == ("node3",)
    num_microbatches = num_updates * record.cluster.accumulate
    losses = [report.microbatch for *_, report in record.reports if report.loss is not None]
    assert len(set(losses)) == num_microbatches, "the leaf did not report every batch"
    is_done_again = any(isinstance(news, ClusterBroken) for _, news in record.news)  # on a PC too busy
    assert is_done_again or len(losses) == num_microbatches, "the leaf reported a batch twice"
    overhead = _overhead(record)
    rates = samples_per_second("mlp-64x3-b32", [1], num_microbatches=2, num_updates=2, num_warm_up=1)
    assert min(rates.values()) > 0
    assert _digits_alone(num_epochs=1) > 0
    process = compare_process(num_turns=1, num_updates=6)
    return {"microbatches": num_microbatches, "wire_overhead": overhead, "process": process}


def _emulated() -> Figures:
    """Return throughput over that of the slowest stage alone, per case and link."""
    found: Figures = {}
    for name, shares in EMULATED.items():
        for words, link in (("same PC", None), ("100 Mbit/s, 10 ms", SLOW_LINK)):
            record, seconds = emulate(shares, link, num_updates=20)
            busy = record.samples_per_second(0.3) * seconds
            found[f"{name}, {words}"] = {"busy": _short(busy), **_shape(record)}
            say(f"{name}, {words}: {found[f'{name}, {words}']}")
    return found


def _shape(record: Record) -> Figures:
    """Return what a plan chose."""
    cluster = record.cluster
    return {"windows": [stage.window for stage in cluster.stages], "microbatches": cluster.accumulate}


def _wire() -> Figures:
    """Return the bytes between peers over those of the tensors, for 256 KB each way and microbatch."""
    record, _ = emulate((1.0, 1.0), None, num_updates=15, counts_bytes=True)
    found = {"overhead": _overhead(record), "microbatches": len(record.leaf_times)}
    say(f"bytes on the wire: {found}")
    return found


def _overhead(record: Record) -> float:
    tensors = sum(size for _, size in record.leaf_times) * BYTES_PER_SAMPLE
    share = record.num_bytes[-1][1] / tensors - 1
    assert 0 <= share < 0.5, f"{record.num_bytes[-1]} bytes for {tensors} bytes of tensors"
    return _short(share)


def _against_gloo() -> Figures:
    """Compare with GPipe and 1F1B: the systems in turn, ratios within each turn."""
    from benchmarks.baselines.gloo_pipeline import samples_per_second

    rates: dict[str, list[dict[str, float]]] = {case: [] for case in COMPARED}
    for repeat in range(5):
        for case, (blocks, num_microbatches) in COMPARED.items():
            num_updates = 48 // num_microbatches
            cuts = [sum(blocks[: index + 1]) for index in range(len(blocks) - 1)]
            turn = samples_per_second(MODEL, cuts, num_microbatches, num_updates)
            turn["ours"] = _ours(cuts, num_microbatches, num_updates)
            rates[case].append(turn)
            say(f"turn {repeat + 1}, {case}: { {key: round(rate) for key, rate in turn.items()} }")
    return {
        case: {
            "samples_per_second": {key: spread([turn[key] for turn in turns]) for key in turns[0]},
            "over_gpipe": spread([turn["ours"] / turn["gpipe"] for turn in turns]),
            "over_1f1b": spread([turn["ours"] / turn["1f1b"] for turn in turns]),
        }
        for case, turns in rates.items()
    }


def _against_emulated_gloo() -> Figures:
    """Compare with GPipe and 1F1B on emulated devices, where no stage takes time from another."""
    from benchmarks.baselines.gloo_pipeline import samples_per_second

    found: Figures = {}
    for name in ("4 equal", "4 unequal"):
        shares = EMULATED[name]
        for num_microbatches in (len(shares), 2 * len(shares)):
            num_updates = 160 // num_microbatches
            waits = [MICROBATCH_SECONDS * share for share in shares]
            cuts, model = range(1, len(shares)), name_model(len(shares))
            rates = samples_per_second(model, cuts, num_microbatches, num_updates // 2, seconds=waits)
            record, _ = emulate(shares, None, 2 * num_updates, num_microbatches=num_microbatches)
            rates["ours"] = record.samples_per_second(0.3)
            found[f"{name}, {num_microbatches} microbatches"] = {
                "samples_per_second": {key: _short(rate) for key, rate in rates.items()},
                "over_gpipe": _short(rates["ours"] / rates["gpipe"]),
                "over_1f1b": _short(rates["ours"] / rates["1f1b"]),
            }
            say(f"emulated, {name}, {num_microbatches} microbatches: {rates}")
    return found


def _ours(cuts: Sequence[int], num_microbatches: int, num_updates: int) -> float:
    from benchmarks.models import build, find_cuts, make_job
    from ravnest.model.stage.profile import measure

    made, job = build(MODEL), make_job(MODEL, num_microbatches, 2 * num_updates)
    profile = measure(job.capture().blueprint, made.microbatch_size)
    setting = Setting([3e10] * (len(cuts) + 1), find_cuts(made, profile, cuts))
    return train(job, setting).samples_per_second(0.4)


def _digits() -> Figures:
    """Compare the digits CNN over three stages with a plain loop in one process, in turn."""
    turns: list[dict[str, float]] = []
    for _ in range(5):
        record = train(_digits_job(num_epochs=12), Setting([None] * 3, cuts=[2, 3]))
        turns.append({"single": _digits_alone(num_epochs=8), "swarm": record.samples_per_second(0.3)})
        say(f"digits: {turns[-1]}, microbatches {record.cluster.accumulate}")
    return {
        **{f"{key}_samples_per_second": spread([turn[key] for turn in turns]) for key in turns[0]},
        "share": spread([turn["swarm"] / turn["single"] for turn in turns]),
        "microbatches": record.cluster.accumulate,
    }


@cache
def _digits_example() -> dict[str, Any]:
    import runpy

    return runpy.run_path(str(DIGITS))


def _digits_job(num_epochs: int) -> Any:
    import torch

    job = _digits_example()["job"]
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    changes = {"optimizer": optimizer, "learning_rate": None, "schedule": None}
    return replace(job, val_data=None, metrics={}, epochs=num_epochs, **changes)


def _digits_alone(num_epochs: int) -> float:
    """Return samples per second of a plain loop, at the better number of threads."""
    import torch
    import torch.nn.functional as F

    job = _digits_job(num_epochs)
    fields, optimizer = job.train_data, torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    num_samples, rates, before = len(fields["x"]), [], torch.get_num_threads()
    for num_threads in (1, before):
        torch.set_num_threads(num_threads)
        for epoch in range(num_epochs + 1):
            if epoch == min(1, num_epochs - 1):
                started = time.perf_counter()
            order = torch.randperm(num_samples)
            for batch in order.split(job.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(job.model(fields["x"][batch]), fields["y"][batch]).backward()
                optimizer.step()
        rates.append(num_epochs * num_samples / (time.perf_counter() - started))
    torch.set_num_threads(before)
    return max(rates)


def compare_process(num_turns: int, num_updates: int) -> Figures:
    """Compare compute as a fenced process with compute as a thread of the agent, in turn."""
    turns: list[dict[str, float]] = []
    for _ in range(num_turns):
        found: dict[str, float] = {}
        for words, is_fenced in (("process", True), ("thread", False)):
            seen: dict[Any, float] = {}

            def watch(processes: dict[Any, int], record: Record, seen: dict[Any, float] = seen) -> None:
                for node, pid in processes.items():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        now = process_seconds(pid)
                        if len(record.reports) > 4:
                            seen.setdefault(f"{node} begin", now)
                        seen[f"{node} end"] = max(now, seen.get(f"{node} end", 0.0))

            record, _ = emulate((1.0, 1.0), None, num_updates, is_fenced=is_fenced, watch=watch)
            found[f"{words}_rate"] = record.samples_per_second(0.3)
            nodes = {key.partition(" ")[0] for key in seen}
            ends = {node: seen[f"{node} end"] for node in nodes}
            used = sum(end - seen.get(f"{node} begin", end) for node, end in ends.items())
            found[f"{words}_cpu"] = 1e3 * used / len(record.leaf_times)
        turns.append(found)
        say(f"process and thread: { {key: _short(value) for key, value in found.items()} }")
    return {
        "over_thread": spread([turn["process_rate"] / turn["thread_rate"] for turn in turns]),
        **{key: spread([turn[key] for turn in turns]) for key in turns[0]},
    }


def _idle() -> float:
    """Return the share of a core that a joined peer without work uses, while two others train."""
    seen: list[tuple[float, float]] = []

    def watch(processes: dict[Any, int], record: Record) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if record.reports:  # everyone has a part by then
                seen.append((time.perf_counter(), process_seconds(processes["node3"])))

    record, _ = emulate((1.0, 1.0), None, num_updates=40, num_spares=1, watch=watch)
    assert record.formed.plan.spares == ("node3",)
    trained_at = record.reports[-1][0]
    (started, first), *_, (ended, last) = [each for each in seen if each[0] < trained_at]
    share = (last - first) / (ended - started)
    say(f"an idle peer used {share:.2%} of a core over {ended - started:.1f} s")
    return _short(share)


def _missed(figures: Figures) -> list[str]:
    missed = [
        f"stages {case}: the slowest is busy {found['busy']:.1%}, not {BUSY_TARGET:.0%}"
        for case, found in figures["emulated"].items()
        if found["busy"] < BUSY_TARGET
    ]
    for case, found in figures["against_gloo"].items():
        target = FASTER_TARGET if case.endswith("unequal") else NEVER_BELOW
        for other in ("gpipe", "1f1b"):
            ratio = found[f"over_{other}"]["median"]
            if ratio < target:
                missed.append(f"stages {case}: {ratio} of {other}'s rate, not {target}")
    if (share := figures["digits"]["share"]["median"]) < SINGLE_TARGET:
        missed.append(f"digits over three stages: {share} of one process, not {SINGLE_TARGET}")
    if figures["idle_peer_cpu_share"] >= IDLE_TARGET:
        missed.append(f"an idle peer uses {figures['idle_peer_cpu_share']:.1%} of a core")
    if figures["wire"]["overhead"] > BYTES_TARGET:
        missed.append(f"the wire carries {figures['wire']['overhead']:.1%} more than the tensors")
    if (ratio := figures["process"]["over_thread"]["median"]) < PROCESS_TARGET:
        missed.append(f"compute as a process: {ratio} of the rate as a thread, not {PROCESS_TARGET}")
    return missed


def _report(figures: Figures) -> str:
    busy = [
        [case, found["busy"], found["windows"], found["microbatches"]]
        for case, found in figures["emulated"].items()
    ]
    against = [
        [
            case,
            *(_show(found["samples_per_second"][key]) for key in ("ours", "gpipe", "1f1b")),
            _show(found["over_gpipe"]),
            _show(found["over_1f1b"]),
        ]
        for case, found in figures["against_gloo"].items()
    ]
    emulated = [
        [
            case,
            *(found["samples_per_second"][key] for key in ("ours", "gpipe", "1f1b")),
            found["over_gpipe"],
            found["over_1f1b"],
        ]
        for case, found in figures["against_emulated_gloo"].items()
    ]
    head = ["stages", "ours, samples/s", "GPipe", "1F1B", "ours / GPipe", "ours / 1F1B"]
    digits = figures["digits"]
    rest = [
        ["digits over three stages, samples/s", _show(digits["swarm_samples_per_second"])],
        ["digits in one process, samples/s", _show(digits["single_samples_per_second"])],
        ["share of one process", _show(digits["share"])],
        ["microbatches of a digits batch", digits["microbatches"]],
        ["CPU of an idle peer, of a core", f"{figures['idle_peer_cpu_share']:.2%}"],
        ["rate with compute as a process, of that as a thread", _show(figures["process"]["over_thread"])],
        ["CPU of a microbatch over both stages, as a process, ms", _show(figures["process"]["process_cpu"])],
        ["the same as a thread, ms", _show(figures["process"]["thread_cpu"])],
        ["bytes on the wire over those of the tensors", f"+{figures['wire']['overhead']:.2%}"],
    ]
    return _METHOD.format(
        busy=table(["stages, links", "busy", "windows", "microbatches"], busy),
        against=table(head, against),
        emulated=table(head, emulated),
        rest=table(["what", "measured"], rest),
    )


def _show(found: dict[str, float]) -> str:
    return f"{found['median']:g} ({found['min']:g}-{found['max']:g})"


def _short(value: float) -> float:
    return float(f"{value:.4g}")


_METHOD = """\
Real peers (`ravnest join`, ZeroMQ with CURVE) and a hub on this PC; every process computes with one thread.

## The slowest stage is busy

Emulated devices: a piece of work takes as long as its FLOPs at the device's speed, 40 ms per microbatch of
512 samples at the slowest stage, as a timed wait; the real work beside it is small. Busy is the measured rate
(losses reported by the leaf, after the synchronous start) times the slowest stage's seconds per sample: 1 is
the limit of any schedule. Slow links are TCP connections through a process that passes 12.5 MB/s each way,
10 ms later; a tensor of 256 KB needs 21 ms on them. An update has four microbatches per stage.

{busy}

## Against GPipe and 1F1B

`torch.distributed.pipelining` over gloo: the same 12 equal blocks (LayerNorm and an MLP, width 256, AdamW),
cut at the same places, the same batch per update and microbatches of 128 samples, as many in an update as
there are stages. Real compute on this PC's cores, which all stages share. Five turns, the systems one after
the other in each; median (smallest-largest). The differences: ours does not wait for an update before it goes
on, gets its data from the hub, encrypts, and has the hub as one more process; gloo's processes make their
data themselves.

{against}

The same with emulated devices, as above and without slow links, where only the schedule counts; once each:

{emulated}

## Overhead

The digits CNN of `make demo` (batches of 32, AdamW) over three stages against a plain loop in one process at
the better number of threads, in five turns. An idle peer is a spare beside a cluster that trains. Bytes are
those of all connections between peers over a whole run, after encryption, without TCP/IP headers, against two
tensors of 256 KB per microbatch. Compute as a fenced process of its own is compared with compute as a thread
of the agent over two emulated stages, in five turns; the CPU is that of both peers with all their processes.

{rest}
"""
