"""Bags of embeddings, written with the operators that providers run.

A bag is a row of numbers; its embeddings are added, averaged, or the largest taken. Rows of one length are a
tensor like any other. Bags of different lengths come as offsets: sizes that follow from values stay refused.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ravnest.model.export_hazards import replaced

_embedding_bag = F.embedding_bag


@contextlib.contextmanager
def plain_bags() -> Iterator[None]:
    """Let embedding bags run for export as an embedding and what becomes of a row."""
    with replaced(F, "embedding_bag", _read_rows):
        yield


def _read_rows(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
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
