"""The stage engine on a GPU against a bare compiled loop: tokens/s, time to the first update, memory.

Each part is a process; as it ends, one JSON line goes to `--out`, so a run that is cut short leaves what it
found. `--given FILE` makes the report of such lines, on any PC. Without a GPU only `--quick` runs.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_peers import StopRule, shared_gpu
from benchmarks.measure import say, table
from benchmarks.models import GPTS, LLAMAS, GptShape

Figures = dict[str, Any]

ONE_STAGE_TARGET, FOUR_STAGES_TARGET = 0.9, 0.8
SETUP_TARGETS = {"small": 20.0, "medium": 40.0}
MICROBATCH_SIZE = 8
PARTS = ("bare", "eager", "one", "four", "eager-one")
_SLICE_SECONDS = 5.0
_GRACE_SECONDS = 30.0  # of a part, to end in order
# Of the time: how much longer than others a part takes. A stage is compiled for most of that.
_SHARES = {
    ("small", "bare"): 0.6,
    ("medium", "one"): 1.4,
    ("medium", "four"): 1.4,
    ("qlora7b", "bare"): 0.3,
    ("llama7b", "bare"): 0.3,
}
_METHOD = f"""GPT-2 in plain torch, 1024 tokens, {MICROBATCH_SIZE} samples in a microbatch, AdamW.
`bare`: one process, `torch.compile`, bf16 autocast, fused AdamW. `eager`: the same, uncompiled.
`one`: one peer of `rv.local`, one microbatch in an update. `four`: four peers on the same GPU, a stage
each, four microbatches in an update, untied head; what crosses has 4.5 bits unless `formats` says more.
`eager-one`: `one` with `--compile off`. `llama7b`: bf16, the last two blocks trained, four peers of 8 GB.
`qlora7b`: the base in int4, LoRA 16 on all linear layers of blocks, four peers of 6 GB. `bare` of these two
is one process, uncompiled, with the base in bf16. Both are cut by the planner and made without weights here.
Four peers share the GPU through MPS where the driver brings it (`mps` in the rows), else they take turns.
tokens/s are the median of the last three slices of five seconds; memory is that of all processes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    group = parser.add_argument_group("gpu")
    group.add_argument(
        "--only", default="small,medium", metavar="MODELS", help="small, medium, llama7b, qlora7b"
    )
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
    jobs = [(model, part) for model in models for part in parts if _is_part(model, part)]
    ends_at = time.monotonic() + 60 * options.minutes
    shares = [_SHARES.get(job, 1.0) for job in jobs]
    for place, (model, part) in enumerate(jobs):
        seconds = (ends_at - time.monotonic()) * shares[place] / sum(shares[place:])
        rows.append(_run_part(model, part, device, seconds, options))
    return {"parts": rows}, _report(rows), _missed(rows)


def _is_part(model: str, part: str) -> bool:
    known = {"llama7b": ("bare", "four"), "qlora7b": ("bare", "four")}
    return part in known.get(model, PARTS)


def _check(device: str, options: argparse.Namespace) -> Figures:
    """Train the tiny models in every way, for a moment."""
    jobs = [("tiny", "bare"), ("tiny", "one"), ("tiny", "four")]
    jobs += [("llama-tiny", "bare"), ("llama-tiny", "four"), ("qlora-tiny", "bare"), ("qlora-tiny", "four")]
    rows = [_run_part(*job, device, 10.0, options) for job in jobs]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["tokens_per_second"] > 0
    # The planner cuts the last ones: one peer can hold so small a model.
    assert [len(row.get("stages", ())) for row in rows[:3]] == [0, 1, 4]
    return {"parts": rows}


def _run_part(model: str, part: str, device: str, seconds: float, options: argparse.Namespace) -> Figures:
    say(f"{model}, {part}: at most {seconds:.0f} s")
    out, mode = options.out, "off" if part == "eager-one" else options.compile
    row: Figures = {"model": model, "part": part}
    work: tuple[Any, ...]
    if model in LLAMAS:
        work = (_bare_llama if part == "bare" else _llama, model, device, seconds, mode)
    elif part in ("bare", "eager"):
        work = (_bare_loop, GPTS[model], device, part == "bare", min(seconds, 60.0))
    else:
        work = (_through_peers, model, 4 if part == "four" else 1, device, seconds, mode, options.formats)
    began = time.monotonic()
    row |= _in_process(work, seconds + (_GRACE_SECONDS if device == "cuda" else 10 * _GRACE_SECONDS))
    row |= {"device": _name(device), "took_seconds": round(time.monotonic() - began, 1)}
    say(f"{model}, {part}: { {key: value for key, value in row.items() if key != 'slices'} }")
    _write(out, row)
    return row


def _in_process(work: tuple[Any, ...], most_seconds: float) -> Figures:
    """Do the work in a process of its own, and end it if it takes too long; its peers end with it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, work))
    process.start()
    there.close()
    try:
        found: Figures = here.recv() if here.poll(most_seconds) else {"error": f"took {most_seconds:.0f} s"}
    except EOFError:
        found = {"error": "the process ended without an answer"}
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    return found


def _answer(there: Any, work: tuple[Any, ...]) -> None:
    try:
        there.send(work[0](*work[1:]))
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        there.send(told)


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
    with shared_gpu(device, num_stages) as is_shared:
        found = train_for(job, hardware, seconds, formats, _equal_stages)
    found |= {"mps": is_shared, "parameters": shape.num_parameters, "formats": formats}
    rates = [samples * shape.length for samples in found.pop("samples_per_second")]
    return {"tokens_per_second": statistics.median(rates[-3:]), "slices": rates, **found}


def train_for(job: Any, hardware: Sequence[Any], seconds: float, formats: str, form: Any = None) -> Figures:
    """Train a job for some time; return samples/s by slices of time, what was planned, and GPU memory.

    `form` makes what plans; without it, the planner that ships cuts, and may recompute.
    """
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

    planner = SearchPlanner() if form is None else SearchPlanner(form=form(record, num_stages))
    parts = HubParts(planner, watch=note)
    plan = replace(LOCAL_PLAN, clusters=1, max_window=2 * num_stages)
    plan = plan if form is None else replace(plan, recompute=Recompute.NEVER)
    plan = replace(plan, activations=crossing, gradients=crossing)
    ended = threading.Event()

    pace = StopRule(record, device, seconds)
    with contextlib.ExitStack() as stack:
        peak = stack.enter_context(_watch_memory(device))
        swarm = stack.enter_context(
            local(hardware, plan=plan, tell=lambda news: _hear(record, news, started), parts=parts)
        )
        stack.callback(ended.set)
        threading.Thread(target=pace.stop_in_time, args=(swarm, ended), daemon=True).start()
        try:
            swarm.fit(job)
        except RavnestError as error:  # stopped before it had anything to keep: what was seen counts
            if not record.leaf_times:
                raise
            say(f"it ended with: {error}")
    times = record.leaf_times
    slice_seconds = _SLICE_SECONDS if device == "cuda" else 0.5
    return {
        **pace.seen,
        "samples_per_second": _rates(times, slice_seconds),
        "first_update_seconds": times[0][0] - started,
        "stages": [[stage.start, stage.stop, stage.window] for stage in record.cluster.stages],
        "recompute": [stage.recompute for stage in record.cluster.stages],
        "accumulate": record.cluster.accumulate,
        "peak_bytes": peak[0],
        "loss": next(report.loss for *_, report in reversed(record.reports) if report.loss is not None),
        "microbatch_seconds": _work_seconds(record),
    }


def _hear(record: Any, news: Any, started: float) -> None:
    at = time.monotonic()
    say(f"{at - started:.0f} s: {type(news).__name__}: {str(news)[:160]}")
    record.news.append((at, news))


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
        # A head may be more work than a stage's share: some of the blocks stay with it.
        wanted = int(np.searchsorted(work, work[-1] * (1 - 1 / num_stages)))
        last = max(1, min(profile.num_positions - 8, wanted))
        cuts = []
        for number in range(1, num_stages):
            at = int(np.searchsorted(work, work[last] * number / (num_stages - 1)))
            near = range(max(1, at - 12), max(2, min(last + 4, at + 12) + 1))
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


_LLAMA_BATCH = 8  # samples of 512 tokens in a batch, in as many microbatches as there are pairs


def _llama(name: str, device: str, seconds: float, mode: str) -> Figures:
    """Train some of a Llama that nobody holds whole, over four peers: the last blocks, or adapters."""
    import torch

    import ravnest as rv
    from benchmarks.models import Llama, make_tokens, token_loss
    from ravnest.config import CompileMode
    from ravnest.requester.local_peers import Hardware

    shape = LLAMAS[name]
    with rv.empty_weights():
        model = Llama(shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_microbatches = _LLAMA_BATCH // 2 if shape.rank else 4
    job = rv.Job(
        model,
        make_tokens(shape, 64),
        batch_size=_LLAMA_BATCH if shape.rank else 4,
        microbatches=num_microbatches,
        epochs=100_000,
        inputs=["ids"],
        loss=lambda logits, batch: token_loss(logits, batch["labels"]),
        optimizer=torch.optim.AdamW(trained, lr=1e-5),
        checkpoint_every=None,
        is_padded=False,
        is_pretrained=True,
        frozen="int4" if shape.rank else None,
    )
    # A program takes some of a GPU beside its tensors: the context, and kernels.
    lent = (6e9 if shape.rank else 8e9) - (6e8 if device == "cuda" else 0)
    hardware = [Hardware(lent, device=device, compile_mode=CompileMode(mode))] * 4
    with shared_gpu(device, len(hardware)) as is_shared:
        found = train_for(job, hardware, max(10.0, seconds - 20.0), "bf16")
    found |= {
        "mps": is_shared,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "lent_bytes": lent,
    }
    rates = [samples * shape.length for samples in found.pop("samples_per_second")]
    return {"tokens_per_second": statistics.median(rates[-3:]), "slices": rates, **found}


def _bare_llama(name: str, device: str, seconds: float, mode: str) -> Figures:
    """Train the adapters, or the last blocks, in one process, with the base in bf16."""
    import torch

    from benchmarks.models import Llama, make_tokens, token_loss

    shape, started = LLAMAS[name], time.monotonic()
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    data = {key: value.to(device) for key, value in make_tokens(shape, 64).items()}
    size = 2 if shape.rank else 1  # samples of a microbatch; four make an update
    num_steps, rates, number = 4 if device == "cuda" else 1, [], 0
    while len(rates) < 4 or (time.monotonic() < started + min(seconds, 25.0) and len(rates) < 12):
        began = time.monotonic()
        for _ in range(num_steps):
            for _ in range(4):
                ids, labels = (data[key][number % 64 : number % 64 + size] for key in ("ids", "labels"))
                token_loss(model(ids), labels).backward()
                number += size
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(num_steps * 4 * size * shape.length / (time.monotonic() - began))
    return {
        "tokens_per_second": statistics.median(rates[1:]),
        "spread": [min(rates[1:]), max(rates[1:])],
        "peak_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


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
    missed += [f"{model}, {part}: {row['left']}" for (model, part), row in good.items() if "left" in row]
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
