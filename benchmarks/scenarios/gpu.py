"""The stage engine on a GPU against a bare compiled loop: tokens/s, time to the first update, memory.

Each part appends one JSON line to `--out` as it ends, so a run that is cut short leaves what it found;
`--given FILE` makes the report of such lines, on any PC. Without a GPU only `--quick` runs: a tiny model.
"""

import argparse
import contextlib
import json
import statistics
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import in_fresh_process, say, table
from benchmarks.models import GPTS, LLAMAS, GptShape, LlamaShape

Figures = dict[str, Any]

ONE_STAGE_TARGET, FOUR_STAGES_TARGET = 0.9, 0.8
SETUP_TARGETS = {"small": 20.0, "medium": 40.0}
MICROBATCH_SIZE = 8
PARTS = ("bare", "eager", "one", "four", "eager-one")
_SLICE_SECONDS = 5.0
_METHOD = f"""GPT-2 in plain torch, 1024 tokens, {MICROBATCH_SIZE} samples in a microbatch, AdamW.
`bare`: one process, `torch.compile`, bf16 autocast, fused AdamW. `eager`: the same, uncompiled.
`one`: one peer of `rv.local`, one microbatch in an update. `four`: four peers on the same GPU, a stage
each, four microbatches in an update, untied head; what crosses has 4.5 bits unless `formats` says more.
`eager-one`: `one` with `--compile off`. `llama7b`: bf16, the last two blocks trained, four peers of 8 GB.
tokens/s are the median of the last three slices of five seconds; memory is that of all processes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    group = parser.add_argument_group("gpu")
    group.add_argument("--only", default="small,medium", metavar="MODELS", help="small, medium, llama7b")
    group.add_argument("--parts", default="bare,one,four", metavar="PARTS", help=", ".join(PARTS))
    group.add_argument("--minutes", type=float, default=8.0, metavar="M", help="for all of it together")
    group.add_argument("--formats", default="int4", metavar="FORMAT", help="of what crosses between stages")
    group.add_argument("--compile", default="auto", metavar="auto|on|off", help="what peers do")
    group.add_argument("--out", type=Path, metavar="FILE", help="a JSON line for each part, as it ends")
    group.add_argument(
        "--profile", action="store_true", help="where the time of a microbatch goes, only that"
    )
    group.add_argument("--given", type=Path, metavar="FILE", help="make the report of these lines")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    if options.given is not None:
        found = [json.loads(line) for line in options.given.read_text().splitlines() if line]
        rows = [row for row in found if "note" not in row]
        notes = [f"- {row['note']}" for row in found if "note" in row]
        report = "\n\n".join([_report(rows), *(["What was seen:", "\n".join(notes)] if notes else [])])
        return {"parts": rows}, report, _missed(rows)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.profile:
        from benchmarks.gpu_profile import profile_engine

        models = [model for model in options.only.split(",") if model in GPTS]
        rows = [profile_engine(model, device, mode) for model in models for mode in ("auto", "off")]
        for row in rows:
            _write(options.out, row)
        return {"profiles": rows}, "", []
    if quick:
        return _check(device, options), "", []
    if device == "cpu":
        raise SystemExit("no GPU is here; --quick checks the parts with a tiny model")
    rows = []
    models, parts = options.only.split(","), options.parts.split(",")
    jobs = [(model, part) for model in models if model != "llama7b" for part in parts]
    jobs += [("llama7b", "four")] if "llama7b" in models else []
    ends_at = time.monotonic() + 60 * options.minutes
    for place, (model, part) in enumerate(jobs):
        seconds = (ends_at - time.monotonic()) / (len(jobs) - place)
        rows.append(_run_part(model, part, device, seconds, options))
    return {"parts": rows}, _report(rows), _missed(rows)


def _check(device: str, options: argparse.Namespace) -> Figures:
    """Train the tiny models in every way, for a moment."""
    jobs = [("tiny", "bare"), ("tiny", "one"), ("tiny", "four"), ("llama-tiny", "four")]
    rows = [_run_part(*job, device, 10.0, options) for job in jobs]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["tokens_per_second"] > 0
    assert [len(row.get("stages", ())) for row in rows] == [0, 1, 4, 4]
    return {"parts": rows}


def _run_part(model: str, part: str, device: str, seconds: float, options: argparse.Namespace) -> Figures:
    say(f"{model}, {part}: at most {seconds:.0f} s")
    out, mode = options.out, "off" if part == "eager-one" else options.compile
    row: Figures = {"model": model, "part": part}
    try:
        if model in LLAMAS:
            row |= _llama(LLAMAS[model], device, seconds, mode)
        elif part in ("bare", "eager"):
            found, _ = in_fresh_process(_bare_loop, GPTS[model], device, part == "bare", min(seconds, 60.0))
            row |= found
        else:
            num_stages = 4 if part == "four" else 1
            row |= _through_peers(model, num_stages, device, seconds, mode, options.formats)
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    row |= {"device": _name(device)}
    say(f"{model}, {part}: { {key: value for key, value in row.items() if key != 'slices'} }")
    _write(out, row)
    return row


def _write(out: Path | None, row: Figures) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _bare_loop(shape: GptShape, device: str, compiles: bool, seconds: float) -> Figures:
    """Train in one process, as a user's own script would."""
    import torch

    from benchmarks.models import Gpt, make_tokens, token_loss

    is_cuda = device == "cuda"
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    torch.manual_seed(0)
    model = Gpt(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_cuda)
    data = make_tokens(shape, 64)
    batches = [
        [data[name][low : low + MICROBATCH_SIZE].to(device) for name in ("ids", "labels")]
        for low in range(0, 64, MICROBATCH_SIZE)
    ]

    def find_loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=is_cuda):
            return token_loss(model(ids), labels)

    run = torch.compile(find_loss, dynamic=False) if compiles and is_cuda else find_loss

    def step(number: int) -> torch.Tensor:
        loss = run(*batches[number % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    float(step(0))
    first = time.monotonic() - started
    rates, number, ends_at = [], 1, started + seconds
    while len(rates) < 4 or (time.monotonic() < ends_at and len(rates) < 12):
        began = time.monotonic()
        for _ in range(10 if is_cuda else 1):
            loss = step(number)
            number += 1
        value = float(loss)
        num_steps = 10 if is_cuda else 1
        rates.append(num_steps * MICROBATCH_SIZE * shape.length / (time.monotonic() - began))
    return {
        "tokens_per_second": statistics.median(rates[2:]),
        "spread": [min(rates[2:]), max(rates[2:])],
        "first_update_seconds": first,
        "peak_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
        "loss": value,
        "parameters": shape.num_parameters,
    }


def _through_peers(
    model: str, num_stages: int, device: str, seconds: float, mode: str, formats: str
) -> Figures:
    """Train through peers on this PC, as `rv.local` does, with stages of equal work."""
    import torch

    import ravnest as rv
    from benchmarks.models import Gpt, make_tokens, token_loss
    from ravnest.config import CompileMode
    from ravnest.requester.local_peers import Hardware

    # Tied weights of two stages would travel with every update: the model of four stages has none.
    shape = replace(GPTS[model], is_tied=num_stages == 1)
    torch.manual_seed(0)
    gpt, num_microbatches = Gpt(shape), 1 if num_stages == 1 else 4
    batch_size = num_microbatches * MICROBATCH_SIZE
    job = rv.Job(
        gpt,
        make_tokens(shape, 256),
        batch_size=batch_size,
        microbatches=num_microbatches,
        epochs=100_000,
        inputs=["ids"],
        loss=lambda logits, batch: token_loss(logits, batch["labels"]),
        optimizer=torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=device == "cuda"),
        checkpoint_every=None,
        is_padded=False,
        is_pretrained=False,
    )
    memory = torch.cuda.mem_get_info()[1] * 0.9 / min(2, num_stages) if device == "cuda" else 2e9
    hardware = [Hardware(memory, device=device, compile_mode=CompileMode(mode))] * num_stages
    found = train_for(job, hardware, seconds, formats)
    found |= {"parameters": shape.num_parameters, "formats": formats}
    rates = [samples * shape.length for samples in found.pop("samples_per_second")]
    return {"tokens_per_second": statistics.median(rates[-3:]), "slices": rates, **found}


def train_for(job: Any, hardware: Sequence[Any], seconds: float, formats: str) -> Figures:
    """Train a job for some time; return samples/s by slices of time, what was planned, and GPU memory."""
    from benchmarks.swarm import Record
    from ravnest.config import Recompute, WireChoice
    from ravnest.errors import RavnestError
    from ravnest.hub.coordinator.events import Received
    from ravnest.hub.coordinator.planner import SearchPlanner
    from ravnest.hub.service.server import HubParts
    from ravnest.protocol.training import StepReport
    from ravnest.requester.session import LOCAL_PLAN, local

    record, started, num_stages = Record(), time.monotonic(), len(hardware)
    device, crossing = hardware[0].device, WireChoice(formats)

    def note(event: Any, orders: Any) -> None:
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            record.reports.append((time.monotonic(), event.sender, event.message))

    parts = HubParts(SearchPlanner(form=_equal_stages(record, num_stages)), watch=note)
    plan = replace(LOCAL_PLAN, recompute=Recompute.NEVER, clusters=1, max_window=2 * num_stages)
    plan = replace(plan, activations=crossing, gradients=crossing)
    ended = threading.Event()

    def stop_in_time() -> None:
        # The first update may be late; then at least some slices are measured.
        while not ended.wait(0.5):
            times = record.leaf_times
            is_enough = times and time.monotonic() > times[0][0] + (2 if device == "cpu" else 15)
            if is_enough and time.monotonic() > started + seconds - (0 if device == "cpu" else 10):
                swarm.stop("measured long enough")
                return

    with contextlib.ExitStack() as stack:
        peak = stack.enter_context(_watch_memory(device))
        swarm = stack.enter_context(
            local(hardware, plan=plan, tell=lambda news: _hear(record, news), parts=parts)
        )
        stack.callback(ended.set)
        threading.Thread(target=stop_in_time, daemon=True).start()
        try:
            swarm.fit(job)
        except RavnestError as error:  # stopped before it had anything to keep: what was seen counts
            if not record.leaf_times:
                raise
            say(f"it ended with: {error}")
    times = record.leaf_times
    slice_seconds = _SLICE_SECONDS if device == "cuda" else 0.5
    return {
        "samples_per_second": _rates(times, slice_seconds),
        "first_update_seconds": times[0][0] - started,
        "stages": [[stage.start, stage.stop, stage.window] for stage in record.cluster.stages],
        "accumulate": record.cluster.accumulate,
        "peak_bytes": peak[0],
        "loss": next(report.loss for *_, report in reversed(record.reports) if report.loss is not None),
        "microbatch_seconds": _work_seconds(record),
    }


def _hear(record: Any, news: Any) -> None:
    record.news.append((time.monotonic(), news))


def _rates(times: Sequence[tuple[float, int]], slice_seconds: float) -> list[float]:
    """Return samples/s by slices of time; the last one, which may be short, is left out."""
    first, last = times[0][0], times[-1][0]
    counts = [0.0] * (int((last - first) / slice_seconds) + 1)
    for at, num_samples in times[1:]:
        counts[int((at - first) / slice_seconds)] += num_samples
    whole = counts[:-1] if len(counts) > 1 else counts
    return [count / slice_seconds for count in whole]


def _work_seconds(record: Any) -> Figures:
    """Return forward and backward seconds of each node, of the last reports."""
    found: Figures = {}
    for node in sorted({node for _, node, _ in record.reports}):
        last = [report for _, sender, report in record.reports if sender == node][-50:]
        found[str(node)] = [
            statistics.median(report.forward_seconds for report in last),
            statistics.median(report.backward_seconds for report in last),
        ]
    return found


def _equal_stages(record: Any, num_stages: int) -> Any:
    """Return what forms a plan of so many stages of equal work, cut where least crosses."""
    from benchmarks.swarm import Setting, fix_plan

    def form(profile: Any, swarm: Any, config: Any, seed: int, plan_id: int) -> Any:
        work = np.cumsum(np.add(profile.forward_flops, profile.backward_flops))
        crossing = np.asarray(profile.crossing_bytes)
        cuts = []
        for number in range(1, num_stages):
            at = int(np.searchsorted(work, work[-1] * number / num_stages))
            near = range(max(1, at - 12), min(profile.num_positions - 1, at + 12) + 1)
            taken = [place for place in near if not cuts or place > cuts[-1]]
            cuts.append(min(taken, key=lambda place: (crossing[place], abs(place - at))))
        setting = Setting([None] * num_stages, cuts)
        return fix_plan(record, setting)(profile, swarm, config, seed, plan_id)

    return form


@contextlib.contextmanager
def _watch_memory(device: str) -> Iterator[list[float]]:
    """Give the most memory that programs took of the GPU meanwhile, beside what was taken before."""
    import torch

    peak, ended = [0.0], threading.Event()
    if device != "cuda":
        yield peak
        return
    before = torch.cuda.mem_get_info()[0]

    def look() -> None:
        while not ended.wait(0.2):
            peak[0] = max(peak[0], before - torch.cuda.mem_get_info()[0])

    threading.Thread(target=look, daemon=True).start()
    try:
        yield peak
    finally:
        ended.set()


def _llama(shape: LlamaShape, device: str, seconds: float, mode: str) -> Figures:
    """Train the last blocks of a Llama in bf16 that nobody holds whole, over four peers of 8 GB."""
    import torch

    import ravnest as rv
    from benchmarks.models import Llama, make_tokens, token_loss
    from ravnest.config import CompileMode
    from ravnest.requester.local_peers import Hardware

    with rv.empty_weights():
        model = Llama(shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    job = rv.Job(
        model,
        make_tokens(shape, 64),
        batch_size=4,
        microbatches=4,
        epochs=100_000,
        inputs=["ids"],
        loss=lambda logits, batch: token_loss(logits, batch["labels"]),
        optimizer=torch.optim.AdamW(trained, lr=1e-5),
        checkpoint_every=None,
        is_padded=False,
        is_pretrained=True,
    )
    hardware = [Hardware(8e9, device=device, compile_mode=CompileMode(mode))] * 4
    found = train_for(job, hardware, max(10.0, seconds - 60.0), "bf16")  # the result takes its time, too
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    rates = [samples * shape.length for samples in found.pop("samples_per_second")]
    return {"tokens_per_second": statistics.median(rates[-3:]), "slices": rates, **found}


def _report(rows: Sequence[Figures]) -> str:
    good = [row for row in rows if "error" not in row]
    bare = {row["model"]: row["tokens_per_second"] for row in good if row["part"] == "bare"}
    lines = []
    for row in good:
        rate = row["tokens_per_second"]
        ratio = f"{rate / bare[row['model']]:.2f}" if row["model"] in bare else ""
        lines.append(
            (
                row["model"],
                row["part"],
                f"{rate / 1e3:.1f} k",
                ratio,
                f"{row['slices'][-1] / 1e3:.1f} k" if "slices" in row else "",
                f"{row['first_update_seconds']:.1f} s" if "first_update_seconds" in row else "",
                f"{row['peak_bytes'] / 1e9:.1f} GB",
            )
        )
    head = ("model", "part", "tokens/s", "of the bare loop", "last slice", "first loss after", "GPU memory")
    failed = [f"- {row['model']}, {row['part']}: {row['error']}" for row in rows if "error" in row]
    device = rows[0].get("device", "") if rows else ""
    return "\n\n".join(
        filter(
            None,
            (
                f"Device: {device}.",
                _METHOD,
                table(head, lines),
                "Failed:\n\n" + "\n".join(failed) if failed else "",
            ),
        )
    )


def _missed(rows: Sequence[Figures]) -> list[str]:
    good = {(row["model"], row["part"]): row for row in rows if "error" not in row}
    missed = [f"{row['model']}, {row['part']}: {row['error']}" for row in rows if "error" in row]
    for (model, part), row in good.items():
        bare = good.get((model, "bare"))
        target = {"one": ONE_STAGE_TARGET, "four": FOUR_STAGES_TARGET}.get(part)
        if target is None or model not in SETUP_TARGETS:
            continue
        if bare is not None and row["tokens_per_second"] < target * bare["tokens_per_second"]:
            share = row["tokens_per_second"] / bare["tokens_per_second"]
            missed.append(f"{model}, {part}: {share:.2f} of the bare loop, not {target}")
        if row["first_update_seconds"] > SETUP_TARGETS[model]:
            seconds = row["first_update_seconds"]
            missed.append(
                f"{model}, {part}: the first update after {seconds:.0f} s, not {SETUP_TARGETS[model]:.0f}"
            )
    return missed
