"""Rewrites while a model is exported: complex numbers as pairs, bags of embeddings as rows, closed attention.

Rotary embeddings are often complex: `view_as_complex(x) * polar(1, angle)`. A pair of real numbers does the
same; what else such code does with complex tensors ends with Python's own words. A bag is a row of numbers
whose embeddings are added, averaged, or the largest taken. Bags of different lengths come as offsets: sizes
that follow from values stay refused. An attention is one operation: only its size is asked for.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey

from ravnest.model.capture.export_hazards import replaced

_embedding_bag = F.embedding_bag
_ATTENTION_DIMENSIONS = 4  # rows, heads, places, features


class ComplexPair:
    """A complex tensor: real and imaginary parts along the last dimension of `parts`."""

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
