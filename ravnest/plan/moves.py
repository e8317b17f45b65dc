"""Local moves of the search: small changes of one cluster or of a pair, a few alternatives for each.

Every cluster takes part in at most one proposal of a round and every spare in at most one, so all proposals
can be judged and accepted independently. The stage that limits a cluster is tried first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.plan.hub_line import alternate
from ravnest.plan.split import NodeOrder

_ALTERNATIVES = (2, 8)  # fewest and most for each cluster or pair


@dataclass(frozen=True, slots=True)
class Proposal:
    """Replace the clusters at these places by these orders; an order more is a new cluster."""

    places: tuple[int, ...]
    orders: tuple[NodeOrder, ...]


def propose(
    clusters: Sequence[NodeOrder],
    slowest: Sequence[int],
    spares: Sequence[int],
    max_stages: int,
    rng: np.random.Generator,
    hidden: Sequence[bool] | None = None,
) -> list[list[Proposal]]:
    """Return for each cluster or pair of clusters some alternatives, at most one of which may be accepted.

    `hidden` says who cannot be dialled, where moves are to spare the hub's line.
    """
    shuffled = rng.permutation(len(clusters)).tolist()
    stock = rng.permutation(np.asarray(spares, np.int64)).tolist()
    if hidden is not None:  # the last one is taken first
        stock.sort(key=lambda node: not hidden[node])
    count = int(np.clip(32 // max(1, len(clusters)), *_ALTERNATIVES))
    dice = rng.random((len(clusters), count, 6)).tolist()
    proposals: list[list[Proposal]] = []
    while shuffled:
        place = shuffled.pop()
        rolls = dice[place]
        if shuffled and (rolls[0][0] < 0.5 or not stock):
            other = shuffled.pop()
            moves = [_pair(clusters, slowest, place, other, roll, max_stages) for roll in rolls]
            moves.append(_deal(clusters, place, other, max_stages, rng))
        else:
            mine = [stock.pop() for _ in range(min(count, -(-len(stock) // (len(shuffled) + 1))))]
            moves = [
                _single(
                    clusters[place],
                    slowest[place],
                    place,
                    mine[k % len(mine)] if mine else None,
                    roll,
                    max_stages,
                )
                for k, roll in enumerate(rolls)
            ]
            moves.append(_split(clusters[place], place, rng))
        found = [move for move in moves if move is not None]
        proposals.append(found if hidden is None else [*found, *_spread(found, clusters, place, hidden)])
    return proposals


def _spread(
    found: Sequence[Proposal], clusters: Sequence[NodeOrder], place: int, hidden: Sequence[bool]
) -> list[Proposal]:
    """Return the same changes with hidden nodes apart, and a cluster with nothing else changed."""
    alone = Proposal((place,), (clusters[place],))
    spread = [
        Proposal(move.places, tuple(alternate(order, hidden) for order in move.orders))
        for move in (alone, *found)
    ]
    known = {(move.places, move.orders) for move in (alone, *found)}
    return [move for move in spread if (move.places, move.orders) not in known]


def neighbours(order: NodeOrder, place: int, spares: Sequence[int], max_stages: int) -> list[Proposal]:
    """Return all clusters that one change of this one makes: a spare put in or added, a node out or moved."""
    places = range(len(order))
    found = _with_spares(order, spares, max_stages) + _swapped(order)
    if len(order) > 1:
        found += [_drop(order, at) for at in places]
        found += [_insert(_drop(order, i), j, order[i]) for i in places for j in places if i != j]
    return [Proposal((place,), (each,)) for each in dict.fromkeys(found)]


def pair_neighbours(clusters: Sequence[NodeOrder], one: int, other: int, max_stages: int) -> list[Proposal]:
    """Return all pairs of clusters that an exchange of two nodes makes, or a node that changes sides."""
    left, right = clusters[one], clusters[other]
    found = [
        (_put(left, i, right[j]), _put(right, j, left[i]))
        for i in range(len(left))
        for j in range(len(right))
    ]
    for giver, taker, is_left in ((left, right, True), (right, left, False)):
        if len(giver) > 1 and len(taker) < max_stages:
            pairs = [
                (_drop(giver, i), _insert(taker, j, giver[i]))
                for i in range(len(giver))
                for j in range(len(taker) + 1)
            ]
            found += pairs if is_left else [(second, first) for first, second in pairs]
    return [Proposal((one, other), orders) for orders in found]


def second_neighbours(
    order: NodeOrder,
    place: int,
    spares: Sequence[int],
    max_stages: int,
    most: int,
    rng: np.random.Generator,
) -> list[Proposal]:
    """Return some clusters that take in a spare and exchange two nodes: neither may gain alone."""
    first = _with_spares(order, spares, max_stages)
    longest = min(len(order) + 1, max_stages)
    pairs = [(i, j) for j in range(longest) for i in range(j)]
    picked = rng.permutation(len(first) * len(pairs))[:most].tolist()
    found = []
    for number in picked:
        base, (i, j) = first[number // len(pairs)], pairs[number % len(pairs)]
        if j < len(base):
            found.append(_put(_put(base, i, base[j]), j, base[i]))
    return [Proposal((place,), (each,)) for each in dict.fromkeys(found)]


def _with_spares(order: NodeOrder, spares: Sequence[int], max_stages: int) -> list[NodeOrder]:
    found = [_put(order, at, spare) for at in range(len(order)) for spare in spares]
    if len(order) < max_stages:
        found += [_insert(order, at, spare) for at in range(len(order) + 1) for spare in spares]
    return found


def _swapped(order: NodeOrder) -> list[NodeOrder]:
    return [_put(_put(order, i, order[j]), j, order[i]) for j in range(len(order)) for i in range(j)]


def _pair(
    clusters: Sequence[NodeOrder],
    slowest: Sequence[int],
    one: int,
    other: int,
    roll: Sequence[float],
    max_stages: int,
) -> Proposal | None:
    """Exchange a node between two clusters, or give one away."""
    left, right = clusters[one], clusters[other]
    i = slowest[one] if roll[1] < 0.5 else int(roll[2] * len(left))
    if roll[4] < 0.7:
        j = slowest[other] if roll[1] > 0.75 else int(roll[3] * len(right))
        orders = (_put(left, i, right[j]), _put(right, j, left[i]))
    elif len(left) > 1 and len(right) < max_stages:
        orders = (_drop(left, i), _insert(right, int(roll[3] * (len(right) + 1)), left[i]))
    else:
        return None
    return Proposal((one, other), orders)


def _deal(
    clusters: Sequence[NodeOrder], one: int, other: int, max_stages: int, rng: np.random.Generator
) -> Proposal | None:
    """Shuffle the nodes of two clusters and deal them anew: what no exchange of one node reaches."""
    nodes: list[int] = rng.permutation(clusters[one] + clusters[other]).tolist()
    size = int(rng.integers(1, len(nodes)))
    if max(size, len(nodes) - size) > max_stages:
        return None
    return Proposal((one, other), (tuple(nodes[:size]), tuple(nodes[size:])))


def _split(order: NodeOrder, place: int, rng: np.random.Generator) -> Proposal | None:
    """Shuffle the nodes of a cluster and make two of it."""
    if len(order) < 2:
        return None
    nodes: list[int] = rng.permutation(order).tolist()
    size = int(rng.integers(1, len(nodes)))
    return Proposal((place,), (tuple(nodes[:size]), tuple(nodes[size:])))


def _single(
    order: NodeOrder, slowest: int, place: int, spare: int | None, roll: Sequence[float], max_stages: int
) -> Proposal | None:
    """Swap in or add a spare, drop a node, or change the order."""
    size = len(order)
    i = slowest if roll[1] < 0.5 else int(roll[2] * size)
    j = int(roll[3] * size)
    if spare is not None and roll[4] < 0.5:
        return Proposal((place,), (_put(order, i, spare),))
    if spare is not None and roll[4] < 0.7 and size < max_stages:
        return Proposal((place,), (_insert(order, int(roll[3] * (size + 1)), spare),))
    if size < 2 or i == j:
        return None
    if roll[4] < 0.8:
        return Proposal((place,), (_drop(order, i),))
    if roll[5] < 0.5:
        return Proposal((place,), (_put(_put(order, i, order[j]), j, order[i]),))
    return Proposal((place,), (_insert(_drop(order, i), j, order[i]),))


def _put(order: NodeOrder, at: int, node: int) -> NodeOrder:
    return (*order[:at], node, *order[at + 1 :])


def _insert(order: NodeOrder, at: int, node: int) -> NodeOrder:
    return (*order[:at], node, *order[at:])


def _drop(order: NodeOrder, at: int) -> NodeOrder:
    return order[:at] + order[at + 1 :]
