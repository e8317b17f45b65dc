"""The lies that one of four clusters tells in the simulation, each with what is to come of it."""

import math
import struct
from dataclasses import replace

from support.attack_world import FALSE_SKETCH, LIAR, Lie

from ravnest.ids import LeaseId, MicrobatchId
from ravnest.protocol.averaging import RoundAbort, RoundReady
from ravnest.protocol.placement import BlobRef, SketchMade, SnapshotMade, StageReady
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone, StepReport


def _training(message):
    return isinstance(message, StepReport) and (
        message.forward_seconds > 0 or message.anchor_round is not None
    )


def false_losses(loss):
    """Report another loss than was found, in training."""

    def tell(world):
        def lie(message):
            is_own = isinstance(message, StepReport) and message.forward_seconds > 0
            return [replace(message, loss=loss(message))] if is_own else [message]

        world.lie = lie

    return tell


def _say(kind, change):
    def tell(world):
        world.lie = lambda message: [change(message)] if isinstance(message, kind) else [message]

    return tell


def _silent(*kinds):
    def tell(world):
        world.lie = lambda message: [] if isinstance(message, kinds) else [message]

    return tell


def _also(make):
    """Say something beside every report."""

    def tell(world):
        def lie(message):
            return [message, *make(world, message)] if isinstance(message, StepReport) else [message]

        world.lie = lie

    return tell


def claim_at_once(world):
    """Report every microbatch of a lease as soon as it is granted, and the lease as done."""
    work = world.work

    def workclaim_at_once(order, grant):
        if order.pipeline != (LIAR,) or grant.is_evaluation:
            work(order, grant)
            return
        peer = world.peers[LIAR]
        for index, size in enumerate(grant.num_samples):
            batch = grant.first_microbatch + index
            average, peer.average = peer.average, None
            facts = (grant.build_id, batch, 0, 0, size, 0.01, 0.01, 0.0, 0.0)
            world.say(LIAR, StepReport(*facts, 1.0, (), None, average), seconds=0.01)
        done = LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples))
        world.say(LIAR, done, seconds=0.02)

    world.work = workclaim_at_once


def _done_only(world):
    """Say that leases are done, and report nothing."""
    work = world.work

    def work_not(order, grant):
        if order.pipeline != (LIAR,) or grant.is_evaluation:
            work(order, grant)
        else:
            done = LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples))
            world.say(LIAR, done, seconds=0.02)

    world.work = work_not


def _lazy(world):
    """Take leases and do nothing; answer all else."""
    work = world.work
    world.work = lambda order, grant: None if order.pipeline == (LIAR,) else work(order, grant)


def _sketches(values):
    def tell(world):
        world.liar_sketch = values

    return tell


def _false_state(world):
    """Give other weights than all hold, with a sketch of the right ones."""
    world.liar_gives = FALSE_SKETCH


def _false_checker(world):
    world.liar_again = lambda microbatch: 50.0


def _evaluates(loss):
    """Report another validation loss."""

    def tell(world):
        def lie(message):
            is_evaluation = isinstance(message, StepReport) and message.microbatch in evaluated
            return [replace(message, loss=loss)] if is_evaluation else [message]

        work, evaluated = world.work, set()

        def note(order, grant):
            if grant.is_evaluation:
                evaluated.update(
                    range(grant.first_microbatch, grant.first_microbatch + len(grant.num_samples))
                )
            work(order, grant)

        world.work, world.lie = note, lie

    return tell


def _replays(world):
    """Say everything twice, and once more much later."""

    def lie(message):
        world.after(30.0, HubSays(world, message))
        return [message, message]

    world.lie = lie


class HubSays:
    """An old message, said again."""

    def __init__(self, world, message):
        self._world, self._message = world, message

    def __call__(self):
        peer = self._world.peers[LIAR]
        super(type(self._world), self._world).speak(LIAR, peer, self._message)


def _wrong_hash(message):
    return replace(message, hashes=tuple((segment, b"x" * 16) for segment, _ in message.hashes))


def _stale(message):
    return replace(message, anchor_round=message.anchor_round - 1) if message.anchor_round else message


SPOT, SKETCH, REPORTS = "spot checks", "sketches", "reports per microbatch"
NAN_SKETCH = struct.pack("<4f", math.nan, 0.5, 0.5, 0.5)
HARMLESS = "its own cluster is left out"
LIES = (
    Lie("reports made up at once, leases done at once", claim_at_once, True, SPOT),
    Lie("constant losses at an honest pace", false_losses(lambda _: 1.0), True, SPOT),
    Lie("losses of 1e6", false_losses(lambda _: 1e6), True, SPOT),
    Lie("losses of 1e-9", false_losses(lambda _: 1e-9), True, SPOT),
    Lie("losses a third too low", false_losses(lambda m: 0.66 * m.loss), True, SPOT),
    Lie("false losses found for others", _false_checker, True, SPOT),
    Lie("leases done, nothing reported", _done_only, False, "nothing counts; it is sent away as idle"),
    Lie("leases taken, nothing done", _lazy, False, "it is sent away as idle"),
    Lie(
        "other weights given, right sketch",
        _false_state,
        True,
        "sketches, when the lot falls on it",
        is_drawn=True,
    ),
    Lie("a false sketch", _sketches(FALSE_SKETCH), True, SKETCH),
    Lie("a sketch that is no number", _sketches(NAN_SKETCH), True, SKETCH),
    Lie("a sketch of other length", _sketches(b"12"), True, SKETCH),
    Lie("an empty sketch", _say(SketchMade, lambda m: replace(m, rows=())), False, "others confirm"),
    Lie("no sketch", _silent(SketchMade), False, "others confirm, 30 s later"),
    Lie("state of an older round", _say(SnapshotMade, _stale), False, "that checkpoint is not kept"),
    Lie("no state", _silent(SnapshotMade), False, "it is sent away where the result is awaited"),
    Lie(
        "state of a petabyte",
        _say(SnapshotMade, lambda m: replace(m, weights=BlobRef("0" * 64, 2**50))),
        False,
        "it is sent away at once",
    ),
    Lie("validation loss of 1e-9", _evaluates(1e-9), False, "nobody backs it; weights are compared"),
    Lie("validation loss of 1e9", _evaluates(1e9), False, "others evaluate again; weights are compared"),
    Lie("no votes", _silent(RoundReady), False, HARMLESS),
    Lie("wrong hashes in votes", _say(RoundReady, _wrong_hash), False, HARMLESS),
    Lie(
        "every round given up, another blamed",
        _say(RoundReady, lambda m: RoundAbort(m.round_id, "nothing came", "a")),
        False,
        HARMLESS,
    ),
    Lie(
        "leases that were never granted",
        _also(lambda _, m: [LeaseDone(m.build_id, LeaseId(10_000 + m.microbatch), 4)]),
        False,
        "refused",
    ),
    Lie(
        "leases of others",
        _also(lambda world, m: [LeaseDone(m.build_id, x.number, 1) for x in world.open_leases]),
        False,
        "refused",
    ),
    Lie(
        "more samples than a lease has",
        _say(LeaseDone, lambda m: replace(m, num_samples=10**6)),
        False,
        "refused",
    ),
    Lie(
        "reports of microbatches of others",
        _also(lambda _, m: [replace(m, microbatch=MicrobatchId(k)) for k in range(0, 40, 5)]),
        False,
        "refused",
    ),
    Lie("a billion updates", _say(StepReport, lambda m: replace(m, version=10**9)), False, "refused: idle"),
    Lie("everything again, at once and later", _replays, False, "dropped by number"),
    Lie(
        "stages that nobody gave it are ready", _also(lambda _, m: [StageReady(m.build_id)]), False, "refused"
    ),
    Lie(
        "microbatches of others dropped",
        _also(lambda _, m: [DroppedMicrobatch(m.build_id, MicrobatchId(k), "no") for k in range(0, 60, 7)]),
        False,
        "refused, but for its own",
    ),
    Lie(
        "a hundred times the loss, as metrics of that name",
        _say(StepReport, lambda m: replace(m, metrics=(("loss", 100.0 * (m.loss or 1.0)),) * 256)),
        False,
        "refused: idle",
    ),
    Lie("updates and losses without numbers", false_losses(lambda _: None), False, "nobody believes it"),
)
