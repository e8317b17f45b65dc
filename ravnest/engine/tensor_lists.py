"""Lists of tensors at once: their types, how long each is, and whether all their numbers are finite."""

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


def find_not_finite(tensors: Mapping[Key, Tensor], norms: list[float] | None = None) -> Key | None:
    """Return the first key whose tensor holds an infinity or no number at all; their norms may be known."""
    # The norm is twenty times faster than a look at each number, but may overflow without an infinity.
    pairs = zip(tensors.items(), norms or find_norms(list(tensors.values())), strict=True)
    suspects = (pair for pair, norm in pairs if not math.isfinite(norm))
    return next((key for key, tensor in suspects if not tensor.isfinite().all()), None)


def cast_together(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in this type, those that are not yet in one launch."""
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype is not dtype]
    if not places or tensors[0].device.type != "cuda":
        return [tensor.to(dtype) for tensor in tensors]
    wide = [torch.empty_like(tensors[place], dtype=dtype) for place in places]
    torch._foreach_copy_(wide, [tensors[place] for place in places])
    found = dict(zip(places, wide, strict=True))
    return [found.get(place, tensor) for place, tensor in enumerate(tensors)]


def find_norms(tensors: list[Tensor]) -> list[float]:
    """Return how long each tensor is."""
    return [float(norm) for norm in torch.stack(measure_norms(tensors)).tolist()] if tensors else []


def measure_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return how long each tensor is, still on its device."""
    if not tensors:
        return []
    found: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # in one launch, if they are of one type
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
        some = [tensors[place] for place in places]
        is_narrow = dtype is torch.bfloat16
        norms = torch._foreach_norm(some, dtype=torch.float32) if is_narrow else torch._foreach_norm(some)
        found.update(zip(places, norms, strict=True))
    return [found[place] for place in range(len(tensors))]
