"""What backward runs again gives the same gradients, keeps nothing, and imports no compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from ravnest.model.stage.recompute import run_again_in_backward

CODE = """
import sys, torch
from ravnest.model.stage.recompute import run_again_in_backward
given = torch.randn(3, requires_grad=True)
run_again_in_backward(lambda x: (x.exp(),), [given], keeps_random=True)[0].sum().backward()
assert given.grad is not None
print("torch._dynamo" in sys.modules)
"""


def test_gradients_are_those_of_one_run_and_nothing_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
    given = torch.randn(5, 4, requires_grad=True)
    found = []
    for is_again in (False, True):
        runs = []

        def run(x: torch.Tensor, runs: list[int] = runs) -> tuple[torch.Tensor, ...]:
            runs.append(len(runs))
            return model(x), x * 2

        torch.manual_seed(1)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # noqa: B023
            out, more = run_again_in_backward(run, [given], keeps_random=True) if is_again else run(given)
        torch.rand(3)  # others draw numbers meanwhile
        model.zero_grad()
        found.append(torch.autograd.grad((out.square().sum() + more.sum()), [given, *model.parameters()]))
        assert len(runs) == 1 + is_again
        assert bool(kept) is not is_again
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_second_backward_runs_it_once_more() -> None:
    given = torch.randn(3, requires_grad=True)
    (out,) = run_again_in_backward(lambda x: (x.exp(),), [given], keeps_random=False)
    first = torch.autograd.grad(out.sum(), given, retain_graph=True)
    second = torch.autograd.grad(out.sum(), given)
    assert torch.equal(first[0], second[0])


def test_a_run_that_differs_the_second_time_is_told() -> None:
    given, runs = torch.randn(3, requires_grad=True), []

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs.append(1)
        return ((x * 2).exp() if len(runs) == 1 else x * 2,)

    (out,) = run_again_in_backward(run, [given], keeps_random=False)
    with pytest.raises(RuntimeError, match="saved 0 tensors for its backward, the first 1"):
        out.sum().backward()


def test_torchs_compiler_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
