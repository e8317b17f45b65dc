"""FLOPs of the kernels that torch's own counter does not know."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(_: torch.Size, *shapes: torch.Size, **__: object) -> int:
    # Five products instead of two: the scores are computed again, as torch counts its other flash kernels.
    query, key, value = shapes[:3]
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


UNCOUNTED_BY_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def recurrent_flops(weights: Iterable[Tensor], sequence: Tensor) -> int:
    """Return the FLOPs of a fused recurrent kernel: each weight is used once per sample and step."""
    return 2 * prod(sequence.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() > 1)
