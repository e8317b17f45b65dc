"""Sketches: a few numbers that tell whether two machines hold the same weights, up to rounding.

Of each tensor a sketch has its norm and three sums of its items, each item with a sign that depends on a key.
The difference of two such sums is as large as the difference of the tensors, whoever made them and wherever;
so other hardware and other formats make no other sketch, and other weights do. Who does not know the key
cannot make other weights of the same sketch. Signs are products of one per row and one per column of 1,024
items, so a sketch costs little more than to read the weights once.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from ravnest.protocol.placement import SKETCH_VALUES

_COLUMNS = 1024
_ROWS = 1 << 12  # at a time, so that no copy of a large tensor is made


def sketch_tensors(tensors: Mapping[str, Tensor], names: Iterable[str], key: bytes) -> bytes:
    """Return the sketch of the named tensors, in the order of their names."""
    found = [_sketch(tensors[name], name, key) for name in sorted(names)]
    values = torch.stack(found) if found else torch.empty(0, SKETCH_VALUES)
    return values.to(torch.float32).numpy().astype("<f4").tobytes()


@torch.no_grad()
def _sketch(tensor: Tensor, name: str, key: bytes) -> Tensor:
    """Return the norm of a tensor and its sums with keyed signs, in float64."""
    items = tensor.detach().reshape(-1)
    num_sums, num_rows = SKETCH_VALUES - 1, -(-items.numel() // _COLUMNS)
    seed = int.from_bytes(blake2b(key + name.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    columns = _signs((_COLUMNS, num_sums), generator).to(items.device)
    total = torch.zeros(SKETCH_VALUES, dtype=torch.float64)
    for first in range(0, num_rows, _ROWS):
        part = items[first * _COLUMNS : (first + _ROWS) * _COLUMNS].to(torch.float32)
        rest = -part.numel() % _COLUMNS
        rows = (torch.cat((part, part.new_zeros(rest))) if rest else part).view(-1, _COLUMNS)
        signs = _signs((rows.shape[0], num_sums), generator)
        sums = (rows @ columns).cpu().double() * signs.double()
        total[0] += rows.square().sum(1).double().sum().item()
        total[1:] += sums.sum(0)
    total[0] = total[0].sqrt()
    return total


def _signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8).to(torch.float32) * 2 - 1
