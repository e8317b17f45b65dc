"""Random histories of a hub: drawn from a seed, run with scripted peers on a virtual clock, and written down.

Most are as in the laws of the hub. Some are made for what seldom happens: training that goes wrong, peers
that become slow or hang for long, a job that goes on from a checkpoint, messages that fit nothing.
"""

import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from replay.names import is_in_log
from replay.neutral import Codec, canonical
from replay.replaying import is_logged, write_answer
from support.hub_world import HubWorld, Trouble, counted, job
from support.plan_world import node

from ravnest.config import Averaging, HubTimeouts
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Collected,
    JobGiven,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Probed,
    Received,
)
from ravnest.hub.monitors.monitors import MonitoredCoordinator
from ravnest.protocol.averaging import RoundAbort, RoundOpen, RoundQuery, RoundReady
from ravnest.protocol.membership import Complaint, Fact, Leave
from ravnest.protocol.placement import (
    BackupKept,
    BlobRef,
    SnapshotMade,
    SnapshotOrder,
    StageMissing,
    StageReady,
)
from ravnest.protocol.training import DroppedMicrobatch, LeaseDone, StepReport

NAMES, RESCUE, LATE = "abcdefgh", ("x", "y", "z"), 400.0
HUGE = BlobRef("0" * 64, 10**9)


class Tape:
    """The lines of a history, and how many of its events are in the hub's log."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.lines: list[str] = []
        self.num_logged = 0

    def begin(self) -> None:
        """Write down that there is a new hub, which is told the log before anything else."""
        if self.lines:
            self.lines += ['{"restart":true}', canonical(self.num_logged)]


class TapedHub(Coordinator):
    """A hub whose answers to who is waited for are written down."""

    def __init__(self, tape: Tape, given: JobGiven, timeouts: HubTimeouts) -> None:
        super().__init__(given, timeouts)
        self._tape = tape

    def find_missing(self, key: str, build_id: int) -> Any:
        found = super().find_missing(key, build_id)
        self._tape.lines += [canonical({"find_missing": [key, build_id]}), canonical(found)]
        return found


class TapedDriver:
    """Writes down what a hub and its monitors are told, and what comes of it."""

    def __init__(self, tape: Tape, driven: MonitoredCoordinator) -> None:
        self._tape, self._driven = tape, driven
        tape.begin()

    @property
    def due(self) -> float | None:
        return self._driven.due

    def apply(self, event: Any) -> tuple[Any, ...]:
        tape, codec = self._tape, self._tape.codec
        event = codec.read(codec.write(event))
        is_heard, orders = is_in_log(self._driven.hub, event), self._driven.apply(event)
        answer = write_answer(codec, orders, is_heard, self._driven.due)
        tape.lines += [canonical({"event": codec.write(event)}), answer]
        tape.num_logged += is_logged(answer)
        return orders


class TapedWorld(HubWorld):
    """A world of which every hub is taped."""

    def __init__(self, tape: Tape, given: Any, trouble: Trouble) -> None:
        self._tape = tape
        self.hesitant: set[str] = set()  # who makes no snapshots
        super().__init__(given, trouble)

    def _begin(self) -> None:
        self.hub = TapedHub(self._tape, self.given, self.timeouts)
        self.monitored = TapedDriver(self._tape, MonitoredCoordinator(self.hub, watch=self.note))

    def deliver(self, peer: Any, message: Any) -> None:
        if not (isinstance(message, SnapshotOrder) and peer.node.name in self.hesitant):
            super().deliver(peer, message)


def record(codec: Codec, seed: int) -> tuple[str, list[str]]:
    """Return the name of the history of a seed, and its lines; it ends where the hub or the world fails."""
    draw, tape = _KINDS[seed % len(_KINDS)], Tape(codec)
    name = f"{seed} {draw.__name__.strip('_')}"
    try:
        draw(tape, Random(seed))
    except AssertionError as failure:
        *_, (frame, line) = traceback.walk_tb(failure.__traceback__)
        name += f" until {frame.f_code.co_qualname} fails in line {line}: {failure!s:.80}"
    return name.strip(" :"), tape.lines


def _trouble(random: Random, **changes: Any) -> Trouble:
    drawn = {
        "seed": random.randrange(2**32),
        "latency": random.choice([0.0, 0.1, 2.0]),
        "twice": random.choice([0.0, 0.2]),
        "dropped": random.choice([0.0, 0.1]),
        "gives_up": random.choice([0.0, 0.1, 0.3]),
        "silent": random.choice([0.0, 0.1]),
        "wrong": random.choice([0.0, 0.1]),
        "blames": random.choice([0.0, 0.8]),
        "detect_seconds": random.choice([0.0, 1.0, 5.0]),
        "guessed": random.choice([(), (), (Fact.SPEED,), tuple(Fact)]),
        "misses": random.choice([0.0, 0.0, 0.3]),
        "no_room": random.choice([0.0, 0.5]),
    }
    return Trouble(**(drawn | changes))


def _job(random: Random, **changes: Any) -> Any:
    drawn = {
        "num_samples": random.choice([3, 30, 50]),
        "batch_size": random.choice([4, 8, 16]),
        "microbatches": random.choice([0, 0, 1, 3]),
        "num_validation": random.choice([0, 7, 23]),
        "epochs": random.randint(1, 2),
        "chunk_batches": random.randint(1, 4),
        "average_every": random.choice([1, 4, None]),
        "evaluate_every": random.randint(0, 2),
        "expected_nodes": random.choice([0, 4]),
        "rates": random.choice([(0.1,), (0.1, 0.2, 0.3, 0.2)]),
        "checkpoint_every": random.choice([None, 3.0, 10.0]),
        "reserve_seconds": random.choice([0.0, 0.3]),
    }
    given = job(**(drawn | changes))
    averaging = random.choice([Averaging.OVERLAPPED, Averaging.OVERLAPPED, Averaging.BLOCKING])
    return replace(given, config=replace(given.config, averaging=averaging))


def _moment(random: Random, latest: float = 40.0) -> float:
    return random.choice([0.0, random.uniform(0.0, latest)])


def _people(random: Random, world: TapedWorld, latest: float = 40.0) -> None:
    """Let some come, die, leave, come again, become slow or hang; in the end there are enough."""
    for name in random.sample(NAMES, random.randint(2, 7)):
        world.join(name, memory_mb=random.choice([250.0, 150.0]), at=_moment(random, latest))
    for _ in range(random.randint(0, 4)):
        world.kill(random.choice(NAMES), at=_moment(random, latest))
    for _ in range(random.randint(0, 2)):
        world.join(random.choice(NAMES), at=_moment(random, latest))
    for _ in range(random.randint(0, 2)):
        world.leave(random.choice(NAMES), at=_moment(random, latest))
    for _ in range(random.randint(0, 1)):
        world.slow(random.choice(NAMES), random.choice([0.5, 2.0, 5.0]), at=_moment(random, latest))
    if random.random() < 0.3:
        world.at(_moment(random, latest), world.muted.add, random.choice(NAMES))
    world.join(*RESCUE, at=LATE)


def _restarts(random: Random, world: TapedWorld, most: int) -> None:
    for _ in range(random.randint(0, most)):
        world.restart(at=random.uniform(1.0, 40.0))


def _ordinary(tape: Tape, random: Random) -> TapedWorld:
    world = TapedWorld(tape, _job(random), _trouble(random))
    _people(random, world)
    _restarts(random, world, 2)
    return world.run()


def _stopped(tape: Tape, random: Random) -> TapedWorld:
    world = TapedWorld(tape, _job(random), _trouble(random))
    _people(random, world)
    _restarts(random, world, 1)
    world.at(random.choice([random.uniform(0.0, 30.0), random.uniform(0.0, LATE)]), world.stop)
    return world.run()


def _pestered(tape: Tape, random: Random) -> TapedWorld:
    """Many messages fit nothing: too late, too early, from others, of others."""
    world = TapedWorld(tape, _job(random), _trouble(random))
    _people(random, world)
    _restarts(random, world, 1)
    for _ in range(30):
        world.at(random.uniform(0.0, 60.0), _pester, random, world)
    return world.run()


def _resumed(tape: Tape, random: Random) -> TapedWorld:
    """The job goes on from the checkpoint of a run before."""
    given = _job(random, num_samples=50, batch_size=4, epochs=2, checkpoint_every=3.0)
    before = HubWorld(given, Trouble(seed=random.randrange(2**32)))
    before.join("a", memory_mb=250.0)
    before.run_until(lambda: before.books is not None)
    world = TapedWorld(tape, replace(given, books=before.books), _trouble(random))
    world.books, world.checkpoint = before.books, before.checkpoint
    world.saved = counted(given.settings, before.books)
    world.ledger = Counter(world.saved)
    _people(random, world)
    _restarts(random, world, 1)
    return world.run()


def _guarded(tape: Tape, random: Random) -> TapedWorld:
    """Training goes wrong: the loss leaps, now and then or for ever, or batches are no numbers."""
    given = _job(
        random,
        num_samples=60,
        batch_size=1,
        microbatches=1,
        num_validation=0,
        epochs=4,
        chunk_batches=4,
        checkpoint_every=random.choice([None, 3.0, 3.0]),
    )
    is_storm = random.random() < 0.4
    world = TapedWorld(tape, given, Trouble(random.randrange(2**32), dropped=0.8 if is_storm else 0.0))
    first, length = random.randint(30, 60), random.choice([40, 200, 10_000])
    world.loss = lambda batch: 50.0 if first <= batch < first + length else 1.0 + 0.01 * (batch % 7)
    world.join(*random.sample(NAMES, random.randint(1, 2)), memory_mb=250.0)
    world.join(*RESCUE, at=LATE)
    world.at(random.choice([100.0, 200.0]), world.stop)  # with checkpoints it could go back for ever
    return world.run()


def _slowed(tape: Tape, random: Random) -> TapedWorld:
    """Somebody becomes slow, or fast, for long."""
    given = _job(random, num_samples=100, batch_size=2, microbatches=1, num_validation=0, epochs=2)
    world = TapedWorld(tape, given, Trouble(random.randrange(2**32), silent=random.choice([0.0, 0.05])))
    names = random.sample(NAMES, random.randint(2, 4))
    world.join(*names, memory_mb=random.choice([250.0, 150.0]))
    for name in names:
        world.slow(name, 6.0, at=0.5)
    for name in random.sample(names, random.randint(1, 2)):
        world.slow(name, random.choice([1.0, 20.0]), at=random.uniform(30.0, 50.0))
    if random.random() < 0.5:
        world.leave(random.choice(names), at=random.uniform(30.0, 90.0))
    world.join(*RESCUE, at=2 * LATE)
    return world.run()


def _backed(tape: Tape, random: Random) -> TapedWorld:
    """There are spares, which keep backups of those who die often."""
    given = _job(random, num_samples=80, batch_size=4, microbatches=1, epochs=2, expected_nodes=0)
    world = TapedWorld(tape, given, _trouble(random, latency=0.1, misses=random.choice([0.0, 0.3])))
    names = random.sample(NAMES, 4)
    world.join(*names[:3], memory_mb=65.0)
    world.join(*names[3:], memory_mb=45.0, at=random.choice([0.0, 12.0]))
    for name in names:
        world.slow(name, 5.0, at=0.5)
    for _ in range(random.randint(1, 3)):
        world.kill(random.choice(names), at=random.uniform(35.0, 90.0))
    world.join(*RESCUE, at=LATE)
    return world.run()


def _hanging(tape: Tape, random: Random) -> TapedWorld:
    """Somebody lives and does nothing: while it builds, trains, or is asked for what it has."""
    given = _job(random, num_samples=50, batch_size=4, checkpoint_every=random.choice([None, 3.0]))
    world = TapedWorld(tape, given, _trouble(random, latency=0.1))
    world.join(*random.sample(NAMES, random.randint(2, 5)), memory_mb=random.choice([250.0, 150.0]))
    for _ in range(random.randint(1, 2)):
        muted, moment = random.choice(NAMES), random.uniform(0.0, 25.0)
        world.at(moment, world.muted.add, muted)
        if random.random() < 0.3:
            world.at(moment + 100.0, world.muted.discard, muted)
    if random.random() < 0.5:
        world.leave(random.choice(NAMES), at=random.uniform(0.0, 30.0))
    world.join(*RESCUE, at=LATE)
    return world.run()


def _hesitating(tape: Tape, random: Random) -> TapedWorld:
    """Somebody trains, and makes no snapshots: no checkpoint comes of it, and nobody gets its state."""
    given = _job(random, num_samples=80, batch_size=4, microbatches=1, epochs=2, checkpoint_every=10.0)
    world = TapedWorld(tape, given, Trouble(random.randrange(2**32), latency=0.1))
    names = random.sample(NAMES, random.randint(2, 3))
    world.join(*names, memory_mb=150.0)
    for name in names:
        world.slow(name, 20.0, at=0.5)
    world.hesitant |= {*random.sample(names, random.randint(1, len(names)))}
    world.join("h", "i", at=random.uniform(20.0, 60.0))
    if random.random() < 0.5:
        world.leave(random.choice(names), at=random.uniform(30.0, 200.0))
    world.join(*RESCUE, at=LATE)
    world.at(2 * LATE, world.hesitant.clear)
    return world.run()


def _crawling(tape: Tape, random: Random) -> TapedWorld:
    """All answer and nothing moves; then the job is stopped, and what is under way takes too long."""
    world = TapedWorld(tape, _job(random, num_samples=50), Trouble(random.randrange(2**32)))
    names = random.sample(NAMES, random.randint(1, 4))
    world.join(*names, memory_mb=random.choice([250.0, 150.0]))
    slowed = random.sample(names, random.randint(1, len(names)))
    moment = random.uniform(5.0, 15.0)
    for name in slowed:
        world.slow(name, 1000.0, at=moment)
    if random.random() < 0.5:
        world.kill(random.choice(names), at=random.uniform(20.0, 40.0))
    world.at(random.uniform(20.0, 300.0), world.stop)
    for name in slowed:
        world.slow(name, 1.0, at=400.0)
    world.join(*RESCUE, at=LATE)
    return world.run()


def _voting(tape: Tape, random: Random) -> TapedWorld:
    """Members of rounds vote for others, twice, or give up late, and ask what became of it."""
    given = _job(random, num_samples=50, batch_size=4, average_every=1, num_validation=7)
    trouble = _trouble(random, latency=random.choice([0.0, 0.1]), guessed=(), detect_seconds=0.0)
    world = TapedWorld(tape, given, trouble)
    usual, mortal = world.vote, random.sample(NAMES, 2)

    def vote(name: str, opened: RoundOpen) -> Any:
        other, drawn = random.choice([*world.peers]), random.random()
        if drawn < 0.2:
            say = partial(world.say, name)
            ready = world.ready(name, opened.round_id)
            moment = random.choice([0.6, opened.deadline_seconds])
            for message in (replace(ready, member=other), ready, ready):
                world.after(moment, say, message)
            return None
        if drawn < 0.4:
            abort = RoundAbort(
                opened.round_id, "nothing came", random.choice([other, None]), random.choice([1, 2])
            )
            return opened.deadline_seconds + random.uniform(0.0, 0.5), abort
        if drawn > 0.9 or opened.is_final:
            world.kill(random.choice(mortal), at=world.now + random.choice([0.3, 1.5]))
        seconds = random.choice([1.0, 20.0])
        world.say(name, RoundQuery(opened.round_id, name), seconds=seconds)
        if drawn < 0.5:
            stranger = Received(random.choice([*NAMES]), RoundReady(opened.round_id, name, ()), world.now)
            world.after(0.3, lambda: world.feed(replace(stranger, now=world.now)))
        return usual(name, opened)

    world.vote = vote
    world.loss = lambda batch: None if batch % 5 == 0 else float(batch)
    world.join(*random.sample(NAMES, random.randint(3, 6)), memory_mb=250.0)
    if random.random() < 0.3:
        world.kill(random.choice(NAMES), at=random.uniform(5.0, 20.0))
    world.join(*RESCUE, at=LATE)
    return world.run()


def _refused(tape: Tape, random: Random) -> TapedWorld:
    """Hardly anybody gives what it has."""
    given = _job(random, num_samples=80, batch_size=4, epochs=2, checkpoint_every=random.choice([None, 10.0]))
    trouble = _trouble(random, latency=0.0, guessed=(), silent=0.0, misses=random.choice([0.7, 0.95]))
    world = TapedWorld(tape, given, trouble)
    names = random.sample(NAMES, 6)
    world.join(*names[:5], memory_mb=150.0)
    world.join(*names[5:], memory_mb=150.0, at=random.uniform(0.0, 30.0))
    for name in names:
        world.slow(name, 3.0, at=0.5)
    for name in random.sample(names, 2):
        world.kill(name, at=random.uniform(10.0, 40.0))
    world.join(*RESCUE, at=LATE)
    world.at(200.0, setattr, world.trouble, "misses", 0.0)
    return world.run()


def _pester(random: Random, world: TapedWorld) -> None:
    """Let something happen that fits nothing, or seldom."""
    if not world.peers or world.is_finished:
        return
    name = random.choice([*world.peers, "stranger"])
    peer, now = world.peers.get(name), world.now
    epoch = max(0, world.told_epoch.get(name, 0) + random.choice([0, 0, 0, -1, 1]))
    round_id = max((each.round_id for each in world.in_round.values()), default=random.randint(0, 5))
    report = StepReport(epoch, 10**6, 1, 0, 4, random.choice([0.1, -1.0]), 0.1, 0.0, 0.0, 1.0, ())
    messages = [
        RoundQuery(round_id - random.randint(0, 1), name),
        RoundReady(round_id, random.choice([*world.peers]), ()),
        RoundReady(round_id - 1, name, ()),
        RoundAbort(round_id, "it is too slow", random.choice([*world.peers]), random.choice([1, 2])),
        StageMissing(epoch, random.choice([*world.peers, "hub"]), "it has nothing"),
        StageReady(epoch - 1),
        LeaseDone(epoch, 10**6, 4),
        report,
        replace(report, version=10**9),
        DroppedMicrobatch(epoch, 10**6, "not a number"),
        BackupKept(0, 10**6),
        SnapshotMade(epoch, 10**6, 1, BlobRef("1" * 64, 100)),
        SnapshotMade(epoch, 10**6, 1, HUGE),
        Leave(epoch, "Ctrl-C"),
        Leave(epoch, "Ctrl-C", can_hand_over=True),
        Complaint(epoch, name, "it sends nonsense"),
    ]
    facts = [random.choice([1e9, 5e10, float("inf"), 0.0, None]) for _ in range(4)]
    unlikely = node(name, 150.0, gflops=random.choice([0.0, 1e30]))
    events = [
        Probed(name, *facts, now),
        PeerReturned(name, (f"tcp://{name}:1",), now),
        Collected(10**6, now),
        PartsMade(1, 2, HUGE, HUGE, (), (), now),
        PlanMade(10**6, None, 1, "too few", now),
        PeerJoined(replace(unlikely), f"key of {name}", (), now),
        PeerLeft("stranger", "silent", now),
    ]
    if peer is not None and peer.is_alive and random.random() < 0.1:
        peer.is_alive = False
        world.feed(PeerLeft(name, "its link broke", now, max(0.0, now - 2.0)))
    elif random.random() < 0.7:
        if peer is None or peer.is_alive:
            world.feed(Received(name, random.choice(messages), now))
    else:
        world.feed(random.choice(events))


# Seed after seed, over and over.
_KINDS = (
    _ordinary,
    _ordinary,
    _ordinary,
    _ordinary,
    _stopped,
    _pestered,
    _pestered,
    _resumed,
    _hanging,
    _backed,
    _ordinary,
    _ordinary,
    _stopped,
    _pestered,
    _slowed,
    _guarded,
    _hesitating,
    _crawling,
    _voting,
    _refused,
)
