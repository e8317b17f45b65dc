"""An adapter and its base become one model's folder, tensor by tensor: no model has to fit in memory.

Both are read as foreign files: safetensors and JSON alone, bounded. Each weight keeps the type that the base
stores it in. The rest of the base's folder, such as its tokenizer, is copied.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ravnest.disk import read_bounded
from ravnest.errors import ConfigError, WeightsError
from ravnest.foreign import decode_json, quote
from ravnest.model.state.shards import SHARD_BYTES, ShardWriter, open_weights
from ravnest.model.state.state_dict import to_bytes
from ravnest.model.state.state_source import FileSource, read_pieces, read_tensor
from ravnest.requester.converted_weights import ConvertedSource, base_name, convert_weights
from ravnest.requester.finetuning.base_model import build_empty, find_model_folder, read_config
from ravnest.requester.run_folder import ADAPTER, MODEL

_CONFIG = "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_COPIED_BYTES = 1 << 28  # of a file beside the weights
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")


class _Settings(msgspec.Struct, frozen=True):
    """What is used of an adapter_config.json."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What an adapter adds to weights of the base, by their names there."""

    tensors: FileSource
    modules: Mapping[str, str]  # by weight of the base
    scale: float
    is_turned: bool

    def find_change(self, name: str) -> Tensor | None:
        """Return what is added to a weight of the base, if anything is."""
        module = self.modules.get(name)
        if module is None:
            return None
        down, up = (read_tensor(self.tensors, module + end).float() for end in (_DOWN, _UP))
        change = self.scale * (up @ down)
        return change.T if self.is_turned else change


def merge_adapter(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the model with the adapter's change in its weights to a new folder, and return it.

    `from_pretrained` loads the folder without peft. It is the size of the base.
    """
    folder, place = find_model_folder(model), Path(out)
    base = FileSource(open_weights(folder))
    found = _open_adapter(Path(adapter), _name_weights(folder, base))
    try:
        if place.exists() and any(place.iterdir()):
            raise ConfigError(f"{place} has files in it; give another folder for the merged model")
        place.mkdir(parents=True, exist_ok=True)
        _copy_rest(folder, place)
        with ShardWriter(place / MODEL, base.types, max_shard_bytes) as writer:
            for name, kind in base.types.items():
                change = found.find_change(name)
                if change is None:
                    writer.write(name, read_pieces(base, name))
                    continue
                if tuple(change.shape) != kind.shape:
                    problem = f"the adapter changes {name!r} as {tuple(change.shape)}, the model has {kind}"
                    raise WeightsError(f"{problem}; give the model that it was trained with")
                weight = read_tensor(base, name)
                writer.write(name, [to_bytes((weight.float() + change).to(weight.dtype))])
            writer.finish()
    except OSError as error:
        problem = f"{place} cannot be written: {error.strerror or error}"
        raise ConfigError(f"{problem}; give a folder that is yours and has room for the model") from None
    return place


def _name_weights(folder: Path, base: FileSource) -> Mapping[str, str | None]:
    """Return under which name the files have each weight of the model; None: it is made of others."""
    with contextlib.suppress(ConfigError):  # without transformers, or of no model that it knows
        found = convert_weights(base, build_empty(folder, read_config(folder)))
        if isinstance(found, ConvertedSource):
            return {name: found.origins.get(name) for name in found.types}
    return {name: name for name in base.types}


def _open_adapter(folder: Path, known: Mapping[str, str | None]) -> _Adapter:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give one with {_CONFIG} and {ADAPTER}")
    content = read_bounded(folder / _CONFIG, _MOST_CONFIG_BYTES)
    config = decode_json(content, _Settings, str(folder / _CONFIG), _MOST_CONFIG_BYTES, ConfigError)
    other = next(
        (name for name in ("use_dora", "rank_pattern", "alpha_pattern") if getattr(config, name)), ""
    )
    if config.peft_type != "LORA" or other or config.bias != "none" or config.r < 1:
        kind = other or (f"bias={quote(config.bias)}" if config.bias != "none" else quote(config.peft_type))
        fix = "load it with peft and use merge_and_unload()"
        raise ConfigError(f"the adapter in {folder} is no plain LoRA ({kind}), which alone is merged; {fix}")
    tensors = FileSource(open_weights(folder / ADAPTER))
    modules = {}
    for name in tensors.types:
        if not name.endswith((_DOWN, _UP)):
            fix = "load it with peft and use merge_and_unload()"
            raise ConfigError(f"the adapter has {name!r}, which cannot be merged here; {fix}")
        module = name.removesuffix(_DOWN).removesuffix(_UP)
        modules[_find_weight(module, known)] = module
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    return _Adapter(tensors, modules, scale, config.fan_in_fan_out)


def _find_weight(module: str, known: Mapping[str, str | None]) -> str:
    """Return the weight that an adapter is beside; a base may be stored with or without its prefix."""
    name = base_name(f"{module}.weight")
    tried = next((each for each in (name, name.partition(".")[2]) if each in known), None)
    if tried is None:
        raise WeightsError(
            f"the model has no {name!r}, which the adapter changes; give the model it was made for"
        )
    found = known[tried]
    if found is None:
        fix = "load it with peft and use merge_and_unload()"
        raise ConfigError(f"the files have {name!r} in another form, so the adapter is not merged; {fix}")
    return found


def _copy_rest(folder: Path, place: Path) -> None:
    """Copy configuration and tokenizer; weights and their index are written anew."""
    for file in sorted(folder.iterdir()):
        is_weights = ".safetensors" in file.name or ".bin" in file.name
        if file.is_file() and file.suffix in _COPIED and not is_weights:
            if file.stat().st_size > _MOST_COPIED_BYTES:
                raise ConfigError(f"{file} is too large for what it should be; look at the model's folder")
            shutil.copyfile(file, place / file.name)
