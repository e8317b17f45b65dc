"""The tied weights of one stage: carries out what averaging.tied decides.

In lockstep the home of a weight waits for its step before the next forward, and stamps what it sends on with
the steps it has made; the stages behind it wait for those. Ahead of lockstep no stage waits. After a rebuild
copies may differ: the home's copy counts, with its optimizer state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from ravnest.averaging.tied import Addressed, Stamp, TiedOrder
from ravnest.codec import decode_tensor, describe, encode_tensor
from ravnest.config import WireFormat
from ravnest.engine.stage import StageEngine
from ravnest.errors import ProtocolError, WeightsError
from ravnest.ids import NodeId
from ravnest.model.blueprint.program import Blueprint
from ravnest.protocol.averaging import TiedCall, TiedGradient, TiedHolder, TiedStep
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import StagePosition
from ravnest.protocol.tensors import FLOAT_BYTES, Buffer, TensorSpec
from ravnest.transfer.outbox import Outgoing


class TiedWeights:
    """The tied weights of one stage."""

    def __init__(self, position: StagePosition, blueprint: Blueprint, stage: StageEngine) -> None:
        names = stage.shared.keys()
        uses = {entry.name: entry.positions for entry in blueprint.state if entry.name in names}
        interval = (blueprint.start, blueprint.stop)
        self._is_rebuilt = stage.version > 0  # in all stages of a cluster, or in none
        self._order: TiedOrder[Tensor] = TiedOrder(
            position.build_id, position.node, position.pipeline, interval, uses, self._is_rebuilt
        )
        self._node = position.node
        self._names = frozenset(uses)
        self._stage = stage
        self._needed: dict[NodeId, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether this stage holds no tied weight."""
        return not self._names

    @property
    def is_settled(self) -> bool:
        """Whether the weights whose home this stage is have had all that was trained."""
        return self._order.is_settled

    @property
    def is_ready(self) -> bool:
        """Whether this stage knows its weights, though not all that was trained is in them."""
        return self._order.is_ready

    def may_forward(self, waits: bool) -> bool:
        """Return whether a microbatch meets the weights that stages before had, if it waits the newest."""
        is_newest = self.is_settled or not waits
        return is_newest and self.is_ready and self._order.has_seen(tuple(self._needed.items()))

    def need(self, stamp: Stamp) -> None:
        """Remember the steps that a microbatch must see."""
        self._needed |= {home: max(number, self._needed.get(home, 0)) for home, number in stamp}

    def stamp(self, waits: bool) -> Stamp:
        """Return the steps that the next stage must have made before a microbatch."""
        return tuple((self._needed | dict(self._order.stamp if waits else ())).items())

    def hello(self) -> list[Outgoing]:
        """Tell the others of the cluster that this stage is ready; after a rebuild, with its copies."""
        if not self._names:
            return []
        told = self._order.hello()
        if self._is_rebuilt:
            found, homes = self._stage.snapshot(copies=False), self._order.homes
            state = {name: found.state[name] for name in sorted(homes)}
            slots = {key: each for key, each in found.optimizer.items() if key.partition("/")[2] in homes}
            told += self._order.change(state | slots)
        return self._carry_out(told)

    def offer(self, rate: float, is_closing: bool) -> list[Outgoing]:
        """Remove the gradients of tied weights from the update about to be made."""
        if not self._names:
            return []
        return self._carry_out(self._order.offer(rate, self._stage.take_shared_gradients(), is_closing))

    def commit(self, changes: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Outgoing]]:
        """Make the tied part of a round's changes; return the rest."""
        tied = {name: change for name, change in changes.items() if name in self._names}
        rest = {name: change for name, change in changes.items() if name not in self._names}
        return rest, self._carry_out(self._order.change(tied))

    def receive_holder(self, message: TiedHolder, sender: NodeId) -> list[Outgoing] | Refusal:
        """Learn which positions another stage holds."""
        return self._carry_out(self._order.receive_holder(sender, message))

    def receive_call(self, message: TiedCall, sender: NodeId) -> list[Outgoing] | Refusal:
        """Give a home the gradients since its last call."""
        return self._carry_out(self._order.receive_call(sender, message))

    def receive_gradient(
        self, message: TiedGradient[TensorSpec], buffers: Sequence[Buffer], sender: NodeId
    ) -> list[Outgoing] | Refusal:
        """As a home, collect the gradients that were called for."""
        decoded = _with_values(message, self._decode(message.values, buffers, is_state=False))
        return self._carry_out(self._order.receive_gradient(sender, decoded))

    def receive_step(
        self, message: TiedStep[TensorSpec], buffers: Sequence[Buffer], sender: NodeId
    ) -> list[Outgoing] | Refusal:
        """Make the step that a home has numbered."""
        is_state = self._says_state(message.number)
        decoded = _with_values(message, self._decode(message.values, buffers, is_state))
        return self._carry_out(self._order.receive_step(sender, decoded))

    def _decode(
        self, values: Sequence[tuple[str, TensorSpec]], buffers: Sequence[Buffer], is_state: bool
    ) -> tuple[tuple[str, Tensor], ...]:
        pairs = zip(values, buffers, strict=True)
        return tuple((key, self._read(key, spec, buffer, is_state)) for (key, spec), buffer in pairs)

    def _says_state(self, number: int) -> bool:
        return self._is_rebuilt and number == 1

    def _read(self, key: str, spec: TensorSpec, buffer: Buffer, is_state: bool) -> Tensor:
        is_slot = is_state and key not in self._names
        weight = self._stage.shared.get(key.partition("/")[2] if is_slot else key)
        if weight is None or spec.shape not in (tuple(weight.shape), *([()] if is_slot else ())):
            raise ProtocolError(f"{key[:80]!r} of shape {spec.shape} is no weight that this stage shares")
        if spec.dtype not in FLOAT_BYTES:
            raise ProtocolError(f"{key[:80]!r} came as {spec.dtype}, which no weight is")
        value = decode_tensor(buffer, spec).to(weight.device)
        dtype = torch.float32 if is_slot and not spec.shape else weight.dtype
        if is_state and (value.dtype != dtype or not value.isfinite().all()):
            raise ProtocolError(f"{key[:80]!r} came as what its home has, but is no finite {dtype}")
        return value

    @overload
    def _carry_out(self, decided: Addressed[Tensor]) -> list[Outgoing]: ...
    @overload
    def _carry_out(self, decided: Addressed[Tensor] | Refusal) -> list[Outgoing] | Refusal: ...
    def _carry_out(self, decided: Addressed[Tensor] | Refusal) -> list[Outgoing] | Refusal:
        """Make the steps addressed to this stage; return the messages to others."""
        if isinstance(decided, Refusal):
            return decided
        outgoing = []
        for receiver, message in decided:
            if receiver == self._node:
                assert isinstance(message, TiedStep)
                self._step(message)
            elif isinstance(message, TiedGradient | TiedStep):
                specs = tuple((name, describe(value, WireFormat.FP32)) for name, value in message.values)
                # Exactly as they are: all must add the same.
                buffers = tuple(encode_tensor(value, WireFormat.FP32) for _, value in message.values)
                outgoing.append(Outgoing(receiver, _with_values(message, specs), buffers))
            else:
                outgoing.append(Outgoing(receiver, message))
        return outgoing

    def _step(self, step: TiedStep[Tensor]) -> None:
        """Make a step, weight by weight: one whose sum is not finite stays, in this stage as in all."""
        if self._says_state(step.number):
            self._adopt(step)
            return
        for name, value in step.values:
            if step.rate is None:
                self._stage.add({name: value})
            else:
                self._stage.step_shared(name, value, step.rate)

    def _adopt(self, step: TiedStep[Tensor]) -> None:
        state = {key: value for key, value in step.values if key in self._names}
        if state.keys() <= self._order.homes:  # the own: microbatches in flight hold it
            return
        try:
            self._stage.adopt(state, {key: value for key, value in step.values if key not in state})
        except WeightsError as error:
            raise ProtocolError(str(error)) from None


def _with_values(message: TiedGradient[Any] | TiedStep[Any], values: tuple[tuple[str, Any], ...]) -> Any:
    return replace(message, values=values)
