"""Where the time of a microbatch goes: the stage engine in this process, without a network."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import say
from benchmarks.models import GPTS, Gpt, make_tokens, token_loss

_NUM_TIMED = 20
_MOST_ROWS = 25


def profile_engine(model: str, device: str, mode: str, microbatch_size: int = 8) -> dict[str, Any]:
    """Return seconds of each piece of work, alone and in a row, and what torch's profiler says."""
    is_cuda, told = device == "cuda", []
    data = make_tokens(GPTS[model], microbatch_size)
    engine, program, captured, captured_seconds = _make_engine(model, data, device, mode, told.append)
    number = iter(range(1_000_000_000))

    def microbatch(timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        this = next(number)
        passed = timed("forward", lambda: engine.forward(this, {}, data, key=(0, this)))
        timed("backward_inputs", lambda: engine.backward_inputs(this, {}))
        dropped = timed("backward_weights", lambda: engine.backward_weights(this, 1.0, microbatch_size, 1e-4))
        assert dropped is None, dropped
        timed("loss", lambda: float(passed.results["loss"]))
        timed("update", lambda: engine.update(1e-4))

    def at_once(name: str, work: Callable[[], Any]) -> Any:
        return work()

    compile_started, num_before = time.monotonic(), 0
    for _ in range(3):
        microbatch(at_once)
    while mode != "off" and not told:  # beside the process that compiles
        microbatch(at_once)
        num_before += 1
    _wait(device)
    compile_seconds = time.monotonic() - compile_started
    for _ in range(3):
        microbatch(at_once)
    pieces: dict[str, list[float]] = {}

    def alone(name: str, work: Callable[[], Any]) -> Any:
        _wait(device)
        began = time.perf_counter()
        found = work()
        launched = time.perf_counter()
        _wait(device)
        pieces.setdefault(name, []).append(time.perf_counter() - began)
        pieces.setdefault(f"{name}, until it returns", []).append(launched - began)
        return found

    num_timed = _NUM_TIMED if is_cuda else 2
    for _ in range(num_timed):
        microbatch(alone)
    _wait(device)
    began = time.perf_counter()
    for _ in range(num_timed):
        microbatch(at_once)
    _wait(device)
    seconds = (time.perf_counter() - began) / num_timed
    row = {
        "model": model,
        "part": f"profile, compile {mode}",
        "capture_seconds": captured_seconds,
        "compile_seconds": compile_seconds,
        "told": told,
        "tokens_per_second_meanwhile": microbatch_size * GPTS[model].length * num_before / compile_seconds,
        "microbatch_seconds_in_a_row": seconds,
        "tokens_per_second": microbatch_size * GPTS[model].length / seconds,
        "median_seconds": {name: sorted(found)[len(found) // 2] for name, found in pieces.items()},
        "program_seconds": _time_program(program, captured, data, device, num_timed),
        "codec_seconds": _time_codec(
            device, (microbatch_size, GPTS[model].length, GPTS[model].width), num_timed
        ),
        "peak_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
        "tables": _profile(lambda: microbatch(at_once), device),
    }
    say("\n".join([str({key: value for key, value in row.items() if key != "tables"}), *row["tables"]]))
    return row


def _make_engine(
    model: str, data: Any, device: str, mode: str, warn: Callable[[str], None]
) -> tuple[Any, Any, Any, float]:
    """Return the engine of a whole model, its program, what was captured, and how long that took."""
    import ravnest as rv
    from ravnest.engine.recipe import from_torch
    from ravnest.engine.stage import StageEngine
    from ravnest.engine.weight_versions import Snapshot
    from ravnest.model.stage.compiled_stage import StageCompiler
    from ravnest.model.stage.stage_program import build_stage_program
    from ravnest.peer.compile_process import compile_apart, load_compiler
    from ravnest.peer.machine import keep_compiled
    from ravnest.peer.stage_builder import find_roles

    if mode != "off":
        keep_compiled(os.environ)
        load_compiler()
    started, is_cuda = time.monotonic(), device == "cuda"
    torch.manual_seed(0)
    gpt = Gpt(GPTS[model])
    captured = rv.capture(
        gpt, data, lambda logits, batch: token_loss(logits, batch["labels"]), inputs=["ids"]
    )
    seconds, blueprint = time.monotonic() - started, captured.blueprint
    trained = {entry.name: captured.state[entry.name] for entry in blueprint.state if entry.is_trainable}
    settings = from_torch(torch.optim.AdamW(trained.values(), lr=1e-4, fused=is_cuda), trained)
    program = build_stage_program(
        blueprint,
        device,
        autocast=torch.bfloat16 if is_cuda else None,
        make_compiler=None
        if mode == "off"
        else partial(StageCompiler, compile_stage=compile_apart, warn=warn, tell=warn),
    )
    state = {name: tensor.detach().to(device) for name, tensor in captured.state.items()}
    roles = find_roles(blueprint, program.castable)
    return (
        StageEngine(program, Snapshot(0, state, {}), roles, settings, True, True),
        program,
        captured,
        seconds,
    )


def _time_program(program: Any, captured: Any, data: Any, device: str, num_timed: int) -> dict[str, float]:
    """Return seconds of the program alone, without the engine: forward, and both parts of the backward."""
    state = {
        name: tensor.detach()
        .to(device, torch.bfloat16 if name in program.castable else tensor.dtype)
        .requires_grad_()
        for name, tensor in captured.state.items()
    }
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for number in range(num_timed + 5):
        _wait(device)
        began = time.perf_counter()
        with torch.enable_grad():
            passed = program.forward(state, {}, data, training=True, key=(0, number))
        _wait(device)
        between = time.perf_counter()
        if passed.backward is None:
            torch.autograd.grad(passed.results["loss"], list(state.values()), allow_unused=True)
        else:
            passed.backward.backward_inputs({})
            passed.backward.backward_weights()
        _wait(device)
        if number >= 5:
            found["forward"].append(between - began)
            found["backward"].append(time.perf_counter() - between)
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def _time_codec(device: str, shape: tuple[int, ...], num_timed: int) -> dict[str, float]:
    from ravnest.codec import decode_tensor, describe, encode_tensor
    from ravnest.config import WireFormat

    tensor, found = torch.randn(shape, device=device), {}
    for name in (
        WireFormat.FP32,
        WireFormat.BF16,
        WireFormat.INT8,
        WireFormat.INT4_CHANNELS,
        WireFormat.INT4_STOCHASTIC,
    ):
        times: list[tuple[float, float]] = []
        for number in range(num_timed):
            _wait(device)
            began = time.perf_counter()
            buffer = encode_tensor(tensor, name, (number,))
            between = time.perf_counter()
            decode_tensor(bytearray(buffer), describe(tensor, name), device)
            _wait(device)
            times.append((between - began, time.perf_counter() - between))
        found[f"{name}: encode"] = sorted(one for one, _ in times)[num_timed // 2]
        found[f"{name}: decode"] = sorted(other for _, other in times)[num_timed // 2]
    return found


def _profile(work: Callable[[], None], device: str) -> list[str]:
    """Return what takes most time of the device, and of the host, over three microbatches."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        for _ in range(3):
            work()
        _wait(device)
    averages = found.key_averages()
    orders = [*(["self_cuda_time_total"] if device == "cuda" else []), "self_cpu_time_total"]
    return [averages.table(sort_by=order, row_limit=_MOST_ROWS, max_name_column_width=60) for order in orders]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
