"""A job from a `transformers.Trainer`: its model, data, collator, optimizer, schedule and arguments.

What has no counterpart is refused with the way out, or told as a note where training does not change.
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ravnest.errors import ConfigError
from ravnest.requester.job import Job
from ravnest.requester.lr_schedules import per_update
from ravnest.requester.padding import round_up

logger = logging.getLogger(__name__)

_LABELS = ("label", "labels", "label_ids")
_CLASSIFIERS = ("SequenceClassification", "TokenClassification", "ImageClassification", "AudioClassification")
# AdamW by bitsandbytes: the same steps; `8bit` keeps its moments in fewer bits.
_ADAMW = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
_REFUSED = {
    "neftune_noise_alpha": "leave it out",
    "deepspeed": "leave it out: Ravnest cuts the model itself",
    "use_liger_kernel": "leave it out",
}


def from_trainer(trainer: Any, **changes: Any) -> Job:
    """Return the job that a `transformers.Trainer` describes; `changes` are arguments of Job that differ."""
    arguments = trainer.args
    _refuse_strange(trainer, arguments)
    if "loss" not in changes:
        _refuse_own_loss(trainer)
    num_together = max(1, int(arguments.gradient_accumulation_steps))
    batch_size = int(arguments.per_device_train_batch_size) * num_together
    data = _Columns.of(trainer, trainer.train_dataset, "train_dataset")
    max_length = data.find_length()
    job: dict[str, Any] = {
        "val_data": None,
        "batch_size": batch_size,
        "seed": int(arguments.seed),
        "clip_norm": float(arguments.max_grad_norm) if arguments.max_grad_norm else None,
        "precision": "bf16" if arguments.bf16 else "auto",
        "max_length": max_length,
    }
    num_batches = -(-len(data) // batch_size)
    epochs = float(arguments.num_train_epochs)
    job["max_steps"] = (
        int(arguments.max_steps) if arguments.max_steps > 0 else math.ceil(epochs * num_batches)
    )
    if trainer.eval_dataset is not None:
        held_out = _Columns.of(trainer, trainer.eval_dataset, "eval_dataset")
        job["max_length"] = max(max_length or 0, held_out.find_length() or 0) or None
        job["val_data"] = held_out.loader(batch_size)
        job["evaluate_every"] = _find_eval_steps(arguments, job["max_steps"])
    if "optimizer" not in changes:
        job["optimizer"], scheduler = _make_optimizer(trainer, job["max_steps"])
        job["schedule"] = per_update(scheduler)
    if trainer.label_smoother is not None and "loss" not in changes:
        job |= _find_smoothed_loss(trainer, data.collate_first())
    if trainer.compute_metrics is not None:
        logger.warning("note: compute_metrics needs all predictions; give Job(metrics=...) functions instead")
    if arguments.gradient_checkpointing:
        logger.warning("note: gradient_checkpointing is not needed; a plan recomputes where memory is short")
    return Job(trainer.model, data.loader(batch_size), **job | changes)


def _make_optimizer(trainer: Any, max_steps: int) -> tuple[Any, Any]:
    """Return the trainer's optimizer and scheduler; AdamW of bitsandbytes becomes that of torch."""
    maker, chosen = copy.copy(trainer), str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if trainer.optimizer is None and chosen == "adafactor":
        problem = (
            "optim='adafactor' of the trainer is not taken over: it steps by the learning rate alone, and"
        )
        problem += " torch.optim.Adafactor by the rate times the size of the weights"
        fix = (
            "give optim='adamw_torch', or from_trainer(trainer, optimizer=...) with torch's and a rate for it"
        )
        raise ConfigError(f"{problem}; {fix}")
    if trainer.optimizer is None and chosen in _ADAMW:
        maker.args = copy.copy(trainer.args)
        maker.args.optim = type(trainer.args.optim)("adamw_torch")
        if "8bit" in chosen:
            told = (
                "note: %s is taken as torch.optim.AdamW; states=int8 of the plan keeps its moments in 8 bits"
            )
            logger.warning(f"{told} (--set states=int8, PlanConfig(states=StateFormat.INT8))", chosen)
    maker.create_optimizer_and_scheduler(num_training_steps=max_steps)
    return maker.optimizer, maker.lr_scheduler


def _find_smoothed_loss(trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss over smoothed labels as the trainer computes it, for a model that gives classes."""
    factor, kind = trainer.args.label_smoothing_factor, type(_find_base(trainer.model)).__name__
    labels = batch.get("labels")
    if labels is None:
        return {}  # nor does the trainer smooth any others
    if not kind.endswith(_CLASSIFIERS) or labels.is_floating_point():
        fix = "smooth the labels in a loss of your own: from_trainer(trainer, loss=...)"
        raise ConfigError(
            f"label_smoothing_factor={factor} of the trainer is not taken over for {kind}; {fix}"
        )
    return {"loss": smooth_labels(factor), "inputs": [name for name in batch if name != "labels"]}


def smooth_labels(factor: float) -> Callable[[Any, Mapping[str, Tensor]], Tensor]:
    """Return a loss over classes, of which each label has its share, and all together `factor`."""

    def smoothed_loss(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = out.logits.flatten(0, -2), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, label_smoothing=factor)

    return smoothed_loss


def _find_eval_steps(arguments: Any, max_steps: int) -> int | None:
    """Return the updates between two evaluations, if it is not by epochs; a share is one of all updates."""
    strategy = getattr(arguments.eval_strategy, "value", arguments.eval_strategy)
    steps = arguments.eval_steps
    if strategy != "steps" or not steps:
        return None
    return max(1, math.ceil(steps * max_steps) if steps < 1 else int(steps))


def _refuse_strange(trainer: Any, arguments: Any) -> None:
    for name, fix in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ConfigError(f"{name}={getattr(arguments, name)!r} of the trainer is not taken over; {fix}")
    if arguments.fp16:
        raise ConfigError("fp16=True of the trainer is not taken over; give bf16=True or neither")
    if trainer.train_dataset is None:
        raise ConfigError("the trainer has no train_dataset; give it one")


def _refuse_own_loss(trainer: Any) -> None:
    base: Any = next(kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    if type(trainer).compute_loss is not base.compute_loss or trainer.compute_loss_func is not None:
        fix = "give it as from_trainer(trainer, loss=...), a function of what the model returns and the batch"
        raise ConfigError(f"the trainer computes its loss in Python of its own; {fix}")


def _find_base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft


class _Columns(torch.utils.data.Dataset[Any]):
    """A dataset with the columns that the model takes, as the trainer would leave them."""

    def __init__(self, data: Any, wanted: frozenset[str] | None, collate: Any, num_workers: int) -> None:
        self._data, self._wanted, self._collate, self._num_workers = data, wanted, collate, num_workers

    @classmethod
    def of(cls, trainer: Any, data: Any, name: str) -> "_Columns":
        """Return the columns of one of the trainer's datasets."""
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, Mapping):
            raise ConfigError(f"the {name} of the trainer has no length and no index; give one that has both")
        names = inspect.signature(_find_base(trainer.model).forward).parameters
        wanted = frozenset((*names, *_LABELS)) if trainer.args.remove_unused_columns else None
        return cls(data, wanted, trainer.data_collator, int(trainer.args.dataloader_num_workers))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        sample = self._data[index]
        if self._wanted is None or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self._wanted}

    def find_length(self) -> int | None:
        """Return the length to which collated tokens are padded; None where all have one length."""
        tokens = (_tokens(self[index]) for index in range(len(self)))
        found = {len(ids) for ids in tokens if ids is not None}
        return round_up(max(found)) if len(found) > 1 else None

    def collate_first(self) -> Mapping[str, Any]:
        """Return a batch of the first sample."""
        found: Any = self._collate([self[0]])
        return found if isinstance(found, Mapping) else {}

    def loader(self, batch_size: int) -> "DataLoader[Any]":
        """Return the data with the trainer's collator."""
        workers = self._num_workers
        return DataLoader(self, batch_size=batch_size, collate_fn=self._collate, num_workers=workers)


def _tokens(sample: Any) -> Any:
    return sample.get("input_ids") if isinstance(sample, Mapping) else None
