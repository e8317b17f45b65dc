"""What formats of crossing tensors cost: time to encode and decode, loss of models trained through them."""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.measure import say, spread, table

MODELS, OPTIMIZERS = ("gpt", "llama", "conv"), ("adamw", "muon")
MAIN_FORMATS = ("fp32", "bf16", "int8", "int8-int4", "int4")
_LINK_BITS_PER_SECOND = 40e6
_TINY_UPDATES, _MOST_TINY_CHANGE = 12, 0.05
_QUICK = [("gpt", "adamw", 2), ("gpt", "muon", 2), ("llama", "adamw", 0), ("conv", "adamw", 2)]

Record = dict[str, object]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    group = parser.add_argument_group("wire")
    group.add_argument("--device", default="cpu", help="cpu or cuda")
    group.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    group.add_argument("--formats", nargs="+", default=MAIN_FORMATS, choices=(*MAIN_FORMATS, "int4-nearest"))
    group.add_argument("--optimizers", nargs="+", default=("adamw",), choices=OPTIMIZERS)
    group.add_argument("--lags", nargs="+", type=int, default=(2,), help="of the root, in updates")
    group.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    group.add_argument("--updates", type=int, default=500)
    group.add_argument("--minutes", type=float, default=math.inf, help="what is not done then is left out")
    group.add_argument("--processes", type=int, default=1, help="runs side by side")
    group.add_argument("--out", type=Path, metavar="FILE", help="one line of JSON as each run ends")
    group.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="the table of these, no run")
    group.add_argument("--no-speed", action="store_true", help="do not time the codec")


def run(quick: bool, options: argparse.Namespace) -> tuple[dict[str, object], str, list[str]]:
    deadline = time.time() + 60 * options.minutes
    if options.report:
        lines = [line for path in options.report for line in path.read_text().splitlines()]
        report = f"{_METHOD}\n\n{show_losses([json.loads(line) for line in lines])}"
        say(report)
        return {"losses": report.splitlines()}, report, []
    speeds = [] if options.no_speed else list(time_codec(options.device, quick))
    records = []
    for record in _train_all(list(_choose_runs(quick, options)), options, deadline):
        records.append(record)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    report = "\n\n".join((_METHOD, show_losses(records), show_speeds(speeds)))
    say(report)
    missed = [f"{each['format']} takes longer than it saves" for each in speeds if not each["pays"]]
    if quick:
        missed += _check_tiny(records)
    return {"losses": records, "speeds": speeds}, report, missed


def _choose_runs(quick: bool, options: argparse.Namespace) -> Iterator[object]:
    from benchmarks.wire_runs import Run

    if quick:
        for model, optimizer, lag in _QUICK:
            for formats in MAIN_FORMATS:
                yield Run(model, optimizer, lag, formats, 0, _TINY_UPDATES, is_tiny=True)
        return
    for seed in options.seeds:
        for model in options.models:
            for optimizer in options.optimizers:
                for lag in options.lags:
                    for formats in options.formats:
                        yield Run(model, optimizer, lag, formats, seed, options.updates)


def _train_all(runs: Sequence[object], options: argparse.Namespace, deadline: float) -> Iterator[Record]:
    """Train side by side, in the order given; yield what each run says as it ends."""
    place = (options.device, max(1, (os.cpu_count() or 1) // options.processes))
    work = [(number, len(runs), each, *place, deadline) for number, each in enumerate(runs)]
    if options.processes == 1:
        yield from (found for each in work if (found := _train(each)))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context) as pool:  # it ends when one of them dies
        for done in as_completed([pool.submit(_train, each) for each in work]):
            if found := done.result():
                yield found


_CORPUS: dict[str, object] = {}  # read once in each process


def _train(work: tuple[int, int, object, str, int, float]) -> Record | None:
    import torch

    from benchmarks.wire_models import read_corpus
    from benchmarks.wire_runs import OutOfTimeError, train

    number, count, chosen, device, num_threads, deadline = work
    # Threads that wait for each other waste a busy core, most of all over tiny tensors.
    torch.set_num_threads(1 if chosen.is_tiny else num_threads)
    if time.time() > deadline:
        return None
    if device not in _CORPUS:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        is_tiny = chosen.is_tiny
        _CORPUS[device] = read_corpus(device, 1_000_000) if is_tiny else read_corpus(device)
    try:
        record = train(chosen, _CORPUS[device], device, deadline)
    except OutOfTimeError as late:
        say(str(late))
        return None
    say(f"{number + 1}/{count} {record}")
    return record


def show_losses(records: Sequence[Record]) -> str:
    """Return a table: formats by group, with differences over fp32 of the same seed."""
    groups: dict[tuple[object, ...], dict[str, dict[object, Record]]] = {}
    for record in records:
        group = tuple(record[key] for key in ("model", "optimizer", "lag", "updates"))
        groups.setdefault(group, {}).setdefault(str(record["formats"]), {})[record["seed"]] = record
    rows = []
    for group, by_format in groups.items():
        plain = by_format.get("fp32", {})
        for formats, by_seed in by_format.items():
            pairs = [(one, plain[seed]) for seed, one in by_seed.items() if seed in plain]
            rows.append(
                [
                    *group,
                    formats,
                    " / ".join(f"{bits:.3g}" for bits in next(iter(by_seed.values()))["bits"]),
                    len(by_seed),
                    _show([float(one["validation"]) for one in by_seed.values()], "{:.4f}"),
                    _show([float(one["without_wire"]) for one in by_seed.values()], "{:.4f}"),
                    _show([_change(one, other) for one, other in pairs], "{:+.2%}"),
                ]
            )
    head = ["model", "optimizer", "lag", "updates", "formats", "bits", "seeds", "validation", "without wire"]
    return table([*head, "over fp32"], rows)


def _change(one: Record, other: Record) -> float:
    return float(one["validation"]) / float(other["validation"]) - 1


def _show(values: Sequence[float], form: str) -> str:
    """Return the mean, and the standard error where there is one."""
    if not values:
        return "-"
    mean = form.format(statistics.mean(values))
    if len(values) == 1:
        return mean
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {form.format(error).lstrip('+')}"


def _check_tiny(records: Sequence[Record]) -> list[str]:
    plain = {(each["model"], each["optimizer"]): each for each in records if each["formats"] == "fp32"}
    missed = []
    for record in records:
        change = _change(record, plain[record["model"], record["optimizer"]])
        if not abs(change) <= _MOST_TINY_CHANGE:
            missed.append(f"{record['model']} with {record['formats']} differs by {change:+.1%} from fp32")
    return missed


def time_codec(device: str, quick: bool) -> Iterator[Record]:
    """Yield how fast each format is, on one core of a CPU, against what it saves of a slow link."""
    import torch

    from ravnest.codec import describe, pack_tensor, unpack_tensor
    from ravnest.config import ACTIVATION_FORMATS, WireFormat

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = (2, 256, 256) if quick else (8, 512, 768)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(shape, generator=generator).to(device, dtype)
        bf16_bytes = 2 * tensor.numel()
        for wire_format in (*ACTIVATION_FORMATS, WireFormat.INT4_STOCHASTIC):
            spec = describe(tensor, wire_format)
            packed = pack_tensor(tensor, wire_format, (0,))
            encode = _median_seconds(lambda: pack_tensor(tensor, wire_format, (0,)), device)  # noqa: B023
            decode = _median_seconds(lambda: unpack_tensor(packed, spec), device)  # noqa: B023
            saved = 8 * (bf16_bytes - spec.num_bytes) / _LINK_BITS_PER_SECOND
            yield {
                "format": str(wire_format),
                "dtype": spec.dtype,
                "encode_seconds": encode,
                "decode_seconds": decode,
                "encode_gigabytes_per_second": round(4 * tensor.numel() / encode / 1e9, 2),
                "decode_gigabytes_per_second": round(4 * tensor.numel() / decode / 1e9, 2),
                "saved_seconds": saved,
                "pays": saved <= 0 or encode + decode < saved,
            }
    torch.set_num_threads(num_threads)


def _median_seconds(work: object, device: str, repeats: int = 7) -> float:
    import torch

    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return spread(seconds)["median"]


def show_speeds(speeds: Sequence[Record]) -> str:
    """Return a table of the codec's speed."""
    head = ["format", "of", "encode GB/s", "decode GB/s", "both, ms", "saved of 40 Mbit/s against bf16, ms"]
    rows = [
        [
            each["format"],
            each["dtype"],
            each["encode_gigabytes_per_second"],
            each["decode_gigabytes_per_second"],
            f"{1e3 * (float(each['encode_seconds']) + float(each['decode_seconds'])):.2f}",
            f"{1e3 * float(each['saved_seconds']):.0f}",
        ]
        for each in speeds
    ]
    return table(head, rows) if rows else ""


_METHOD = """Models of eight stages are trained in one process. What crosses a cut goes through the product's
codec, forward and back, in training and in validation. The root's weights are `lag` updates old, the leaf's
are new, those between in proportion. Data: the sources of Python's standard library, every tenth file for
validation. The same seed gives the same weights and the same batches in every format; `over fp32` compares
within a seed. ± is a standard error over seeds. GB/s are of float32, on one core of a CPU."""
