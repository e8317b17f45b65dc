"""Run a captured model as if its stages were on different PCs, and the user's own module beside it.

Each stage gets its blueprint as bytes and its own copies of its tensors; a value that crosses is detached and
copied, and its gradient travels back by value id. What both ways return is an `Outcome`, to be compared.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from support.model_zoo import FAMILIES, PITFALLS, Batch, Sample, copy_of, fields_of
from torch import Tensor

from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import PARAMETER, Blueprint, Program, ValueId
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.stage_program import build_stage_program

SEED = 123


@dataclass(frozen=True)
class Outcome:
    """One training or evaluation step. Gradients and buffers by name, tied weights under one name."""

    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Errors:
    """The worst differences of two outcomes; of a gradient relative to its own largest number."""

    loss: float
    gradient: float
    buffer: float
    worst_gradient: str = ""

    def __or__(self, other: "Errors") -> "Errors":
        worse = max((self, other), key=lambda errors: errors.gradient)
        return Errors(
            max(self.loss, other.loss), worse.gradient, max(self.buffer, other.buffer), worse.worst_gradient
        )


# --- many PCs


class Host:
    """One stage on its own PC."""

    def __init__(self, blueprint_bytes: bytes, state: Mapping[str, Tensor], **options: Any) -> None:
        self.blueprint = read_blueprint(blueprint_bytes)
        self.is_mixed = options.get("autocast") is not None
        self.state = {
            entry.name: state[entry.name].detach().clone().requires_grad_(entry.is_trainable)
            for entry in self.blueprint.state
        }
        self._rebuilt = build_stage_program(self.blueprint, **options)
        self._inputs: dict[ValueId, Tensor] = {}
        self._outputs: dict[ValueId, Tensor] = {}
        self._loss: Tensor | None = None

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state.items() if tensor.requires_grad}

    def program(self, *, training: bool) -> Program:
        return self.blueprint.train if training else self.blueprint.evaluate

    def forward(
        self,
        received: Mapping[ValueId, Tensor],
        fields: Mapping[str, Tensor],
        *,
        training: bool,
        key: tuple[int, int] | None,
    ) -> tuple[dict[ValueId, Tensor], dict[str, Tensor]]:
        """Return what crosses to the next stage and, at the last one, loss and metrics."""
        program = self.program(training=training)
        assert set(received) == set(program.inputs)
        self._inputs = {
            value: _hop(tensor).requires_grad_(training and program.values[value].has_gradient)
            for value, tensor in received.items()
        }
        own_fields = {name: _hop(fields[name]) for _, name in program.fields}
        with torch.set_grad_enabled(training):
            passed = self._rebuilt.forward(self.state, self._inputs, own_fields, training=training, key=key)
        assert set(passed.outputs) == set(program.outputs)
        assert set(passed.results) == {name for name, _ in program.results}
        batch_size = next(iter(fields.values())).shape[0]
        for value, tensor in passed.outputs.items():
            expected = program.values[value]
            assert tuple(tensor.shape) == expected.shape_at(batch_size)
            assert self.is_mixed or str(tensor.dtype) == f"torch.{expected.dtype}"
        self._outputs = dict(passed.outputs)
        self._loss = passed.results.get("loss")
        return self._outputs, dict(passed.results)

    def backward(self, gradients: Mapping[ValueId, Tensor]) -> dict[ValueId, Tensor]:
        """Take the gradients of what it sent, return those of what it received."""
        pairs = [
            (tensor, _hop(gradients[value]))
            for value, tensor in self._outputs.items()
            if tensor.requires_grad and value in gradients
        ]
        if self._loss is not None:
            pairs.append((self._loss, torch.ones_like(self._loss)))
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return {value: tensor.grad for value, tensor in self._inputs.items() if tensor.grad is not None}


class Hosts:
    """All stages of one line, cut before the positions in `cuts`."""

    def __init__(self, captured: Captured, cuts: Sequence[int], **options: Any) -> None:
        self.hosts = [Host(packed, captured.state, **options) for packed in packed_stages(captured, cuts)]

    def step(self, batch: Batch, *, key: tuple[int, int] | None = None, seed: int = SEED) -> Outcome:
        """Run forward and backward from zero gradients, and change no parameter."""
        for host in self.hosts:
            for tensor in host.trainable.values():
                tensor.grad = None
        torch.manual_seed(seed)
        results = self._forward(batch, training=True, key=key)
        gradients: dict[ValueId, Tensor] = {}
        for host in reversed(self.hosts):
            gradients = host.backward(gradients)
        assert not gradients
        return _outcome(results, self.gradients(), self.buffers())

    def evaluate(self, batch: Batch, *, key: tuple[int, int] | None = None) -> Outcome:
        return _outcome(self._forward(batch, training=False, key=key), {}, self.buffers())

    def holders(self, name: str) -> list[Tensor]:
        """Return every copy of a tensor."""
        return [host.state[name] for host in self.hosts if name in host.state]

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by name, summed over the holders."""
        total: dict[str, Tensor] = {}
        for host in reversed(self.hosts):
            for name, tensor in host.trainable.items():
                if tensor.grad is not None:
                    total[name] = total[name] + tensor.grad if name in total else tensor.grad.clone()
        return total

    def buffers(self) -> dict[str, Tensor]:
        """Return buffers and constants by name; copies of the same one have to agree."""
        found: dict[str, Tensor] = {}
        for host in self.hosts:
            for entry in host.blueprint.state:
                if entry.kind != PARAMETER:
                    tensor = host.state[entry.name]
                    assert torch.equal(found.setdefault(entry.name, tensor.clone()), tensor), entry.name
        return found

    def _forward(self, batch: Batch, *, training: bool, key: tuple[int, int] | None) -> dict[str, Tensor]:
        fields = fields_of(batch)
        crossing: dict[ValueId, Tensor] = {}
        results: dict[str, Tensor] = {}
        for host in self.hosts:
            assert not results, "only the last stage has results"
            crossing, results = host.forward(crossing, fields, training=training, key=key)
        assert not crossing
        return results


def packed_stages(captured: Captured, cuts: Sequence[int]) -> list[bytes]:
    """Return the blueprint of each stage as it travels."""
    whole = captured.blueprint
    return [
        write_blueprint(slice_blueprint(whole, start, stop))
        for start, stop in pairwise((0, *cuts, whole.num_positions))
    ]


def _hop(tensor: Tensor) -> Tensor:
    """Return the tensor as it arrives: without history, its own memory, and dense."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _outcome(
    results: Mapping[str, Tensor], gradients: dict[str, Tensor], buffers: dict[str, Tensor]
) -> Outcome:
    metrics = {name: tensor.detach() for name, tensor in results.items() if name != "loss"}
    return Outcome(results["loss"].detach(), metrics, gradients, buffers)


# --- one PC


class Alone:
    """The user's own module, trained the ordinary way; names are those of the blueprint."""

    def __init__(self, sample: Sample, blueprint: Blueprint) -> None:
        self.model = copy.deepcopy(sample.model)
        self._sample = sample
        self._aliases = dict(blueprint.aliases)

    def step(self, batch: Batch, *, seed: int = SEED, autocast: torch.dtype | None = None) -> Outcome:
        """Run forward, under autocast if asked, and backward."""
        self.model.train()
        self.model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss, metrics = self._sample.run(self.model, copy_of(batch))
        loss.backward()
        gradients = {name: tensor.grad for name, tensor in self.parameters() if tensor.grad is not None}
        return Outcome(loss.detach(), metrics, gradients, self.buffers())

    def evaluate(self, batch: Batch) -> Outcome:
        self.model.eval()
        with torch.no_grad():
            loss, metrics = self._sample.run(self.model, copy_of(batch))
        return Outcome(loss, metrics, {}, self.buffers())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield self._aliases.get(name, name), tensor

    def buffers(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_buffers()}


# --- comparing


@dataclass(frozen=True)
class Subject:
    """A sample and what capture made of it. Both are shared between tests: copy before changing."""

    sample: Sample
    captured: Captured

    @property
    def num_positions(self) -> int:
        return self.captured.blueprint.num_positions

    def alone(self) -> Alone:
        return Alone(self.sample, self.captured.blueprint)

    def apart(self, cuts: Sequence[int], **options: Any) -> Hosts:
        return Hosts(self.captured, cuts, **options)

    def compare(self, apart: Outcome, alone: Outcome) -> Errors:
        """Return the worst differences of a training step; names have to be the same."""
        missing = [name for name in alone.gradients if name not in apart.gradients]
        assert not missing, f"no gradient apart: {missing}"
        for name in set(apart.gradients) - set(alone.gradients):
            assert not apart.gradients[name].any(), f"a gradient apart only: {name}"
        gradient, worst = _gradient_error(apart.gradients, alone.gradients)
        loss = abs((apart.loss - alone.loss).item()) / max(abs(alone.loss.item()), 1e-12)
        return Errors(loss, gradient, self._buffer_error(apart.buffers, alone.buffers), worst)

    def _buffer_error(self, apart: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> float:
        before = dict(self.sample.model.named_buffers())
        worst = 0.0
        for name, truth in alone.items():
            # What no stage holds must be something that training does not change.
            held = apart[name] if name in apart else before[name]
            difference = (held.double() - truth.double()).abs()
            worst = max(worst, difference.max().item() if difference.numel() else 0.0)
        return worst


@functools.cache
def subject(name: str) -> Subject:
    """Capture a family or a pitfall, once per process."""
    sample = {**FAMILIES, **PITFALLS}[name].sample()
    batch = copy_of(sample.batch)
    return Subject(sample, capture(sample.model, batch, sample.loss, dict(sample.metrics) or None))


def _gradient_error(apart: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the worst error and its name; a gradient that should be zero is measured against the others."""
    largest = max(gradient.abs().max().item() for gradient in alone.values())
    worst = (0.0, "")
    for name, truth in alone.items():
        scale = max(truth.abs().max().item(), 1e-3 * largest)
        error = (apart[name].double() - truth.double()).abs().max().item() / scale
        worst = max(worst, (error, name))
    return worst
