"""From the requester's model and loss to a blueprint. Runs on the requester's PC only, on its own code.

The model, its loss and its metrics become one module and two programs (`export`), and these one blueprint.
It is compared with the module itself on a real batch (`verify`). What export would get wrong without a word
is refused while it happens (`export_hazards`).
"""

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ravnest.errors import CaptureError, UnknownBatchSize, UnsafeBlueprint
from ravnest.model.blueprint.aliasing import Storages
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import CONSTANT, Blueprint, StateEntry
from ravnest.model.blueprint.slicing import find_positions
from ravnest.model.capture.batch_loss import BatchLoss, find_summed_metrics, judge_loss
from ravnest.model.capture.capture_errors import NO_BATCH_SIZE, refuse_node
from ravnest.model.capture.export import Programs, export_programs
from ravnest.model.capture.export_hazards import plain_bags
from ravnest.model.capture.huggingface import plain_transformers, switched_off
from ravnest.model.capture.model_with_loss import BatchFields, Metric, ModelWithLoss, name_fields
from ravnest.model.capture.sample_length import SHORT, TokenRows, find_rows, is_costly
from ravnest.model.capture.verify import (
    FEW_SAMPLES,
    SAMPLES,
    Outcomes,
    compare,
    compare_empty,
    try_module,
)
from ravnest.model.state.initialiser import keep_first_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as a blueprint, with the tensors of its state by name (the model's own, not copies).

    `notes` are sentences the requester should read.
    """

    blueprint: Blueprint
    state: dict[str, torch.Tensor]
    batch_size: int
    notes: tuple[str, ...]
    batch_loss: BatchLoss = BatchLoss.MEAN  # whether a batch may be cut


@dataclass(frozen=True, slots=True)
class CaptureWishes:
    """How a model is captured, as `capture` says; `tell` hears what is done next."""

    name: str | None = None
    inputs: Sequence[str] | None = None
    is_padded: bool | None = None
    self_test: bool = True
    tell: Callable[[str], object] = lambda _: None


def capture(
    model: nn.Module,
    batch: BatchFields,
    loss: Metric | None = None,
    metrics: Mapping[str, Metric] | None = None,
    *,
    name: str | None = None,
    inputs: Sequence[str] | None = None,
    is_padded: bool | None = None,
    self_test: bool = True,
) -> Captured:
    """Turn a model into a blueprint, or raise CaptureError with the user's file, line, reason and fix.

    `loss` and `metrics` take what the model returned and the batch (a dict of fields) or its target (the last
    part of a tuple). Without a loss the model returns it, as Hugging Face models do. `inputs` names the
    fields the model takes. `is_padded=False` promises that no sample is padded: causal masks cost nothing.
    """
    return capture_as(model, batch, loss, metrics, CaptureWishes(name, inputs, is_padded, self_test))


def capture_as(
    model: nn.Module,
    batch: BatchFields,
    loss: Metric | None,
    metrics: Mapping[str, Metric] | None,
    wishes: CaptureWishes,
) -> Captured:
    """Turn a model into a blueprint."""
    fields = _beside(model, name_fields(batch, wishes.is_padded))
    is_tuple = not isinstance(batch, Mapping)
    whole = ModelWithLoss(model, fields, loss, metrics or {}, is_tuple=is_tuple, inputs=wishes.inputs)
    _check_module(whole)
    with switched_off(model) as switched:
        captured = _capture(whole, fields, wishes)
    notes = [*captured.notes, *switched]
    if wishes.is_padded is None and "attention_mask" in fields:
        notes.append(
            "batches have an attention_mask; if no sample is padded, is_padded=False saves the masks"
        )
    return replace(captured, notes=tuple(notes))


def _capture(whole: ModelWithLoss, fields: dict[str, torch.Tensor], wishes: CaptureWishes) -> Captured:
    tell = wishes.tell
    is_empty = any(parameter.is_meta for parameter in whole.model.parameters())
    is_tested = wishes.self_test and not is_empty
    if is_tested:
        tell("the model runs alone")
        tried = _try(whole, fields)
    else:
        is_short = wishes.self_test and _count(whole) <= _MOST_COMPARED and _is_costly(whole, fields)
        tried = _Tried(find_rows(fields) if is_short else None, {})
    tell("it is exported")
    with plain_transformers(fields.keys()) as told, plain_bags():
        programs = export_programs(whole, fields, is_empty, tried.rows)
    blueprint, state = _join(wishes.name or type(whole.model).__name__, whole, programs)
    batch_loss = BatchLoss.MEAN
    if is_tested:
        tell("it is compared with the model")
        with _naming_lines(programs):
            batch_loss = _test(whole, programs, blueprint, state, fields, tried)
    notes = [*([batch_loss.note] if batch_loss.note else []), *told]
    for metric in find_summed_metrics(whole, fields) if is_tested else ():
        notes.append(
            f"metric {metric!r} is a sum over the batch, but what is told is the mean over microbatches; "
            "give a mean"
        )
    if is_empty:
        tell("it is compared with the model")
        facts = (whole, programs, blueprint, state, fields)
        with _naming_lines(programs):
            notes.append(_test_empty(*facts) if wishes.self_test else _UNTESTED)
    return Captured(blueprint, state, next(iter(fields.values())).shape[0], tuple(notes), batch_loss)


@contextlib.contextmanager
def _naming_lines(programs: Programs) -> Iterator[None]:
    """Refuse what no stage can run with the line that it came from."""
    try:
        yield
    except UnknownBatchSize as problem:
        for traced in (programs.train, programs.evaluate):
            if any((op.name, op.number) == problem.place for op in traced.program.ops):
                raise refuse_node(traced.nodes[problem.place[1]], *NO_BATCH_SIZE) from None
        raise


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules whose parameters have shapes but no values, to train a model larger than this PC.

    Buffers keep their values: rotary tables and position ids are part of the program. A Job takes the first
    weights from its `weights`, or draws them layer by layer.
    """
    register = nn.Module.register_parameter
    made = WeakTensorKeyDictionary()  # one that two modules share stays one

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            if parameter not in made:
                empty = parameter.detach().to("meta")
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                keep_first_values(module, parameter, made[parameter])
            module._parameters[name] = made[parameter]

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _beside(model: nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the fields where the model's weights are, if they have values."""
    places = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    device = next(places, torch.device("cpu"))
    return {name: field.to(device) for name, field in fields.items()}


def _check_module(whole: ModelWithLoss) -> None:
    """Refuse what a module can have that no program has."""
    script = torch.jit.ScriptModule  # noqa: TID251 - named here, never run
    if any(isinstance(module, script) for module in whole.modules()):
        raise CaptureError("the model is TorchScript (torch.jit); give the nn.Module itself")
    if any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in whole.modules()
    ):
        raise CaptureError(
            "the model is compiled by torch.compile; give the module as it was before: peers compile their "
            "stages themselves where that pays"
        )
    _check_precision(whole)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"{whole.state_name(name)!r} has no shape yet; run the model once on a batch before making "
                "the Job"
            )
    for name, buffer in whole.named_buffers():
        if buffer.is_meta:
            raise CaptureError(
                f"buffer {whole.state_name(name)!r} of the model has no values; build the model under "
                'ravnest.empty_weights() instead of torch.device("meta"), which keeps buffers'
            )
    for name, parameter in whole.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {whole.state_name(name)!r} has a hook, which is Python code that providers do "
                "not run; remove it (to limit gradients, give the Job clip=)"
            )


def _check_precision(whole: ModelWithLoss) -> None:
    """Refuse to train float16: a usual epsilon is zero in it, so the first update ends in NaN."""
    narrow = (name for name, x in whole.named_parameters() if x.requires_grad and x.dtype is torch.float16)
    if (name := next(narrow, None)) is not None:
        raise CaptureError(
            f"parameter {whole.state_name(name)!r} is float16, in which small changes are lost and updates "
            'end in NaN; train model.float(), with precision="bf16" to compute in half of it, or freeze it'
        )


@dataclass(frozen=True, slots=True)
class _Tried:
    """What the module computed alone: on these rows, shortened, or on whole samples."""

    rows: TokenRows | None
    outcomes: Outcomes


def _try(whole: ModelWithLoss, fields: Mapping[str, torch.Tensor]) -> _Tried:
    """Run the module alone: on short rows where whole ones are costly, if it takes them."""
    rows = find_rows(fields) if _is_costly(whole, fields) else None
    if rows is not None:
        try:
            return _Tried(rows, try_module(whole, rows.take(fields, SHORT), FEW_SAMPLES))
        except CaptureError as error:  # it may be the row's fault
            logger.info("the self-test takes whole samples: %s", error)
    return _Tried(None, try_module(whole, fields, _num_samples(whole, fields)))


def _is_costly(whole: ModelWithLoss, fields: Mapping[str, torch.Tensor]) -> bool:
    return is_costly(_count(whole), fields)


def _count(whole: ModelWithLoss) -> int:
    return sum(parameter.numel() for parameter in whole.parameters())


def _num_samples(whole: ModelWithLoss, fields: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    return FEW_SAMPLES if _is_costly(whole, fields) else SAMPLES


def _test(
    whole: ModelWithLoss,
    programs: Programs,
    blueprint: Blueprint,
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    tried: _Tried,
) -> BatchLoss:
    """Compare the blueprint with the module; return what the loss of a batch is."""
    short = programs.short
    if short is not None:
        few = short.rows.take(fields, short.length)
        same = replace(blueprint, train=short.train.program, evaluate=short.evaluate.program)
        known = tried.outcomes if short.length == SHORT else None
        try:
            compare(whole, same, state, few, num_samples=FEW_SAMPLES, known=known)
            return judge_loss(whole, few)
        except CaptureError as error:  # the verdict is that of whole samples
            logger.info("the self-test takes whole samples: %s", error)
    known = tried.outcomes if tried.rows is None else None
    compare(whole, blueprint, state, fields, num_samples=_num_samples(whole, fields), known=known)
    return judge_loss(whole, fields)


_MOST_COMPARED = 2e9  # parameters without values: more would take a slow PC minutes
_UNTESTED = (
    "the weights have no values here, so the cut model was not compared with the module, "
    "and the loss is taken for a mean over the samples"
)


def _test_empty(
    whole: ModelWithLoss,
    programs: Programs,
    blueprint: Blueprint,
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
) -> str:
    """Compare a blueprint without weights with its module; return what to tell of it."""
    short = programs.short
    if _count(whole) > _MOST_COMPARED or (short is None and _is_costly(whole, fields)):
        return _UNTESTED
    if short is not None:
        fields = short.rows.take(fields, short.length)
        blueprint = replace(blueprint, train=short.train.program, evaluate=short.evaluate.program)
    if problem := compare_empty(whole, blueprint, state, fields):
        logger.info("the model does not run with stand-ins for its weights: %s", problem)
        return _UNTESTED
    return (
        "the weights have no values here, so the cut model was compared with the module once, with others in "
        "their place, and the loss is taken for a mean over the samples"
    )


def _join(name: str, whole: ModelWithLoss, programs: Programs) -> tuple[Blueprint, dict[str, torch.Tensor]]:
    """Make one blueprint of the two programs."""
    train, evaluate = programs.train, programs.evaluate
    if not train.program.values[dict(train.program.results)["loss"]].has_gradient:
        raise CaptureError(
            "the loss does not depend on any parameter that is trained; check that it is computed from what "
            "the model returns, and that not every parameter is frozen or detached"
        )
    found = {**evaluate.state, **train.state}
    written: set[str] = set()
    for traced in (train, evaluate):
        storages = Storages(traced.program)
        written |= {name for value, name in traced.program.state if storages.is_written(value)}
    own = whole.tensors()
    _check_memory(own, {name: found[name][1] for name in written if found[name][0] == CONSTANT}, written)
    entries = [
        StateEntry(
            name=name,
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            positions=(),
            is_trainable=tensor.requires_grad,
            is_written=name in written,
        )
        for name, (kind, tensor) in found.items()
    ]
    positions = find_positions(train.program, evaluate.program, entries)
    kept = {entry.name for entry in positions.state}
    blueprint = Blueprint(
        name=name,
        num_positions=len(positions.cuts) - 1,
        start=0,
        stop=len(positions.cuts) - 1,
        cuts=positions.cuts,
        state=positions.state,
        aliases=tuple((alias, name) for alias, name in whole.aliases.items() if name in kept),
        train=train.program,
        evaluate=evaluate.program,
    )
    _check_names(whole, blueprint)
    try:
        read_blueprint(write_blueprint(blueprint))
    except UnsafeBlueprint as problem:
        raise CaptureError(f"providers would refuse this model: {problem}") from None
    return blueprint, {
        name: tensor if kind == CONSTANT else own.get(name, tensor)
        for name, (kind, tensor) in found.items()
        if name in kept
    }


def _check_memory(
    own: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor], written: set[str]
) -> None:
    """Refuse a tensor that changes but is no state, and two that change each other: apart, they would not."""
    for name in constants:
        if name not in own:
            short = name.rpartition(".")[2]
            raise CaptureError(
                f"the tensor {short!r} is changed in forward, but is no buffer; make it one: "
                f"self.register_buffer({short!r}, ...)"
            )
    spans: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in own.items():
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.itemsize
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * int(stride) for size, stride in pairs)
            spans[tensor.untyped_storage()._cdata].append((start, start + length * tensor.itemsize, name))
    for sharing in spans.values():
        for (_, stop, one), (start, _, other) in pairwise(sorted(sharing)):
            is_changing = any(own[name].requires_grad or name in written for name in (one, other))
            if start < stop and is_changing:
                raise CaptureError(
                    f"{one!r} and {other!r} are two tensors in one memory, which would be trained apart; "
                    "tie them (b.weight = a.weight) or clone one"
                )


_WORD = re.compile(r"(?!__)[A-Za-z0-9_]+")


def _check_names(whole: ModelWithLoss, blueprint: Blueprint) -> None:
    """Say what to rename: names travel, so they are plain."""
    for program in (blueprint.train, blueprint.evaluate):
        for kind, names in (("field", program.fields), ("metric", [pair[::-1] for pair in program.results])):
            for _, name in names:
                if not _WORD.fullmatch(name):
                    raise CaptureError(f"rename the {kind} {name!r}: letters, digits and _")
    modules = dict(whole.named_modules())
    for target, _ in (*whole.named_parameters(), *whole.named_buffers()):
        *path, _ = parts = target.split(".")
        for depth, part in enumerate(parts):
            if not _WORD.fullmatch(part):
                kind = type(modules[".".join(path[:depth])]).__name__
                raise CaptureError(f"rename the key {part!r} of the {kind}: letters, digits and _")
