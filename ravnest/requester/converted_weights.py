"""A Hugging Face folder's tensors as its model has them today: renamed, or made of several.

transformers changes names and forms of weights from version to version, and says in a table how files become
models (experts of their own become one tensor, `embed_out` becomes `lm_head`). The table is its own; what is
read here is one tensor of the model at a time, so that no model has to be in memory.
"""

import copy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.foreign import quote
from ravnest.model.state.state_dict import to_bytes, type_of
from ravnest.model.state.state_source import StateSource, read_tensor
from ravnest.protocol.tensors import Buffer, StoredType

ADAPTED = "base_model.model."  # what peft puts before the names of a model


def base_name(name: str) -> str:
    """Return what a tensor of an adapted model (peft) is called in the model without adapters."""
    return name.removeprefix(ADAPTED).replace(".base_layer.", ".")


def convert_weights(given: StateSource, model: nn.Module) -> "StateSource | ConvertedSource":
    """Return what is given as transformers would load it into this model; of other models as it is."""
    find: Any = getattr(model, "get_base_model", None)
    inner: Any = find() if callable(find) else model
    library = sys.modules.get("transformers")
    if library is None or not isinstance(inner, library.PreTrainedModel):
        return given
    groups = _group(given, inner)
    if all(group.is_kept for group in groups):
        return given
    return ConvertedSource(given, groups, inner)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the files, by the pattern that they fit, that become one or more of the model."""

    name: str  # of the first one in the model
    parts: Mapping[str, Sequence[str]]
    converter: Any  # of transformers; None: the tensor only has another name, or the same

    @property
    def only(self) -> str:
        """The tensor of the files, if there is no converter."""
        return next(iter(self.parts.values()))[0]

    @property
    def is_kept(self) -> bool:
        """Whether the model has the tensor as the files have it."""
        return self.converter is None and self.only == self.name


def _group(given: StateSource, inner: Any) -> list[_Group]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(inner)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted = {base_name(name): tensor for name, tensor in inner.state_dict().items()}
    prefix = inner.base_model_prefix
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in sorted(given.types, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted:  # it was no name of before
            name, pattern = key, None
        rule = None if pattern is None else of_pattern[pattern]
        _, parts = groups.setdefault(name, (rule, {}))
        parts.setdefault(pattern or key, []).append(key)
    return [_Group(name, parts, rule) for name, (rule, parts) in groups.items()]


class ConvertedSource:
    """Tensors of files under the names and in the form that a model of transformers has them.

    `origins` says which tensor of the files one is; those that are made of others are not in it.
    """

    def __init__(self, given: StateSource, groups: Sequence[_Group], inner: Any) -> None:
        self._given, self._inner = given, inner
        self._made_by: dict[str, _Group] = {}
        self.origins: dict[str, str] = {}
        types: dict[str, StoredType] = {}
        for group in groups:
            if group.converter is None:
                self.origins[group.name], types[group.name] = group.only, given.types[group.only]
                continue
            for name, made in self._convert(group, lambda key: _shape_of(given.types[key])).items():
                self._made_by[name], types[name] = group, type_of(made)
        self.types: Mapping[str, StoredType] = types
        self._lock = threading.Lock()
        self._made: dict[str, Buffer] = {}  # the last group's, for those who read piece by piece

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        if name in self.origins:
            return self._given.read(self.origins[name], start, stop)
        with self._lock:
            if name not in self._made:
                self._made = {}
                made = self._convert(self._made_by[name], lambda key: read_tensor(self._given, key))
                self._made = {each: to_bytes(tensor) for each, tensor in made.items()}
            return memoryview(self._made[name])[start:stop]

    def _convert(self, group: _Group, find: Callable[[str], Tensor]) -> dict[str, Tensor]:
        rule = copy.deepcopy(group.converter)
        for pattern, keys in group.parts.items():
            rule.collected_tensors[pattern] = [find(key) for key in keys]
        try:
            found = rule.convert(group.name, model=self._inner, config=self._inner.config)
        except Exception as error:  # of transformers, about files that lack some of the parts
            problem = f"{quote(group.name)} cannot be made of {quote(group.only)} and those like it"
            raise WeightsError(f"{problem} ({error}); fetch the model's files again") from None
        made = {name: each[0] if isinstance(each, list) else each for name, each in found.items()}
        return {name: tensor.detach().contiguous() for name, tensor in made.items()}


def _shape_of(kind: StoredType) -> Tensor:
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta")
