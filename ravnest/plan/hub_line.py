"""The hub's line, which all clusters share: samples, and what passes between two nodes nobody can dial.

A cluster asks for so many bytes per batch. Together they have one upload; when they ask for more, all of them
slow down by the same factor. So a cluster that needs much relaying may be worth less than none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.plan.line import Bools, Floats, Ints, LineCost
from ravnest.plan.split import NodeOrder


@dataclass(frozen=True, slots=True)
class HubLine:
    """What the hub can send, and what clusters ask of it."""

    upload: float  # bytes per second; infinite where it is not counted
    sample_bytes: float  # of a batch
    relay_bytes: float  # of a batch that passes the hub once each way, at the cut where that is least
    slowest_relay: float  # seconds a batch takes at least, between two nodes that nobody can dial

    @classmethod
    def of(cls, line: LineCost, share: float = 1.0) -> "HubLine":
        """Return the line of a hub, or a share of it, for the batches of a model."""
        upload, between = line.config.hub_bytes_per_second, slice(1, -1)
        both_ways = (line.send_after + line.send_before)[between]
        busier = np.maximum(line.send_after, line.send_before)[between]
        return cls(
            upload=share * upload if upload else np.inf,
            sample_bytes=line.sample_bytes,
            relay_bytes=float(both_ways.min(initial=np.inf)),
            slowest_relay=float(busier.min(initial=np.inf)) / line.config.relay_bytes_per_second,
        )

    def busy_share(self, asked: float) -> float:
        """Return the bytes per second that are asked for, in those the line carries."""
        return asked / self.upload

    def hold_back(self, rate: float, asked: float) -> float:
        """Return what remains of a rate when so much is asked of the line."""
        return rate / max(1.0, self.busy_share(asked))

    def most_relays(self, period: float, left: float) -> float:
        """Return how many pairs of a cluster may use the relay, where so much of the line is left."""
        if period < self.slowest_relay:
            return 0
        if not np.isfinite(left):
            return np.inf
        return max(0, int((left * period - self.sample_bytes) // max(self.relay_bytes, 1e-9)))

    def asked_by(self, num_relays: int, period: float) -> float:
        """Return the bytes per second that a cluster with so many relayed pairs asks for, at least."""
        relayed = num_relays * self.relay_bytes if num_relays else 0.0
        return (self.sample_bytes + relayed) / period


def choose_clusters(
    periods: Floats, hub_bytes: Floats, speed_ratio: float, hub: HubLine
) -> tuple[float, Bools]:
    """Return the most batches per second, and which clusters are worth keeping for it.

    A cluster more than `speed_ratio` faster than the slowest one is held back to that ratio, so leaving out
    a slow cluster can pay; and so can leaving out one that asks much of the hub's line.
    """
    kept = np.zeros(len(periods), bool)
    order = np.argsort(periods, kind="stable")
    order = order[np.isfinite(periods[order])]
    if not len(order):
        return 0.0, kept
    ascending = periods[order]
    rates = np.concatenate([[0.0], np.cumsum(1.0 / ascending)])
    num_held = np.searchsorted(ascending, ascending / speed_ratio)
    totals = num_held * speed_ratio / ascending + rates[1:] - rates[num_held]
    best = int(totals.argmax())
    kept[order[: best + 1]] = True
    kept |= periods == ascending[best]
    rate = float(totals[best])
    held = np.minimum(1.0 / periods, speed_ratio / ascending[best])
    if hub.busy_share(float((held * hub_bytes)[kept].sum())) <= 1.0:
        return rate, kept
    return _relieve(kept, periods, hub_bytes, speed_ratio, hub)


def _relieve(
    kept: Bools, periods: Floats, hub_bytes: Floats, speed_ratio: float, hub: HubLine
) -> tuple[float, Bools]:
    """Leave out the clusters that ask most of the line, as long as the others gain more."""

    def judge(chosen: Ints) -> float:
        held = np.minimum(1.0 / periods[chosen], speed_ratio / periods[chosen].max())
        return hub.hold_back(float(held.sum()), float((held * hub_bytes[chosen]).sum()))

    places = np.flatnonzero(kept)
    places = places[np.lexsort((periods[places], hub_bytes[places]))]
    rates = [judge(places[: count + 1]) for count in range(len(places))]
    count = int(np.argmax(np.array(rates) >= max(rates) * (1 - 1e-9))) + 1  # of equals, the fewest
    best, chosen = rates[count - 1], places[:count]
    for other in places[count:]:  # one that did not fit may be followed by one that does
        rate = judge(np.append(chosen, other))
        if rate > best * (1 + 1e-9):
            best, chosen = rate, np.append(chosen, other)
    kept = np.zeros(len(periods), bool)
    kept[chosen] = True
    return best, kept


def relayed_places(order: Sequence[int], hidden: Sequence[bool]) -> list[int]:
    """Return the depths at which a node and the one before it in the order need the hub between them."""
    return [k for k in range(1, len(order)) if hidden[order[k]] and hidden[order[k - 1]]]


def alternate(order: Sequence[int], hidden: Sequence[bool]) -> NodeOrder:
    """Return the same nodes with as few hidden neighbours as can be, otherwise in their order."""
    queues = [[node for node in order if hidden[node] == kind] for kind in (False, True)]
    places, made = [0, 0], list[int]()
    for _ in order:
        num_visible, num_hidden = (len(queue) - place for queue, place in zip(queues, places, strict=True))
        was_hidden = bool(made) and hidden[made[-1]]
        wanted = order[len(made)]
        kind = int(hidden[wanted])
        if was_hidden and num_visible:
            kind = 0
        elif not was_hidden and num_hidden > num_visible:
            kind = 1
        if not (num_visible, num_hidden)[kind]:
            kind = 1 - kind
        made.append(queues[kind][places[kind]])
        places[kind] += 1
    return tuple(made)
