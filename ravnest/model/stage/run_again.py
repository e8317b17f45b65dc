"""Run a function again in its backward, instead of keeping what it computed with.

torch.utils.checkpoint does the same, but its first call imports torch's compiler: 80 MB and some seconds of a
provider's PC, in the middle of a training.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Run = Callable[..., tuple[Tensor, ...]]


def run_again_in_backward(run: Run, given: Sequence[Tensor], *, keeps_random: bool) -> tuple[Tensor, ...]:
    """Return what a function makes of tensors; autograd keeps nothing but these.

    With `keeps_random` the second run draws the random numbers of the first.
    """
    again = _Again(run, given, keeps_random)
    with saved_tensors_hooks(again.pack, again.unpack):
        return run(*given)


class _Enough(Exception):  # noqa: N818 - nothing is wrong
    """The second run has made all that backward needs."""


class _Again:
    """Counts what autograd wants to save, and makes it anew when it is asked for."""

    def __init__(self, run: Run, given: Sequence[Tensor], keeps_random: bool) -> None:
        self._run, self._given = run, given
        self._num_saved = 0
        self._made: dict[int, Tensor] = {}
        self._random = _read_random() if keeps_random else None

    def pack(self, _: Tensor) -> int:
        """Keep the number in place of a tensor."""
        self._num_saved += 1
        return self._num_saved - 1

    def unpack(self, number: int) -> Tensor:
        """Return a tensor once, after a second run for all of them."""
        if number not in self._made:
            self._made = self._make()
        return self._made.pop(number)

    def _make(self) -> dict[int, Tensor]:
        made: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> None:
            made[len(made)] = tensor.detach()
            if len(made) == self._num_saved:
                raise _Enough

        fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._given]
        with contextlib.ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(torch.random.fork_rng())
                _write_random(self._random)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, _never))
            stack.enter_context(contextlib.suppress(_Enough))
            self._run(*fresh)
        if len(made) != self._num_saved:
            problem = f"a second run saved {len(made)} tensors for its backward, the first {self._num_saved}"
            raise RuntimeError(problem)
        return made


def _never(_: object) -> NoReturn:
    raise RuntimeError("the second run has a backward of its own")


_RandomState = tuple[Tensor, list[Tensor]]


def _read_random() -> _RandomState:
    has_gpus = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if has_gpus else []


def _write_random(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
