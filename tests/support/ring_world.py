"""A ring of members in one process that delivers its parts in a drawn order."""

from random import Random

import numpy as np

from ravnest.averaging.ring import RingReduce
from ravnest.protocol import Refusal, RingPart


def make_ring(vectors: list, weights: list[float], chunk_size: int) -> list[RingReduce]:
    size = len(vectors)
    return [
        RingReduce(1, 0, position, size, vector, weight, chunk_size)
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
