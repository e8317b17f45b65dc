"""Ravnest: train one model together on ordinary, unequal PCs over the internet.

Names are loaded when they are first used, so that importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ravnest.config import PlanConfig
    from ravnest.engine.train_config import AveragingRule
    from ravnest.hub.coordinator import notice_texts as notices
    from ravnest.model.capture.capture import capture, empty_weights
    from ravnest.requester.callbacks import CsvLog, EarlyStopping, StopTraining, TensorBoard
    from ravnest.requester.finetuning.finetune import finetune
    from ravnest.requester.finetuning.merging import merge_adapter
    from ravnest.requester.from_lightning import from_lightning
    from ravnest.requester.from_trainer import from_trainer
    from ravnest.requester.generation import generate
    from ravnest.requester.job import Job
    from ravnest.requester.lr_schedules import constant, cosine, linear, per_epoch, per_update
    from ravnest.requester.session import Hub, local

__all__ = [
    "AveragingRule",
    "CsvLog",
    "EarlyStopping",
    "Hub",
    "Job",
    "PlanConfig",
    "StopTraining",
    "TensorBoard",
    "capture",
    "constant",
    "cosine",
    "empty_weights",
    "finetune",
    "from_lightning",
    "from_trainer",
    "generate",
    "linear",
    "local",
    "merge_adapter",
    "notices",
    "per_epoch",
    "per_update",
]

_PLACES = {
    "AveragingRule": "ravnest.engine.train_config",
    "CsvLog": "ravnest.requester.callbacks",
    "EarlyStopping": "ravnest.requester.callbacks",
    "Hub": "ravnest.requester.session",
    "Job": "ravnest.requester.job",
    "PlanConfig": "ravnest.config",
    "StopTraining": "ravnest.requester.callbacks",
    "TensorBoard": "ravnest.requester.callbacks",
    "capture": "ravnest.model.capture.capture",
    "constant": "ravnest.requester.lr_schedules",
    "cosine": "ravnest.requester.lr_schedules",
    "empty_weights": "ravnest.model.capture.capture",
    "finetune": "ravnest.requester.finetuning.finetune",
    "from_lightning": "ravnest.requester.from_lightning",
    "from_trainer": "ravnest.requester.from_trainer",
    "generate": "ravnest.requester.generation",
    "linear": "ravnest.requester.lr_schedules",
    "local": "ravnest.requester.session",
    "merge_adapter": "ravnest.requester.finetuning.merging",
    "per_epoch": "ravnest.requester.lr_schedules",
    "per_update": "ravnest.requester.lr_schedules",
}


_MODULES = {
    "notices": "ravnest.hub.coordinator.notice_texts"
}  # public as a whole: records and their sentences


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _PLACES:
        raise AttributeError(f"module 'ravnest' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
