"""Padding: samples of different lengths become one length, because a model is captured with one.

Only the first size of a field is padded, at its end. What stands for padding is known of the fields that
tokenizers make, if there is an attention mask; of other fields the requester says it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ravnest.errors import ConfigError

MASK = "attention_mask"
_KNOWN = {
    "input_ids": 0,
    MASK: 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
    "labels": -100,  # which losses of torch leave out
}
_MULTIPLE = 8  # lengths are rounded up to it: matrix products like that


@dataclass(frozen=True, slots=True)
class PaddedField:
    """A field that is padded with a value to a length."""

    value: float
    length: int

    def extend(self, tensor: Tensor, dim: int, name: str, sample: str) -> Tensor:
        """Return the tensor with padding at the end of this dimension."""
        num_missing = self.length - tensor.shape[dim]
        if num_missing < 0:
            problem = f"{name!r} has a length of {tensor.shape[dim]} in {sample}, more than {self.length}"
            raise ConfigError(f"{problem}; cut it, or set max_length={round_up(tensor.shape[dim])}")
        if not num_missing:
            return tensor
        return functional.pad(tensor, (0, 0) * (tensor.ndim - dim - 1) + (0, num_missing), value=self.value)


Padding = Mapping[str, PaddedField]


@dataclass(frozen=True, slots=True)
class PaddingWish:
    """What a requester says of padding: values by field, and the length of all that is padded."""

    values: Mapping[str, float] | None = None
    max_length: int | None = None

    def find(self, some: Mapping[int, Any], read_all: Callable[[], Iterable[Any]], what: str) -> Padding:
        """Return which fields are padded, and how far: as `some` samples show, by number.

        All samples are read where the longest one is to be found.
        """
        lengths = {number: _lengths(sample) for number, sample in some.items()}
        varying = _find_varying(lengths)
        values = dict(self.values or {})
        for name, (one, other) in varying.items():
            if name not in values:
                pair = f"{lengths[one][name]} in sample {one} and {lengths[other][name]} in sample {other}"
                values[name] = self._know(name, some[one], f"a length of {pair}", what)
        padded = [
            name for name in values if name in varying or (self.max_length and name in lengths[min(some)])
        ]
        if not padded:
            return {}
        if self.max_length is not None:
            return {name: PaddedField(values[name], self.max_length) for name in padded}
        longest = dict.fromkeys(padded, 1)
        for sample in read_all():
            found = _lengths(sample)
            for name in padded:
                longest[name] = max(longest[name], found.get(name, 1))
        return {name: PaddedField(values[name], round_up(longest[name])) for name in padded}

    def of_batches(
        self,
        some: Mapping[int, Any],
        collate: Callable[[], Mapping[str, Any]],
        read_all: Callable[[], Iterable[Any]],
    ) -> Padding:
        """Return which fields are padded of batches that a collate_fn makes, and how far.

        Without a length it is that of the longest sample, if `some` differ in a field of the batch, and
        padding has a meaning there: there is a mask, or a value for the field.
        """
        values = {**_KNOWN, **(self.values or {})}
        length = self.max_length
        if length is None:
            varying = _find_varying({number: _lengths(sample) for number, sample in some.items()})
            batch = collate() if any(name in values for name in varying) else {}
            names = [name for name in varying if name in values and name in batch]
            if not names or not (MASK in batch or self.values):
                return {}
            longest = max(_lengths(sample).get(name, 1) for sample in read_all() for name in names)
            length = round_up(longest)
        return {name: PaddedField(value, length) for name, value in values.items()}

    def _know(self, name: str, sample: Any, shown: str, what: str) -> float:
        is_masked = isinstance(sample, Mapping) and MASK in sample
        if self.values is None and is_masked and name in _KNOWN:
            return _KNOWN[name]
        fix = f"pad={{{name!r}: VALUE}} pads all samples to the longest, or cut them to one length"
        raise ConfigError(f"{name!r} of the {what} differs in shape ({shown}); {fix}")


def pad_samples(samples: Sequence[Any], numbers: Sequence[int], padding: Padding, what: str) -> list[Any]:
    """Return the samples with their fields at full length."""
    done = []
    for number, sample in zip(numbers, samples, strict=True):
        named = name_parts(sample)
        if named is None:  # it is refused where samples are put together
            return list(samples)
        full = {
            name: padding[name].extend(torch.as_tensor(value), 0, name, f"sample {number} of the {what}")
            if name in padding
            else value
            for name, value in named.items()
        }
        done.append(full if isinstance(sample, Mapping) else tuple(full.values()))
    return done


def pad_batch(fields: Mapping[str, Tensor], padding: Padding, what: str) -> dict[str, Tensor]:
    """Return a ready batch with its fields at full length."""
    where = f"a batch of the {what}"
    return {
        name: padding[name].extend(field, 1, name, where) if name in padding and field.ndim > 1 else field
        for name, field in fields.items()
    }


def name_parts(sample: Any) -> dict[str, Any] | None:
    """Return the fields of a sample by name, those of a tuple as in a batch; None: it is no sample."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        return None
    names = ["x"] if len(sample) == 2 else [f"x{index}" for index in range(len(sample) - 1)]
    return dict(zip([*names, "y"], sample, strict=True))


def _lengths(sample: Any) -> dict[str, int]:
    """Return the first size of each field that has one."""
    found = {}
    for name, value in (name_parts(sample) or {}).items():
        if isinstance(value, list | tuple):
            found[name] = len(value)
        elif isinstance(value, Tensor | np.ndarray) and value.ndim:
            found[name] = int(value.shape[0])
    return found


def _find_varying(lengths: Mapping[int, Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Return the fields whose length differs, each with two samples that show it."""
    first, *others = lengths
    varying: dict[str, tuple[int, int]] = {}
    for other in others:
        for name, length in lengths[other].items():
            if name in lengths[first] and length != lengths[first][name]:
                varying.setdefault(name, (first, other))
    return varying


def round_up(length: int) -> int:
    """Return the length of padded samples."""
    return -(-length // _MULTIPLE) * _MULTIPLE
