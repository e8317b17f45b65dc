"""Matrices made orthogonal by the iteration of Newton and Schulz, as Muon needs them."""

import math

import torch
from torch import Tensor

_ITERATION = (3.4445, -4.7750, 2.0315)  # of Newton and Schulz: lifts small singular values fast
_NUM_ITERATIONS = 5
_BATCH_ITEMS = 1 << 26  # of matrices that go together: their copies take 128 MB


def orthogonalise(precision: str, epsilon: float, matrices: list[Tensor]) -> list[Tensor]:
    """Return the matrices with singular values near 1; those of one shape go through one product together."""
    found: dict[int, Tensor] = {}
    shapes: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        shapes.setdefault(tuple(matrix.shape), []).append(place)
    for shape, places in shapes.items():
        num_together = max(1, _BATCH_ITEMS // math.prod(shape))
        for low in range(0, len(places), num_together):
            some = places[low : low + num_together]
            found.update(
                zip(
                    some,
                    orthogonalise_one(precision, epsilon, torch.stack([matrices[at] for at in some])),
                    strict=True,
                )
            )
    return [found[place] for place in range(len(matrices))]


def orthogonalise_one(precision: str, epsilon: float, matrix: Tensor) -> Tensor:
    """Return the matrix, or each of several, with singular values near 1."""
    is_exact = precision == "float32" or (precision == "auto" and matrix.device.type == "cpu")
    first, second, third = _ITERATION
    is_tall, is_one = matrix.shape[-2] > matrix.shape[-1], matrix.ndim == 2
    add_product = torch.addmm if is_one else torch.baddbmm
    result = matrix.to(torch.float32 if is_exact else torch.bfloat16)
    result = result.mT if is_tall else result
    norm = result.norm() if is_one else result.flatten(1).norm(dim=1)[:, None, None]
    result = result / norm.clamp(min=epsilon)
    del matrix
    for _ in range(_NUM_ITERATIONS):
        square = result @ result.mT
        polynomial = add_product(square, square, square, beta=second, alpha=third)
        result = add_product(result, polynomial, result, beta=first)
    return result.mT if is_tall else result
