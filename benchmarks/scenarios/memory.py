"""Peak memory of every peer against what the plan said, and against training in one process."""

import argparse
import contextlib
from collections import defaultdict
from dataclasses import replace
from typing import Any

import psutil

from benchmarks.measure import in_fresh_process, memory_of, peak_since_look, say, table
from benchmarks.swarm import Record, Setting, train
from ravnest.config import Averaging, StateFormat, WeightFormat
from ravnest.plan.assembly import stage_bytes
from ravnest.plan.line import LineCost

Figures = dict[str, Any]

PLAN_TARGET = 0.10
SINGLE_TARGET = 0.60
NUM_MICROBATCHES = 8
MODEL, SMALL_MODEL = "mlp-512x12-b256", "mlp-64x12-b32"  # as many operations
QUICK_MODEL = "mlp-64x6-b32"
SETTINGS = {"wide": "fp32 fp32", "int8": "bf16 int8"}
LENT_BYTES = 3.2e8  # by each peer for its stage: less than its share with all activations kept


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    names = ("stages", *SETTINGS, "frozen")
    parser.add_argument("--only", choices=names, help="one setting, printed; no report is written")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    small = _measure_swarm(QUICK_MODEL if quick else SMALL_MODEL, 3, 0)
    program_bytes = max(stage["peak_bytes"] for stage in small)
    say(f"a peer with a stage of almost nothing: {_mega(program_bytes)} MB")
    if quick:
        assert all(0 < stage["planned_bytes"] < stage["peak_bytes"] < 1e9 for stage in small), small
        return {"program_bytes": program_bytes}, "", []
    if options.only:
        is_frozen, states = options.only == "frozen", SETTINGS.get(options.only, "")
        found = _measure_swarm(MODEL, 6, program_bytes, states, is_frozen=is_frozen)
        return {"program_bytes": program_bytes, options.only: found}, "", []
    stages = _measure_swarm(MODEL, 6, program_bytes)
    figures: Figures = {"program_bytes": program_bytes, "stages": stages}
    for key, states in SETTINGS.items():
        say(f"weights in flight and moments: {states}")
        figures[key] = _measure_swarm(MODEL, 6, program_bytes, states)
    figures["frozen"] = _measure_swarm(MODEL, 6, program_bytes, is_frozen=True)
    for words, is_cut in (("whole_batches", False), ("microbatches", True)):
        found, _ = in_fresh_process(_train_alone, MODEL, is_cut)
        figures[f"one_process_{words}"] = found
        say(f"one process, {words}: {found}")
    largest = max(stage["training_bytes"] for stage in stages)
    figures["below_one_process"] = _short(1 - largest / figures["one_process_whole_batches"]["bytes"])
    return figures, _report(figures), _missed(figures)


def _measure_swarm(
    name: str, num_updates: int, program_bytes: int, states: str = "", *, is_frozen: bool = False
) -> list[Figures]:
    """Train over three stages of a third of the blocks each; return what each planned and used.

    `states` other than the default are of weights in flight and of the optimizer, as "fp32 fp32".
    """
    from benchmarks.models import build, find_cuts, make_job
    from ravnest.model.stage.profile import measure
    from ravnest.requester.session import LOCAL_PLAN

    made = build(name)
    job = make_job(name, NUM_MICROBATCHES, num_updates, num_batches_kept=4, is_frozen=is_frozen)
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=99, averaging=Averaging.OVERLAPPED)
    if states:
        versions, moments = states.split()
        plan = replace(plan, versions=WeightFormat(versions), states=StateFormat(moments))
    third = len(made.blocks) // 3
    profile = measure(job.capture().blueprint, made.microbatch_size)
    cuts = find_cuts(made, profile, [third, 2 * third])
    peaks: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # reports heard so far, bytes

    def watch(processes: dict[Any, int], record: Record) -> None:
        for node, pid in processes.items():
            with contextlib.suppress(OSError, KeyError, psutil.Error):  # it may have ended
                peaks[node].append((len(record.reports), peak_since_look(pid)))

    record = train(job, Setting([3e10] * 3, cuts, memory_bytes=LENT_BYTES), plan, watch=watch)
    assert record.profile is not None
    assert record.config is not None
    line = LineCost(record.profile, record.config, is_averaged=False)
    found = []
    for stage in record.cluster.stages:
        planned = stage_bytes(line, stage, record.cluster) - record.config.overhead_bytes
        seen = peaks[stage.node]
        training = max(peak for num_reports, peak in seen if num_reports < len(record.reports))
        found.append(
            {
                "node": stage.node,
                "window": stage.window,
                "recomputes": stage.recompute,
                "planned_bytes": round(planned),
                "peak_bytes": training,
                "training_bytes": training - program_bytes,
                "saving_bytes": max(peak for _, peak in seen) - program_bytes,
                "over_plan": _short((training - program_bytes) / planned - 1),
            }
        )
        say(str(found[-1]))
    return found


def _train_alone(name: str, is_cut: bool) -> Figures:
    """Train in this process; return the peak and what was there before, in whole or in accumulated parts."""
    import torch

    from benchmarks.models import build

    torch.set_num_threads(1)
    made = build("mlp-8x1-b8")
    _updates(made, 2, made.microbatch_size, 1)  # loads what torch loads on first use
    before = memory_of("self")["VmRSS"]
    made = build(name)
    parts = NUM_MICROBATCHES if is_cut else 1
    _updates(made, 3, NUM_MICROBATCHES * made.microbatch_size, parts)
    return {"before_bytes": before, "bytes": memory_of("self")["VmHWM"] - before}


def _updates(made: Any, num_updates: int, batch_size: int, num_parts: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(made.blocks.parameters(), lr=1e-4)
    inputs, targets = made.data(batch_size)
    for _ in range(num_updates):
        optimizer.zero_grad()
        for given, wanted in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
            (made.loss(made.blocks(given), wanted) / num_parts).backward()
        optimizer.step()


def _missed(figures: Figures) -> list[str]:
    missed = [
        f"{key}: {stage['node']} used {stage['over_plan']:+.0%} against the plan, over {PLAN_TARGET:.0%}"
        for key in ("stages", *SETTINGS, "frozen")
        for stage in figures[key]
        if abs(stage["over_plan"]) > PLAN_TARGET
    ]
    if figures["below_one_process"] < SINGLE_TARGET:
        missed.append(f"the largest peer is {figures['below_one_process']:.0%} below one process")
    return missed


def _report(figures: Figures) -> str:
    words = {"stages": "bf16, bf16", "wide": "fp32, fp32", "int8": "bf16, int8", "frozen": "matrices frozen"}
    rows = [
        [
            words[key],
            stage["node"],
            stage["window"],
            "yes" if stage["recomputes"] else "no",
            *(_mega(stage[key]) for key in ("planned_bytes", "training_bytes", "saving_bytes")),
            f"{stage['over_plan']:+.1%}",
        ]
        for key in words
        for stage in figures[key]
    ]
    head = [
        "weights in flight, moments",
        "peer",
        "window",
        "recomputes",
        "planned MB",
        "peak MB",
        "peak with the end MB",
        "peak over plan",
    ]
    alone = [
        [words, _mega(found["bytes"]), _mega(found["before_bytes"])]
        for words, found in (
            ("whole batches", figures["one_process_whole_batches"]),
            ("accumulated microbatches", figures["one_process_microbatches"]),
        )
    ]
    return _METHOD.format(
        stages=table(head, rows),
        alone=table(["one process", "peak MB", "before MB"], alone),
        program=_mega(figures["program_bytes"]),
        below=f"{figures['below_one_process']:.1%}",
    )


def _mega(size: float) -> int:
    return round(size / 1e6)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


_METHOD = """\
Twelve blocks (LayerNorm and an MLP, width 512; 101 MB of parameters), AdamW, batches of 2,048 samples that
travel as 8 microbatches, three stages of four blocks on peers that lend 320 MB each. The weights that
microbatches in flight have seen and the optimizer's moments are kept in the formats named (decision 21); in
the last run the matrices are frozen, and vectors alone are trained. Peak is the largest
resident size of a real peer, its agent and its compute at the same moment, less that of a peer with a stage
of as many operations and almost no bytes, {program} MB: Python, torch and its libraries. The plan's figure is
without its constant for these. "With the end" includes handing over the trained weights.

{stages}

{alone}

The largest peer is {below} below one process that trains whole batches.
"""
