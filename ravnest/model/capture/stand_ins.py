"""Weights for a model that has none: each parameter is a view of one tensor as large as the largest.

So a model that is larger than this PC can run on a few tokens. Of each gradient three sums are kept as soon
as it is there, and it is gone: no two of them exist at once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

_SEED = 20_263
_STEPS = (2, 3, 5)  # of the numbers that a sum takes in
_SCALE = 0.02  # of matrices; gains of norms lie as close to one


class StandIns:
    """Stand-ins for the parameters of a module that have no values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        empty = [each for each in module.parameters() if each.is_meta]
        draw = torch.Generator().manual_seed(_SEED)
        most = max((each.numel() for each in empty), default=0)
        noise = _SCALE * torch.randn(most, generator=draw)
        self._flat = {(dtype, False): noise.to(dtype) for dtype in {each.dtype for each in empty}}
        rows = max((each.numel() for each in empty if each.ndim < 2), default=0)
        gains = 1 + noise[:rows]
        self._flat |= {(dtype, True): gains.to(dtype) for dtype in {each.dtype for each in empty}}
        self._made: dict[int, nn.Parameter] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """Return the stand-in of a parameter; one with values is its own."""
        if not parameter.is_meta:
            return parameter
        if id(parameter) not in self._made:
            flat = self._flat[parameter.dtype, parameter.ndim < 2][: parameter.numel()]
            made = nn.Parameter(flat.view(parameter.shape), requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = made
        return self._made[id(parameter)]

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Put them into the module for a while."""
        held = [(module, dict(module._parameters)) for module in self._module.modules()]
        for module, parameters in held:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = self.of(parameter)  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, parameters in held:
                module._parameters.update(parameters)

    @contextlib.contextmanager
    def summing(self, leaves: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Sum up the gradient of each leaf by a few numbers when backward has made it, and drop it."""
        found: dict[str, Tensor] = {}

        def sum_up(name: str, leaf: Tensor) -> None:
            assert leaf.grad is not None
            flat = leaf.grad.flatten().float()
            found[name] = torch.stack([flat[index::step].sum() for index, step in enumerate(_STEPS)])
            leaf.grad = None

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(sum_up, name))  # type: ignore[no-untyped-call]
            for name, leaf in leaves.items()
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
