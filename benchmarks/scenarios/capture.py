"""How long capture takes, step by step, and how much memory it takes beside the model's own."""

import os
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import in_fresh_process, say, table

Figures = dict[str, Any]

# Layers, width and heads of GPT-2; weights without values (rv.empty_weights); seconds allowed.
MODELS = {
    "GPT-2 small": (12, 768, 12, False, 10.0),
    "GPT-2 medium": (24, 1024, 16, False, 15.0),
    "GPT-2 XL, empty": (48, 1600, 25, True, 30.0),
    "GPT-2 XL": (48, 1600, 25, False, 30.0),
}
QUICK_MODELS = {"tiny": (2, 64, 4, False, 60.0), "tiny, empty": (2, 64, 4, True, 60.0)}
LENGTH, NUM_SAMPLES = 1024, 8
MEMORY_TIMES = 2.5  # what a model with values takes at most, its own included: weights, gradients, and some


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    figures: Figures = {}
    for name, (*shape, is_empty, seconds) in (QUICK_MODELS if quick else MODELS).items():
        needed = 0 if is_empty or quick else MEMORY_TIMES * _count(*shape) * 4 + 2e9
        if needed > _available_bytes():
            free = _available_bytes() / 1e9
            say(f"{name} is left out: it needs {needed / 1e9:.0f} GB, and {free:.0f} are free")
            continue
        found, _ = in_fresh_process(_measure, shape, is_empty, 64 if quick else LENGTH)
        figures[name] = {**found, "target_seconds": seconds}
        say(f"{name}: {figures[name]}")
    if quick:
        for found in figures.values():
            assert found["num_positions"] > 2, found
            assert sum(step["cpu_seconds"] for step in found["steps"].values()) <= found["cpu_seconds"] + 0.1
        return figures, "", []
    return figures, _report(figures), _missed(figures)


def _count(num_layers: int, width: int, _: int) -> int:
    return 12 * num_layers * width**2 + 51_281 * width


def _available_bytes() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return float(line.split()[1]) * 1024
    return 0.0


def _measure(shape: list[int], is_empty: bool, length: int) -> Figures:
    """Capture and measure a GPT-2 of this shape in this process, with one thread."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import ravnest as rv
    from ravnest.model.capture.capture import CaptureWishes, capture_as
    from ravnest.model.stage.profile import measure

    torch.set_num_threads(1)
    num_layers, width, num_heads = shape
    with rv.empty_weights() if is_empty else nullcontext():
        config = GPT2Config(n_layer=num_layers, n_embd=width, n_head=num_heads)
        model = GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (NUM_SAMPLES, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    steps: list[tuple[str, float, float]] = []

    def tell(step: str) -> None:
        steps.append((step, time.monotonic(), time.process_time()))

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    tell("fields are read")
    captured = capture_as(model, batch, None, None, CaptureWishes(tell=tell))
    tell("it is measured")
    measure(captured.blueprint, NUM_SAMPLES)
    tell("end")
    model_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    pairs = pairwise(steps)
    return {
        "num_parameters": sum(each.numel() for each in model.parameters()),
        "num_positions": captured.blueprint.num_positions,
        "seconds": round(steps[-1][1] - steps[0][1], 1),
        "cpu_seconds": round(steps[-1][2] - steps[0][2], 1),
        "steps": {
            one[0]: {"seconds": round(two[1] - one[1], 1), "cpu_seconds": round(two[2] - one[2], 1)}
            for one, two in pairs
        },
        "model_bytes": model_bytes,
        "beside_bytes": _status("VmHWM") - before,
        "load": round(os.getloadavg()[0], 1),
    }


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def _missed(figures: Figures) -> list[str]:
    return [
        f"{name} took {found['cpu_seconds']} s of CPU, over {found['target_seconds']:.0f} s"
        for name, found in figures.items()
        if found["cpu_seconds"] > found["target_seconds"]
    ]


def _report(figures: Figures) -> str:
    names = list(dict.fromkeys(step for found in figures.values() for step in found["steps"]))
    head = ["model", "parameters", "positions", *names, "all, CPU s", "all, wall s", "target s", "load"]
    rows = [
        [
            name,
            f"{found['num_parameters'] / 1e6:,.0f} M",
            found["num_positions"],
            *(found["steps"].get(step, {}).get("cpu_seconds", "-") for step in names),
            found["cpu_seconds"],
            found["seconds"],
            f"{found['target_seconds']:.0f}",
            found["load"],
        ]
        for name, found in figures.items()
    ]
    memory = [
        [name, f"{found['model_bytes'] / 1e9:.2f}", f"{found['beside_bytes'] / 1e9:.2f}"]
        for name, found in figures.items()
    ]
    method = (
        "`python -m benchmarks.run capture`. GPT-2 of transformers with random weights, batches of "
        f"{NUM_SAMPLES} rows of {LENGTH:,} tokens, one thread, each model in a process of its own, one run "
        "each. The steps are in CPU seconds. The last column is the load of the machine; "
        "wall seconds mean little where it is above 1, for other programs shared the cores. CPU seconds "
        "are what one quiet core would take at most, so targets are judged by them. Of a model with empty "
        "weights two short samples are compared, with stand-ins."
    )
    beside = table(["model", "model, GB", "beside it, GB"], memory)
    return "\n\n".join([method, table(head, rows), "Memory at the peak, beside the model's own:", beside])
