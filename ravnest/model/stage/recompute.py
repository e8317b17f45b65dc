"""Recompute: a stage keeps less between forward and backward, and computes it again just before its backward.

A program is cut into blocks, where little crosses. A microbatch in flight then holds what crosses between
blocks; a backward holds the insides of one block. More blocks hold more of the former and less of the latter.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ravnest.model.blueprint.aliasing import Storages
from ravnest.model.blueprint.program import Program, Size, ValueId

_TYPICAL_BATCH = 8  # for comparing sizes
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class ProgramBlock:
    """A part of a program: `program.inputs` are what it uses of blocks before it and of what arrived."""

    program: Program

    @property
    def state(self) -> tuple[ValueId, ...]:
        """The state it uses."""
        return tuple(value for value, _ in self.program.state)


def find_blocks(program: Program, window: int) -> list[ProgramBlock]:
    """Return the blocks of a program, for so many microbatches in flight."""
    storages = Storages(program)
    ends = {*program.outputs, *(value for _, value in program.results)}
    made: dict[ValueId, int] = {}
    last_use = dict.fromkeys(ends, len(program.ops))
    for place, op in enumerate(program.ops):
        made.update((out, place) for out in op.outs if out is not None)
        for value in op.refs():
            last_use[value] = max(last_use.get(value, 0), place)
    new_bytes, crossing = _count_bytes(program, storages, made, last_use)
    forbidden = storages.uncuttable()
    allowed = [place not in forbidden for place in range(len(program.ops))]
    cuts = [0, *choose_block_cuts(new_bytes, crossing, allowed, window), len(program.ops)]
    return [_take(program, start, stop, made, last_use) for start, stop in pairwise(cuts)]


def choose_block_cuts(
    new_bytes: Sequence[int], crossing: Sequence[int], allowed: Sequence[bool], window: int
) -> list[int]:
    """Return the places to cut before: what microbatches in flight and the largest block hold is least."""
    reached = [0, *accumulate(new_bytes)]
    best: list[int] = []
    least = reached[-1]
    for count in range(2, _MOST_BLOCKS + 1):
        stretch = reached[-1] / count
        nearest: dict[int, int] = {}  # the best cut around each of the even ones
        for place in range(1, len(new_bytes)):
            number = round(reached[place] / stretch) if stretch else 0
            if allowed[place] and 0 < number < count:
                before = nearest.get(number)
                if before is None or crossing[place] < crossing[before]:
                    nearest[number] = place
        cuts = sorted(nearest.values())
        largest = max(reached[stop] - reached[start] for start, stop in pairwise([0, *cuts, len(new_bytes)]))
        held = window * sum(crossing[cut] for cut in cuts) + largest
        if held < least:
            best, least = cuts, held
    return best


def _count_bytes(
    program: Program, storages: Storages, made: dict[ValueId, int], last_use: dict[ValueId, int]
) -> tuple[list[int], list[int]]:
    """Return the bytes that each operation makes, and those that cross before it; views are no new memory."""
    new_bytes, change = [0] * len(program.ops), [0] * (len(program.ops) + 2)
    until: dict[ValueId, int] = {}
    for value in made:
        root = storages.root(value)
        until[root] = max(until.get(root, 0), last_use.get(value, 0))
    for value, place in made.items():
        if storages.root(value) == value:
            size = program.values[value].bytes_at(_TYPICAL_BATCH)
            new_bytes[place] += size
            change[place + 1] += size
            change[max(until[value], place) + 1] -= size
    return new_bytes, list(accumulate(change))[: len(program.ops)]


def _take(
    program: Program, start: int, stop: int, made: dict[ValueId, int], last_use: dict[ValueId, int]
) -> ProgramBlock:
    ops = program.ops[start:stop]
    used = {value for op in ops for value in op.refs()}
    state = {value for value, _ in program.state}
    inside = {out for op in ops for out in op.outs if out is not None}
    given = sorted(used - state - inside)
    arrived = [*(value for value, _ in program.fields), *program.inputs]
    given += [value for value in arrived if value not in given and _has_batch_size(program, value)][:1]
    outputs = tuple(value for value in sorted(inside) if last_use.get(value, -1) >= stop)
    return ProgramBlock(
        Program(
            values=program.values,
            inputs=tuple(given),
            fields=(),
            state=tuple(pair for pair in program.state if pair[0] in used),
            ops=ops,
            outputs=outputs,
            results=(),
        )
    )


def _has_batch_size(program: Program, value: ValueId) -> bool:
    """Return whether a block can read the number of samples from this value."""
    shape = program.values[value].shape
    return any(isinstance(size, Size) and size.per_sample > 0 and size.fixed == 0 for size in shape)


Run = Callable[..., tuple[Tensor, ...]]


def run_again_in_backward(run: Run, given: Sequence[Tensor], *, keeps_random: bool) -> tuple[Tensor, ...]:
    """Return what a function makes of tensors; autograd keeps nothing but these.

    With `keeps_random` the second run draws the random numbers of the first. torch.utils.checkpoint does the
    same, but its first call imports torch's compiler: 80 MB and some seconds in the middle of a training.
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
