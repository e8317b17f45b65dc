"""Complex numbers as pairs of real ones, while a model is exported: no program has complex tensors.

Rotary embeddings are often written so: `view_as_complex(x) * polar(1, angle)`. What such code does with
complex tensors, a pair does too; anything else ends with Python's own words.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ravnest.model.export_hazards import replaced


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
