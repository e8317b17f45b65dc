"""One stage at work: forward, backward and update, with many microbatches in flight.

The backward of a microbatch uses the weights that its forward saw, whatever was updated since. A microbatch
that fails, or with numbers that are not finite, is dropped, and nothing of it is applied. The schedule
decides what runs when.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ravnest.engine.norms import ForwardChecks, NoiseMeter, find_norms, find_not_finite, measure_norms
from ravnest.engine.optimizers import Optimizer, OptimizerSettings
from ravnest.engine.weight_versions import Graph, HeldInputs, MakeAgain, Snapshot, Versions
from ravnest.errors import ProtocolError, RavnestError
from ravnest.ids import MicrobatchId
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import GradientNoise

_NOTHING_LEFT = "no microbatch was left to learn from"
_LAGS_REMEMBERED = 32  # microbatches: prediction follows a new window soon, and ends exactly when lag does

# What torch raises for a sample that does not fit the model: a label out of range, a shape, a type.
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError, MemoryError)
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")
_DEVICE_LOST = ("CUDA error", "HIP error", "device-side assert")  # nothing runs on it in this program again

RandomKey = tuple[int, int]
Tensors = Mapping[str, Tensor]
Values = Mapping[Any, Tensor]  # by value id, a whole number; model gives it a type of its own


class Backward(Protocol):
    """The backward of one microbatch, in two parts."""

    def backward_inputs(self, gradients: Values) -> Mapping[int, Tensor]: ...
    def backward_weights(self) -> Tensors: ...


class ForwardOutcome(Protocol):
    """What a program makes of a microbatch: values for the next stage; loss and metrics in the last one.

    A compiled program brings its backward.
    """

    @property
    def outputs(self) -> Values: ...
    @property
    def results(self) -> Tensors: ...
    @property
    def backward(self) -> Backward | None: ...


class RunnableStage(Protocol):
    """A rebuilt stage, as model.rebuild makes it."""

    def forward(
        self, state: Tensors, inputs: Values, fields: Tensors, *, training: bool, key: RandomKey | None
    ) -> ForwardOutcome: ...
    def forward_text(self, state: Tensors, inputs: Values, fields: Tensors) -> ForwardOutcome: ...


RunBeside = Callable[[Tensors, Values, Tensors], ForwardOutcome]  # state, inputs, fields


@dataclass(frozen=True, slots=True)
class Roles:
    """Which parts of a stage's state are trained, written by a forward, or held by other stages too.

    `inputs` are the values whose gradient the stage before waits for. Of the `narrow` parameters forwards see
    bf16 while gradients are late; of `casts` they use nothing else.
    """

    trainable: frozenset[str]
    written: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    inputs: frozenset[int] = frozenset()
    narrow: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PassedOn:
    """What a microbatch leaves behind: values to send; loss and metrics in the last stage."""

    outputs: dict[int, Tensor]
    results: dict[str, Tensor]
    backward: Backward | None = None  # of a program that is compiled


@dataclass(frozen=True, slots=True)
class DroppedWork:
    """A microbatch that was given up because of its samples; the hub is told and training goes on.

    After some failures a GPU runs nothing more in this program: `has_lost_device`.
    """

    microbatch: MicrobatchId
    where: str  # forward, backward, evaluation, generation
    reason: str
    has_lost_device: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """One update: the version it made; why nothing changed, if so."""

    version: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """The sums of the update under way, by name; divided by the number they are means over these samples."""

    sums: Tensors
    divisor: float
    num_samples: int


@dataclass(slots=True)
class _Autograd:
    """The backward of a program that brings none: torch recorded it."""

    graph: Graph
    outputs: dict[int, Tensor]
    loss: Tensor | None

    def backward_inputs(self, gradients: Values) -> dict[int, Tensor]:
        pairs = [
            (tensor, gradients[value].to(tensor.dtype))
            for value, tensor in self.outputs.items()
            if value in gradients
        ]
        if self.loss is not None and self.loss.requires_grad:
            pairs.append((self.loss, torch.ones_like(self.loss)))
        self.outputs, self.loss = {}, None
        return self.graph.backward_inputs([root for root, _ in pairs], [other for _, other in pairs])

    def backward_weights(self) -> Tensors:
        return self.graph.backward_weights()


@dataclass(slots=True)
class _Flight:
    num_updates: int  # when it went forward
    weights: int  # the number under which those of its forward are held
    backward: Backward
    shapes: dict[int, torch.Size]  # of what was sent on
    unread: ForwardChecks  # of its forward
    inputs: HeldInputs
    sent: tuple[Tensor, ...] = ()  # gradients of the inputs, on their way


class StageEngine:
    """The state of one stage, taken over from a snapshot, and the microbatches in flight on it.

    `is_split`: gradients of inputs are ready before those of weights. It costs 0.1 ms per layer, and
    where activations are recomputed a second run: leave it off there. `defers`: the loss is looked at after
    the backward, so that a GPU does not wait in between; what a forward writes must be known good before.
    """

    def __init__(
        self,
        program: RunnableStage,
        start: Snapshot,
        roles: Roles,
        settings: OptimizerSettings,
        is_split: bool = True,
        defers: bool = False,
    ) -> None:
        self._program = program
        self._roles = roles
        self._is_split = is_split
        self._defers = defers and not roles.written
        state = {name: tensor.detach() for name, tensor in start.state.items()}
        trained = {name: state[name] for name in roles.trainable}
        narrow = roles.narrow | roles.casts
        self._optimizer = Optimizer(settings, trained, narrow=narrow)
        self._optimizer.load(start.optimizer)
        self._versions = Versions(
            {name: state.pop(name) for name in [*state] if name in self._optimizer.names}, narrow
        )
        self._rest = state
        self._num_updates = start.version
        self._flights: dict[MicrobatchId, _Flight] = {}
        self._sums: dict[str, Tensor] = {}
        self._own_sums: set[str] = set()  # sums that only this stage holds
        self._bounds: dict[str, float] = {}  # of their norms: a sum is no longer than its parts together
        self._num_microbatches = self._num_samples = 0
        self._shares, self._first_size = 0.0, 1  # shares: microbatches, by their samples
        self._lags: deque[int] = deque(maxlen=_LAGS_REMEMBERED)
        self._noise = NoiseMeter()
        self._is_ahead = False  # the update under way is made already
        self.squares_before = self.squares_after = 0.0  # of gradients' norms in other stages, as last heard

    @property
    def norm_square(self) -> float:
        """The square of the norm of the last gradient, where the whole model's norm is limited."""
        return self._optimizer.norm_square

    @property
    def version(self) -> int:
        """Updates made, also those without a change: it counts as engine.schedule does."""
        return self._num_updates

    @property
    def num_live_versions(self) -> int:
        """Copies of the weights in memory."""
        return self._versions.num_live

    @property
    def lag(self) -> float:
        """Mean lag of the last microbatches."""
        return sum(self._lags) / len(self._lags) if self._lags else 0.0

    @property
    def noise(self) -> GradientNoise | None:
        """How noisy the gradients of this stage are, once that is known."""
        return self._noise.noise

    def forward(
        self,
        microbatch: MicrobatchId,
        inputs: Values,
        fields: Tensors,
        key: RandomKey | None = None,
        again: Mapping[Any, MakeAgain] | None = None,
    ) -> PassedOn | DroppedWork:
        """Run a microbatch on the weights as they are expected when its gradient comes back.

        Inputs that can be made `again` are freed until then: only for a program that runs again before its
        backward, and keeps nothing of them.
        """
        assert microbatch not in self._flights, f"microbatch {microbatch} is in flight already"
        weights = self._versions.seen
        leaves = {
            value: tensor.detach().requires_grad_(value in self._roles.inputs)
            for value, tensor in inputs.items()
        }
        # Copies: microbatches in flight may need the buffers as they were, and this one may be dropped.
        buffers = {name: self._rest[name].clone() for name in self._roles.written}
        try:
            with torch.enable_grad():
                outcome = self._program.forward(
                    {**self._rest, **buffers, **weights}, leaves, fields, training=True, key=key
                )
            checks, reason = ForwardChecks.of(outcome.outputs, outcome.results.get("loss")), None
            if outcome.outputs or not self._defers:  # a GPU says only here that an operation failed
                reason = checks.read_with_buffers(buffers)
        except _FAILURES as error:
            return _give_up(microbatch, "forward", error)
        if reason:
            return DroppedWork(microbatch, "forward", reason)
        self._rest.update(buffers)
        wanted = {value: leaf for value, leaf in leaves.items() if leaf.requires_grad}
        outputs = {value: tensor for value, tensor in outcome.outputs.items() if tensor.requires_grad}
        backward = outcome.backward or _Autograd(
            Graph(wanted, weights, self._is_split), outputs, outcome.results.get("loss")
        )
        shapes = {value: tensor.shape for value, tensor in outcome.outputs.items()}
        passed = (*outcome.outputs.values(), *outcome.results.values())
        held = HeldInputs(leaves, again or {}, passed)
        flight = _Flight(self._num_updates, self._versions.hold(), backward, shapes, checks, held)
        self._flights[microbatch] = flight
        return _detach(outcome)

    def backward_inputs(self, microbatch: MicrobatchId, gradients: Values) -> dict[int, Tensor] | DroppedWork:
        """Take the gradients of what was sent on, return those of what was received."""
        flight = self._flights[microbatch]
        _check_shapes(gradients, flight.shapes)
        try:
            flight.inputs.restore()
            found = dict(flight.backward.backward_inputs(gradients))
            reason, norms = (
                flight.unread.read_with(measure_norms(list(found.values()))) if found else (None, [])
            )
            value = find_not_finite(found, norms)
        except _FAILURES as error:
            self.forget(microbatch)
            return _give_up(microbatch, "backward", error)
        flight.sent = tuple(found.values())
        if reason or value is not None:
            self.forget(microbatch)
            told = f"the gradient of value {value} is not finite"
            return DroppedWork(microbatch, "forward" if reason else "backward", reason or told)
        return found

    def backward_weights(
        self,
        microbatch: MicrobatchId,
        weight: float = 1.0,
        num_samples: int = 1,
        rate: float | None = None,
    ) -> DroppedWork | None:
        """Add the microbatch to the update under way, by its samples; a straggler may weigh less.

        With the `rate` of an update that ends with it, a GPU makes the update while the host looks at norms.
        """
        flight = self._flights[microbatch]
        try:
            found = flight.backward.backward_weights()
            numbers = flight.unread.gather(measure_norms(list(found.values())))
            self.forget(microbatch)
            if numbers is not None and rate is not None and self._can_go_ahead(flight, weight, found):
                self._go_ahead(found, numbers, rate)
            reason, norms = flight.unread.read(numbers)
        except _FAILURES as error:
            self._is_ahead = False
            return _give_up(microbatch, "backward", error)
        finally:
            self.forget(microbatch)
        if self._is_ahead and (reason or not all(map(math.isfinite, norms))):
            self._is_ahead = False  # the device has seen the same, and changed nothing
            self._optimizer.take_back(found)
        if reason:
            return DroppedWork(microbatch, "forward", reason)
        if (name := find_not_finite(found, norms)) is not None:
            return DroppedWork(microbatch, "backward", f"the gradient of {name!r} is not finite")
        self._lags.append(self._num_updates - flight.num_updates)
        own = [norm for name, norm in zip(found, norms, strict=True) if name not in self._roles.shared]
        self._noise.add_microbatch(own, num_samples, weight)  # tied weights take updates of their own
        self._first_size = self._first_size if self._num_microbatches else num_samples
        share = num_samples / self._first_size  # one, exactly, for microbatches of equal size
        self._num_microbatches += 1
        self._num_samples += num_samples
        self._shares += share
        weight *= share
        if not self._is_ahead:
            try:
                self._add(found, norms, weight, flight.sent)
            except (MemoryError, torch.OutOfMemoryError) as error:
                _give_up(microbatch, "backward", error)  # raises: a PC without memory has to leave
        return None

    def _can_go_ahead(self, flight: _Flight, weight: float, found: Tensors) -> bool:
        """Whether an update is this microbatch alone, plain, and without lag."""
        is_alone = not self._num_microbatches and weight == 1.0 and not self._roles.shared
        is_fresh = flight.num_updates == self._num_updates and not any(self._lags)
        can_skip = self._defers and bool(found) and self._optimizer.can_skip
        return is_alone and is_fresh and can_skip and found.keys() <= self._optimizer.names

    def _go_ahead(self, found: Tensors, numbers: Tensor, rate: float) -> None:
        """Launch the update; the device leaves it out if a number is not finite."""
        versions, skip = self._versions, (~numbers.isfinite()).any().float()
        after = self._optimizer.step(
            versions.weights, dict(found), rate, held=versions.find_held(found), skip=skip
        )
        assert not isinstance(after, Refusal)
        versions.replace(after, after)
        self._is_ahead = True

    def _add(self, found: Tensors, norms: Sequence[float], weight: float, sent: tuple[Tensor, ...]) -> None:
        """Add gradients to the sums of the update under way."""
        alone = _find_alone(found, sent) if found.keys() - self._own_sums else set()
        for (name, gradient), norm in zip(found.items(), norms, strict=True):
            self._bounds[name] = self._bounds.get(name, 0.0) + weight * norm
            part = gradient if weight == 1.0 else gradient * weight
            total = self._sums.get(name)
            if total is None:
                self._sums[name] = part
                self._own_sums |= {name} if name in alone or part is not gradient else set()
            elif total.dtype is torch.bfloat16:
                self._sums[name] = total.float() + part  # a sum needs more bits than its parts
                self._own_sums.add(name)
            elif name in self._own_sums:
                total.add_(part)
            else:
                self._sums[name] = total + part
                self._own_sums.add(name)

    def forget(self, microbatch: MicrobatchId) -> None:
        """Free what a microbatch holds, if it is in flight."""
        if (flight := self._flights.pop(microbatch, None)) is not None:
            self._versions.release(flight.weights)

    @property
    def shared(self) -> dict[str, Tensor]:
        """The trained weights that other stages hold too."""
        weights = self._versions.weights
        return {name: weights[name] for name in sorted(self._roles.shared & weights.keys())}

    def take_shared_gradients(self) -> dict[str, Tensor]:
        """Take the mean gradients of tied weights out of the update, to be summed over all copies."""
        names = sorted(self._roles.shared & self._sums.keys())
        return {name: self._mean(name) for name in names}

    def _mean(self, name: str) -> Tensor:
        """Take a gradient out of the update under way."""
        total, is_own = self._sums.pop(name), name in self._own_sums
        self._own_sums.discard(name)
        if self._shares == 1.0:
            return total
        return total.div_(self._shares) if is_own else total / self._shares

    def step_shared(self, name: str, gradient: Tensor, learning_rate: float) -> Refusal | None:
        """Apply the sum of all holders to a tied weight alone; the same numbers give the same bits in each.

        So it knows no lag and no prediction: both are the stage's own.
        """
        versions = self._versions
        held = versions.find_held([name])
        own, others = self.norm_square, self.squares_before + self.squares_after
        gradients = {name: gradient}
        after = self._optimizer.step(
            versions.weights, gradients, learning_rate, held=held, other_square=own + others
        )
        self._optimizer.norm_square = own
        if isinstance(after, Refusal):
            return after
        versions.replace(after, versions.seen | {name: after[name]})
        return None

    def update(self, learning_rate: float) -> Updated:
        """Apply the mean gradient of the microbatches since the last update."""
        num_microbatches, lag = self._num_microbatches, self.lag
        bounds = {name: bound / self._shares for name, bound in self._bounds.items()}
        gradients = {name: self._mean(name) for name in tuple(self._sums)}
        wants_noise = self._noise.wants_batch
        self._noise.end_update(find_norms(list(gradients.values())) if wants_noise else None)
        is_made = self._is_ahead
        self._forget_sums()
        self._num_updates += 1
        if is_made:
            return Updated(self._num_updates)
        if not gradients:
            reason = None if num_microbatches else _NOTHING_LEFT
            return Updated(self._num_updates, reason)
        return self._step(gradients, learning_rate, lag, bounds)

    @property
    def summed(self) -> SummedGradient:
        """What an update would be made of now; the next microbatch may change it."""
        return SummedGradient(self._sums, self._shares, self._num_samples)

    def update_with(self, gradients: Tensors, learning_rate: float) -> Updated:
        """Apply this mean gradient, of all clusters, in place of the own; it came without lag."""
        self._forget_sums()
        self._num_updates += 1
        if not gradients:
            reason = _NOTHING_LEFT if self._versions.weights else None
            return Updated(self._num_updates, reason)
        return self._step(dict(gradients), learning_rate, 0.0, {})

    def forget_prediction(self) -> None:
        """Let forwards see the weights as they are: there will be no lag."""
        self._lags.clear()
        self._versions.see_exactly(self._roles.casts)

    def _forget_sums(self) -> None:
        self._num_microbatches = self._num_samples = 0
        self._shares = 0.0
        self._sums.clear()
        self._own_sums.clear()
        self._bounds.clear()
        self._noise.forget()
        self._is_ahead = False

    def _step(
        self, gradients: dict[str, Tensor], learning_rate: float, lag: float, bounds: Mapping[str, float]
    ) -> Updated:
        versions = self._versions
        held = versions.find_held(gradients)
        after = self._optimizer.step(
            versions.weights,
            gradients,
            learning_rate,
            lag,
            held=held,
            bounds=bounds,
            other_square=self.squares_before + self.squares_after,
        )
        if isinstance(after, Refusal):
            return Updated(self._num_updates, after.reason)
        versions.replace(after, after | self._optimizer.take_predicted())
        return Updated(self._num_updates)

    def evaluate(self, microbatch: MicrobatchId, inputs: Values, fields: Tensors) -> PassedOn | DroppedWork:
        """Run a microbatch as in evaluation, on the current weights, and change nothing."""
        run = partial(self._program.forward, training=False, key=None)
        return self._run_beside(run, microbatch, "evaluation", inputs, fields)

    def rerun(
        self, microbatch: MicrobatchId, inputs: Values, fields: Tensors, key: RandomKey, weights: Tensors
    ) -> PassedOn | DroppedWork:
        """Run a microbatch as in training, on these weights, and change nothing."""
        run = partial(self._program.forward, training=True, key=key)
        return self._run_beside(run, microbatch, "evaluation", inputs, fields, weights)

    def generate(
        self, number: int, inputs: Values, fields: Tensors, run: RunBeside | None = None
    ) -> PassedOn | DroppedWork:
        """Run rows of tokens on the current weights, and change nothing; the last stage gives logits.

        `run` may know a shorter way than the program itself.
        """
        run = run or self._program.forward_text
        return self._run_beside(run, MicrobatchId(number), "generation", inputs, fields)

    @property
    def program(self) -> RunnableStage:
        """What it runs."""
        return self._program

    def _run_beside(
        self,
        run: RunBeside,
        microbatch: MicrobatchId,
        where: str,
        inputs: Values,
        fields: Tensors,
        weights: Tensors | None = None,
    ) -> PassedOn | DroppedWork:
        buffers = {name: self._rest[name].clone() for name in self._roles.written}
        state = {**self._rest, **buffers, **self._versions.weights, **(weights or {})}
        try:
            with torch.no_grad():
                outcome = run(state, inputs, fields)
            reason, _ = ForwardChecks.of(outcome.outputs, outcome.results.get("loss")).read_with()
        except _FAILURES as error:
            return _give_up(microbatch, where, error)
        return DroppedWork(microbatch, where, reason) if reason else _detach(outcome)

    def add(self, changes: Tensors) -> None:
        """Add to parameters and buffers, as a round does; microbatches in flight keep what they saw."""
        self._versions.add({name: changes[name] for name in changes if name in self._versions.weights})
        for name in changes.keys() & self._rest.keys():
            self._rest[name] = self._rest[name] + changes[name]

    @property
    def moments(self) -> dict[str, Tensor]:
        """The first moments of the optimizer, live: what is added to them counts in the next update."""
        return self._optimizer.moments(self._versions.weights)

    @property
    def state(self) -> dict[str, Tensor]:
        """The parameters and buffers as they are now; the next update may change them in place."""
        return {**self._rest, **self._versions.weights}

    def snapshot(self, copies: bool = True) -> Snapshot:
        """Return everything that training changes or needs; without a copy, the next update changes it."""
        state = {name: tensor.detach() for name, tensor in self.state.items()}
        found = Snapshot(self._num_updates, state, self._optimizer.state())
        return found.copy() if copies else found

    def adopt(self, state: Tensors, slots: Tensors) -> None:
        """Take over weights exactly as another stage has them, with their optimizer's state."""
        self._versions.replace({**self._versions.weights, **state}, {**self._versions.seen, **state})
        others = {k: v for k, v in self._optimizer.state().items() if k.partition("/")[2] not in state}
        self._optimizer.load({**others, **slots})


def _find_alone(gradients: Tensors, sent: tuple[Tensor, ...]) -> set[str]:
    """Return those that may be changed: autograd may give one tensor to two weights, or to an input."""
    places = {name: gradient.untyped_storage() for name, gradient in gradients.items()}
    uses = Counter(place.data_ptr() for place in places.values())
    uses.update(gradient.untyped_storage().data_ptr() for gradient in sent)
    return {
        name
        for name, place in places.items()
        if uses[place.data_ptr()] == 1 and place.nbytes() == gradients[name].nbytes
    }


def _detach(outcome: ForwardOutcome) -> PassedOn:
    outputs = {value: tensor.detach() for value, tensor in outcome.outputs.items()}
    return PassedOn(outputs, {name: tensor.detach() for name, tensor in outcome.results.items()})


def _give_up(microbatch: MicrobatchId, where: str, error: Exception) -> DroppedWork:
    """Return why a microbatch is dropped; a PC without memory has to leave, whatever the samples are."""
    told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    has_no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if has_no_memory or any(sign in told for sign in _NO_MEMORY):
        raise RavnestError(
            f"this PC has too little memory for its stage ({told:.500}); close other programs, or lend less "
            "with --memory"
        ) from error
    has_lost_device = any(sign in told for sign in _DEVICE_LOST)
    return DroppedWork(microbatch, where, f"{type(error).__name__}: {told:.200}", has_lost_device)


def _check_shapes(gradients: Values, shapes: Mapping[int, torch.Size]) -> None:
    for value, gradient in gradients.items():
        sent = shapes.get(value, gradient.shape)
        if gradient.shape != sent:
            shape = f"{tuple(gradient.shape)}, but {tuple(sent)} was sent on"
            raise ProtocolError(f"the gradient of value {value} is {shape}")
