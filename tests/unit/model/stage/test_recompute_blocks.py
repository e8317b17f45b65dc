"""Recompute by block: the same bits as without, and far less memory between forward and backward."""

import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.recompute import choose_block_cuts, find_blocks
from ravnest.model.stage.stage_program import StageProgram, build_stage_program

NUM_LAYERS, WIDTH, INNER = 8, 16, 128


class Layer(nn.Module):
    """Wide inside, narrow between; it draws, and it writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(torch.relu(self.up(self.norm(x))) + 1.0)
        return x + self.down(nn.functional.dropout(inner, 0.1))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    batch = {"x": torch.randn(8, WIDTH)}
    return capture(model, batch, lambda out, batch: out.square().mean(), self_test=False)


class Held(TorchDispatchMode):
    """Remembers the memory of all results but that of the state."""

    def __init__(self, state: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in state}
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage.data_ptr() not in self.given:  # views of weights are none of them
                    self.storages[storage.data_ptr()] = weakref.ref(storage)
        return found

    @property
    def num_bytes(self) -> int:
        return sum(found.nbytes() for each in self.storages.values() if (found := each()) is not None)


def run(program: StageProgram, captured: Captured) -> tuple[dict[str, Tensor], int]:
    """Return loss, gradients and buffers of one batch, and the bytes held between forward and backward."""
    state = {name: tensor.detach().clone() for name, tensor in captured.state.items()}
    trained = {entry.name for entry in captured.blueprint.state if entry.is_trainable}
    leaves = {name: tensor.requires_grad_(name in trained) for name, tensor in state.items()}
    fields = {"x": torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))}
    with Held(state.values()) as held:
        loss = program.forward(leaves, {}, fields, training=True, key=(3, 4)).results["loss"]
        num_bytes = held.num_bytes
    names = sorted(trained)
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    buffers = {name: tensor for name, tensor in leaves.items() if name not in trained}
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True)), **buffers}, num_bytes


def test_blocks_give_the_same_bits_and_hold_little(captured: Captured) -> None:
    kept, most = run(build_stage_program(captured.blueprint), captured)
    again, held = run(build_stage_program(captured.blueprint, recompute=True, window=2), captured)
    assert kept.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in kept.items())
    assert held < most / 6


def test_blocks_tile_the_program_and_cut_where_little_crosses(captured: Captured) -> None:
    program = captured.blueprint.train
    blocks = find_blocks(program, 2)
    assert [op for block in blocks for op in block.program.ops] == list(program.ops)
    assert 3 < len(blocks) <= NUM_LAYERS + 1
    carried = [block.program.outputs for block in blocks[:-1]]
    assert all(len(values) == 1 for values in carried)
    narrow = {program.values[values[0]].shape[-1] for values in carried}
    assert narrow == {WIDTH}


def test_more_microbatches_in_flight_make_fewer_blocks(captured: Captured) -> None:
    counts = [len(find_blocks(captured.blueprint.train, window)) for window in (1, 4, 16, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_cuts_are_made_only_where_they_are_allowed() -> None:
    sizes, crossing = [10] * 40, [1] * 40
    allowed = [place % 8 == 3 for place in range(40)]
    cuts = choose_block_cuts(sizes, crossing, allowed, 1)
    assert cuts
    assert all(allowed[cut] for cut in cuts)
    assert choose_block_cuts(sizes, crossing, [False] * 40, 1) == []
    assert choose_block_cuts([0] * 5, [0] * 5, [True] * 5, 1) == []
    free = choose_block_cuts(sizes, crossing, [True] * 40, 1)
    lengths = [stop - start for start, stop in pairwise([0, *free, 40])]
    assert max(lengths) - min(lengths) <= 2
