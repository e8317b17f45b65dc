"""What torch.export would drop without a word, caught while the model runs for export.

A backward written in Python, a buffer replaced by another tensor, randomness that is not torch's: each would
give a program that computes something else than the module. Each is refused at the line that does it.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ravnest.model.refusals import refuse_here

_SetAttribute = Callable[[nn.Module, str, Any], None]

_PYTHON_DRAWS = ("random", "randint", "randrange", "uniform", "choice", "choices", "sample", "shuffle")
_NUMPY_DRAWS = ("rand", "randn", "random", "randint", "uniform", "choice", "normal", "permutation", "shuffle")


@contextlib.contextmanager
def traps() -> Iterator[None]:
    """Refuse such code while the context lasts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch.autograd.Function, "apply", classmethod(_refuse_function)))
        stack.enter_context(_replaced(nn.Module, "__setattr__", _watch_buffers(nn.Module.__setattr__)))
        for module, names in ((random, _PYTHON_DRAWS), (np.random, _NUMPY_DRAWS)):
            for name in names:
                stack.enter_context(_replaced(module, name, _refuse_randomness))
        yield


@contextlib.contextmanager
def _replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _refuse_function(function: type, *_: Any, **__: Any) -> Any:
    if function.__name__ == "CheckpointFunction":
        raise refuse_here("torch.utils.checkpoint is used in its reentrant form", "pass use_reentrant=False")
    if function.__name__ == "BackwardHookFunction":
        raise refuse_here("a backward hook is Python code, which providers do not run", "remove the hook")
    raise refuse_here(
        f"the autograd function {function.__name__} has a backward of its own, which is Python code",
        "write it with tensor operations: x + (f(x) - x).detach() is a straight-through estimator",
    )


def _refuse_randomness(*_: Any, **__: Any) -> Any:
    raise refuse_here(
        "it draws a random number outside torch, so every batch would take the branch of the first",
        "draw it with torch: a mask like torch.rand(...) < p instead of an if",
    )


def _watch_buffers(set_attribute: _SetAttribute) -> _SetAttribute:
    def set_watched(module: nn.Module, name: str, value: Any) -> None:
        buffers = module.__dict__.get("_buffers", {})
        if name in buffers and value is not buffers[name]:
            raise refuse_here(
                f"buffer {name!r} is replaced by another tensor, which export would forget",
                f"change it in place: self.{name}.copy_(...) or .add_(...)",
            )
        set_attribute(module, name, value)

    return set_watched
