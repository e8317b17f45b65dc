"""What a stage is built from: what this PC holds of the one before, and snapshots of others, by name.

Nothing here believes a source: what is used of it must be what the blueprint says, and finite. One that
cannot be used is named to the hub, which knows others. Driven by peer.host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ravnest.engine.optimizers import find_not_finite
from ravnest.engine.stage import Snapshot
from ravnest.errors import WeightsError
from ravnest.exchange import HUB
from ravnest.model.blueprint import Blueprint, StateEntry
from ravnest.model.flat import Layout, read_snapshot
from ravnest.net.transport import Buffer
from ravnest.peer.standing import Standing
from ravnest.staging import StageMissing, StageParts


@dataclass(frozen=True, slots=True)
class Held:
    """What is left of a stage whose plan has ended: enough to go on with under another."""

    snapshot: Snapshot
    standing: Standing


def assemble(
    blueprint: Blueprint, parts: StageParts, contents: Sequence[Buffer], held: Held | None, device: str
) -> tuple[Snapshot, Standing] | StageMissing:
    """Return what a stage begins with; contents are those of the order's sources."""
    state: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    standing = Standing(parts.base)
    if parts.keeps and held is not None:
        state, optimizer = _keep(held.snapshot, blueprint)
        averaged = {entry.name for entry in Layout.of(blueprint).entries}
        if averaged <= state.keys() and averaged <= held.standing.anchors.keys():
            standing = held.standing
    for source, content in zip(parts.sources, contents, strict=True):
        missing = [entry for entry in blueprint.state if entry.name not in state]
        if not missing:
            break
        try:
            found, slots = _read(content, missing)
        except WeightsError as error:
            if source.node == HUB:
                raise
            return StageMissing(parts.epoch, source.node, str(error))
        state |= {name: tensor.to(device) for name, tensor in found.items()}
        optimizer |= {key: tensor.to(device) for key, tensor in slots.items()}
    lacks = [entry.name for entry in blueprint.state if entry.name not in state]
    if lacks:
        raise WeightsError(
            f"no source of the stage has {lacks[0]!r}, nor {len(lacks) - 1} more of its tensors"
        )
    return Snapshot(parts.version, state, optimizer), standing


def _keep(held: Snapshot, blueprint: Blueprint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is held of a stage, with the optimizer's state."""
    state = {}
    for entry in blueprint.state:
        tensor, kind = held.state.get(entry.name), (entry.shape, f"torch.{entry.dtype}")
        if tensor is not None and (tuple(tensor.shape), str(tensor.dtype)) == kind:
            state[entry.name] = tensor
    slots = {key: tensor for key, tensor in held.optimizer.items() if key.partition("/")[2] in state}
    return state, slots


def _read(content: Buffer, entries: Sequence[StateEntry]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a source has; not finite may only be what training leaves as it is, such as a mask."""
    state, slots = read_snapshot(content, entries)
    slots = {key: tensor for key, tensor in slots.items() if key.partition("/")[2] in state}
    changing = {entry.name for entry in entries if entry.is_trainable or entry.is_written}
    numbers = {name: state[name] for name in changing & state.keys()} | slots
    fractions = {key: tensor for key, tensor in numbers.items() if tensor.is_floating_point()}
    if (key := find_not_finite(fractions)) is not None:
        raise WeightsError(f"{key!r} of a snapshot is not finite, so nothing could be trained on with it")
    return state, slots
