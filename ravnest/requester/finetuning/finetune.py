"""Fine-tune a Hugging Face model on text, with adapters, on PCs that cannot hold it.

`Finetuning` is a model, data and settings, each with a default; it becomes a plain Job. `finetune` trains it
and writes the adapter. The base is never in one memory: stages are cut from its safetensors files.
"""

import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ravnest.config import FrozenFormat
from ravnest.errors import ConfigError
from ravnest.foreign import quote, suggest
from ravnest.requester.callbacks import Callback
from ravnest.requester.dataset import show_thing
from ravnest.requester.finetuning.base_model import (
    ALL_LINEAR,
    BaseModel,
    LoraSettings,
    build_adapted,
    can_pack,
    open_base,
)
from ravnest.requester.finetuning.records import read_records
from ravnest.requester.finetuning.tokens import (
    NOT_LEARNED,
    RecordEncoder,
    TokenRow,
    TokenTable,
    pack_rows,
    pad_rows,
    split_rows,
)
from ravnest.requester.job import Job
from ravnest.requester.lr_schedules import Schedule, constant, cosine, linear
from ravnest.requester.padding import round_up
from ravnest.requester.result import Result
from ravnest.requester.session import Hub, local
from ravnest.units import show_count

logger = logging.getLogger(__name__)

_SCHEDULES = {"cosine": cosine, "linear": linear, "constant": constant}
_USUAL_LENGTH = 1024  # tokens, if the model can have so many
_USUAL_BATCH = 16  # rows
_LEAST_SPLIT = 20  # rows; of fewer none is kept for validation unless the requester says so
_VALIDATION_SHARE = 0.05
_MUCH_PADDING = 0.5


@dataclass(frozen=True, eq=False, kw_only=True)
class Finetuning:
    """A model to fine-tune, its data, and how; docs/finetuning.md explains every setting."""

    model: str | os.PathLike[str]
    data: Any = field(repr=False)
    val_data: Any = field(default=None, repr=False)
    val_share: float | None = None  # of the rows; 0.05 unless they are few
    columns: Mapping[str, str] | None = None
    max_length: int | None = None  # tokens of a row; 1024, or what the model can have
    pack: bool = False
    rank: int = 16
    alpha: float | None = None  # twice the rank
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL_LINEAR
    base: str | None = None  # how the base is stored: fp32, bf16, int8, int4; as its files have it
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    clip_norm: float | None = None  # of the gradient of all adapters
    ema: float | None = None  # of the adapters, a mean over time, like 0.999
    schedule: str | Schedule = "cosine"
    warmup: float = 0.03  # updates, or below 1 a share of them
    epochs: int = 3
    max_steps: int | None = None  # updates, in place of epochs
    evaluate_every: int | None = None  # updates; else after each epoch
    batch_size: int | None = None  # rows; 16, or all there are
    seed: int = 0
    precision: str = "auto"
    checkpoint_every: str | None = "1 min"
    sample_prompts: Sequence[str] = ()  # gone on with after every evaluation
    name: str | None = None

    @cached_property
    def source(self) -> BaseModel:
        """The model's folder, configuration and tokenizer."""
        return open_base(self.model)

    @cached_property
    def length(self) -> int:
        """How many tokens a row may have."""
        most = self.source.most_tokens
        if self.max_length is None:
            return min(_USUAL_LENGTH, most or _USUAL_LENGTH)
        if not isinstance(self.max_length, int) or self.max_length < 2:
            raise ConfigError(f"max_length is {quote(self.max_length)}; give tokens, 2 or more")
        if most is not None and self.max_length > most:
            raise ConfigError(f"max_length is {self.max_length}, but the model has {most} positions at most")
        return self.max_length

    @cached_property
    def tables(self) -> tuple[TokenTable, TokenTable | None]:
        """The rows to train on, and those to validate with, if any."""
        encoder = RecordEncoder(self.source.tokenizer, self.length)
        rows = list(encoder.encode(read_records(self.data, self.columns)))
        validation: list[TokenRow] = []
        if self.val_data is not None:
            validation = list(encoder.encode(read_records(self.val_data, self.columns)))
        elif share := self._find_share(len(rows)):
            rows, validation = split_rows(rows, share, np.random.default_rng(self.seed))
        for told in encoder.describe():
            logger.warning("note: %s", told)
        if not rows or (self.val_data is not None and not validation):
            given, name = (self.val_data, "val_data") if rows else (self.data, "data")
            where = f" ({given})" if isinstance(given, str | os.PathLike) else ""
            raise ConfigError(f"the {name}{where} has nothing to learn from; give records with text")
        self._check_words((*rows, *validation))
        longest = max(len(row) for row in (*rows, *validation))
        length = self.length if self.pack else min(round_up(longest), self.length)
        arrange, pad = (pack_rows if self.pack else pad_rows), self._find_pad()
        train = arrange(rows, pad, length)
        return train, arrange(validation, pad, length) if validation else None

    @cached_property
    def job(self) -> Job:
        """The job that trains the adapters, with the model's empty weights."""
        lora = LoraSettings(self.rank, self.alpha, self.dropout, self.targets)
        rates, base = self._find_schedule(), self._find_base()
        self._check()
        train, validation = self.tables
        if train.padding_share > _MUCH_PADDING and not self.pack:
            told = "note: %.0f %% of what is computed is padding; pack=True (--pack) would save most of it"
            logger.warning(told, 100 * train.padding_share)
        if self.pack and len(train) < _USUAL_BATCH:
            told = "note: all texts are in %s of %d tokens; a smaller max_length would give more updates"
            logger.warning(told, show_count(len(train), "row"), train.length)
        model = build_adapted(self.source, lora, self.seed)
        if self.pack and not can_pack(model):
            fix = "leave pack out"
            raise ConfigError(f"texts in one row of {self.source.name} would see each other; {fix}")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        columns = _to_tensors(train)
        return Job(
            model,
            columns,
            val_data=None if validation is None else _to_tensors(validation),
            batch_size=min(_USUAL_BATCH, len(train)) if self.batch_size is None else self.batch_size,
            epochs=self.epochs,
            max_steps=self.max_steps,
            evaluate_every=self.evaluate_every,
            loss=token_loss,
            optimizer=torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay),
            schedule=rates,
            clip_norm=self.clip_norm,
            ema=self.ema,
            checkpoint_every=self.checkpoint_every,
            precision=self.precision,
            frozen=base,
            seed=self.seed,
            inputs=[name for name in columns if name in ("input_ids", "position_ids")],
            is_pretrained=True,
            weights=self.source.folder,
            sample_prompts=self.sample_prompts,
            tokenizer=self.source.tokenizer,
            name=self.name or self._make_name(),
        )

    def describe(self) -> str:
        """Return what is trained on what, in one line."""
        train, validation = self.tables
        trained = sum(each.numel() for each in self.job.model.parameters() if each.requires_grad)
        everything = sum(each.numel() for each in self.job.model.parameters())
        parts = [
            f"{show_count(len(train), 'row')} of {train.length} tokens",
            f"{show_count(train.num_learned, 'token')} learned",
            f"{0 if validation is None else len(validation)} rows for validation",
            f"{show_count(trained, 'parameter')} of {everything:,} trained",
        ]
        return ", ".join(parts)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer beside an adapter, as people expect it there."""
        save: Any = getattr(self.source.tokenizer, "save_pretrained", None)
        if callable(save):
            save(folder)

    def _find_share(self, num_rows: int) -> float:
        share = self.val_share
        if share is None:
            return _VALIDATION_SHARE if num_rows >= _LEAST_SPLIT else 0.0
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            raise ConfigError(f"val_share is {quote(share)}; give a share of the rows, from 0 to below 1")
        return share

    def _make_name(self) -> str:
        folder = Path(self.source.name).name or self.source.folder.resolve().name
        return re.sub(r"[^\w.+-]+", "-", folder)[:50].strip("-") + "-lora"

    def _check_words(self, rows: Sequence[TokenRow]) -> None:
        """Refuse a tokenizer that has more words than the model."""
        largest, num_words = max(int(row.ids.max()) for row in rows), self.source.num_words
        if num_words is not None and largest >= num_words:
            problem = f"its tokenizer gives token {largest}, and the model has {num_words} words"
            raise ConfigError(f"{self.source.name}: {problem}; give the tokenizer that belongs to it")

    def _find_base(self) -> str | None:
        """Return how the base is stored: as the requester says, or as its files have it."""
        if self.base is None:
            return FrozenFormat.BF16 if self.source.is_bf16 else None
        if self.base not in list(FrozenFormat):
            raise ConfigError(f"base is {quote(self.base)}; give {', '.join(FrozenFormat)}")
        return self.base

    def _find_pad(self) -> int:
        tokenizer = self.source.tokenizer
        found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return next(each for each in found if each is not None)

    def _find_schedule(self) -> Schedule:
        if not isinstance(self.schedule, str):
            return self.schedule
        if self.schedule not in _SCHEDULES:
            raise ConfigError(f"schedule is {quote(self.schedule)}; give {', '.join(_SCHEDULES)}")
        if self.schedule == "constant":
            return constant(self.warmup)
        return _SCHEDULES[self.schedule](self.warmup, final=0.0)  # type: ignore[call-arg]

    def _check(self) -> None:
        rate = self.learning_rate
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise ConfigError(f"learning_rate is {show_thing(rate)}; give a number above 0")
        decay = self.weight_decay
        if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay < math.inf:
            raise ConfigError(f"weight_decay is {show_thing(decay)}; give a number, 0 or more")


def finetune(
    model: str | os.PathLike[str],
    data: Any,
    *,
    hub: Hub | None = None,
    nodes: int = 4,
    out: str | os.PathLike[str] | None = None,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Fine-tune a Hugging Face model with adapters, by the peers of a hub, or by so many on this PC.

    `model` is a folder, or a hub id in the local cache. `data` is a .jsonl, .csv or .parquet file, a
    datasets.Dataset or a list of dicts, with text, prompt and completion, or messages. The adapter and the
    tokenizer go to the folder `out`. `callbacks` are as of `hub.fit`, like [rv.EarlyStopping(3)]. `settings`
    are those of docs/finetuning.md, like rank=16 or epochs=3.
    """
    given = make_finetuning(model, data, settings)
    if out is not None and Path(out).suffix:
        raise ConfigError(f"{out} is the name of a file; an adapter is a folder, like runs/my-adapter")
    job = given.job
    logger.info("%s", given.describe())
    with contextlib.ExitStack() as stack:
        swarm = stack.enter_context(local(nodes)) if hub is None else hub
        result = swarm.fit(job, out=out, resume=resume, callbacks=callbacks)
    if out is not None:
        given.save_tokenizer(Path(out))
    return result


def make_finetuning(model: str | os.PathLike[str], data: Any, settings: Mapping[str, Any]) -> Finetuning:
    """Return a Finetuning with these settings by name; one that is misspelt is told."""
    known = [each.name for each in fields(Finetuning) if each.name not in ("model", "data")]
    for name in settings:
        if name not in known:
            raise ConfigError(f"finetune has no setting {quote(name)}; {suggest(name, known)}")
    return Finetuning(model=model, data=data, **settings)


def token_loss(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over rows of each one's summed loss, scaled.

    It is a mean over samples, so a batch may be cut into microbatches. `loss_scale` is one over the learned
    tokens of a row, on average over the data: so every token of the data counts the same.
    """
    labels = batch["labels"]
    logits = out.logits.flatten(0, 1).float()
    each = F.cross_entropy(logits, labels.flatten(), ignore_index=NOT_LEARNED, reduction="none")
    return (each.view(labels.shape).sum(1) * batch["loss_scale"]).mean()


def _to_tensors(table: TokenTable) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in table.fields.items()}
