"""Where a stage stands among its neighbours, and how values become what travels between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ravnest.codec import decode_tensor, describe, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.stage import PassedOn, Roles
from ravnest.errors import ProtocolError
from ravnest.ids import NodeId
from ravnest.model.blueprint import Blueprint, Program, ValueId
from ravnest.protocol.tensors import Buffer, TensorSpec
from ravnest.protocol.training import Activation, Gradient, Metrics


@dataclass(frozen=True, slots=True)
class StagePosition:
    """Where a stage stands: its plan, its neighbours in the cluster, how numbers travel from it."""

    build_id: int
    seed: int
    node: NodeId
    pipeline: tuple[NodeId, ...]
    activations: WireFormat = WireFormat.FP32
    gradients: WireFormat = WireFormat.FP32
    device: str = "cpu"

    @property
    def index(self) -> int:
        """Its number in the cluster, from the root."""
        return self.pipeline.index(self.node)

    @property
    def before(self) -> NodeId | None:
        """The neighbour towards the root."""
        return self.pipeline[self.index - 1] if self.index else None

    @property
    def after(self) -> NodeId | None:
        """The neighbour towards the leaf."""
        return self.pipeline[self.index + 1] if self.index + 1 < len(self.pipeline) else None


def find_roles(blueprint: Blueprint) -> Roles:
    """Return which state of a stage is trained, written, shared, and which inputs want gradients."""
    program = blueprint.train
    return Roles(
        trainable=frozenset(entry.name for entry in blueprint.state if entry.is_trainable),
        written=frozenset(entry.name for entry in blueprint.state if entry.is_written),
        shared=frozenset(blueprint.shared),
        inputs=frozenset(value for value in program.inputs if program.values[value].has_gradient),
    )


def encode_values(
    values: Sequence[tuple[ValueId, Tensor]], wire_format: WireFormat
) -> tuple[tuple[tuple[int, TensorSpec], ...], tuple[memoryview, ...]]:
    """Return what announces values and the bytes beside it."""
    specs = tuple((int(value), describe(tensor, wire_format)) for value, tensor in values)
    return specs, tuple(encode_tensor(tensor, wire_format) for _, tensor in values)


def decode_fields(
    specs: Sequence[tuple[str, TensorSpec]], buffers: Sequence[Buffer], device: str
) -> dict[str, Tensor]:
    """Return the fields that came with a message."""
    return {
        name: decode_tensor(buffer, spec, device) for (name, spec), buffer in zip(specs, buffers, strict=True)
    }


def decode_values(
    message: Activation | Gradient, buffers: Sequence[Buffer], program: Program, num_samples: int, device: str
) -> dict[ValueId, Tensor]:
    """Return the values that a neighbour sends, or refuse what the program does not have in this shape."""
    found = {}
    for (number, spec), buffer in zip(message.values, buffers, strict=True):
        kind = program.values.get(value := ValueId(number))
        if kind is None or spec.shape != kind.shape_at(num_samples):
            raise ProtocolError(
                f"value {number} of microbatch {message.microbatch} has shape {spec.shape}, not its own"
            )
        found[value] = decode_tensor(buffer, spec, device)
    return found


def read_results(passed: PassedOn) -> tuple[float | None, Metrics]:
    """Return the loss and the metrics of the last stage."""
    results: Mapping[str, float] = {name: float(value) for name, value in passed.results.items()}
    return results["loss"], tuple((name, value) for name, value in results.items() if name != "loss")
