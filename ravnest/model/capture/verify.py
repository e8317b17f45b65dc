"""The user's module on a real batch, alone and against the cut program: loss, every gradient, buffers.

Alone, before it is exported: a module that fails or that gives another loss each time is refused. Then, at
the end of capture, in training and in evaluation, through two cuts, after a trip through JSON: what a
provider would compute is what the module computes, or capture refuses the model.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ravnest.errors import CaptureError
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import FLOATING, Blueprint, StateEntry, ValueId
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture_errors import refuse_failure
from ravnest.model.capture.export_hazards import fixed_generators, fixed_numbers, watched
from ravnest.model.capture.model_with_loss import ModelWithLoss
from ravnest.model.stage.stage_program import StageOutputs, StageProgram, build_stage_program

_WEIGHT_SEED = 20_263
_STEPS = (2, 3, 5)  # of the numbers that a sum takes in
_SCALE = 0.02  # of matrices; gains of norms lie as close to one


class StandIns:
    """Weights for a module that has none: each parameter is a view of one tensor as large as the largest.

    So a model that is larger than this PC can run on a few tokens. Of each gradient three sums are kept as
    soon as it is there, and it is gone: no two of them exist at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        empty = [each for each in module.parameters() if each.is_meta]
        draw = torch.Generator().manual_seed(_WEIGHT_SEED)
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


SAMPLES = (4, 3)  # in training and in evaluation: two numbers, so that neither is a constant of the program
FEW_SAMPLES = (2, 4)  # of a costly model
_MOST_ITEMS = 1 << 16  # of a parameter whose gradient is compared for a batch of one too
_PIECE = 1 << 22  # numbers that are compared at once: wide copies of all of a large tensor would be as large
_NUM_REPEATS = 3
_NUM_STAGES = 3
_SEED = 20_261
_ROUNDING = {"float64": 1e-6, "float32": 1e-3}
_COARSE_ROUNDING = 5e-2  # of half precision


RunOutcome = dict[str, torch.Tensor]  # by what it is: "loss", "gradient of NAME", "buffer NAME"
Outcomes = dict[bool, RunOutcome]  # of the module, in training and in evaluation


def try_module(
    whole: ModelWithLoss, fields: Mapping[str, torch.Tensor], num_samples: tuple[int, int] = SAMPLES
) -> Outcomes:
    """Raise CaptureError if the module fails by itself, or does not do the same for the same batch.

    Return what it computed, for `compare`; of a batch of one nothing, for that is compared as two samples.
    """
    outcomes: Outcomes = {}
    for training, num_taken in zip((True, False), num_samples, strict=True):
        few = {name: field[:num_taken] for name, field in fields.items()}
        with torch.random.fork_rng(), as_it_was(whole), fixed_generators():
            buffers = dict(whole.named_buffers(remove_duplicate=False))
            places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
            whole.train(training)
            first = _run_alone(whole, few, backward=training)
            after = dict(whole.named_buffers(remove_duplicate=False))
            for name, buffer in buffers.items():
                if after.get(name) is not buffer or buffer.data_ptr() != places[name]:
                    raise CaptureError(
                        f"buffer {name.partition('.')[2]!r} is replaced by another tensor in forward, which "
                        "export would forget; change it in place: .copy_(...) or .add_(...)"
                    )
            _check_numbers(whole, first)
            with fixed_numbers():
                for _ in range(_NUM_REPEATS if training else 1):
                    _check_again(first, _run_alone(whole, few, backward=False))
        if len(next(iter(fields.values()))) > 1:
            outcomes[training] = first
    return outcomes


def compare(
    whole: ModelWithLoss,
    blueprint: Blueprint,
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    build: Callable[[Blueprint, torch.device], StageProgram] = build_stage_program,
    *,
    num_samples: tuple[int, int] = SAMPLES,
    known: Outcomes | None = None,
) -> None:
    """Raise CaptureError if the stages of the blueprint compute anything else than the module.

    For a batch of one the gradients of small parameters do: they come through all layers, and cost little.
    `known` is what `try_module` found for these fields; it is used up, so that its memory is free again.
    """
    device = next(iter(fields.values())).device
    stages = [build(_send(stage), device) for stage in _cut(blueprint)]
    known = {} if known is None else known
    for training, num_taken in ((True, num_samples[0]), (False, num_samples[1]), (True, 1), (False, 1)):
        few = {name: _take(field, num_taken) for name, field in fields.items()}
        trained = _find_trained(whole, is_small=num_taken == 1) if training else {}
        with torch.random.fork_rng(), as_it_was(whole):
            try:
                expected = known.pop(training, None)
                if expected is None:
                    expected = _run_module(whole.train(training), few, trained)
            except Exception as error:
                if num_taken == 1:
                    continue  # the module refuses a batch of one, as BatchNorm does in training
                raise refuse_failure(error) from error
            try:
                problem = _find_difference(expected, _run_stages(stages, state, few, training, trained))
            except Exception as error:  # torch's own, out of an operation
                problem = f"it fails with {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        if problem and num_taken == 1:
            raise CaptureError(
                f"the model cannot be captured: it behaves differently for a batch of one ({problem}); "
                "compute the same for every batch size"
            )
        if problem:
            raise _differs(training, problem)


def compare_empty(
    whole: ModelWithLoss,
    blueprint: Blueprint,
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
) -> str:
    """Compare a model without values as `compare` does, but with stand-ins, on two samples, and once.

    Of each gradient a few sums are compared. Return why it was not compared, if the module fails with them.
    """
    device = next(iter(fields.values())).device
    stages = [build_stage_program(_send(stage), device) for stage in _cut(blueprint)]
    stand_ins = StandIns(whole)
    given = {name: stand_ins.of(tensor) for name, tensor in state.items()}
    few = {name: _take(field, 2) for name, field in fields.items()}
    for training in (True, False):
        with torch.random.fork_rng(), as_it_was(whole), stand_ins.standing_in():
            try:
                trained = _find_trained(whole) if training else {}
                expected = _run_module(whole.train(training), few, trained, stand_ins=stand_ins)
            except Exception as error:
                return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            found = _run_stages(stages, given, few, training, trained, stand_ins)
            problem = _find_difference(expected, found)
        if problem:
            raise _differs(training, problem)
    return ""


def _differs(training: bool, problem: str) -> CaptureError:
    return CaptureError(
        f"the captured model is not the same as the module: in {'training' if training else 'evaluation'}, "
        f"{problem}. Usually something in the model runs outside torch's operations: a hook, or data kept "
        "between batches; write it with plain tensor operations and buffers changed in place"
    )


@contextlib.contextmanager
def as_it_was(whole: torch.nn.Module) -> Iterator[None]:
    """Leave every module in its mode, with the attributes and the buffers it had, and their values."""
    held = [(module, dict(vars(module)), dict(module._buffers)) for module in whole.modules()]
    plain = [each for _, attributes, _ in held for each in attributes.values() if type(each) is dict]
    caches = [(each, dict(each)) for each in plain]  # some keep tensors in a dict of their own
    try:
        with _same_values(whole):
            yield
    finally:
        for cache, before in caches:
            cache.clear()
            cache.update(before)
        for module, attributes, buffers in held:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextlib.contextmanager
def _same_values(whole: torch.nn.Module) -> Iterator[None]:
    """Give buffers and other tensors of the modules, but for parameters, the values back that they had."""
    copies = [
        (tensor, tensor.detach().clone())
        for module in whole.modules()
        for tensor in (*vars(module).values(), *module._buffers.values())
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _cut(blueprint: Blueprint) -> list[Blueprint]:
    count = min(_NUM_STAGES, blueprint.num_positions)
    bounds = [index * blueprint.num_positions // count for index in range(count + 1)]
    return [slice_blueprint(blueprint, *pair) for pair in pairwise(bounds)]


def _send(stage: Blueprint) -> Blueprint:
    return read_blueprint(write_blueprint(stage))


def _take(field: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Return the first samples; of a batch of one two of them, unless one is wanted."""
    enough = torch.cat([field, field]) if len(field) == 1 < num_samples else field
    return enough[:num_samples].clone()


def _run_alone(whole: ModelWithLoss, fields: Mapping[str, torch.Tensor], *, backward: bool) -> RunOutcome:
    try:
        with watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run_module(whole, fields, _find_trained(whole) if backward else {})
    except CaptureError:
        raise
    except Exception as error:  # whatever the user's code raises, said in the user's terms
        raise refuse_failure(error) from error


def _find_trained(whole: ModelWithLoss, *, is_small: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors that have gradients; if there are small ones, those alone where these are wanted."""
    trained = {name: tensor for name, tensor in whole.tensors().items() if tensor.requires_grad}
    small = {name: tensor for name, tensor in trained.items() if tensor.numel() <= _MOST_ITEMS}
    return small if is_small and small else trained


def _run_module(
    whole: ModelWithLoss,
    fields: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    *,
    stand_ins: StandIns | None = None,
) -> RunOutcome:
    """Run the user's own module, and back to `trained`; leave its buffers and gradients as they were."""
    torch.manual_seed(_SEED)
    with _same_values(whole):
        results = whole(*(field.clone() for field in fields.values()))
        outcome = {name: value.detach() for name, value in results.items()}
        for name, tensor in whole.tensors().items():
            if not isinstance(tensor, torch.nn.Parameter):
                outcome[f"buffer {name}"] = tensor.detach().clone()
        if trained and results["loss"].requires_grad:
            for name, gradient in _differentiate(results["loss"], trained, stand_ins).items():
                outcome[f"gradient of {name}"] = gradient
    return outcome


def _differentiate(
    loss: torch.Tensor, trained: Mapping[str, torch.Tensor], stand_ins: StandIns | None
) -> Mapping[str, torch.Tensor]:
    """Return the gradients that there are, or what they sum up to."""
    if stand_ins is not None:
        with stand_ins.summing(trained) as sums:
            torch.autograd.backward([loss])
        return sums
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


def _check_numbers(whole: ModelWithLoss, outcome: RunOutcome) -> None:
    """Refuse a first batch that teaches nothing: a loss or a gradient that is no number, or sparse."""
    for what, value in outcome.items():
        if value.is_sparse:
            name = what.removeprefix("gradient of ")
            raise CaptureError(
                f"the gradient of {name!r} is sparse, which cannot be averaged; make the embedding without "
                "sparse=True"
            )
        is_judged = what == "loss" or _is_gradient(what)
        if is_judged and whole.training and not _is_finite(value):
            parameters = whole.named_parameters()
            bad = next((name for name, tensor in parameters if not _is_finite(tensor)), None)
            shown = f"the weights (first bad one: {whole.state_name(bad)})" if bad else "the loss"
            kind = "NaN" if bool(value.isnan().any()) else "infinite"
            raise CaptureError(f"the {what} is {kind} on the first batch; check {shown} and the data")


def _check_again(first: RunOutcome, again: RunOutcome) -> None:
    for what, value in again.items():
        if what in first and not _distance(first[what], value, 1e-6) <= _tolerance(value):
            raise CaptureError(
                f"the model cannot be captured: {what} is another each time it runs on the same batch with "
                "the same seed. Usually it draws random numbers outside torch or keeps data between batches; "
                "draw them with torch, and keep data in buffers changed in place"
            )


def _run_stages(
    stages: list[StageProgram],
    state: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    training: bool,
    trained: Collection[str],
    stand_ins: StandIns | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run stage after stage forward and back, as providers would; yield each outcome once it is complete."""
    torch.manual_seed(_SEED)
    runs: list[_Run] = []
    values: dict[ValueId, torch.Tensor] = {}
    for stage in stages:
        run = _Run(stage, state, values, fields, trained if training else None)
        runs.append(run)
        values = run.passed.outputs
    yield from ((name, value.detach()) for name, value in runs[-1].passed.results.items())
    still = {name: tensor for run in runs for name, tensor in run.state.items() if name not in run.trainable}
    yield from ((f"buffer {name}", tensor) for name, tensor in still.items())
    num_uses = Counter(name for run in runs for name in run.trained)
    sums: dict[str, torch.Tensor] = {}
    gradients: dict[ValueId, torch.Tensor] = {}
    while training and runs:  # a stage and its gradients are gone before the one before it
        run = runs.pop()
        gradients, found = run.backward(gradients, stand_ins)
        for name, gradient in found.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        num_uses.subtract(run.trained)
        del found, run
        for name in [name for name in sums if not num_uses[name]]:
            yield f"gradient of {name}", sums.pop(name)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it arrives elsewhere: bytes in order, whatever its strides were."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _state_of(entry: StateEntry, tensor: torch.Tensor) -> torch.Tensor:
    """Return state as a stage has it: a copy only if it is changed, or would arrive with other strides."""
    return _sent(tensor) if entry.is_written or not tensor.is_contiguous() else tensor.detach()


class _Run:
    """One stage's part of the batch."""

    def __init__(
        self,
        stage: StageProgram,
        state: Mapping[str, torch.Tensor],
        values: Mapping[ValueId, torch.Tensor],
        fields: Mapping[str, torch.Tensor],
        trained: Collection[str] | None,  # None: as in evaluation
    ) -> None:
        training = trained is not None
        program = stage.blueprint.train if training else stage.blueprint.evaluate
        entries = stage.blueprint.state
        self.state = {entry.name: _state_of(entry, state[entry.name]) for entry in entries}
        self.trainable = {entry.name for entry in entries if entry.is_trainable}
        self.trained = [
            entry.name for entry in entries if entry.is_trainable and entry.name in (trained or ())
        ]
        for name in self.trained:
            self.state[name].requires_grad_()
        self.inputs = {
            value: _sent(values[value]).requires_grad_(program.values[value].has_gradient)
            for value in program.inputs
        }
        with torch.set_grad_enabled(training):
            self.passed: StageOutputs = stage.forward(self.state, self.inputs, fields, training=training)

    def backward(
        self, gradients: Mapping[ValueId, torch.Tensor], stand_ins: StandIns | None
    ) -> tuple[dict[ValueId, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradients of what came in and of the parameters, given those of what went out."""
        ends = [
            (out, _sent(gradients[value])) for value, out in self.passed.outputs.items() if value in gradients
        ]
        ends += [
            (value, torch.ones_like(value)) for name, value in self.passed.results.items() if name == "loss"
        ]
        ends = [(end, gradient) for end, gradient in ends if end.requires_grad]
        with contextlib.ExitStack() as stack:
            sums: dict[str, torch.Tensor] = {}
            if stand_ins is not None:
                trained = {name: self.state[name] for name in self.trained}
                sums = stack.enter_context(stand_ins.summing(trained))
            if ends:
                torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
        back = {value: leaf.grad for value, leaf in self.inputs.items() if leaf.grad is not None}
        found = {name: leaf.grad for name, leaf in self.state.items() if leaf.grad is not None}
        return back, found | sums


def _find_difference(expected: RunOutcome, found: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return what differs, if anything; `expected` is used up on the way."""
    largest = max((_largest(value) for what, value in expected.items() if _is_gradient(what)), default=0.0)
    for what, value in found:
        wanted = expected.pop(what, None)
        if wanted is None:
            if _is_gradient(what) and bool(value.any()):
                return f"{what} is not zero, though the module gives none"
            continue
        error = _distance(wanted, value, 1e-2 * largest if _is_gradient(what) else 1e-6)
        if not error <= _tolerance(wanted):
            return f"{what} differs by {error:.1g} of its size"
    missing = [what for what in expected if not what.startswith("buffer ")]  # one that no operation reads
    return f"{missing[0]} is missing" if missing else None


def _is_gradient(what: str) -> bool:
    return what.startswith("gradient of ")


def _tolerance(value: torch.Tensor) -> float:
    name = str(value.dtype).removeprefix("torch.")
    return _ROUNDING.get(name, _COARSE_ROUNDING if name in FLOATING else 0.0)


def _largest(value: torch.Tensor) -> float:
    """Return the size of the largest number; infinity or NaN if one is there."""
    if not value.numel():
        return 0.0
    parts = torch.view_as_real(value) if value.is_complex() else value
    least, most = (float(each) for each in torch.aminmax(parts.detach()))  # an eighth of the time of a norm
    return max(abs(least), abs(most))


def _is_finite(value: torch.Tensor) -> bool:
    return math.isfinite(_largest(value))


def _distance(expected: torch.Tensor, found: torch.Tensor, floor: float) -> float:
    """Return the largest difference, as a share of the largest value expected."""
    if expected.shape != found.shape:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    gap = largest = 0.0
    pieces = (torch.split(each.flatten(), _PIECE) for each in (expected, found))
    for one, two in zip(*pieces, strict=True):
        wide, other = one.double(), two.double()
        same = (wide == other) | (wide.isnan() & other.isnan())
        away = float(torch.where(same, 0.0, (wide - other).abs()).max())
        gap = away if away > gap or math.isnan(away) else gap
        largest = max(largest, float(wide.abs().nan_to_num(posinf=0.0).max()))
    return gap / max(largest, floor)
