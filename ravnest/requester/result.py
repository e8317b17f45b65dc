"""The result of a run: its history, and the trained weights under the model's names.

The weights are plain tensors by name, in memory or read from disk one by one. They are checked against the
blueprint, then loaded into a module, or written to safetensors files or a Hugging Face folder.
"""

import contextlib
import inspect
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ravnest.errors import ConfigError, WeightsError
from ravnest.hub.coordinator.progress import DroppedSamples
from ravnest.model.blueprint.program import CONSTANT, Blueprint
from ravnest.model.state.shards import SHARD_BYTES, ShardWriter, has_weights
from ravnest.model.state.state_dict import LOSS_PREFIX, check_names, check_type, to_bytes, type_of
from ravnest.model.state.state_source import SourceTensors, read_pieces, state_type
from ravnest.protocol.tensors import StoredType
from ravnest.requester.run_folder import ADAPTER, BEST, BEST_ADAPTER, EMA, EMA_ADAPTER, MODEL, find_result
from ravnest.units import show_bytes


@dataclass(frozen=True, eq=False)
class Result:
    """A trained model. `history` has the numbers of each report in order; `model` itself is not changed.

    `dropped` says which samples were left out, and why: those at fault, or all of their microbatch where that
    is not known. It names the first hundred.
    """

    model: nn.Module = field(repr=False)
    blueprint: Blueprint = field(repr=False)
    state: Mapping[str, Tensor] = field(repr=False)
    history: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    dropped: Sequence[DroppedSamples] = field(default=(), repr=False)
    best: "Best | None" = field(default=None, repr=False)  # by validation loss, if anything was evaluated
    ema: "Result | None" = field(
        default=None, repr=False
    )  # the mean of the weights over time, if it was kept

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every number that was reported."""
        return {name: value for report in self.history for name, value in report.items()}

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a module, all or none; untrained values, dtype and device stay its own."""
        targets, trained = _tensors(model), self._trained
        for name, (_, kind) in trained.items():
            found = targets.get(name)
            if found is None or found.shape != kind.shape or found.is_meta:
                raise WeightsError(_misfit(name, kind, found))
        with torch.no_grad():
            for name, (source, _) in trained.items():
                targets[name].copy_(self.state[source])

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        max_shard_bytes: int = SHARD_BYTES,
    ) -> Path:
        """Write all weights of the model into a safetensors file, whole or not at all.

        What is larger than a shard becomes several, FILE-00001-of-0000N.safetensors, with an index; its path
        is returned then.
        """
        file = Path(path)
        if file.suffix != ".safetensors":
            fix = "give a name that ends in .safetensors"
            if hasattr(self.model, "save_pretrained"):
                fix += f"; for a Hugging Face folder: result.save_pretrained({str(path)!r})"
            raise ConfigError(f"{file} would hold safetensors; {fix}")
        if has_weights(file) and not overwrite:
            raise ConfigError(f"{file} exists already; give another name, or overwrite=True")
        return self._write(file, self._all_types(), max_shard_bytes)

    def _write(self, file: Path, types: Mapping[str, StoredType], max_shard_bytes: int) -> Path:
        trained, own = self._trained, self.model.state_dict()
        try:
            with ShardWriter(file, types, max_shard_bytes) as writer:
                for name in types:
                    source = trained[name][0] if name in trained else None
                    if source is not None and isinstance(self.state, SourceTensors):
                        writer.write(name, read_pieces(self.state.source, source))
                    else:
                        writer.write(name, [to_bytes(own[name] if source is None else self.state[source])])
                return writer.finish()
        except OSError as error:
            size = show_bytes(sum(kind.size_bytes for kind in types.values()))
            problem = f"{file} cannot be written: {error.strerror or error}"
            fix = f"give a file in a folder that exists, is yours and has room for {size}"
            raise ConfigError(f"{problem}; {fix}") from None

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        max_shard_bytes: int = SHARD_BYTES,
    ) -> Path:
        """Let a Hugging Face model write itself, with the trained weights, into a folder.

        Weights of more than a shard are written tensor by tensor; then only the rest is the model's own work.
        A model with adapters (peft) writes these alone: `PeftModel.from_pretrained` loads them.
        """
        place = Path(folder)
        save = getattr(self.model, "save_pretrained", None)
        takes_state = self.is_adapted or (save and "state_dict" in inspect.signature(save).parameters)
        if save is None or not takes_state:
            raise ConfigError("the model has no save_pretrained(folder, state_dict); use result.export(FILE)")
        types = self._all_types()
        is_large = sum(kind.size_bytes for kind in types.values()) > max_shard_bytes
        try:
            if place.exists() and any(place.iterdir()) and not overwrite:
                raise ConfigError(f"{place} has files in it; give another folder, or overwrite=True")
            if self.is_adapted:
                save(place, state_dict=self._adapters(), save_embedding_layers=self._has_own_embeddings())
            elif is_large:
                save(place, state_dict={})
                self._write(place / MODEL, types, max_shard_bytes)
            else:
                save(place, state_dict=self._whole())
        except OSError as error:
            fix = "give a folder that can be made, is yours and has room"
            raise ConfigError(f"{place} cannot be written: {error.strerror or error}; {fix}") from None
        return place

    @property
    def is_adapted(self) -> bool:
        """Whether the model has adapters of peft, which write no more than themselves."""
        return hasattr(self.model, "peft_config")

    def _adapters(self) -> dict[str, Tensor]:
        """Return the state_dict with what was trained; the rest is the model's own and may have no values."""
        changing = {entry.name for entry in self.blueprint.state if entry.is_trainable or entry.is_written}
        found = dict(self.model.state_dict())
        for name, (source, _) in self._trained.items():
            if source in changing and name in found:
                found[name] = self.state[source].detach()
        return found

    def _has_own_embeddings(self) -> bool:
        find = getattr(self.model, "get_input_embeddings", None)
        weight = getattr(find() if callable(find) else None, "weight", None)
        return isinstance(weight, Tensor) and weight.requires_grad

    @cached_property
    def _trained(self) -> dict[str, tuple[str, StoredType]]:
        """What the state has of the model (not of the loss), under all names of tied weights.

        Each with its name in the state.
        """
        aliases, known = dict(self.blueprint.aliases), _tensors(self.model)
        check_names((name for name in self.state if name not in aliases), self.blueprint)
        entries = {entry.name: entry for entry in self.blueprint.state if entry.kind != CONSTANT}
        for name, entry in entries.items():
            check_type(entry, state_type(self.state, name))
        kinds = {name: StoredType(entry.dtype, entry.shape) for name, entry in entries.items()}
        found = {name: (name, kind) for name, kind in kinds.items()}
        found |= {alias: (name, kinds[name]) for alias, name in aliases.items() if name in kinds}
        return {
            name: each for name, each in found.items() if name in known and not name.startswith(LOSS_PREFIX)
        }

    def _all_types(self) -> dict[str, StoredType]:
        """Return everything the model's state_dict has, but for what has no values."""
        trained, own = self._trained, self.model.state_dict()
        return {
            name: trained[name][1] if name in trained else type_of(value)
            for name, value in own.items()
            if name in trained or not getattr(value, "is_meta", True)
        }

    def _whole(self) -> dict[str, Tensor]:
        """Return all of that in memory."""
        own, trained = self.model.state_dict(), self._trained
        read: dict[str, Tensor] = {}
        for name in self._all_types():
            source = trained[name][0] if name in trained else None
            if source is not None and source not in read:
                read[source] = self.state[source].detach()
        return {
            name: read[trained[name][0]] if name in trained else own[name].detach()
            for name in self._all_types()
        }


@dataclass(frozen=True, eq=False)
class Best(Result):
    """The weights with the lowest validation loss, `loss`, evaluated after so many epochs."""

    epoch: int = 0
    loss: float = math.nan


def keep_weights(result: Result, file: Path, *, overwrite: bool = False) -> None:
    """Write the weights of a training where they are to go; where that fails they are not lost with it."""
    try:
        _write_result(result, file, overwrite=overwrite)
    except ConfigError as error:
        with contextlib.suppress(ConfigError, OSError):
            place = Path(tempfile.mkdtemp(prefix="ravnest-"), file.name)
            _write_result(replace(result, best=None), place, overwrite=False)
            error = ConfigError(f"{error}; meanwhile the weights are in {find_result(place)}")
        raise error from None


def _write_result(result: Result, file: Path, *, overwrite: bool) -> None:
    """Write weights to a file; a folder's model.safetensors stands for what that kind of model has there."""
    best, is_folder = result.best, file.name == MODEL
    if is_folder and result.is_adapted:
        result.save_pretrained(file.parent, overwrite=True)  # the hub's own files lie there
        if best is not None:
            best.save_pretrained(file.with_name(BEST_ADAPTER), overwrite=True)
        if result.ema is not None:
            result.ema.save_pretrained(file.with_name(EMA_ADAPTER), overwrite=True)
        return
    result.export(file, overwrite=overwrite)
    if is_folder and best is not None:
        best.export(file.with_name(BEST), overwrite=overwrite)
    if is_folder and result.ema is not None:
        result.ema.export(file.with_name(EMA), overwrite=overwrite)
    for name in ("config", "generation_config"):  # with these, from_pretrained loads the folder
        save = getattr(getattr(result.model, name, None), "save_pretrained", None)
        if is_folder and callable(save):
            with contextlib.suppress(OSError):
                save(file.parent)


def check_place(place: str | os.PathLike[str], *, may_exist: bool = False) -> Path:
    """Return the file that weights will go to, a folder's model.safetensors; refuse it before a training."""
    given = Path(place)
    file = given if given.suffix == ".safetensors" else given / MODEL
    if given.suffix and given.suffix != ".safetensors" and not given.is_dir():
        raise ConfigError(
            f"{given} would hold safetensors; give a name that ends in .safetensors, or a folder"
        )
    beside = [file.with_name(name) for name in (BEST, ADAPTER) if file.name == MODEL]
    for written in (file, *beside):
        if has_weights(written) and not may_exist:
            raise ConfigError(f"{written} exists already; give another name, or move it away")
    try:
        if file is not given:
            given.mkdir(parents=True, exist_ok=True)
        is_ours = os.access(file.parent, os.W_OK | os.X_OK)
    except OSError:
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{file} cannot be written; give a folder that exists and is yours")
    return file


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def _misfit(name: str, kind: StoredType, found: Tensor | None) -> str:
    shown = "missing" if found is None else f"of shape {tuple(found.shape)}"
    fix = "give a model built like the one that was trained"
    if found is not None and found.is_meta:
        shown = "without memory (empty_weights)"
        fix = 'give one with memory: model.to_empty(device="cpu")'
    return f"{name!r}, of shape {kind.shape} in the result, is {shown} in the model; {fix}"
