"""What torch.export would drop without a word, caught while the model runs.

A backward written in Python, a buffer replaced by another tensor, a number kept in Python, randomness that is
not torch's: each would give a program that computes something else than the module. Each is refused, at the
line that does it where that can be known.
"""

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ravnest.errors import CaptureError
from ravnest.model.capture.capture_errors import refuse_here

_SetAttribute = Callable[[nn.Module, str, Any], None]

_PYTHON_DRAWS = (
    "random",
    "randint",
    "randrange",
    "uniform",
    "choice",
    "choices",
    "sample",
    "shuffle",
    "gauss",
)
_NUMPY_DRAWS = ("rand", "randn", "random", "randint", "uniform", "choice", "normal", "permutation", "shuffle")
_OUTSIDE_TORCH = (
    "it draws random numbers outside torch, so every batch would take the branch of the first",
    "draw them with torch: a mask like torch.rand(...) < p instead of an if",
)


@contextlib.contextmanager
def traps(plain: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Refuse such code while a model is exported.

    `plain` has functions to run instead of autograd functions, by their full name.
    """
    known = plain or {}

    def apply(function: type, *arguments: Any, **keywords: Any) -> Any:
        instead = known.get(f"{function.__module__}.{function.__name__}", None)
        return instead(*arguments, **keywords) if instead else _refuse_function(function)

    with (
        watched(),
        replaced(torch.autograd.Function, "apply", classmethod(apply)),
        replaced(torch.Tensor, "register_hook", _refuse_hook),
    ):
        yield


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Refuse what must not happen in a plain run either, where torch itself may use the rest."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, "backward", _refuse_step))
        stack.enter_context(replaced(torch.optim.Optimizer, "zero_grad", _refuse_step))
        stack.enter_context(replaced(nn.Module, "__setattr__", _watch_buffers(nn.Module.__setattr__)))
        for module, names in ((random, _PYTHON_DRAWS), (np.random, (*_NUMPY_DRAWS, "default_rng"))):
            for name in names:
                stack.enter_context(replaced(module, name, _refuse_draws(vars(module)[name])))
        yield


@contextlib.contextmanager
def fixed_numbers() -> Iterator[None]:
    """Refuse a module that counts in Python; runs of one batch, so each ends with the numbers before it."""
    changed: dict[tuple[nn.Module, str], tuple[object, CaptureError]] = {}
    with replaced(nn.Module, "__setattr__", _watch_numbers(nn.Module.__setattr__, changed)):
        yield
    for (module, name), (before, refusal) in changed.items():
        if vars(module).get(name) != before:
            raise refusal


@contextlib.contextmanager
def fixed_generators() -> Iterator[None]:
    """Refuse a model if anything but torch drew random numbers, by whatever name it did."""
    drawn = [(thing, _DRAWN[type(thing)]) for thing in gc.get_objects() if type(thing) in _DRAWN]
    before = [state_of(thing) for thing, state_of in drawn]
    yield
    if [state_of(thing) for thing, state_of in drawn] != before:
        raise CaptureError(f"the model cannot be captured: {'; '.join(_OUTSIDE_TORCH)}")


_DRAWN: dict[type, Callable[[Any], Any]] = {
    random.Random: lambda thing: thing.getstate(),
    np.random.Generator: lambda thing: str(thing.bit_generator.state),
    np.random.RandomState: lambda thing: str(thing.get_state(legacy=False)),
}


@contextlib.contextmanager
def replaced(owner: type | ModuleType, name: str, value: object) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _refuse_function(function: type) -> Any:
    if function.__name__ == "CheckpointFunction":
        raise refuse_here("torch.utils.checkpoint is used in its reentrant form", "pass use_reentrant=False")
    if function.__name__ == "BackwardHookFunction":
        raise refuse_here("a backward hook is Python code, which providers do not run", "remove the hook")
    raise refuse_here(
        f"the autograd function {function.__name__} has a backward of its own, which is Python code",
        "write it with tensor operations: x + (f(x) - x).detach() is a straight-through estimator",
    )


def _refuse_hook(*_: Any, **__: Any) -> Any:
    raise refuse_here("a hook on a tensor is Python code, which providers do not run", "remove the hook")


def _refuse_step(*_: Any, **__: Any) -> Any:
    raise refuse_here(
        "the model trains itself while it runs (backward() or an optimizer)",
        "return the loss, and leave backward and the update to Ravnest",
    )


def _refuse_draws(draw: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()  # others may draw: a hub may answer its peers meanwhile

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        if threading.get_ident() != thread:
            return draw(*arguments, **keywords)
        raise refuse_here(*_OUTSIDE_TORCH)

    return refuse


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


def _watch_numbers(
    set_attribute: _SetAttribute, changed: dict[tuple[nn.Module, str], tuple[object, CaptureError]]
) -> _SetAttribute:
    """Take note of the numbers that change, with what they were at first and how to refuse that."""

    def set_watched(module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get(name)
        is_new = isinstance(before, int | float) and before != value and name != "training"
        if is_new and (module, name) not in changed:
            refusal = refuse_here(
                f"the number self.{name} changes from batch to batch, which export would forget",
                f"keep it in a buffer that is changed in place (self.{name}.add_(1)), or out of the model",
            )
            changed[module, name] = before, refusal
        set_attribute(module, name, value)

    return set_watched
