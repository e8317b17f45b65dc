"""Text from a model on this PC, token by token: a folder, with an adapter or with weights of a result.

The model is loaded whole, so it must fit in memory; what it would take is read from its files before. The
next token is the most likely one, or drawn from those that make up `top_p` of the chance. Nothing is
downloaded, and no code that a folder brings is run.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ravnest.disk import read_bounded
from ravnest.errors import ConfigError, WeightsError
from ravnest.foreign import decode_json, quote
from ravnest.model.blueprint.program import FLOATING
from ravnest.model.state.shards import open_weights
from ravnest.model.state.state_source import FileSource, read_tensor
from ravnest.requester.converted_weights import convert_weights
from ravnest.requester.finetuning.base_model import (
    BaseModel,
    build_empty,
    explained,
    import_hf,
    open_base,
    quiet_hf,
)
from ravnest.requester.run_folder import ADAPTER
from ravnest.requester.text_codec import TextStream, encode_prompt, find_ends
from ravnest.units import show_bytes

_ADAPTER_CONFIG = "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
_LONGEST_NAME = 512  # of a base that an adapter names
_GPU_TIMES = 1.2


class _AdapterConfig(msgspec.Struct, frozen=True):
    """What is used of an adapter_config.json: peft reads the rest."""

    base_model_name_or_path: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else by chance among those of `top_p`."""

    max_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_count = isinstance(self.max_tokens, int) and self.max_tokens >= 1
        checks = (
            ("max_tokens", is_count, "a whole number, 1 or more"),
            ("temperature", 0 <= self.temperature <= 100, "a number from 0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("seed", isinstance(self.seed, int) and 0 <= self.seed < 2**63, "a whole number, 0 or more"),
        )
        for name, is_good, wanted in checks:
            if not is_good:
                raise ConfigError(f"{name} is {quote(getattr(self, name))}; give {wanted}")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return the next token."""
        if self.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.float() / self.temperature, dim=-1)
        sorted_chances, order = chances.sort(descending=True)
        before = sorted_chances.cumsum(-1) - sorted_chances
        kept = torch.where(before < self.top_p, sorted_chances, 0.0)
        return int(order[torch.multinomial(kept, 1, generator=generator)])


def generate(
    model: str | os.PathLike[str],
    prompt: str,
    *,
    adapter: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    is_chat: bool = False,
    **sampling: Any,
) -> Iterator[str]:
    """Yield what a model writes after a prompt, piece by piece.

    `model` is a Hugging Face folder, a hub id in the local cache, or an adapter's folder, which names its
    base. `weights` are those of a result. With `is_chat` the prompt is what a user says, by the model's chat
    template. `sampling` is max_tokens, temperature, top_p and seed.
    """
    chosen = read_sampling(sampling)
    return load_writer(model, adapter, weights).write(prompt, chosen, is_chat=is_chat)


def read_sampling(given: Mapping[str, Any]) -> Sampling:
    """Return how tokens are chosen; a setting that is misspelt is told."""
    known = Sampling.__dataclass_fields__
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ConfigError(f"generate has no setting {quote(strange)}; there are {', '.join(known)}")
    return Sampling(**given)


@dataclass(frozen=True, eq=False)
class Writer:
    """A model that is loaded, with its tokenizer."""

    model: Any
    base: BaseModel

    def write(
        self,
        prompt: str,
        sampling: Sampling,
        *,
        is_chat: bool = False,
        hear: Callable[[int], object] = lambda _: None,
    ) -> Iterator[str]:
        """Yield pieces of text, at most one for each token; `hear` gets every token when it is there."""
        ids = self._encode(prompt, is_chat)
        stream = TextStream(self.base.tokenizer.decode)  # type: ignore[attr-defined]
        for token in self._choose(ids, sampling):
            hear(token)
            if piece := stream.add(token):
                yield piece
        if piece := stream.end():
            yield piece

    def _choose(self, ids: list[int], sampling: Sampling) -> Iterator[int]:
        """Yield tokens up to an end, which is not among them."""
        generator = torch.Generator().manual_seed(sampling.seed)
        ends, most = self._find_ends(), self.base.most_tokens
        count = sampling.max_tokens if most is None else min(sampling.max_tokens, most - len(ids))
        if count < 1:
            fix = "give a shorter one"
            raise ConfigError(f"the prompt has {len(ids)} tokens, and the model takes {most} in all; {fix}")
        device = next(self.model.parameters()).device
        given, past = torch.tensor([ids], device=device), None
        for _ in range(count):
            with torch.inference_mode():
                out = self.model(input_ids=given, past_key_values=past, use_cache=True)
            token = sampling.choose(out.logits[0, -1].cpu(), generator)
            if token in ends:
                return
            yield token
            given, past = torch.tensor([[token]], device=device), out.past_key_values

    def _encode(self, prompt: str, is_chat: bool) -> list[int]:
        return encode_prompt(self.base.tokenizer, prompt, is_chat=is_chat)

    def _find_ends(self) -> frozenset[int]:
        return find_ends(self.model, self.base.tokenizer)


def load_writer(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    *,
    free_bytes: float | None = None,
) -> Writer:
    """Load a model, or raise ConfigError; `free_bytes` is the memory of this PC that it may take."""
    if adapter is not None and weights is not None:
        raise ConfigError("give an adapter or weights, not both: weights of a result are the whole model")
    place = Path(model)
    if adapter is None and (place / _ADAPTER_CONFIG).is_file() and not (place / "config.json").exists():
        model, adapter = _read_base(place), place
    if adapter is not None and not (Path(adapter) / _ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{adapter} is no adapter; give a folder with {_ADAPTER_CONFIG} and {ADAPTER}")
    base = open_base(model)
    source = Path(weights) if weights is not None else base.folder
    tensors = FileSource(open_weights(source))
    size = sum(kind.size_bytes for kind in tensors.types.values())
    _check_fits(size, base, free_bytes)
    built = _build(base, tensors, source)
    if adapter is not None:
        with explained(f"{adapter} does not fit {base.folder}"), quiet_hf():
            built = import_hf("peft").PeftModel.from_pretrained(built, str(adapter))
    return Writer(built.eval().to(_choose_device(size)), base)


def _read_base(adapter: Path) -> str:
    """Return the model that an adapter's configuration names."""
    file = adapter / _ADAPTER_CONFIG
    content = read_bounded(file, _MOST_CONFIG_BYTES)
    found = decode_json(content, _AdapterConfig, str(file), _MOST_CONFIG_BYTES, ConfigError)
    name = found.base_model_name_or_path or ""
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        problem = f"{file} names no base ({quote(name)})" if name else f"{file} names no base"
        raise ConfigError(f"{problem}; give the model, and the adapter with --adapter {adapter}")
    return name


def _check_fits(size_bytes: int, base: BaseModel, free_bytes: float | None) -> None:
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    if size_bytes > free:
        problem = (
            f"{base.name} takes {show_bytes(size_bytes)}, and {show_bytes(free)} of memory are free here"
        )
        raise ConfigError(f"{problem}; close programs, or use a PC with more memory")


def _choose_device(size_bytes: int) -> str:
    """Return the GPU if the model fits into it, and what it computes beside its weights."""
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if _GPU_TIMES * size_bytes < torch.cuda.mem_get_info()[0] else "cpu"


def _build(base: BaseModel, files: FileSource, source: Path) -> Any:
    """Return the model with these weights, in the type they are stored in, if it is one."""
    model = build_empty(base.folder, base.config)
    tensors = convert_weights(files, model)
    prefix = f"{model.base_model_prefix}."
    dtypes = {kind.dtype for kind in tensors.types.values() if kind.dtype in FLOATING}
    dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 else torch.float32
    state = {}
    for name, parameter in model.named_parameters():
        found = next(
            (x for x in (name, name.removeprefix(prefix), prefix + name) if x in tensors.types), None
        )
        if found is None or tensors.types[found].shape != tuple(parameter.shape):
            shown = "missing" if found is None else str(tensors.types[found])
            problem = f"{source} does not fit {base.folder}: {name!r} is {shown}"
            raise WeightsError(f"{problem}; give weights of this model")
        state[name] = read_tensor(tensors, found).to(dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model
