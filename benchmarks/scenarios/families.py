"""Which architectures of transformers train in stages: each of four auto mappings, with a tiny configuration.

Each runs alone first; what does not is not counted. Then it is captured, cut into two stages, dry-run as
providers do it, and compared with the module: the loss and every gradient. Each architecture has a process of
its own with a time limit. Results are lines of a file, so a run goes on where it was stopped.
"""

import argparse
import json
import multiprocessing
import re
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import say, table
from benchmarks.tiny_transformers import MAPPINGS, Architecture, list_architectures, make_batch, make_config

Figures = dict[str, Any]
Found = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "reports" / "families.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: generated -->", "<!-- families: end -->"
TARGET = 0.95
SECONDS = 300.0  # for one architecture, on a busy machine
QUICK = ("mixtral/MixtralForCausalLM", "fnet/FNetForMaskedLM", "vit/ViTForImageClassification")
TOLERANCE = 1e-3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="kinds of models or architectures, with commas between")
    parser.add_argument("--again", action="store_true", help="try what failed once more")
    parser.add_argument("--table", action="store_true", help="try nothing, only write the table again")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one architecture")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")


def run(quick: bool, options: argparse.Namespace) -> tuple[Figures, str, list[str]]:
    architectures = list_architectures()
    wanted = set(filter(None, options.only.split(","))) or (set(QUICK) if quick else set())
    chosen = [each for each in architectures if not wanted or wanted & {each.model_type, each.key}]
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    known = {} if quick else read_results()
    chosen = [] if options.table else chosen
    for number, architecture in enumerate(chosen, 1):
        earlier = known.get(architecture.key)
        if earlier and not wanted and (earlier["is_captured"] or not options.again):
            continue
        found = try_apart(architecture, options.seconds)
        known[architecture.key] = found
        say(f"{number}/{len(chosen)} {architecture.key}: {found['reason'] or 'works'} ({found['seconds']} s)")
        if not quick:
            with RESULTS.open("a") as results:
                results.write(json.dumps(found) + "\n")
    figures = count(architectures, known)
    if quick:
        failed = [found for found in known.values() if found["reason"]]
        assert not failed, failed
        return figures, "", []
    PAGE.write_text(insert_table(PAGE.read_text(), list_families(architectures, known)))
    missed = [
        f"{name}: {each['share']:.1%} of those that run alone"
        for name, each in figures.items()
        if each["share"] < TARGET
    ]
    if num_left := sum(each.key not in known for each in architectures):
        missed.append(f"{num_left} architectures are not tried yet; run it again, it goes on")
    return figures, list_families(architectures, known), missed


def read_results() -> dict[str, Found]:
    """Return the last result of each architecture."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def try_apart(architecture: Architecture, seconds: float = SECONDS) -> Found:
    """Try an architecture in a process that is forked from this one, which has imported all it needs."""
    import torch
    import transformers

    import ravnest.model.capture.capture
    import ravnest.model.stage.dry_run  # noqa: F401 - the child has all of it then

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(architecture, there))
    child.start()
    there.close()
    found: Found = {"runs_alone": True, "is_captured": False, "reason": f"takes more than {seconds:.0f} s"}
    try:
        if here.poll(seconds):
            found = here.recv()
    except EOFError:
        found["reason"] = "ends its process"
    child.kill()
    child.join()
    taken = round(time.monotonic() - started, 1)
    return {"key": architecture.key, "mappings": architecture.mappings, **found, "seconds": taken}


def _send_result(architecture: Architecture, connection: Any) -> None:
    warnings.simplefilter("ignore")
    connection.send(try_architecture(architecture))
    connection.close()


def try_architecture(architecture: Architecture) -> Found:
    """Say whether an architecture runs alone, whether it is captured, and why not."""
    import torch
    import transformers

    from ravnest.errors import CaptureError, UnsafeBlueprint

    found: Found = {"runs_alone": False, "is_captured": False, "reason": ""}
    try:
        torch.manual_seed(0)
        config = make_config(architecture)
        model = getattr(transformers, architecture.class_name)(config)
        batch = make_batch(architecture, config)
        model.train()(**batch).loss.backward()
        model.zero_grad()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        file = re.sub(r".*/site-packages/", "", place.filename).replace(f"{PAGE.parents[1]}/", "")
        where = f"{file}:{place.lineno}"
        return found | {"reason": f"{_first_line(error)} ({where})"}
    found["runs_alone"] = True
    try:
        _train_in_two(model, batch)
    except (CaptureError, UnsafeBlueprint) as error:
        return found | {"reason": _first_line(error)}
    except Exception as error:
        return found | {"reason": f"a bug: {_first_line(error)}"}
    return found | {"is_captured": True}


def _first_line(error: Exception) -> str:
    text = re.sub(r"\S*/site-packages/", "", " ".join(str(error).split())).replace(f"{PAGE.parents[1]}/", "")
    return f"{type(error).__name__}: {text}"[:400]


def _train_in_two(model: Any, batch: dict[str, Any]) -> None:
    """Capture a model, which compares three stages already; then two of them as providers have them."""
    import torch

    from ravnest.errors import CaptureError
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.capture.capture import capture
    from ravnest.model.capture.huggingface import switched_off
    from ravnest.model.stage.dry_run import dry_run
    from ravnest.model.stage.stage_program import build_stage_program

    captured = capture(model, batch)
    blueprint = captured.blueprint
    if blueprint.num_positions < 2:
        raise CaptureError("the model cannot be cut anywhere")
    middle = blueprint.num_positions // 2
    stages = [slice_blueprint(blueprint, 0, middle), slice_blueprint(blueprint, middle, blueprint.stop)]
    for stage in stages:
        dry_run(stage, len(batch["labels"]), max_bytes=2e9, max_flops=1e12)
    state = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in captured.state.items()
    }
    torch.manual_seed(0)
    first, last = (build_stage_program(stage) for stage in stages)
    sent = first.forward(state, {}, batch).outputs
    kinds = stages[1].train.values
    given = {
        value: sent[value].detach().requires_grad_(kinds[value].has_gradient)
        for value in stages[1].train.inputs
    }
    loss = last.forward(state, given, batch).results["loss"]
    torch.autograd.backward(loss)
    back = [
        (sent[value], each.grad)
        for value, each in given.items()
        if each.grad is not None and sent[value].requires_grad
    ]
    if back:
        torch.autograd.backward([each for each, _ in back], [gradient for _, gradient in back])
    torch.manual_seed(0)
    with switched_off(model):  # LayerDrop, if it has that
        expected = model.train()(**batch).loss
    expected.backward()
    _check_close("the loss", expected.detach(), loss.detach(), float(expected.detach().abs()))
    trained = model.named_parameters()
    wanted = {name: each.grad for name, each in trained if each.grad is not None and each.numel()}
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, gradient in wanted.items():
        if name not in state:
            raise CaptureError(f"{name} has a gradient in the module and is not in the stages")
        other = state[name].grad
        _check_close(
            name,
            gradient,
            torch.zeros_like(gradient) if other is None else other,
            max(float(gradient.abs().max()), 1e-2 * largest),
        )


def _check_close(what: str, one: Any, other: Any, size: float) -> None:
    from ravnest.errors import CaptureError

    gap = float((one - other).abs().max())
    if not gap <= TOLERANCE * max(size, 1e-12):
        raise CaptureError(f"in two stages {what} differs by {gap / max(size, 1e-12):.1g} of its size")


def count(architectures: Sequence[Architecture], known: dict[str, Found]) -> Figures:
    """Return by mapping how many there are, run alone, and are captured."""
    figures: Figures = {}
    for mapping in MAPPINGS:
        found = [known[each.key] for each in architectures if mapping in each.mappings and each.key in known]
        alone = [each for each in found if each["runs_alone"]]
        captured = sum(each["is_captured"] for each in alone)
        figures[mapping] = {
            "architectures": sum(mapping in each.mappings for each in architectures),
            "tried": len(found),
            "run_alone": len(alone),
            "captured": captured,
            "share": captured / max(len(alone), 1),
        }
    return figures


def insert_table(page: str, text: str) -> str:
    """Return the page with the text between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"the page has no {BEGIN} ... {END}"
    return f"{before}{BEGIN}\n\n{text}\n\n{mark}{after}"


def list_families(architectures: Sequence[Architecture], known: dict[str, Found]) -> str:
    """Return the table for people: how many work, which do not, and why."""
    import transformers

    figures = count(architectures, known)
    head = ["mapping", "architectures", "tried", "run alone, tiny", "train in two stages", "share"]
    rows = [
        [
            name,
            each["architectures"],
            each["tried"],
            each["run_alone"],
            each["captured"],
            f"{each['share']:.1%}",
        ]
        for name, each in figures.items()
    ]
    results = [known[each.key] for each in architectures if each.key in known]
    works = sorted({each["key"].partition("/")[2] for each in results if each["is_captured"]})
    refused = [
        [each["key"].partition("/")[2], _cell(each["reason"])]
        for each in results
        if each["runs_alone"] and not each["is_captured"]
    ]
    not_alone = [
        [each["key"].partition("/")[2], _cell(each["reason"])] for each in results if not each["runs_alone"]
    ]
    parts = [
        f"Found by `python -m benchmarks.run families` with transformers {transformers.__version__}.",
        table(head, rows),
        f"**These {len(works)} train in two stages**: {', '.join(f'`{name}`' for name in works)}.",
    ]
    if refused:
        parts += ["**These run alone and are refused**:", table(["architecture", "reason"], refused)]
    if not_alone:
        parts += [
            "**These do not run alone** with the tiny configuration made here, and are not counted:",
            table(["architecture", "what it says"], not_alone),
        ]
    return "\n\n".join(parts)


def _cell(reason: str) -> str:
    return reason.replace("|", "/").replace("\n", " ")[:200]
