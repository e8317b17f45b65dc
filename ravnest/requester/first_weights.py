"""Where the first weights of a job come from: the model's own memory, files, a mirror, or an initialiser.

What the requester gives is fitted to the model: tied weights under any of their names, a Hugging Face model's
base with or without its prefix, floating-point types cast. What it lacks is drawn, and that is said.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from ravnest.config import FrozenFormat
from ravnest.errors import WeightsError
from ravnest.model.blueprint.program import CONSTANT, FLOATING, Blueprint, StateEntry
from ravnest.model.capture.capture import Captured
from ravnest.model.state.initialiser import InitialiserSource
from ravnest.model.state.shards import is_index, open_weights
from ravnest.model.state.state_dict import check_type, to_bytes
from ravnest.model.state.state_source import FileSource, LayeredSource, MemorySource, StateSource, read_tensor
from ravnest.protocol.tensors import Buffer, StoredType
from ravnest.requester.converted_weights import base_name, convert_weights
from ravnest.requester.job import Job
from ravnest.transfer.mirror import MirrorSource, read_mirror
from ravnest.units import show_count

logger = logging.getLogger(__name__)

_FOLDER = "first-weights"
_NUM_SAMPLED = 4  # tensors, by which frozen weights are known again
_SAMPLED_BYTES = 4096  # of each
_ENOUGH = 0.5  # of the parameters must be in what is given, or it is of another model


def find_first_weights(
    job: Job, captured: Captured, folder: Path | None, *, is_needed: bool = True
) -> "FirstWeights":
    """Return the first weights of a job, checked by name and type; say where they come from if that is news.

    They are only drawn if they are needed: a run that goes on from a checkpoint has others.
    """
    memory = MemorySource(captured.state)
    drawn = InitialiserSource(job.model, job.seed, None if folder is None else folder / _FOLDER)
    sources: list[StateSource] = [memory, drawn]
    if job.weights is not None:
        given = convert_weights(_open(Path(job.weights), folder), job.model)
        sources.insert(0, _fit(given, captured.blueprint, job.model, str(job.weights)))
    found = FirstWeights(memory, *sources)
    for entry in captured.blueprint.state:
        check_type(entry, found.types.get(entry.name))
    missing = [entry for entry in captured.blueprint.state if found.is_of(entry.name, drawn)]
    names = [entry.name for entry in missing]
    if job.weights is not None and hasattr(job.model, "peft_config"):
        _refuse_without_base(missing, str(job.weights))
    if names and is_needed:
        few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        told = "note: %d tensors have no values yet (%s): they are drawn layer by layer with seed %d"
        fix = "" if job.weights is not None else "; give the Job weights= to begin with others"
        logger.warning(told + fix, len(names), few, job.seed)
        drawn.fill()
    return found


def _open(place: Path, folder: Path | None) -> StateSource:
    if place.suffix == ".json" and not is_index(place):
        return MirrorSource(read_mirror(place), folder)
    return FileSource(open_weights(place))


def _fit(given: StateSource, blueprint: Blueprint, model: nn.Module, where: str) -> "FittedSource":
    """Return what is given under the model's names and in its types."""
    prefix = f"{_find_prefix(model)}."
    others: dict[str, list[str]] = {}
    for alias, name in blueprint.aliases:
        others.setdefault(name, []).append(alias)
    names, types, num_wanted = {}, {}, 0
    is_adapted = hasattr(model, "peft_config")
    for entry in blueprint.state:
        if entry.kind == CONSTANT:
            continue
        num_wanted += not (is_adapted and entry.is_trainable)  # adapters are new
        own = [entry.name, *others.get(entry.name, ())]
        own += [base_name(each) for each in own if is_adapted]
        tried = [*own, *(each.removeprefix(prefix) for each in own), *(prefix + each for each in own)]
        found = next((each for each in tried if each in given.types), None)
        if found is not None:
            wanted, kind = StoredType(entry.dtype, entry.shape), given.types[found]
            is_cast = {wanted.dtype, kind.dtype} <= set(FLOATING)
            check_type(entry, StoredType(wanted.dtype, kind.shape) if is_cast else kind)
            names[entry.name], types[entry.name] = found, wanted
    if len(names) < _ENOUGH * num_wanted:
        problem = f"{where} has {len(names)} of the model's {num_wanted} tensors by name"
        raise WeightsError(f"{problem}, so it is of another model; give weights of one that is built like it")
    return FittedSource(given, names, types)


def _refuse_without_base(missing: Iterable[StateEntry], where: str) -> None:
    """Refuse to train adapters around weights that were drawn by chance."""
    lost = [base_name(entry.name) for entry in missing if entry.is_frozen]
    if lost:
        few = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
        problem = f"{where} lacks {show_count(len(lost), 'tensor')} of the model ({few})"
        raise WeightsError(f"{problem}, and adapters need all of it; give the whole model's files")


def _find_prefix(model: nn.Module) -> str:
    """Return under which name a Hugging Face model has its base."""
    find = getattr(model, "get_base_model", None)
    inner = find() if callable(find) else model
    return str(getattr(inner, "base_model_prefix", ""))


class FirstWeights(LayeredSource):
    """The first weights of a job, from several sources."""

    def __init__(self, memory: MemorySource, *sources: StateSource) -> None:
        super().__init__(*sources)
        self._memory = memory

    def find_lasting(self, entries: Iterable[StateEntry]) -> frozenset[str]:
        """Return the frozen parameters that no checkpoint need hold: a run that goes on has them again.

        Those that are only in memory may be drawn anew by then, so they are not among them, unless they are
        stored in fewer bits: what is returned in the end is as it was given.
        """
        frozen = [entry for entry in entries if entry.is_frozen]
        given = (entry for entry in frozen if entry.storage is FrozenFormat.FP32)
        in_memory = {entry.name for entry in given if self.is_of(entry.name, self._memory)}
        return frozenset(entry.name for entry in frozen) - in_memory

    def sample(self, names: Collection[str]) -> str:
        """Return a hash that tells these weights from others; empty without any.

        It is of a part of a few of them: a mirror has to fetch what is looked at.
        """
        chosen = sorted(names)[:: max(1, len(names) // _NUM_SAMPLED)]
        digest = blake3()
        for name in chosen:
            middle = self.types[name].size_bytes // 2
            digest.update(f"{name} {self.types[name]}".encode())
            digest.update(bytes(self.read(name, middle, middle + _SAMPLED_BYTES)))
        return digest.hexdigest() if chosen else ""


class FittedSource:
    """Tensors of a source under other names, and cast to other floating-point types where they differ."""

    def __init__(self, given: StateSource, names: Mapping[str, str], types: Mapping[str, StoredType]) -> None:
        self._given, self._names, self.types = given, names, types
        self._lock = threading.Lock()
        self._cast: tuple[str, Buffer] = ("", b"")  # the last one, for those who read it piece by piece

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        source, kind = self._names[name], self.types[name]
        if self._given.types[source] == kind:
            return self._given.read(source, start, stop)
        with self._lock:
            if self._cast[0] != name:
                tensor = read_tensor(self._given, source).to(getattr(torch, kind.dtype))
                self._cast = (name, to_bytes(tensor))
            return memoryview(self._cast[1])[start:stop]
