"""Whether a module does the same in evaluation as in training, but for dropout: then one export serves both.

It runs once in either mode on tensors without memory, and every call of a torch function is recorded: the
function, its numbers, and which results go where. If the records are the same, the evaluation program is the
training program without dropout. Anything else, or anything unknown, means that evaluation is exported too.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ravnest.model.blueprint.program import Argument, Op
from ravnest.model.capture.model_with_loss import ModelWithLoss
from ravnest.model.capture.trace import Traced
from ravnest.model.capture.verify import as_it_was

_PLAIN = (bool, int, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, EllipsisType)
_SETTINGS = {  # what of an operator dropout changes
    "aten.dropout.default": (("p", 0.0), ("train", False)),
    "aten.scaled_dot_product_attention.default": (("dropout_p", 0.0),),
}


@dataclass(frozen=True, slots=True)
class Dropout:
    """One call that may drop numbers: its operator, and the settings in training and in evaluation."""

    operator: str
    train: tuple[float | bool, ...]
    evaluate: tuple[float | bool, ...]


def find_dropout(whole: ModelWithLoss, fields: Mapping[str, Tensor]) -> tuple[Dropout, ...] | None:
    """Return the dropout of the model in order, or None if training and evaluation differ by more."""
    held: dict[int, Tensor] = {}
    records = []
    try:
        with torch.random.fork_rng(), as_it_was(whole), fake_parameters(whole) as mode, mode:
            given = [mode.from_tensor(each[:2]) for each in fields.values()]
            for training in (True, False):
                records.append(_record(whole.train(training), given, held))
    except Exception:  # whatever the user's code or torch raises; export says what matters of it
        return None
    train, evaluate = records
    if train.calls != evaluate.calls or len(train.settings) != len(evaluate.settings):
        return None
    pairs = zip(train.settings, evaluate.settings, strict=True)
    return tuple(Dropout(name, before, after) for (name, before), (_, after) in pairs)


def without_dropout(train: Traced, dropout: Sequence[Dropout]) -> Traced | None:
    """Return the program of evaluation, or None if the one of training has other calls than were recorded."""
    waiting = list(dropout)
    ops: list[Op] = []
    for op in train.program.ops:
        settings = _SETTINGS.get(op.name)
        if settings is None:
            ops.append(op)
            continue
        arguments = dict(op.arguments)
        found = tuple(arguments.get(name, default) for name, default in settings)
        if not waiting or (waiting[0].operator, waiting[0].train) != (op.name, found):
            return None
        names = [name for name, _ in settings]
        after: dict[str, Argument] = dict(zip(names, waiting.pop(0).evaluate, strict=True))
        ops.append(replace(op, arguments=tuple((arguments | after).items())))
    return None if waiting else replace(train, program=replace(train.program, ops=tuple(ops)))


@contextlib.contextmanager
def fake_parameters(whole: ModelWithLoss) -> Iterator[FakeTensorMode]:
    """Let parameters without memory stand in the model, on the CPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held = [(module, dict(module._parameters)) for module in whole.modules()]
    fakes: dict[int, nn.Parameter] = {}
    for module, parameters in held:
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                fake = FakeTensor(mode, parameter.detach().to("meta"), torch.device("cpu"))
                fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            module._parameters[name] = fakes[id(parameter)]
    try:
        yield mode
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)


class _UnknownArgumentError(Exception):
    """A call has an argument that cannot be compared."""


@dataclass
class _Record:
    calls: list[object] = field(default_factory=list)
    settings: list[tuple[str, tuple[float | bool, ...]]] = field(default_factory=list)


def _record(whole: ModelWithLoss, fields: Sequence[Tensor], held: dict[int, Tensor]) -> _Record:
    recorder = _Recorder(held)
    whole.shows_logits = True  # they are of the program of evaluation
    try:
        with recorder:
            results = whole(*fields)
    finally:
        whole.shows_logits = False
    recorder.record.calls.append([(name, recorder.show(value)) for name, value in results.items()])
    return recorder.record


class _Recorder(TorchFunctionMode):
    """Records calls. Tensors are numbered as they are made; `held` are others, the same for both runs."""

    def __init__(self, held: dict[int, Tensor]) -> None:
        super().__init__()
        self.record = _Record()
        self._held = held
        self._made: dict[int, tuple[int, Tensor]] = {}  # the tensor too: an id is free again when it is gone

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a call and run it."""
        keywords = dict(kwargs or {})
        shown_args, shown = self._without_settings(func, args, keywords)
        precision = torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))
        self.record.calls.append(
            (func, self.show(shown_args), self.show(shown), torch.is_grad_enabled(), precision)
        )
        result = func(*args, **keywords)
        if isinstance(result, Tensor) and id(result) in self._made and not _is_writing(func, keywords):
            result = result.view_as(result)  # `contiguous` may return what it is given: a value of its own
        self._number(result)
        return result

    def _without_settings(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments without what dropout changes, which is recorded apart."""
        if func is F.dropout:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | keywords
            settings = float(given.pop("p", 0.5)), bool(given.pop("training", True))
            self.record.settings.append(("aten.dropout.default", settings))
            return (), given
        if func is F.scaled_dot_product_attention:
            places = ("query", "key", "value", "attn_mask", "dropout_p")
            given = dict(zip(places, args, strict=False)) | keywords
            dropped = float(given.pop("dropout_p", 0.0))
            self.record.settings.append(("aten.scaled_dot_product_attention.default", (dropped,)))
            return args[len(places) :], given
        return args, keywords

    def show(self, value: Any) -> object:
        """Return a value as something to compare."""
        match value:
            case None:
                return None
            case Tensor():
                return self._find(value)
            case float():
                return ("float", repr(value))
            case list() | tuple():
                return [self.show(each) for each in value]
            case dict():
                return {name: self.show(each) for name, each in value.items()}
            case slice():
                return ("slice", self.show(value.start), self.show(value.stop), self.show(value.step))
            case type():
                return value
        if isinstance(value, _PLAIN):
            return (type(value), value)
        raise _UnknownArgumentError(str(type(value)))

    def _find(self, tensor: Tensor) -> tuple[str, int]:
        if id(tensor) in self._made:
            return ("made", self._made[id(tensor)][0])
        self._held[id(tensor)] = tensor
        return ("held", id(tensor))

    def _number(self, result: Any) -> None:
        if isinstance(result, Tensor):
            if id(result) not in self._made and id(result) not in self._held:
                self._made[id(result)] = len(self._made), result
        elif isinstance(result, list | tuple):
            for each in result:
                self._number(each)
        elif isinstance(result, dict):
            self._number(list(result.values()))


def _is_writing(func: Any, keywords: Mapping[str, Any]) -> bool:
    """Return whether a call may change what it is given, and return it."""
    name = getattr(func, "__name__", "")
    is_inplace = name.endswith("_") and not name.endswith("__")
    return is_inplace or name.startswith("__i") or bool(keywords.get("inplace")) or "out" in keywords
