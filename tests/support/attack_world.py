"""Four clusters of one scripted peer each, of which one lies; and a table of what came of each lie.

The lies are functions: they change what the liar says, or the whole world. A run is compared with one without
a lie: what it cost in time, who was sent away, and whether the result is what the honest hold.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from support.hub_world import HubWorld, Trouble, job
from support.plan_world import node

from ravnest.config import Averaging
from ravnest.hub.coordinator.events import Abandon, Evict, LossRechecked, SendFields
from ravnest.hub.coordinator.notices import Contradicted, Left, ResultKept, ResultRefused

LIAR, HONEST = "d", ("a", "b", "c")
TRUE_SKETCH, FALSE_SKETCH = struct.pack("<4f", 1.0, 0.5, 0.5, 0.5), struct.pack("<4f", 9.0, 4.0, -1.0, 2.0)


def true_loss(microbatch):
    """The loss of a microbatch: it falls, and no two are alike."""
    return 0.2 + 2.0 / (1.0 + 0.01 * microbatch) * (1.0 + 0.3 * ((microbatch * 7919) % 13 - 6) / 6)


def _far_away(name, memory_mb):
    """A PC on a slow line: it makes a cluster of its own."""
    slow = {"upload_bytes_per_second": 1e6, "download_bytes_per_second": 1e6, "latency_seconds": 0.2}
    return replace(node(name, memory_mb), **slow)


class AttackWorld(HubWorld):
    """A hub with four clusters, the last of which may lie; `lie` says what it sends instead of a message."""

    def __init__(self, seed=0, names=(*HONEST, LIAR), **changes):
        settings = {"num_samples": 480, "epochs": 2, "average_every": 3, "checkpoint_every": 5.0}
        given = job(**({"draw_seed": seed + 1} | settings | changes))
        given = replace(given, config=replace(given.config, averaging=Averaging.BLOCKING))
        self.lie = lambda message: [message]
        self.has_changing_samples = False  # they are others each time they are read
        self.liar_again = None  # what the liar finds of others' losses
        self.liar_sketch = self.liar_gives = TRUE_SKETCH
        self.evicted = {}
        super().__init__(given, Trouble(seed=seed), make_node=_far_away)
        self.loss = true_loss
        self.join(*names, memory_mb=900.0)

    def speak(self, name, peer, message):
        for each in self.lie(message) if name == LIAR else [message]:
            super().speak(name, peer, each)

    def sketch(self, name, key):
        return self.liar_sketch if name == LIAR else TRUE_SKETCH

    def _judge(self, order):
        self.given_sketch = lambda name, key: self.liar_gives if name == LIAR else TRUE_SKETCH
        return super()._judge(order)

    def found_again(self, name, microbatch):
        false = self.liar_again
        return false(microbatch) if name == LIAR and false is not None else self.loss(microbatch)

    def _recheck(self, name, grant):
        if not self.has_changing_samples:
            super()._recheck(name, grant)

    def _carry_out(self, order):
        if isinstance(order, SendFields) and order.checks is not None and self.has_changing_samples:
            self.after(0.1, lambda: self.feed(LossRechecked("", order.first_microbatch, None, self.now)))
        if isinstance(order, Evict):
            self.evicted[order.to] = order
        super()._carry_out(order)


@dataclass(frozen=True)
class Lie:
    """A lie, and what is to come of it: the liar is sent away, or it harms nobody."""

    name: str
    tell: Callable[[AttackWorld], None]
    is_caught: bool  # sent away for good, else harmless
    why: str  # how it is found, or why it is harmless
    changes: dict = None  # of the job
    is_drawn: bool = False  # it can only lie when the lot falls on it


@dataclass(frozen=True)
class Outcome:
    """What came of a lie."""

    is_finished: bool
    evicted: tuple[str, ...]  # for lying
    left: tuple[str, ...]
    num_agreeing: int
    seconds: float
    is_contradicted: bool
    is_false: bool  # what is kept as the result is the liar's own


def tell(lie, seed=0, **changes):
    """Let the liar lie; return what came of it."""
    world = AttackWorld(seed, **((lie.changes or {}) | changes))
    lie.tell(world)
    world.run(until=5_000.0)
    return outcome_of(world)


def outcome_of(world):
    given_by = {part.node for part in world.finish.parts} if world.finish is not None else set()
    kept = world.told(ResultKept)
    return Outcome(
        is_finished=world.is_finished and world.finish is not None,
        evicted=tuple(sorted(name for name, order in world.evicted.items() if order.is_fault)),
        left=tuple(sorted({news.node for news in world.told(Left)})),
        num_agreeing=kept[-1].num_agreeing if kept else 0,
        seconds=world.now,
        is_contradicted=bool(world.told(Contradicted))
        or any("contradict" in news.reason for news in world.told(ResultRefused))
        or isinstance(world.abandoned, Abandon),
        is_false=LIAR in given_by and world.liar_gives != TRUE_SKETCH,
    )
