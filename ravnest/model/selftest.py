"""The cut program against the user's own module, on a real batch: loss, every gradient, buffers.

Runs at the end of capture, in training and in evaluation, through two cuts, after a trip through JSON: what a
provider would compute is what the module computes, or capture refuses the model.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from ravnest.errors import CaptureError
from ravnest.model.blueprint import FLOATING, Blueprint, ValueId
from ravnest.model.line import slice_blueprint
from ravnest.model.reading import read_blueprint, write_blueprint
from ravnest.model.rebuild import Passed, Rebuilt, rebuild
from ravnest.model.whole import Whole

_NUM_SAMPLES = 4
_NUM_STAGES = 3
_SEED = 20_261
_ROUNDING = {"float64": 1e-6, "float32": 1e-3}
_COARSE_ROUNDING = 5e-2  # of half precision


def compare(
    whole: Whole, blueprint: Blueprint, state: Mapping[str, torch.Tensor], fields: Mapping[str, torch.Tensor]
) -> None:
    """Raise CaptureError if the stages of the blueprint compute anything else than the module."""
    stages = [_send(stage) for stage in _cut(blueprint)]
    with torch.random.fork_rng():
        for training, num_samples in ((True, _NUM_SAMPLES), (False, _NUM_SAMPLES - 1)):
            few = {name: field[:num_samples].clone() for name, field in fields.items()}
            whole.train(training)
            _check(blueprint, training, _run_module(whole, few), _run_stages(stages, state, few, training))


Outcome = dict[str, torch.Tensor]  # by what it is: "loss", "gradient of NAME", "buffer NAME"


def _cut(blueprint: Blueprint) -> list[Blueprint]:
    count = min(_NUM_STAGES, blueprint.num_positions)
    bounds = [index * blueprint.num_positions // count for index in range(count + 1)]
    return [slice_blueprint(blueprint, *pair) for pair in pairwise(bounds)]


def _send(stage: Blueprint) -> Blueprint:
    return read_blueprint(write_blueprint(stage))


def _run_module(whole: Whole, fields: Mapping[str, torch.Tensor]) -> Outcome:
    """Run the user's own module; leave its buffers and gradients as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in whole.buffers()]
    torch.manual_seed(_SEED)
    results = whole(*fields.values())
    outcome = {name: value.detach() for name, value in results.items()}
    for name, tensor in whole.tensors().items():
        if not isinstance(tensor, torch.nn.Parameter):
            outcome[f"buffer {name}"] = tensor.detach().clone()
    if whole.training:
        trained = {name: tensor for name, tensor in whole.tensors().items() if tensor.requires_grad}
        gradients = torch.autograd.grad(results["loss"], list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                outcome[f"gradient of {name}"] = gradient
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return outcome


def _run_stages(
    stages: list[Blueprint],
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    training: bool,
) -> Outcome:
    """Run stage after stage forward and back, each with state of its own, as providers would."""
    torch.manual_seed(_SEED)
    device = next(iter(fields.values())).device
    runs: list[_Run] = []
    values: dict[ValueId, torch.Tensor] = {}
    for stage in stages:
        run = _Run(rebuild(stage, device), state, values, fields, training)
        runs.append(run)
        values = run.passed.outputs
    outcome = {name: value.detach() for name, value in runs[-1].passed.results.items()}
    for run in runs:
        outcome |= {
            f"buffer {name}": tensor for name, tensor in run.state.items() if not tensor.requires_grad
        }
    if not training:
        return outcome
    gradients: dict[ValueId, torch.Tensor] = {}
    for run in reversed(runs):
        gradients, found = run.backward(gradients)
        for name, gradient in found.items():
            what = f"gradient of {name}"
            outcome[what] = outcome[what] + gradient if what in outcome else gradient
    return outcome


class _Run:
    """One stage's part of the batch."""

    def __init__(
        self,
        stage: Rebuilt,
        state: Mapping[str, torch.Tensor],
        values: Mapping[ValueId, torch.Tensor],
        fields: Mapping[str, torch.Tensor],
        training: bool,
    ) -> None:
        program = stage.blueprint.train if training else stage.blueprint.evaluate
        self.state = {
            entry.name: state[entry.name].detach().clone().requires_grad_(entry.is_trainable)
            for entry in stage.blueprint.state
        }
        self.inputs = {
            value: values[value].detach().clone().requires_grad_(program.values[value].has_gradient)
            for value in program.inputs
        }
        with torch.set_grad_enabled(training):
            self.passed: Passed = stage.forward(self.state, self.inputs, fields, training=training)

    def backward(
        self, gradients: Mapping[ValueId, torch.Tensor]
    ) -> tuple[dict[ValueId, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradients of what came in and of the parameters, given those of what went out."""
        ends = [(out, gradients[value]) for value, out in self.passed.outputs.items() if value in gradients]
        ends += [
            (value, torch.ones_like(value)) for name, value in self.passed.results.items() if name == "loss"
        ]
        ends = [(end, gradient) for end, gradient in ends if end.requires_grad]
        if ends:
            torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
        back = {value: leaf.grad for value, leaf in self.inputs.items() if leaf.grad is not None}
        found = {name: leaf.grad for name, leaf in self.state.items() if leaf.grad is not None}
        return back, found


def _check(blueprint: Blueprint, training: bool, expected: Outcome, found: Outcome) -> None:
    mode = "training" if training else "evaluation"
    largest = max((float(g.abs().max()) for what, g in expected.items() if _is_gradient(what)), default=0.0)
    for what, value in expected.items():
        if what.startswith("buffer ") and what not in found:
            continue  # a buffer no operation reads
        if what not in found:
            raise _refuse(what, mode, "is missing")
        floor = 1e-4 * largest if _is_gradient(what) else 1e-6
        error = _distance(value, found[what], floor)
        if not error <= _tolerance(value):
            raise _refuse(what, mode, f"differs by {error:.1g} of its size")
    for what, value in found.items():
        if _is_gradient(what) and what not in expected and bool(value.any()):
            raise _refuse(what, mode, "is not zero, though the module gives none")


def _is_gradient(what: str) -> bool:
    return what.startswith("gradient of ")


def _tolerance(value: torch.Tensor) -> float:
    name = str(value.dtype).removeprefix("torch.")
    return _ROUNDING.get(name, _COARSE_ROUNDING if name in FLOATING else 0.0)


def _distance(expected: torch.Tensor, found: torch.Tensor, floor: float) -> float:
    """Return the largest difference, as a share of the largest value expected."""
    if expected.shape != found.shape:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    wide, other = expected.double(), found.double()
    same = (wide == other) | (wide.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (wide - other).abs())
    return float(gap.max()) / max(float(wide.abs().nan_to_num(posinf=0.0).max()), floor)


def _refuse(what: str, mode: str, how: str) -> CaptureError:
    return CaptureError(
        f"the captured model is not the same as the module: in {mode}, {what} {how}. Something in the model "
        "runs outside torch's operations: a hook, a changed Python attribute, data kept between batches, or "
        "randomness that is not torch's; write it with plain tensor operations and buffers changed in place"
    )
