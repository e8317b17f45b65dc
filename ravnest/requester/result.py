"""The result of a run: its history, and the trained weights under the model's names.

The weights arrive as plain tensors by name. They are checked against the blueprint, then loaded into a
module, or written to a safetensors file or a Hugging Face folder.
"""

import contextlib
import inspect
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ravnest.errors import ConfigError, WeightsError
from ravnest.hub.coordinator.progress import DroppedSamples
from ravnest.model.blueprint import Blueprint
from ravnest.model.state_dict import merge_stages
from ravnest.requester.run_folder import BEST, MODEL
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

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every number that was reported."""
        return {name: value for report in self.history for name, value in report.items()}

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a module, all or none; untrained values, dtype and device stay its own."""
        targets = _tensors(model)
        for name, tensor in self._trained.items():
            found = targets.get(name)
            if found is None or found.shape != tensor.shape or found.is_meta:
                raise WeightsError(_misfit(name, tensor, found))
        with torch.no_grad():
            for name, tensor in self._trained.items():
                targets[name].copy_(tensor)

    def export(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write all weights of the model into a safetensors file, whole or not at all."""
        file = Path(path)
        if file.suffix != ".safetensors":
            raise ConfigError(f"{file} would hold safetensors; give a name that ends in .safetensors")
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} exists already; give another name, or overwrite=True")
        tensors = _apart(self._whole())
        unfinished = file.with_name(f".{file.name}.{os.getpid()}.unfinished")
        try:
            unfinished.touch()
            mode = unfinished.stat().st_mode  # the user's own; safetensors would lock others out
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.chmod(mode)
            with unfinished.open("r+b") as written:
                os.fsync(written.fileno())
            unfinished.replace(file)
        except (OSError, SafetensorError) as error:
            size = show_bytes(sum(tensor.nbytes for tensor in tensors.values()))
            problem = f"{file} cannot be written: {getattr(error, 'strerror', None) or error}"
            fix = f"give a file in a folder that exists, is yours and has room for {size}"
            raise ConfigError(f"{problem}; {fix}") from None
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        return file

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Let a Hugging Face model write itself, with the trained weights, into a folder."""
        place = Path(folder)
        save = getattr(self.model, "save_pretrained", None)
        if save is None or "state_dict" not in inspect.signature(save).parameters:
            raise ConfigError("the model has no save_pretrained(folder, state_dict); use result.export(FILE)")
        try:
            if place.exists() and any(place.iterdir()) and not overwrite:
                raise ConfigError(f"{place} has files in it; give another folder, or overwrite=True")
            save(place, state_dict=self._whole())
        except OSError as error:
            fix = "give a folder that can be made, is yours and has room"
            raise ConfigError(f"{place} cannot be written: {error.strerror or error}; {fix}") from None
        return place

    @cached_property
    def _trained(self) -> dict[str, Tensor]:
        """The model's part of the state (not the loss's), under all names of tied weights."""
        aliases = dict(self.blueprint.aliases)
        own = {name: tensor for name, tensor in self.state.items() if name not in aliases}
        merged = merge_stages([own], self.blueprint)
        known = _tensors(self.model)
        return {name: tensor for name, tensor in merged.items() if name in known}

    def _whole(self) -> dict[str, Tensor]:
        """Return everything the model's state_dict has, but for what has no values."""
        found = {name: self._trained.get(name, value) for name, value in self.model.state_dict().items()}
        return {name: value.detach() for name, value in found.items() if not getattr(value, "is_meta", True)}


@dataclass(frozen=True, eq=False)
class Best(Result):
    """The weights with the lowest validation loss, `loss`, evaluated after so many epochs."""

    epoch: int = 0
    loss: float = math.nan


def keep_weights(result: Result, file: Path, *, overwrite: bool = False) -> None:
    """Write the weights of a training where they are to go; where that fails they are not lost with it."""
    try:
        result.export(file, overwrite=overwrite)
        if result.best is not None and file.name == MODEL:
            result.best.export(file.with_name(BEST), overwrite=overwrite)
    except ConfigError as error:
        with contextlib.suppress(ConfigError, OSError):
            place = Path(tempfile.mkdtemp(prefix="ravnest-"), file.name)
            error = ConfigError(f"{error}; meanwhile the weights are in {result.export(place)}")
        raise error from None


def check_place(place: str | os.PathLike[str], *, may_exist: bool = False) -> Path:
    """Return the file that weights will go to, a folder's model.safetensors; refuse it before a training."""
    given = Path(place)
    file = given if given.suffix == ".safetensors" else given / MODEL
    if given.suffix and given.suffix != ".safetensors" and not given.is_dir():
        raise ConfigError(
            f"{given} would hold safetensors; give a name that ends in .safetensors, or a folder"
        )
    for written in (file, file.with_name(BEST)) if file.name == MODEL else (file,):
        if written.exists() and not may_exist:
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


def _misfit(name: str, tensor: Tensor, found: Tensor | None) -> str:
    shown = "missing" if found is None else f"of shape {tuple(found.shape)}"
    if found is not None and found.is_meta:
        shown = "without memory (empty_weights)"
    fix = "give a model built like the one that was trained"
    return f"{name!r}, of shape {tuple(tensor.shape)} in the result, is {shown} in the model; {fix}"


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as a file wants them: in order, and no two in the same memory."""
    apart, seen = {}, set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        is_alone = tensor.is_contiguous() and place not in seen
        seen.add(place)
        apart[name] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
    return apart
