"""The user's model, loss and metrics as one module: batch fields in, loss and metrics out.

How a batch reaches the model: a field goes to the argument of `forward` with its name; if no name fits, the
first fields go by position. Nothing of this leaves the requester's PC.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError
from ravnest.model.blueprint.program import LOGITS_DIMENSIONS
from ravnest.model.state.state_dict import LOSS_PREFIX

BatchFields = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor]

LOGITS = "logits of the rows"  # no metric has this name
_MODEL, _LOSS = "model.", "loss."


def name_fields(batch: BatchFields, is_padded: bool | None) -> dict[str, torch.Tensor]:
    """Return the fields of a batch by name: those of a tuple are x (or x0, x1, ...) and y."""
    if isinstance(batch, Mapping):
        fields = dict(batch)
        if is_padded is False:
            fields.pop("attention_mask", None)
    elif isinstance(batch, Sequence) and len(batch) > 1:
        *parts, target = batch
        names = ["x"] if len(parts) == 1 else [f"x{index}" for index in range(len(parts))]
        fields = {**dict(zip(names, parts, strict=True)), "y": target}
    else:
        kind = type(batch).__name__
        raise CaptureError(f"a batch is a {kind}; give a dict of tensors or a tuple (inputs..., target)")
    _check_fields(fields)
    return fields


def _check_fields(fields: Mapping[str, Any]) -> None:
    if not fields:
        raise CaptureError("a batch has no fields; give a dict with at least one tensor")
    sizes = {}
    for name, field in fields.items():
        if not isinstance(field, torch.Tensor):
            raise CaptureError(
                f"field {name!r} of a batch is a {type(field).__name__}, no tensor; leave it out "
                f"(dataset.remove_columns([{name!r}])) or turn it into numbers (collate_fn=)"
            )
        if field.ndim == 0 or field.shape[0] == 0:
            raise CaptureError(
                f"field {name!r} of a batch has the shape {tuple(field.shape)}; the first size is the batch"
            )
        sizes[name] = field.shape[0]
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise CaptureError(f"the fields of a batch differ in their first size, the batch: {shown}")


class ModelWithLoss(nn.Module):
    """Model, loss and metrics together; `results` names what it returns."""

    def __init__(
        self,
        model: nn.Module,
        fields: Mapping[str, torch.Tensor],
        loss: Metric | None,
        metrics: Mapping[str, Metric],
        *,
        is_tuple: bool,
        inputs: Sequence[str] | None,
    ) -> None:
        super().__init__()
        _check_judges(loss, metrics)
        self.model = model
        self.loss = loss
        self.metrics = dict(metrics)
        self.fields = tuple(fields)
        self.is_tuple = is_tuple
        self.results = ("loss", *metrics)
        self.shows_logits = False  # while it is exported for evaluation
        self.by_name, self.by_position = _choose_inputs(model, fields, inputs, is_tuple)
        self._advice = _find_advice(model, fields)
        self.extra = {"use_cache": False} if "use_cache" in _parameters(model) else {}
        self.aliases, self._canonical = _find_ties(self)

    def forward(self, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the metrics of a batch."""
        batch = dict(zip(self.fields, values, strict=True))
        positional = (batch[name] for name in self.by_position)
        out = self.model(*positional, **{name: batch[name] for name in self.by_name}, **self.extra)
        about = batch[self.fields[-1]] if self.is_tuple else batch
        loss = _returned_loss(out, self._advice) if self.loss is None else self.loss(out, about)
        size = values[0].shape[0]
        found = {"loss": _check_scalar("loss", loss, size)} | {
            name: _check_scalar(name, metric(out, about), size) for name, metric in self.metrics.items()
        }
        logits = find_logits(out) if self.shows_logits else None
        return found if logits is None else {**found, LOGITS: logits}

    def state_name(self, target: str) -> str:
        """Return the name of the state_dict for a name in this module; tied weights have one."""
        return self._canonical.get(target, _own_name(target))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by the names of the state_dict."""
        found = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {self.state_name(name): tensor for name, tensor in found}


def find_logits(out: Any) -> torch.Tensor | None:
    """Return what a model says of each place of its rows, (rows, places, words), if it is there."""
    if isinstance(out, Mapping):
        candidates: Sequence[Any] = (out.get("logits"),)
    elif isinstance(out, tuple | list):
        candidates = tuple(out)
    else:
        candidates = (out, getattr(out, "logits", None))
    for each in candidates:
        is_tensor = isinstance(each, torch.Tensor) and each.is_floating_point()
        if is_tensor and each.ndim == LOGITS_DIMENSIONS:
            found: torch.Tensor = each
            return found
    return None


def _choose_inputs(
    model: nn.Module, fields: Mapping[str, torch.Tensor], inputs: Sequence[str] | None, is_tuple: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields the model takes by name and those it takes by position."""
    accepted = _parameters(model)
    kinds = {parameter.kind for parameter in accepted.values()}
    required = [
        name
        for name, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if inputs is not None:
        missing = [name for name in inputs if name not in fields]
        if missing:
            raise CaptureError(f"inputs names {missing[0]!r}, but a batch has only {', '.join(fields)}")
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds and set(required) <= set(inputs)
        if takes_any or all(name in accepted for name in inputs):
            return tuple(inputs), ()
        return (), tuple(inputs)
    if kinds == {inspect.Parameter.VAR_KEYWORD}:
        raise CaptureError(f"forward takes only **kwargs; name the fields with inputs=: {', '.join(fields)}")
    if is_tuple:
        return (), tuple(fields)[:-1]
    named = tuple(name for name in fields if name in accepted)
    if named:
        return named, ()
    return (), tuple(fields)[: max(1, len(required))]


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _find_advice(model: nn.Module, fields: Mapping[str, torch.Tensor]) -> str:
    """Return what a model needs to return its loss."""
    for name in ("label", "label_ids", "target", "targets", "y"):
        if name in fields and "labels" not in fields and "labels" in _parameters(model):
            fix = f"rename the column: dataset.rename_column({name!r}, 'labels')"
            return f"the data has {name!r}, and the model wants 'labels'; {fix}"
    return "give loss=, or the labels it needs"


def _returned_loss(out: Any, advice: str) -> Any:
    if isinstance(out, torch.Tensor) and out.ndim == 0 and out.is_floating_point():
        return out  # the model returns nothing but its loss
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if found is None:
        kind = "a tensor" if isinstance(out, torch.Tensor) else type(out).__name__
        raise CaptureError(f"the model returned {kind} without a loss; {advice}")
    return found


def _check_judges(loss: Metric | None, metrics: Mapping[str, Metric]) -> None:
    if "loss" in metrics:
        raise CaptureError("a metric is called 'loss', which is the loss itself; choose another name")
    for name, judge in {"loss": loss, **metrics}.items():
        if isinstance(judge, type):
            kind = judge.__name__
            raise CaptureError(f"{_called(name)} is the class {kind}; make one: {kind}()")


def _called(name: str) -> str:
    return "the loss" if name == "loss" else f"the metric {name!r}"


def _check_scalar(name: str, value: Any, batch_size: int) -> torch.Tensor:
    what = _called(name)
    if isinstance(value, tuple | list | Mapping):
        kind = type(value).__name__
        raise CaptureError(
            f"{what} returned a {kind}; return {'the loss' if name == 'loss' else 'a number'} alone, "
            "the rest as metrics"
        )
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise CaptureError(f"{what} is a Python number; return the tensor, without .item()")
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"{what} is a {type(value).__name__}; return a tensor of one number")
    if value.ndim != 0:
        sizes = ["batch" if size == batch_size else str(size) for size in value.shape[:1]]
        shown = " x ".join([*sizes, *(str(size) for size in value.shape[1:])])
        raise CaptureError(
            f"{what} is not one number but a tensor of {shown}; reduce it with .mean() or .sum()"
        )
    if name == "loss" and not value.is_floating_point():
        raise CaptureError(f"the loss is {value.dtype}, not a floating-point number")
    return value


def _own_name(target: str) -> str:
    """Return the name outside this module: the model's own, or the loss's behind its prefix."""
    if target.startswith(_LOSS):
        return LOSS_PREFIX + target.removeprefix(_LOSS)
    return target.removeprefix(_MODEL)


def _find_ties(whole: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return the other names of tied tensors, and the one name each name in the module stands for."""
    first: dict[int, str] = {}
    canonical, aliases = {}, {}
    for tensors in (whole.named_parameters, whole.named_buffers):
        for target, tensor in tensors(remove_duplicate=False):
            name = _own_name(target)
            if target.startswith(_MODEL + LOSS_PREFIX):
                raise CaptureError(f"the model has a {name!r}, which the loss could have; rename that module")
            canonical[target] = first.setdefault(id(tensor), name)
            if canonical[target] != name:
                aliases[name] = canonical[target]
    return aliases, canonical
