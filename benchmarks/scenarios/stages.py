"""A rebuilt stage against the user's own module, capture of a model larger than this PC, and CUDA if any."""

import time
from collections.abc import Callable, Iterator

from benchmarks.measure import in_fresh_process, say, spread, table

SPEED_TARGET = 0.97
CAPTURE_SECONDS, CAPTURE_BYTES = 30.0, 1.5e9
FAMILIES = ("own_gpt", "gpt2", "llama", "bert", "vit", "resnet", "t5", "unet", "lstm", "inception")


def run(quick: bool) -> tuple[dict[str, object], str, list[str]]:
    import torch

    figures: dict[str, object] = {"torch": torch.__version__}
    missed: list[str] = []
    speed = _speed("cpu", repeats=5 if quick else 25)
    figures["rebuilt_over_eager"] = speed
    say(f"rebuilt stage: {speed['median']} of the eager module's speed")
    if speed["median"] < SPEED_TARGET and not quick:
        missed.append(f"a rebuilt stage reaches {speed['median']} of the eager module, not {SPEED_TARGET}")
    sizes = [("tiny", 64, 2)] if quick else [("7B", 4096, 32)]
    for name, width, layers in sizes:
        found, peak = in_fresh_process(_capture_llama, width, layers)
        figures[f"llama_{name}"] = {**found, "peak_bytes": peak}
        say(f"Llama {name}: {figures[f'llama_{name}']}")
        if not quick and (found["capture_seconds"] > CAPTURE_SECONDS or peak > CAPTURE_BYTES):
            missed.append(
                f"capture of a 7 B Llama took {found['capture_seconds']:.0f} s and {peak / 1e9:.2f} GB"
            )
    if torch.cuda.is_available():
        figures["cuda"] = _on_cuda()
        missed += [
            f"{name}: loss on cuda differs" for name, gap in figures["cuda"]["loss"].items() if gap > 1e-4
        ]
    return figures, _report(figures), missed


def _speed(device: str, repeats: int, autocast: bool = False) -> dict[str, float]:
    """Return how many rebuilt steps fit into one eager step: pairs in turn, forward and backward."""
    import torch

    eager, rebuilt = _steps(device, autocast)
    for step in (eager, rebuilt, eager, rebuilt):
        step()
    ratios = []
    for index in range(repeats):
        first, second = (eager, rebuilt) if index % 2 else (rebuilt, eager)
        seconds = {
            step: _seconds(step, torch.cuda.is_available() and device == "cuda") for step in (first, second)
        }
        ratios.append(seconds[eager] / seconds[rebuilt])
    return spread(ratios)


def _seconds(step: Callable[[], None], is_cuda: bool) -> float:
    import torch

    started = time.perf_counter()
    step()
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _steps(device: str, autocast: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return one training step of the GPT at width 512: of the module itself, and of its rebuilt stage."""
    import torch

    from ravnest.model.capture.capture import capture
    from ravnest.model.stage.stage_program import build_stage_program
    from tests.support.model_zoo import OwnGPT, token_batch, token_loss

    torch.manual_seed(0)
    model = OwnGPT(width=512, num_blocks=4)
    batch = token_batch(32, torch.Generator().manual_seed(0))
    captured = capture(model, batch, token_loss)
    model.to(device).train()
    fields = {name: field.to(device) for name, field in batch.items()}
    dtype = torch.bfloat16 if autocast else None
    stage = build_stage_program(captured.blueprint, device, autocast=dtype)
    state = {name: tensor.detach().to(device).clone() for name, tensor in captured.state.items()}
    for entry in captured.blueprint.state:
        state[entry.name].requires_grad_(entry.is_trainable)
    number = iter(range(10**9))

    def run_eager() -> None:
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=autocast):
            loss = token_loss(model(fields["ids"]), fields)
        loss.backward()

    def run_rebuilt() -> None:
        for tensor in state.values():
            tensor.grad = None
        stage.forward(state, {}, fields, key=(1, next(number))).results["loss"].backward()

    return run_eager, run_rebuilt


def _capture_llama(width: int, layers: int) -> dict[str, float]:
    import logging

    import torch
    import transformers

    from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.capture.capture import capture, empty_weights
    from ravnest.model.stage.profile import measure

    logging.disable(logging.WARNING)
    found: dict[str, float] = {}
    started = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        found[f"{name}_seconds"] = round(time.perf_counter() - started, 2)
        started = time.perf_counter()

    with empty_weights():
        config = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, intermediate_size=width * 43 // 16, use_cache=False
        )
        model = transformers.LlamaForCausalLM(config)
    lap("construct")
    ids = torch.zeros(4, 1024, dtype=torch.long)
    captured = capture(model, {"input_ids": ids, "labels": ids})
    lap("capture")
    profile = measure(captured.blueprint, 4)
    lap("measure")
    middle = captured.blueprint.num_positions // 2
    stage = slice_blueprint(captured.blueprint, middle, middle + max(1, middle // 4))
    lap("slice")
    data = write_blueprint(stage)
    read_blueprint(data)
    lap("write_and_read")
    found["parameters_gb"] = round(sum(profile.parameter_bytes) / 1e9, 2)
    found["operations"] = len(captured.blueprint.train.ops)
    found["stage_json_bytes"] = len(data)
    return found


def _on_cuda() -> dict[str, dict[str, object]]:
    """Run every family captured on the CPU on cuda: loss against the CPU, and speed against eager."""
    import torch

    from ravnest.errors import CaptureError
    from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
    from ravnest.model.capture.capture import capture
    from ravnest.model.stage.stage_program import build_stage_program
    from tests.support.model_zoo import FAMILIES as ENTRIES
    from tests.support.model_zoo import fields_of

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    gaps: dict[str, object] = {}
    for name in FAMILIES:
        entry = ENTRIES[name]
        try:
            captured = capture(entry.model(), entry.batch(), entry.loss, entry.metrics)
        except CaptureError as error:  # an older torch may not export it; it runs what another captured
            say(f"{name} cannot be captured with torch {torch.__version__}: {error}")
            continue
        blueprint = read_blueprint(write_blueprint(captured.blueprint))
        losses = {}
        for device in ("cpu", "cuda"):
            state = {key: tensor.detach().to(device, copy=True) for key, tensor in captured.state.items()}
            fields = {key: field.to(device) for key, field in fields_of(entry.batch()).items()}
            stage = build_stage_program(blueprint, device)
            losses[device] = float(stage.forward(state, {}, fields, training=False).results["loss"])
            first, again, other = (
                float(stage.forward(state, {}, fields, key=key).results["loss"])
                for key in ((1, 1), (1, 1), (1, 2))
            )
            if not any(entry.is_written for entry in blueprint.state):
                assert first == again, f"{name}: the same key gave another loss on {device}"
        gaps[name] = abs(losses["cpu"] - losses["cuda"]) / abs(losses["cpu"])
        say(f"{name} on cuda: {gaps[name]:.1e} (dropout differs between batches: {first != other})")
    return {
        "loss": gaps,
        "rebuilt_over_eager": _speed("cuda", 20),
        "rebuilt_over_eager_bf16": _speed("cuda", 20, autocast=True),
        "gpt2_medium_bf16": _gpt2_medium(),
    }


def _gpt2_medium() -> dict[str, object]:
    """Compare a Hugging Face GPT-2 medium (8 x 1,024 tokens, bf16) with its rebuilt stage on cuda."""
    import torch
    import transformers

    from ravnest.model.capture.capture import capture, empty_weights
    from ravnest.model.stage.stage_program import build_stage_program

    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    ids = torch.randint(0, 50257, (8, 1024))
    with empty_weights():
        captured = capture(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})
    model = transformers.GPT2LMHeadModel(config).cuda().train()
    own = model.state_dict()
    state = {
        entry.name: own[entry.name].detach().clone().requires_grad_() for entry in captured.blueprint.state
    }
    fields = {"input_ids": ids.cuda(), "labels": ids.cuda()}

    def run_eager() -> None:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**fields).loss
        loss.backward()

    def stage_step(**options: bool) -> Callable[[], None]:
        stage = build_stage_program(captured.blueprint, "cuda", autocast=torch.bfloat16, **options)

        def run_stage() -> None:
            for tensor in state.values():
                tensor.grad = None
            stage.forward(state, {}, fields, key=(1, 1)).results["loss"].backward()

        return run_stage

    steps = {
        "eager": run_eager,
        "rebuilt": stage_step(),
        "recompute": stage_step(recompute=True),
    }
    found: dict[str, object] = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found[f"{name}_ms"] = round(1e3 * min(_seconds(step, is_cuda=True) for _ in range(8)), 1)
        found[f"{name}_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return found


def _report(figures: dict[str, object]) -> str:
    return _METHOD + table(["what", "measured"], list(_rows("", figures)))


def _rows(name: str, figure: object) -> Iterator[list[object]]:
    """Yield one row per figure; a spread stays together."""
    if isinstance(figure, dict) and set(figure) == {"min", "median", "max"}:
        yield [name, f"{figure['median']} ({figure['min']}-{figure['max']})"]
    elif isinstance(figure, dict):
        for key, value in figure.items():
            yield from _rows(f"{name} {key}".strip().replace("_", " "), value)
    else:
        yield [name, figure]


_METHOD = """\
Speed: forward and backward of a GPT (width 512, 4 blocks, 32 x 16 tokens, dropout keyed per operation), the
user's own module and the rebuilt stage in turn in one process, ratio of each pair (above 1: it is
faster). Capture: a 7 B Llama built without weights, in a process of its own (construct, capture of both
programs, profile, one stage to JSON and back); peak memory is that process's.

"""
