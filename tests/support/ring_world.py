"""A ring of members in one process that delivers its parts in a drawn order."""

from random import Random

import numpy as np

from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.messages import Refusal


class Plain:
    """Passes numpy vectors on as they are; refuses what is not finite."""

    def __init__(self, vector: np.ndarray, edges: tuple[int, ...] = ()) -> None:
        self.vector, self.edges = vector, (*edges, len(vector))

    def fault(self, where: slice, value: np.ndarray, weight: float, num_shares: int) -> str | None:
        return None if np.isfinite(value).all() else "what came is not finite"

    def begin(self, where: slice, weight: float) -> np.ndarray:
        return self.vector[where] * weight

    def add(self, where: slice, value: np.ndarray, weight: float) -> np.ndarray:
        return value + self.begin(where, weight)

    def finish(self, where: slice, value: np.ndarray, weight: float, total: float) -> np.ndarray:
        return self.add(where, value, weight) / total

    def keep(self, value: np.ndarray) -> np.ndarray:
        return value

    def content(self, value: np.ndarray) -> bytes:
        return value.tobytes()


def make_ring(
    vectors: list, weights: list[float], chunk_size: int, edges: tuple[int, ...] = (), segment: int = 0
) -> list[RingReduce]:
    size = len(vectors)
    return [
        RingReduce(RingPosition(1, segment, position, size), Plain(vector, edges), weight, chunk_size)
        for position, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
    ]


def run_ring(members: list[RingReduce], random: Random, meddle=None) -> list[tuple[int, RingPart]]:
    """Deliver until nothing is under way; `meddle(receiver, part)` runs before each delivery."""
    under_way, delivered = [], []

    def send(sender: int, parts) -> None:
        under_way.extend(((sender + 1) % len(members), part) for part in parts)

    for sender in random.sample(range(len(members)), len(members)):
        send(sender, members[sender].start())
    while under_way:
        receiver, part = under_way.pop(random.randrange(len(under_way)))
        if meddle is not None:
            meddle(receiver, part)
        passed_on = members[receiver].receive(part)
        assert not isinstance(passed_on, Refusal), passed_on
        delivered.append((receiver, part))
        if passed_on is not None:
            send(receiver, [passed_on])
    return delivered


def mean_of(member: RingReduce) -> np.ndarray:
    return np.concatenate([np.empty(0), *member.pieces])
