"""LoRA through four stages against peft in one process: loss on the same data, tokens per second, memory."""

import argparse
import contextlib
import string
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import in_fresh_process, peak_since_look, say, spread, table

Figures = dict[str, Any]

WITHIN = 0.01  # of the loss of one process
OVER_PLAN = 0.10
NUM_STAGES = 4
SEEDS = (0, 1, 2)
MARKS = ("<pad>", "<s>", "</s>", "<unk>")
BEFORE, AFTER = ("*.py",), ("json/*.py", "asyncio/*.py", "email/*.py")  # of the standard library's sources


@dataclass(frozen=True)
class Shape:
    """A Llama, how its base comes to be, and how it is fine-tuned."""

    width: int
    num_layers: int
    num_first_updates: int  # of all its weights, on other text
    num_updates: int
    batch_size: int = 16
    length: int = 96
    rank: int = 8


FULL = Shape(width=64, num_layers=8, num_first_updates=300, num_updates=100, batch_size=8, length=64)
LARGE = Shape(width=768, num_layers=8, num_first_updates=0, num_updates=4, batch_size=8)  # for memory
SMALL = Shape(width=32, num_layers=4, num_first_updates=0, num_updates=4, batch_size=8, length=32, rank=2)
LITTLE = replace(LARGE, width=32, length=32, rank=2)  # as many operations, almost no bytes
LENT_BYTES = {"fp32": 1.67e8, "int4": 1.25e8}  # a tenth more than the largest stage needs
QUICK = replace(SMALL, num_first_updates=8, num_updates=8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a run be a part of the whole."""
    parser.add_argument("--memory", action="store_true", help="only that part, printed; no report is written")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    if quick:
        found = _compare(QUICK, 0, ("fp32",))
        assert abs(found["fp32"]["over_one_process"]) < WITHIN, found
        assert found["one_process"]["loss"] < found["one_process"]["first_loss"], found
        return found, "", []
    seeds = [] if options.memory else [_compare(FULL, seed, ("fp32", "int4")) for seed in SEEDS]
    program_bytes = max(each["peak_bytes"] for each in _measure_memory(LITTLE, "fp32", 0))
    memory = {base: _measure_memory(LARGE, base, program_bytes) for base in ("fp32", "int4")}
    figures: Figures = {"seeds": seeds, "program_bytes": program_bytes, "memory": memory}
    if options.memory:
        say(_report_memory(figures))
        return figures, "", _missed(figures)
    return figures, _report(figures), _missed(figures)


def _compare(shape: Shape, seed: int, bases: tuple[str, ...]) -> Figures:
    """Fine-tune one base in one process and through stages."""
    with tempfile.TemporaryDirectory(prefix="ravnest-finetune-") as name:
        folder = Path(name)
        in_fresh_process(write_base, folder, shape, seed)
        alone, _ = in_fresh_process(_train_alone, folder, shape, seed)
        say(f"seed {seed}, one process: {alone}")
        found: Figures = {"one_process": alone}
        for base in bases:
            found[base], _ = in_fresh_process(_train_apart, folder, shape, seed, base)
            found[base]["over_one_process"] = _short(found[base]["loss"] / alone["loss"] - 1)
            say(f"seed {seed}, {NUM_STAGES} stages, base in {base}: {found[base]}")
    return found


def write_base(folder: Path, shape: Shape, seed: int) -> None:
    """Write a model that was trained a little, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate([*MARKS, *string.printable])}
    letters = Tokenizer(models.WordLevel(words, unk_token=MARKS[3]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    names = ("pad_token", "bos_token", "eos_token", "unk_token")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **dict(zip(names, MARKS, strict=True)))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=shape.width,
        intermediate_size=2 * shape.width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=4,
        max_position_embeddings=shape.length,
    )
    model = LlamaForCausalLM(config)
    if shape.num_first_updates:
        rows = [row["text"] for row in read_rows(BEFORE, shape, shape.num_first_updates * shape.batch_size)]
        ids = torch.tensor([tokenizer(row)["input_ids"] for row in rows])
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for part in ids.split(shape.batch_size):
            optimizer.zero_grad()
            model(input_ids=part, labels=part).loss.backward()
            optimizer.step()
    model.save_pretrained(folder)


def read_rows(places: tuple[str, ...], shape: Shape, count: int) -> list[dict[str, str]]:
    """Return pieces of source text, all of one length."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for place in places for file in library.glob(place))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    size = shape.length - 1  # an end follows
    assert len(text) >= count * size, f"{len(text)} letters"
    step = len(text) // count
    return [{"text": text[n * step : n * step + size]} for n in range(count)]


def _make_work(folder: Path, shape: Shape, seed: int, base: str) -> Any:
    from ravnest.requester.finetuning.finetune import make_finetuning

    num_train = shape.num_updates * shape.batch_size
    rows = read_rows(AFTER, shape, num_train + num_train // 10)
    settings = {
        "val_data": rows[::11],
        "rank": shape.rank,
        "learning_rate": 2e-3,
        "max_length": shape.length,
        "epochs": 1,
        "batch_size": shape.batch_size,
        "seed": seed,
        "base": base,
        "checkpoint_every": None,
    }
    train = [row for number, row in enumerate(rows) if number % 11]
    return make_finetuning(folder, train[:num_train], settings)


def _train_alone(folder: Path, shape: Shape, seed: int) -> Figures:
    """Train as peft's users do: one process, one batch after the other."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from ravnest.requester.finetuning.finetune import token_loss
    from ravnest.requester.lr_schedules import factors

    torch.set_num_threads(1)
    job = _make_work(folder, shape, seed, "fp32").job
    config = peft.LoraConfig(
        r=shape.rank, lora_alpha=2 * shape.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    first = {name: each for name, each in job.model.state_dict().items() if "lora_" in name}
    model.load_state_dict(first, strict=False)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], 2e-3, weight_decay=0.0)
    rates = factors(job.rates, job.num_updates)
    order = torch.randperm(len(job.samples), generator=torch.Generator().manual_seed(seed + 1))

    def loss_of(batch: Mapping[str, Any]) -> Any:
        return token_loss(model(input_ids=batch["input_ids"]), batch)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        numbers = torch.arange(len(job.val_samples)).split(shape.batch_size)
        parts = [(len(part), float(loss_of(job.val_samples.batch(part.numpy())))) for part in numbers]
        model.train()
        return sum(size * loss for size, loss in parts) / len(job.val_samples)

    first_loss, started = evaluate(), time.perf_counter()
    for rate, part in zip(rates, order.split(shape.batch_size), strict=True):
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        loss_of(job.samples.batch(part.numpy())).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - started
    num_tokens = len(order) * shape.length
    return {
        "loss": _short(evaluate()),
        "first_loss": _short(first_loss),
        "tokens_per_second": round(num_tokens / seconds),
    }


def _train_apart(folder: Path, shape: Shape, seed: int, base: str) -> Figures:
    from benchmarks.swarm import Setting, train

    job = _make_work(folder, shape, seed, base).job
    record = train(job, Setting([None] * NUM_STAGES, ()), form=_cut_evenly)
    assert len(record.cluster.stages) == NUM_STAGES
    return {
        "loss": _short(record.metrics["val_loss"]),
        "tokens_per_second": round(record.samples_per_second(0.2) * shape.length),
    }


def _cut_evenly(record: Any, setting: Any) -> Any:
    """Cut into stages of equal work, once the model is known."""
    from benchmarks.swarm import fix_plan
    from ravnest.plan.split import best_cuts

    def form(profile: Any, *facts: Any) -> Any:
        cuts = best_cuts(profile, NUM_STAGES)[1:-1]
        return fix_plan(record, replace(setting, cuts=cuts))(profile, *facts)

    return form


def _measure_memory(shape: Shape, base: str, program_bytes: int) -> list[Figures]:
    with tempfile.TemporaryDirectory(prefix="ravnest-finetune-") as name:
        in_fresh_process(write_base, Path(name), shape, 0)
        found, _ = in_fresh_process(_watch_memory, Path(name), shape, base)
    for peer in found:
        peer["training_bytes"] = peer["peak_bytes"] - program_bytes
        peer["over_plan"] = _short(peer["training_bytes"] / peer["planned_bytes"] - 1)
        say(f"base in {base}: {peer}")
    return found


def _watch_memory(folder: Path, shape: Shape, base: str) -> list[Figures]:
    from benchmarks.swarm import Record, Setting, train
    from ravnest.plan.assembly import stage_bytes
    from ravnest.plan.line import LineCost

    job = _make_work(folder, shape, 0, base).job
    peaks: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # reports heard so far, bytes

    def watch(processes: dict[Any, int], record: Record) -> None:
        for node, pid in processes.items():
            with contextlib.suppress(OSError, KeyError, psutil.Error):  # it may have ended
                peaks[node].append((len(record.reports), peak_since_look(pid)))

    setting = Setting([None] * NUM_STAGES, (), memory_bytes=LENT_BYTES[base])
    record = train(job, setting, watch=watch, form=_cut_evenly)
    assert record.profile is not None
    assert record.config is not None
    line = LineCost(record.profile, record.config, is_averaged=False)
    return [
        {
            "node": stage.node,
            "planned_bytes": round(stage_bytes(line, stage, record.cluster) - record.config.overhead_bytes),
            "peak_bytes": max(peak for heard, peak in peaks[stage.node] if heard < len(record.reports)),
        }
        for stage in record.cluster.stages
    ]


def _missed(figures: Figures) -> list[str]:
    missed = [
        f"seed {seed}: with the base in {base} the loss is {each[base]['over_one_process']:+.2%}"
        for seed, each in zip(SEEDS, figures["seeds"], strict=False)
        for base in ("fp32", "int4")
        if each[base]["over_one_process"] > WITHIN
    ]
    missed += [
        f"{base}: {peer['node']} used {peer['over_plan']:+.0%} against the plan"
        for base, peers in figures["memory"].items()
        for peer in peers
        if abs(peer["over_plan"]) > OVER_PLAN
    ]
    return missed


def _report(figures: Figures) -> str:
    rows = []
    for seed, each in zip(SEEDS, figures["seeds"], strict=True):
        alone = each["one_process"]
        rows.append(
            [seed, "peft, one process", f"{alone['loss']:.4f}", "", f"{alone['tokens_per_second']:,}"]
        )
        for base in ("fp32", "int4"):
            found = each[base]
            words = f"{NUM_STAGES} stages, base in {base}"
            change = f"{found['over_one_process']:+.2%}"
            rows.append([seed, words, f"{found['loss']:.4f}", change, f"{found['tokens_per_second']:,}"])
    speeds = {
        key: spread([each[key]["tokens_per_second"] for each in figures["seeds"]])["median"]
        for key in ("one_process", "fp32", "int4")
    }
    quality = _METHOD.format(
        quality=table(["seed", "run", "validation loss", "over one process", "tokens/s"], rows),
        speeds=", ".join(f"{key} {value:,.0f}" for key, value in speeds.items()),
    )
    return f"{quality}\n{_report_memory(figures)}"


def _report_memory(figures: Figures) -> str:
    rows = [
        [
            base,
            peer["node"],
            _mega(peer["planned_bytes"]),
            _mega(peer["training_bytes"]),
            f"{peer['over_plan']:+.1%}",
            f"{(peer['training_bytes'] - peer['planned_bytes']) / 1e6:+.0f}",
        ]
        for base, peers in figures["memory"].items()
        for peer in peers
    ]
    return _MEMORY.format(
        memory=table(["base", "peer", "planned MB", "peak MB", "over plan", "over plan MB"], rows),
        program=_mega(figures["program_bytes"]),
        lent=" and ".join(f"{_mega(size)} MB ({base})" for base, size in LENT_BYTES.items()),
    )


def _mega(size: float) -> int:
    return round(size / 1e6)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


_METHOD = """\
A Llama of eight layers and width 64, trained for 300 updates on some of the standard library's sources, is
fine-tuned on others: 100 updates of 8 rows of 64 letters, LoRA of rank 8 on all linear layers, AdamW at 2e-3
with a cosine. One process uses peft; it begins with the same adapters. The stages are real peers on this PC,
with one thread each; all of them share its cores, so tokens/s say what stages cost here, not what PCs gain.

{quality}

Tokens/s, median: {speeds}.

"""

_MEMORY = """\
Memory: width 768 (33 M parameters), rows of 96 letters, four updates; each peer lends {lent}.
Peak is the largest resident size of a peer, its agent and its compute at the same moment, less that of a peer
with a stage of as many operations and almost no bytes, {program} MB.

{memory}
"""
