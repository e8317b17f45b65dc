"""Runs a stage forward and backward on made-up numbers, to see how long that takes. Driven by peer.host."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ravnest.model.blueprint import TensorType
from ravnest.model.rebuild import Rebuilt

_MOST_SECONDS = 0.5
_MOST_RUNS = 10
_LARGEST = 0.1  # of the numbers made up: sums of them stay finite


def time_batch(program: Rebuilt, num_samples: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of a few batches; the first one, which warms up, does not count."""
    blueprint, device = program.blueprint, program.setting.device
    train, is_trained = blueprint.train, {entry.name: entry.is_trainable for entry in blueprint.state}
    values = train.values
    state = {
        name: _make_up(values[value], num_samples, device).requires_grad_(is_trained[name])
        for value, name in train.state
    }
    inputs = {
        value: _make_up(values[value], num_samples, device).requires_grad_(values[value].has_gradient)
        for value in train.inputs
    }
    fields = {name: _make_up(values[value], num_samples, device) for value, name in train.fields}
    wanted = [tensor for tensor in (*state.values(), *inputs.values()) if tensor.requires_grad]

    def run() -> float:
        started = clock()
        with torch.enable_grad():
            passed = program.forward(state, inputs, fields, training=True, key=(0, 0))
        loss = passed.results.get("loss")
        ends = [tensor for tensor in (*passed.outputs.values(), loss) if tensor is not None]
        ends = [tensor for tensor in ends if tensor.requires_grad]
        if ends and wanted:
            torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
        synchronise(device)
        return clock() - started

    run()
    best, ends_at, num_runs = inf, clock() + _MOST_SECONDS, 0
    while not num_runs or (clock() < ends_at and num_runs < _MOST_RUNS):
        best, num_runs = min(best, run()), num_runs + 1
    return best


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given: it works beside the program."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _make_up(kind: TensorType, num_samples: int, device: torch.device) -> Tensor:
    """Return small fractions, and zeros for what is none: they are an index into anything."""
    dtype, shape = getattr(torch, kind.dtype), kind.shape_at(num_samples)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.rand(shape, dtype=dtype, device=device).mul_(_LARGEST)
