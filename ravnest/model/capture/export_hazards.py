"""What torch.export would drop without a word or cannot say: rewritten while the model runs, or refused.

A backward written in Python, a buffer replaced by another tensor, a number kept in Python, randomness that is
not torch's: each would give a program that computes something else than the module. Each is refused, at the
line that does it where that can be known. What can be said otherwise is rewritten: complex numbers as pairs,
bags of embeddings as rows, a closed attention as one operation whose size is asked for.
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey

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


_embedding_bag = F.embedding_bag
_ATTENTION_DIMENSIONS = 4  # rows, heads, places, features


class ComplexPair:
    """A complex tensor: real and imaginary parts along the last dimension of `parts`.

    Rotary embeddings are often complex: `view_as_complex(x) * polar(1, angle)`. A pair of real numbers does
    the same; what else such code does with complex tensors ends with Python's own words.
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    @property
    def real(self) -> Tensor:
        """The real parts."""
        return self.parts.select(-1, 0)

    @property
    def imag(self) -> Tensor:
        """The imaginary parts."""
        return self.parts.select(-1, 1)

    @property
    def shape(self) -> torch.Size:
        """The shape without the parts."""
        return self.parts.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of dimensions without the parts."""
        return self.parts.ndim - 1

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.parts.device

    def __mul__(self, other: Any) -> "ComplexPair":
        if not isinstance(other, ComplexPair):
            return ComplexPair(self.parts * (other.unsqueeze(-1) if isinstance(other, Tensor) else other))
        real = self.real * other.real - self.imag * other.imag
        return ComplexPair(torch.stack([real, self.real * other.imag + self.imag * other.real], dim=-1))

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> "ComplexPair":
        whole = index if isinstance(index, tuple) else (index,)
        return ComplexPair(self.parts[(*whole, slice(None))] if Ellipsis in whole else self.parts[whole])

    def unsqueeze(self, dim: int) -> "ComplexPair":
        """Return it with one more dimension."""
        return ComplexPair(self.parts.unsqueeze(dim if dim >= 0 else dim - 1))

    def view(self, *shape: int) -> "ComplexPair":
        """Return it in another shape."""
        return ComplexPair(self.parts.reshape(*shape, 2))

    reshape = view

    def conj(self) -> "ComplexPair":
        """Return it with the other sign of the imaginary parts."""
        return ComplexPair(torch.stack([self.real, -self.imag], dim=-1))

    def to(self, device: torch.device | str) -> "ComplexPair":
        """Return it on a device."""
        return ComplexPair(self.parts.to(device))


@contextlib.contextmanager
def complex_as_pairs() -> Iterator[None]:
    """Let what makes complex tensors make pairs."""
    view_as_real = torch.view_as_real

    def read(given: Any) -> Tensor:
        return given.parts if isinstance(given, ComplexPair) else view_as_real(given)

    def polar(size: Tensor, angle: Tensor) -> ComplexPair:
        return ComplexPair(torch.stack([size * torch.cos(angle), size * torch.sin(angle)], dim=-1))

    with (
        replaced(torch, "polar", polar),
        replaced(torch, "view_as_complex", ComplexPair),
        replaced(torch, "view_as_real", read),
    ):
        yield


@contextlib.contextmanager
def plain_bags() -> Iterator[None]:
    """Let embedding bags run for export as an embedding and what becomes of a row."""
    with replaced(F, "embedding_bag", _read_rows):
        yield


def _read_rows(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    *rest: Any,
    **options: Any,
) -> Tensor:
    given = ("sparse", "per_sample_weights", "include_last_offset", "padding_idx")
    options |= dict(zip(given, rest, strict=False))
    factors, padding = options.get("per_sample_weights"), options.get("padding_idx")
    is_plain = rows.ndim == 2 and not (max_norm or scale_grad_by_freq or options.get("sparse"))
    if not is_plain or (mode == "max" and padding is not None):
        return _embedding_bag(rows, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, **options)
    found = F.embedding(rows, weight, padding)
    if mode == "max":
        return found.amax(dim=1)
    is_counted = None if padding is None else (rows != padding % weight.shape[0])[..., None].to(found.dtype)
    found = found if is_counted is None else found * is_counted
    total = (found if factors is None else found * factors[..., None]).sum(dim=1)
    if mode == "sum":
        return total
    return total / (rows.shape[1] if is_counted is None else is_counted.sum(dim=1).clamp_min(1.0))


@contextlib.contextmanager
def closed_attention() -> Iterator[None]:
    """Let an export take what attention returns to be of the query's size, and not run its insides.

    These are a third of an export's time: each size in them is a formula. Other threads see them as before.
    """
    attention, key = (
        torch.ops.aten.scaled_dot_product_attention.default,
        DispatchKey.CompositeImplicitAutograd,
    )
    thread = threading.get_ident()

    def attend(query: Tensor, *others: Any, **keywords: Any) -> Tensor:
        is_plain = len(others) > 1 and query.dim() == others[1].dim() == _ATTENTION_DIMENSIONS
        if threading.get_ident() == thread and is_plain and _has_size_of(query, *others[:2]):
            return query.clone(memory_format=torch.contiguous_format)
        found: Tensor = attention._op_dk(key, query, *others, **keywords)
        return found

    if key in attention.py_kernels:
        yield
        return
    attention.py_impl(key)(attend)
    try:
        yield
    finally:
        del attention.py_kernels[key]
        attention._dispatch_cache.clear()


def _has_size_of(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether these fit each other, and give what has the size and the type of the query."""
    fits = keys.shape[-1] == query.shape[-1] == values.shape[-1] and keys.shape[-2] == values.shape[-2]
    return bool(fits and query.dtype == keys.dtype == values.dtype and query.shape[0] == keys.shape[0])
