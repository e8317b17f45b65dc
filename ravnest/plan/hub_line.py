"""The hub's line, which all clusters share: samples, and what passes between two nodes nobody can dial.

A cluster asks for so many bytes per batch. Together they have one upload; when they ask for more, all of them
slow down by the same factor. So a cluster that needs much relaying may be worth less than none. Rounds pass
this line too, where the owners of a segment are mostly hidden: `RelayedRounds` keeps that short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.config import Averaging, Mean
from ravnest.plan.line import Bools, Floats, Ints, LineCost
from ravnest.plan.split import NodeOrder

_SHORTER = 0.9  # than it may take: the final cuts are a little different
_SHORT = 8  # nodes: so few may stand in any order
_LEAST_COST = 0.01  # of the mean rate: what a change costs at least, so that large ones come first


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


def other_orders(order: NodeOrder, count: int, rng: np.random.Generator) -> list[NodeOrder]:
    """Return the same nodes in so many other orders: some neighbours change places, a few nodes all do."""
    found = [order[::-1]]
    while len(found) < count:
        if len(order) <= _SHORT and len(found) % 2:
            found.append(tuple(rng.permutation(order).tolist()))
            continue
        nodes = list(order)
        for k in range(int(rng.integers(2)), len(nodes) - 1, 2):
            if rng.random() < 0.5:
                nodes[k : k + 2] = nodes[k + 1], nodes[k]
        found.append(tuple(nodes))
    return found


class RelayedRounds:
    """Chooses clusters whose rounds do not keep the hub's line busy for too long.

    A ring has hidden neighbours where more owners of a segment are hidden than not; a robust round needs the
    hub only where all are. `sides` is 1 where the owner of a position is hidden and -1 where it is not,
    [cluster, position].
    """

    def __init__(self, line: LineCost) -> None:
        starts = np.arange(line.num_positions)
        self._bytes = line.round_bytes(starts, starts + 1)
        self._upload = line.config.hub_bytes_per_second or np.inf
        self._most = _SHORTER * line.config.max_relayed_round_seconds
        self._mean = line.config.mean if line.config.averaging is not Averaging.EXACT else Mean.PLAIN

    def sides(self, orders: Sequence[NodeOrder], cuts: Ints, hidden: Bools) -> Ints:
        """Return on which side the owner of each position is; cuts are [cluster, depth]."""
        found = np.zeros((len(orders), len(self._bytes)), np.int64)
        for row, order in enumerate(orders):
            for depth, node in enumerate(order):
                found[row, cuts[row, depth + 1] : cuts[row, depth]] = 1 if hidden[node] else -1
        return found

    def seconds(self, sides: Ints) -> float:
        """Return how long a round of these clusters keeps the line busy."""
        return float(self._seconds(sides.sum(axis=0), len(sides)))

    def is_too_long(self, sides: Ints) -> bool:
        """Say whether a round of these clusters takes longer than it may."""
        return self.seconds(sides) > self._most

    def shorten(self, sides: Ints, rates: Floats, others: Ints, other_rates: Floats) -> tuple[Ints, Ints]:
        """Return the clusters that stay, and the number of the order that each has then; -1 is its own.

        `others` has the sides of other orders, [cluster, order, position], with their rates. Step by step
        it takes the change, or leaves out the cluster, that shortens a round most for what it costs.
        """
        sides, rates = sides.copy(), rates.copy()
        kept, chosen = np.arange(len(sides)), np.full(len(sides), -1)
        total, least = sides.sum(axis=0), _LEAST_COST * float(rates.mean())
        while len(kept) > 1 and (now := float(self._seconds(total, len(kept)))) > self._most:
            without = self._seconds(total - sides[kept], len(kept) - 1)
            drop = (now - without) / np.maximum(rates[kept], least)
            changed = self._seconds((total - sides[kept])[:, None] + others[kept], len(kept))
            change = (now - changed) / np.maximum(rates[kept, None] - other_rates[kept], least)
            change[other_rates[kept] <= 0.0] = -np.inf
            place, order = np.unravel_index(int(change.argmax()), change.shape)
            if change[place, order] > max(0.0, float(drop.max())):
                cluster = kept[place]
                total = total - sides[cluster] + others[cluster, order]
                sides[cluster], rates[cluster] = others[cluster, order], other_rates[cluster, order]
                chosen[cluster] = order
            else:
                out = int(drop.argmax())
                total = total - sides[kept[out]]
                kept = np.delete(kept, out)
        return kept, chosen[kept]

    def _seconds(self, total: Ints, count: int) -> Floats:
        """Return the seconds on the line of so many clusters, by the sum of their sides [..., position]."""
        if count < 2:
            return np.zeros(total.shape[:-1])
        if self._mean.is_robust(count, count):  # straight to owners that can be dialled, if there is one
            num_pairs = np.where(total == count, total, 0)
        else:
            num_pairs = np.maximum(total, 0)  # with nobody between them; all of them where all are hidden
        return np.asarray((num_pairs * self._bytes).sum(axis=-1) * (count - 1) / count / self._upload)
