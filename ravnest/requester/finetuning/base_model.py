"""The model to fine-tune: a Hugging Face folder on this PC, its tokenizer, and adapters around empty weights.

The weights stay in their files; only the adapters have memory. Nothing is downloaded, and no code that a
folder brings is run. What transformers or peft raise becomes a sentence.
"""

import contextlib
import copy
import inspect
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.errors import ConfigError, WeightsError
from ravnest.foreign import quote
from ravnest.model.capture.capture import empty_weights
from ravnest.model.state.shards import find_files, open_weights
from ravnest.requester.finetuning.tokens import Tokenizer

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_ADAPTER = "default"  # peft's own name for it
_RECURRENT = ("mamba", "recurrent", "deltanet", "rwkv", "shortconv", "linearattention", "lightningattention")
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_NOT_ADAPTED = "out_proj"  # of Mamba: a kernel takes its weight, past the adapter; peft refuses it
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FORMS = "a folder with config.json, safetensors weights and a tokenizer, as save_pretrained writes it"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model of a folder: its configuration and tokenizer; `name` is how the requester called it."""

    folder: Path
    name: str
    config: Any
    tokenizer: Tokenizer

    @property
    def is_bf16(self) -> bool:
        """Whether all of its weights are bf16, so that nothing is lost if they stay so."""
        return all(tensor.type.dtype == "bfloat16" for tensor in open_weights(self.folder))

    @property
    def num_words(self) -> int | None:
        """How many different tokens the model knows, if it says so."""
        found = getattr(self.config.get_text_config(), "vocab_size", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def most_tokens(self) -> int | None:
        """How long a row of tokens may be, if the model says so."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The adapters: two narrow matrices beside each of the `targets`, modules by the end of their names."""

    rank: int = 16
    alpha: float | None = None  # twice the rank
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL_LINEAR

    def __post_init__(self) -> None:
        _require(_is_whole(self.rank) and 1 <= self.rank <= 4096, "rank", self.rank, "1 to 4096")
        is_alpha = self.alpha is None or (_is_number(self.alpha) and 0 < self.alpha < math.inf)
        _require(is_alpha, "alpha", self.alpha, "a number above 0")
        is_share = _is_number(self.dropout) and 0 <= self.dropout < 1
        _require(is_share, "dropout", self.dropout, "a number from 0 to below 1")
        names = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        is_names = bool(names) and all(isinstance(name, str) and name for name in names)
        wanted = f"{ALL_LINEAR!r} or names of modules, like ['q_proj', 'v_proj']"
        _require(is_names, "targets", self.targets, wanted)


def open_base(model: str | os.PathLike[str]) -> BaseModel:
    """Return the model of a folder, or of a hub id that is in the local cache; or raise ConfigError."""
    transformers = import_hf("transformers")
    folder = find_model_folder(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give {_FORMS}")
    try:
        find_files(folder)
    except WeightsError as error:
        is_old = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        fix = "its weights are pickled, which is never loaded; save them as safetensors" if is_old else error
        raise ConfigError(f"{folder} has no weights to begin with: {fix}") from None
    config = read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        fix = "give the original, in bf16 or fp32: it can be stored in 4 bits while it is trained"
        raise ConfigError(f"the weights of {folder} are quantised already; {fix}")
    with explained(f"{folder} has no tokenizer that can be read (tokenizer.json)"), quiet_hf():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return BaseModel(folder, str(os.fspath(model)), config, tokenizer)


def read_config(folder: Path) -> Any:
    """Return the configuration of a folder's model."""
    transformers = import_hf("transformers")
    with explained(f"{folder / 'config.json'} is of no model that transformers knows"), quiet_hf():
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def build_adapted(base: BaseModel, lora: LoraSettings, seed: int) -> nn.Module:
    """Return the model with empty weights, and adapters that have first values."""
    peft = import_hf("peft")
    model = build_empty(base.folder, base.config)
    model.config.use_cache = False
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name,
    )
    if lora.targets == ALL_LINEAR:
        _leave_experts_out(config, model)
        config.exclude_modules = [_NOT_ADAPTED] if base.config.model_type in _MAMBA else None
    kinds = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    problem = f"adapters cannot be put at {quote(lora.targets)}; linear layers are {', '.join(sorted(kinds))}"
    with explained(problem), quiet_hf():
        adapted: nn.Module = peft.get_peft_model(model, config)
    beside = sorted({str(x.parameter_name) for x in adapted.modules() if hasattr(x, "parameter_name")})
    if beside:
        told = f"adapters at {quote(lora.targets)} would lie beside experts that are one tensor"
        fix = "leave targets out, or name layers of attention, like ['q_proj', 'v_proj']"
        raise ConfigError(f"{told} ({', '.join(beside)}), which no stage can compute; {fix}")
    _fill_adapters(adapted, seed)
    return adapted


def build_empty(folder: Path, config: Any) -> Any:
    """Return a model of this configuration without values."""
    transformers = import_hf("transformers")
    problem = f"{folder} is no model that writes text after text (a causal language model)"
    with explained(problem), empty_weights(), quiet_hf():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _leave_experts_out(config: Any, model: Any) -> None:
    """Name all linear layers for peft where it would also change experts that are one tensor.

    Those are no linear layers any more; peft takes the names that they had for the tensors that they are in.
    """
    with contextlib.suppress(ImportError):  # an older peft, which does not
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        asked = copy.deepcopy(config)
        with explained("adapters cannot be put at all linear layers"), quiet_hf():
            convert_peft_config_for_transformers(asked, model, None)
        if asked.target_parameters:
            config.target_modules = sorted(asked.target_modules)
            told = (
                "note: experts and their router are single tensors in this model and get no adapters: only %s"
            )
            logger.warning(told, ", ".join(config.target_modules))


def can_pack(adapted: nn.Module) -> bool:
    """Return whether texts in one row are told apart by their positions, as transformers does in attention.

    A model that takes no positions, or that has another way than attention from one token to the next, lets
    them see each other.
    """
    find: Any = getattr(adapted, "get_base_model", None)
    inner = adapted if find is None else find()
    code = sys.modules.get(type(inner).__module__)
    kinds = {type(module).__name__.lower() for module in inner.modules()}
    is_recurrent = any(word in kind for word in _RECURRENT for kind in kinds)
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    return takes_positions and hasattr(code, "create_causal_mask") and not is_recurrent


def import_hf(name: str) -> Any:
    """Return transformers or peft, or raise the sentence that says how to get it."""
    try:
        return __import__(name)
    except ImportError as error:
        missing = error.name or name
        raise ConfigError(f"fine-tuning needs {missing}; install it: pip install 'ravnest[hf]'") from None


def find_model_folder(model: str | os.PathLike[str]) -> Path:
    """Return a folder, or that of a hub id in the local cache."""
    place = str(os.fspath(model))
    if os.path.isdir(place):  # false, where a Path would raise, for a name that no file can have
        return Path(place)
    if os.path.exists(place):
        raise ConfigError(f"{place} is a file; give {_FORMS}")
    if not _HUB_ID.fullmatch(place):
        raise ConfigError(f"{place} does not exist; give {_FORMS}")
    hub = import_hf("huggingface_hub")
    try:
        return Path(hub.snapshot_download(place, local_files_only=True))
    except Exception:  # it has a class of its own for each reason, and none of them is the user's
        fix = f"hf download {place}"
        raise ConfigError(f"{place} is no folder, nor in the local cache; fetch it first: {fix}") from None


@contextlib.contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn what transformers or peft raise into a sentence with the first line of theirs."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "trust_remote_code" in str(error):
            told = "it brings Python code of its own, which is not run"
        raise ConfigError(f"{problem}: {told[:300]}") from None


@contextlib.contextmanager
def quiet_hf() -> Iterator[None]:
    """Keep the advice of transformers and peft, which is about other ways to train, from the user."""
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():  # one of them may use what a newer other one will drop
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def _fill_adapters(adapted: nn.Module, seed: int) -> None:
    """Give the adapters memory and peft's own first values; peft put them beside weights that have none."""
    layer_type = import_hf("peft").tuners.lora.LoraLayer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in adapted.modules():
            if isinstance(module, layer_type):
                for name in module.adapter_layer_names:
                    part = getattr(module, name)
                    if isinstance(part, nn.ModuleDict):
                        part.to_empty(device="cpu")
                module.reset_lora_parameters(_ADAPTER, True)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and parameter.is_meta:
            raise ConfigError(f"{name!r} would be trained, but has no first values; choose other targets")


def _require(is_good: bool, name: str, value: object, wanted: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} is {quote(value)}; give {wanted}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
