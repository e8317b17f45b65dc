"""Ravnest: train one model together on ordinary, unequal PCs over the internet.

Names are loaded when they are first used, so that importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ravnest.engine.training import AveragingRule
    from ravnest.job.callbacks import CsvLog, TensorBoard
    from ravnest.job.job import Job
    from ravnest.job.rates import constant, cosine, linear
    from ravnest.job.swarm import Hub, local
    from ravnest.model.capture import capture, empty_weights

__all__ = [
    "AveragingRule",
    "CsvLog",
    "Hub",
    "Job",
    "TensorBoard",
    "capture",
    "constant",
    "cosine",
    "empty_weights",
    "linear",
    "local",
]

_PLACES = {
    "AveragingRule": "ravnest.engine.training",
    "CsvLog": "ravnest.job.callbacks",
    "Hub": "ravnest.job.swarm",
    "Job": "ravnest.job.job",
    "TensorBoard": "ravnest.job.callbacks",
    "capture": "ravnest.model.capture",
    "constant": "ravnest.job.rates",
    "cosine": "ravnest.job.rates",
    "empty_weights": "ravnest.model.capture",
    "linear": "ravnest.job.rates",
    "local": "ravnest.job.swarm",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'ravnest' has no attribute {name!r}; it has {', '.join(_PLACES)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
