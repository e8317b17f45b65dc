"""Checks: lots that nobody can foresee, and whether clusters hold the weights that most of them hold.

Who evaluates, who gives a checkpoint and who gives the result is drawn, never claimed. Lots come from the
job's secret seed, which is in the log: a replay draws the same. After a round all its clusters hold one
average. So the state that one of them gives is compared with sketches that others make of theirs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ravnest.ids import NodeId
from ravnest.protocol.placement import SKETCH_VALUES, SketchRow

_SAME = 0.01  # of a tensor's norm: rounding to bf16 makes a tenth of it
_NOTHING = 1e-6  # a norm, or a difference of losses, that means nothing
_FAR = 1.0  # times the lower of two validation losses lies between them
_Option = TypeVar("_Option")


class Draws:
    """Lots from a secret seed, one after the other."""

    def __init__(self, seed: int) -> None:
        self._seed, self._num_drawn = seed, 0

    def make_key(self) -> bytes:
        """Return sixteen bytes that nobody can foresee."""
        self._num_drawn += 1
        name = f"ravnest draw {self._seed} {self._num_drawn}".encode()
        return hashlib.blake2b(name, digest_size=16).digest()

    def choose(self, options: Sequence[_Option]) -> _Option:
        """Return one of some; where there is no choice, nothing is drawn."""
        return self.shuffle(options)[0]

    def shuffle(self, options: Sequence[_Option]) -> tuple[_Option, ...]:
        """Return them in an order that is drawn."""
        left, found = list(options), []
        while len(left) > 1:
            found.append(left.pop(int.from_bytes(self.make_key(), "little") % len(left)))
        return (*found, *left)


@dataclass(frozen=True, slots=True)
class NodeSketch:
    """What a node says of its weights, or the requester of what it fetched from it."""

    node: NodeId
    rows: tuple[SketchRow, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comes of a comparison: nodes that hold what most do not, or nodes of which nobody can tell."""

    num_agreeing: (
        int  # nodes that hold the same as each given part, at least; 0: nobody was asked, or could say
    )
    unlike: tuple[NodeId, ...] = ()
    disputed: tuple[NodeId, ...] = ()

    def describe(self) -> str:
        """Return what is wrong with what was given, as people read it; nothing if it is not."""
        if self.disputed:
            return f"{' and '.join(self.disputed)} contradict each other: they hold different weights"
        return f"{' and '.join(self.unlike)} hold other weights than most others" if self.unlike else ""


NOT_COMPARED = Verdict(0)


def is_far_above(loss: float, best: float) -> bool:
    """Return whether a validation loss is further above another than a few updates or chance bring it."""
    return loss - best > max(_FAR * abs(best), _NOTHING)


def is_alike(one: bytes, other: bytes) -> bool:
    """Return whether two sketches by the same key are of the same weights, up to rounding."""
    row_bytes = 4 * SKETCH_VALUES
    if len(one) != len(other) or len(one) % row_bytes:
        return False
    first, second = (np.frombuffer(each, "<f4").astype(np.float64) for each in (one, other))
    first, second = first.reshape(-1, SKETCH_VALUES), second.reshape(-1, SKETCH_VALUES)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return False
    norms = np.maximum(np.abs(first[:, :1]), np.abs(second[:, :1]))
    return bool((np.abs(first - second) <= _SAME * norms + _NOTHING).all())


def judge_sketches(given: Sequence[NodeSketch], others: Sequence[NodeSketch]) -> Verdict:
    """Compare what one cluster gave with what others say, segment by segment; most of them are right."""
    unlike: dict[NodeId, None] = {}
    disputed: dict[NodeId, None] = {}
    least: int | None = None
    for giver in given:
        for start, stop, values in giver.rows:
            found = [(x.node, row[2]) for x in others for row in x.rows if row[:2] == (start, stop)]
            voters = [(giver.node, values), *found]
            groups = [[node for node, said in voters if is_alike(said, own)] for _, own in voters]
            agreed = max(groups, key=len)
            is_majority = 2 * len(agreed) > len(voters)
            others_of = [node for node, _ in voters if node not in agreed]
            (unlike if is_majority else disputed).update(
                dict.fromkeys(others_of if is_majority else (node for node, _ in voters))
            )
            num_agreeing = len(agreed) - 1 if is_majority and giver.node in agreed else 0
            least = num_agreeing if least is None else min(least, num_agreeing)
    return Verdict(least or 0, tuple(unlike), tuple(disputed))
