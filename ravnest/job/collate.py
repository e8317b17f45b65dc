"""From samples to a batch: field by field, each of one type and shape, or a sentence that names the sample.

Numbers and lists become tensors, text is refused with the way to leave it out. Driven by `data`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ravnest.errors import ConfigError
from ravnest.units import show_value

Batch = dict[str, Tensor] | tuple[Tensor, ...]

_GIVE = "give a dict of fields or a tuple (inputs..., target)"


@dataclass(frozen=True, slots=True)
class FieldType:
    """What one sample has under one name."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def put_together(numbers: Sequence[int], samples: Sequence[Any], what: str) -> Batch:
    """Put samples together field by field; numbers and lists become tensors."""
    first = samples[0]
    kind: Any = Mapping if isinstance(first, Mapping) else tuple | list
    if not isinstance(first, kind) or (kind is not Mapping and len(first) < 2):
        raise ConfigError(f"a sample of the {what} is {show_thing(first)}; {_GIVE}")
    for number, sample in zip(numbers, samples, strict=True):
        if not isinstance(sample, kind) or _parts(sample) != _parts(first):
            other = f"other parts than sample {numbers[0]}"
            raise ConfigError(f"sample {number} of the {what} has {other}; give every sample the same")
    if isinstance(first, Mapping):
        return {
            name: _stack(numbers, [sample[name] for sample in samples], f"{name!r} of the {what}", repr(name))
            for name in first
        }
    columns = enumerate(zip(*samples, strict=True))
    return tuple(_stack(numbers, column, f"part {k} of the {what}", f"part {k}") for k, column in columns)


def check_ready(batch: Any, what: str) -> Batch:
    """Return a batch that a DataLoader made, if it is one."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch)
    raise ConfigError(f"a batch of the DataLoader of the {what} is {show_thing(batch)}; {_GIVE}")


def show_thing(thing: object) -> str:
    """Return a thing as an error names it: a class, a small value, or something of a type."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    is_small = thing is None or isinstance(thing, bool | int | float | str | bytes)
    return show_value(thing) if is_small else f"of type {type(thing).__name__}"


def _parts(sample: Any) -> object:
    return sample.keys() if isinstance(sample, Mapping) else len(sample)


def _stack(numbers: Sequence[int], values: Sequence[Any], what: str, column: str) -> Tensor:
    tensors = [_to_tensor(value, what, column) for value in values]
    kind = FieldType(tensors[0].dtype, tuple(tensors[0].shape))
    for number, tensor in zip(numbers, tensors, strict=True):
        if tuple(tensor.shape) != kind.shape:
            shown = f"{kind.shape} in sample {numbers[0]} and {tuple(tensor.shape)} in sample {number}"
            raise ConfigError(f"{what} differs in shape ({shown}); pad or cut to one length")
        if tensor.dtype != kind.dtype:
            other = FieldType(tensor.dtype, kind.shape)
            shown = f"{kind} in sample {numbers[0]} and {other} in sample {number}"
            raise ConfigError(f"{what} differs in type ({shown}); give every sample the same")
    return torch.stack(tensors)


def _to_tensor(value: Any, what: str, column: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # A list that is no array of numbers becomes one of texts or objects, or none at all.
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.tensor(value)  # as_tensor warns of arrays that must not be written
    except (ValueError, TypeError):
        pass
    raise ConfigError(
        f"{what} is {show_value(value)}, not numbers; leave it out of the samples "
        f"(of a Hugging Face dataset: .remove_columns([{column}])) or turn it into numbers first"
    )
