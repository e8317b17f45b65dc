"""A job from a LightningModule: its training_step is the loss, its optimizer and scheduler become numbers.

Lightning itself is not needed: what is used is found by name. What cannot run on other PCs, or would run
another way there, is refused with the way out.
"""

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ravnest.errors import ConfigError
from ravnest.model.capture.model_with_loss import name_fields
from ravnest.requester.dataset import Samples, show_thing
from ravnest.requester.job import Job
from ravnest.requester.lr_schedules import per_epoch, per_update

logger = logging.getLogger(__name__)

_OF_LIBRARIES = ("lightning.", "lightning_fabric.", "pytorch_lightning.", "torch.")
_CHANGES_TRAINING = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
_OF_TRAINER = r"\bself\s*\.\s*(trainer|current_epoch|global_step|optimizers|manual_backward|lr_schedulers)\b"
_CALLBACKS = {"EarlyStopping", "StochasticWeightAveraging", "GradientAccumulationScheduler"}
_PRECISIONS = {"32": "auto", "32-true": "auto", "None": "auto", "bf16-mixed": "bf16", "bf16": "bf16"}


def from_lightning(
    module: nn.Module, *, trainer: Any = None, datamodule: Any = None, train_data: Any = None, **changes: Any
) -> Job:
    """Return the job that a LightningModule describes; `changes` are arguments of Job that differ.

    Data is `train_data` (and `val_data=`), or what the loaders of the datamodule or of the module give.
    `trainer` says how long and how: epochs, steps, accumulation, clipping, precision, evaluations.
    """
    _refuse_strange(module)
    loader, held_out = _find_data(module, datamodule, train_data, changes.pop("val_data", None))
    job: dict[str, Any] = _read_optimizers(module)
    num_together = 1
    if trainer is not None:
        num_together = int(getattr(trainer, "accumulate_grad_batches", 1) or 1)
    if num_together > 1:
        loader = _enlarge(loader, num_together)
    if trainer is not None:
        job |= _read_trainer(trainer, loader)
    batch = Samples(loader, 1).first_batch()
    is_tuple = not isinstance(batch, Mapping)
    step = _as_steps(module, is_tuple=is_tuple)
    metrics = _find_metrics(step, batch) if held_out is not None else ()
    job |= {
        "val_data": held_out,
        "inputs": list(name_fields(batch, None)),
        "loss": _loss_of,
        "metrics": {name: _Logged(name) for name in metrics},
        "name": type(module).__name__[:64],
    }
    if "optimizer" in changes and "schedule" not in changes:
        job["schedule"] = None
    return Job(step, loader, **job | changes)


# ---- what is refused


def _refuse_strange(module: Any) -> None:
    name = type(module).__name__
    for needed in ("training_step", "configure_optimizers"):
        if not callable(getattr(module, needed, None)):
            raise ConfigError(f"{name} has no {needed}; give a LightningModule, or rv.Job(model, data, ...)")
    if getattr(module, "automatic_optimization", True) is False:
        problem = f"{name} optimizes by hand (automatic_optimization=False)"
        raise ConfigError(f"{problem}; a job makes its updates itself, with one optimizer and one loss")
    for hook in _CHANGES_TRAINING:
        if _is_own(module, hook):
            fix = "leave it out; clip_norm, schedule, loss and the dataset say the same in a job"
            raise ConfigError(f"{name}.{hook} is code that runs during training, which a job has not; {fix}")
    for method in ("training_step", "validation_step"):
        used = re.search(_OF_TRAINER, _source_of(module, method))
        if used:
            problem = f"{name}.{method} uses self.{used[1]}, which stands still when the step is captured"
            raise ConfigError(f"{problem}; write the step without it")
    hooks = sorted(x for x in dir(module) if x.startswith("on_") and x != "on_gpu" and _is_own(module, x))
    if hooks:
        logger.warning("note: %s of %s are not called; see rv.notices", ", ".join(hooks), name)


def _is_own(module: Any, method: str) -> bool:
    """Return whether a class of the requester's defines a method, not the library."""
    kinds = (each for each in type(module).__mro__ if method in vars(each))
    kind = next(kinds, None)
    return kind is not None and not f"{kind.__module__}.".startswith(_OF_LIBRARIES)


def _source_of(module: Any, method: str) -> str:
    if not _is_own(module, method):
        return ""
    try:
        return inspect.getsource(getattr(type(module), method))
    except (OSError, TypeError):  # it was typed in
        return ""


# ---- data


def _find_data(module: Any, datamodule: Any, train_data: Any, val_data: Any) -> tuple[Any, Any]:
    if train_data is not None:
        return train_data, val_data
    source = module
    if datamodule is not None:
        source = datamodule
        for method in ("prepare_data", "setup"):
            if callable(found := getattr(datamodule, method, None)):
                found(*(("fit",) if method == "setup" else ()))
    loader = source.train_dataloader() if _is_own(source, "train_dataloader") else None
    if loader is None:
        fix = "give train_data=loader, datamodule=..., or define train_dataloader"
        raise ConfigError(f"{type(source).__name__} has no train_dataloader; {fix}")
    held_out = source.val_dataloader() if val_data is None and _is_own(source, "val_dataloader") else val_data
    return _only_one(loader, "train_dataloader"), _only_one(held_out, "val_dataloader")


def _only_one(loader: Any, name: str) -> Any:
    if isinstance(loader, list | tuple | dict) and any(isinstance(x, DataLoader) for x in loader):
        if len(loader) == 1 and not isinstance(loader, dict):
            return loader[0]
        raise ConfigError(f"{name} gives {len(loader)} loaders; give one")
    return loader


def _enlarge(loader: Any, num_together: int) -> Any:
    """Return the loader with batches of one update: those of so many steps."""
    if not isinstance(loader, DataLoader) or not loader.batch_size:
        raise ConfigError("accumulate_grad_batches needs a DataLoader; set batch_size= of one update instead")
    options: dict[str, Any] = {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size * num_together,
        worker_init_fn=loader.worker_init_fn,
        **options,
    )


# ---- optimizer and trainer


def _read_optimizers(module: Any) -> dict[str, Any]:
    found: Any = module.configure_optimizers()
    schedulers: Any = ()
    if isinstance(found, Mapping):
        found, schedulers = found.get("optimizer"), found.get("lr_scheduler", ())
    elif isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedulers = found
    optimizers = list(found) if isinstance(found, list | tuple) else [found]
    only: Any = optimizers[0] if len(optimizers) == 1 else None
    if isinstance(only, Mapping):
        schedulers, optimizers = only.get("lr_scheduler", ()), [only.get("optimizer")]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        shown = f"{len(optimizers)} optimizers" if len(optimizers) > 1 else show_thing(optimizers[0])
        fix = "return one of torch.optim, with or without a scheduler"
        raise ConfigError(f"configure_optimizers of {type(module).__name__} returned {shown}; {fix}")
    return {"optimizer": optimizers[0], "schedule": _read_scheduler(schedulers)}


def _read_scheduler(schedulers: Any) -> Any:
    several = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    if len(several) > 1:
        raise ConfigError(f"configure_optimizers returned {len(several)} schedulers; return one")
    if not several or several[0] is None:
        return None
    scheduler: Any = several[0]
    interval = "epoch"
    if isinstance(scheduler, Mapping):
        if scheduler.get("frequency", 1) != 1:
            problem = f"a scheduler has frequency={scheduler['frequency']}"
            raise ConfigError(f"{problem}; give one that steps each time, or schedule=")
        scheduler, interval = scheduler.get("scheduler"), scheduler.get("interval", "epoch")
    return per_update(scheduler) if interval == "step" else per_epoch(scheduler)


def _read_trainer(trainer: Any, loader: Any) -> dict[str, Any]:
    for name in ("limit_train_batches", "limit_val_batches", "overfit_batches"):
        if getattr(trainer, name, None) not in (None, 0, 0.0, 1.0):
            raise ConfigError(f"{name} of the trainer is not taken over; give less data instead")
    job: dict[str, Any] = {}
    steps, epochs = getattr(trainer, "max_steps", -1), getattr(trainer, "max_epochs", None)
    if isinstance(steps, int) and steps > 0:
        job["max_steps"] = steps
    elif isinstance(epochs, int) and epochs > 0:
        job["epochs"] = epochs
    if clip := getattr(trainer, "gradient_clip_val", None):
        algorithm = str(getattr(trainer, "gradient_clip_algorithm", None) or "norm").lower()
        if not algorithm.endswith("norm"):
            raise ConfigError("gradient_clip_algorithm of the trainer is not taken over; clip by norm")
        job["clip_norm"] = float(clip)
    precision = str(getattr(trainer, "precision", None))
    if precision not in _PRECISIONS:
        problem = f"precision={precision!r} of the trainer is not taken over"
        raise ConfigError(f'{problem}; give "32-true" or "bf16-mixed"')
    kinds = {type(each).__name__ for each in getattr(trainer, "callbacks", None) or ()}
    if told := sorted(kinds & _CALLBACKS):
        logger.warning("note: callbacks that are not taken over: %s; see rv.EarlyStopping, ema=", told)
    every = _read_interval(getattr(trainer, "val_check_interval", None), loader)
    return job | {"precision": _PRECISIONS[precision], "evaluate_every": every}


def _read_interval(often: Any, loader: Any) -> int | None:
    """Return the updates between two evaluations; a share is one of the batches of an epoch."""
    if isinstance(often, int) and not isinstance(often, bool):
        return often
    return max(1, int(often * len(loader))) if isinstance(often, float) and often < 1 else None


# ---- the steps as a model


class _Recorder:
    """What a step logs, in place of a logger."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Keep a value."""
        self.found[name] = value

    def log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Keep some values."""
        self.found |= values


@contextlib.contextmanager
def _recording(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Let what the module logs be kept here; `self(...)` is its own forward meanwhile."""
    recorder, before = _Recorder(), {}
    put = {"log": recorder.log, "log_dict": recorder.log_dict, "_is_in_step": True}
    own = vars(module)
    before = {name: own[name] for name in put if name in own}
    own |= put
    try:
        yield recorder.found
    finally:
        for name in put:
            own.pop(name, None)
        own |= before


def _as_steps(module: nn.Module, *, is_tuple: bool) -> nn.Module:
    """Return the module, with the same parameters by the same names, whose forward is its steps."""
    kind: Any = type(module)

    def forward(self: Any, *parts: Any, **fields: Any) -> Any:
        if vars(self).get("_is_in_step"):
            return kind.forward(self, *parts, **fields)
        batch = tuple(fields.values()) if is_tuple else fields
        has_own = not self.training and _is_own(self, "validation_step")
        with _recording(self) as logged:
            returned = _call(self, "validation_step" if has_own else "training_step", batch)
            loss = _find_loss(returned, logged)
            if loss is None and has_own:
                loss = _find_loss(_call(self, "training_step", batch), {})
        if loss is None:
            raise ConfigError(f"training_step of {kind.__name__} returned no loss; return a tensor or a dict")
        numbers = _find_numbers(logged) if has_own else {}
        return {"loss": loss, **numbers}

    steps = copy.copy(module)
    # The class of a module says how it runs; the copy has the same parameters and modules.
    steps.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return steps


def _call(module: Any, name: str, batch: Any) -> Any:
    step = getattr(module, name)
    taken = [x for x in inspect.signature(step).parameters.values() if x.kind is not x.VAR_KEYWORD]
    return step(batch, 0) if len(taken) > 1 else step(batch)


def _find_loss(returned: Any, logged: Mapping[str, Any]) -> Any:
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(returned, Tensor):
        return returned
    return next((value for name, value in logged.items() if _plain(name) == "loss"), None)


def _find_numbers(logged: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {_plain(name): value for name, value in logged.items()}
    return {x: value.float() for x, value in found.items() if x != "loss" and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _plain(name: str) -> str:
    return re.sub(r"^(val|valid|validation)[_/]", "", name)


def _find_metrics(steps: nn.Module, batch: Any) -> tuple[str, ...]:
    """Return the names of what validation_step logs, as one batch shows it."""
    fields = name_fields(batch, None)
    was_training = steps.training
    steps.eval()
    try:
        with torch.no_grad():
            out = steps(**fields)
    finally:
        steps.train(was_training)
    return tuple(name for name in out if name != "loss")


def _loss_of(out: Mapping[str, Tensor], _: Any) -> Tensor:
    return out["loss"]


class _Logged:
    """A metric: what validation_step logged; in training nothing is logged, and nobody looks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, out: Mapping[str, Tensor], _: Any) -> Tensor:
        return out.get(self._name, out["loss"].detach() * 0)
