"""Laws of the schedule: against an oracle with a full history, and the bounds on lag."""

import math
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ravnest.engine.schedule import StageSchedule, Task, Work


@dataclass
class Oracle:
    """Says what the schedule must do by counting over everything that ever happened."""

    window: int
    accumulate: int
    synchronous: bool
    inputs: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    history: list = field(default_factory=list)  # [batch, state, updates at its forward]
    num_backwards: int = 0
    num_updates: int = 0

    def flying(self):
        return [entry for entry in self.history if entry[1] == "flying"]

    def has_room(self):
        flying = self.flying()
        if not flying:
            return True
        since = self.history[self.history.index(flying[0]) :]
        if sum(entry[1] != "forgotten" for entry in since) >= self.window:
            return False
        return not self.synchronous or self.num_backwards + len(flying) < self.accumulate

    def next(self):
        if self.gradients:
            batch = self.gradients.pop(0)
            entry = next(entry for entry in self.flying() if entry[0] == batch)
            entry[1] = "done"
            lag = self.num_updates - entry[2]
            self.num_backwards += 1
            is_update = self.num_backwards >= self.accumulate
            if is_update:
                self.num_updates, self.num_backwards = self.num_updates + 1, 0
            return Task(Work.BACKWARD, batch, lag, is_update)
        if self.inputs and self.has_room():
            batch = self.inputs.pop(0)
            self.history.append([batch, "flying", self.num_updates])
            return Task(Work.FORWARD, batch)
        return None

    def forget(self, batch):
        if batch in self.inputs:
            self.inputs.remove(batch)
            return True
        for entry in self.flying():
            if entry[0] == batch:
                entry[1] = "forgotten"
                if batch in self.gradients:
                    self.gradients.remove(batch)
                return True
        return False

    def take_input(self, batch):
        is_here = batch in self.inputs or any(entry[0] == batch for entry in self.flying())
        if is_here:
            return False
        self.inputs.append(batch)
        return True

    def take_gradient(self, batch):
        is_flying = any(entry[0] == batch for entry in self.flying())
        if not is_flying or batch in self.gradients:
            return False
        self.gradients.append(batch)
        return True


def draw_bounds(random: Random) -> tuple[int, int, bool]:
    return random.randint(1, 6), random.randint(1, 4), random.random() < 0.3


def draw_batch(oracle: Oracle, random: Random) -> int:
    """Return a batch that is mostly in flight and sometimes any."""
    flying = [entry[0] for entry in oracle.flying()]
    return random.choice(flying) if flying and random.random() < 0.8 else random.randrange(10)


@given(st.integers(0, 2**32))
def test_does_what_the_oracle_says(seed):
    random = Random(seed)
    first = draw_bounds(random)
    schedule, oracle = StageSchedule(*first), Oracle(*first)
    for _ in range(150):
        batch = draw_batch(oracle, random)
        match random.choices(["input", "gradient", "next", "forget", "resize"], [4, 4, 6, 1, 1])[0]:
            case "input":
                batch = random.randrange(10)
                assert (schedule.offer_input(batch) is None) == oracle.take_input(batch)
            case "gradient":
                assert (schedule.offer_gradient(batch) is None) == oracle.take_gradient(batch)
            case "forget":
                assert (schedule.forget(batch) is None) == oracle.forget(batch)
            case "resize":
                bounds = draw_bounds(random)
                schedule.resize(*bounds)
                oracle.window, oracle.accumulate, oracle.synchronous = bounds
            case "next":
                assert schedule.next() == oracle.next()
        assert (schedule.version, schedule.num_in_flight, schedule.num_accumulated) == (
            oracle.num_updates,
            len(oracle.flying()),
            oracle.num_backwards,
        )
    while (task := oracle.next()) is not None:
        assert schedule.next() == task
    assert schedule.next() is None


def lags_of(schedule: StageSchedule, num_batches: int, random: Random, order: str) -> list[int]:
    """Run all batches; gradients come back in admission order or in any order, some are lost."""
    lags, flying, num_offered, num_ended = [], [], 0, 0
    for _ in range(20_000):
        if num_ended == num_batches:
            return lags
        if num_offered < num_batches and random.random() < 0.6:
            schedule.offer_input(num_offered)
            num_offered += 1
        if flying and random.random() < random.choice((0.1, 0.9)):
            batch = flying.pop(0 if order == "fifo" else random.randrange(len(flying)))
            if order == "lossy" and random.random() < 0.2:
                schedule.forget(batch)
                num_ended += 1
            else:
                schedule.offer_gradient(batch)
        while (task := schedule.next()) is not None:
            if task.work is Work.FORWARD:
                flying.append(task.microbatch)
            else:
                lags.append(task.lag)
                num_ended += 1
    raise AssertionError(f"stuck after {num_ended} of {num_batches} batches")


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_lag_in_order_is_bounded(window, accumulate, seed):
    lags = lags_of(StageSchedule(window, accumulate), 60, Random(seed), "fifo")
    assert max(lags) <= math.ceil((window - 1) / accumulate)


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from(["any", "lossy"]), st.integers(0, 2**32))
def test_lag_in_any_order_is_bounded(window, accumulate, order, seed):
    lags = lags_of(StageSchedule(window, accumulate), 60, Random(seed), order)
    assert max(lags, default=0) <= math.ceil(2 * (window - 1) / accumulate)


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from(["any", "lossy"]), st.integers(0, 2**32))
def test_synchronous_has_no_lag_and_never_sticks(window, accumulate, order, seed):
    lags = lags_of(StageSchedule(window, accumulate, synchronous=True), 60, Random(seed), order)
    assert not any(lags)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_one_starved_gradient_never_breaks_the_bound(window, accumulate, seed):
    """The gradient of batch 0 comes last of all: later batches may not overtake it without end."""
    schedule, random = StageSchedule(window, accumulate), Random(seed)
    flying = []
    for batch in range(60):
        schedule.offer_input(batch)
    for _ in range(200):
        while (task := schedule.next()) is not None:
            if task.work is Work.FORWARD:
                flying.append(task.microbatch)
        others = [batch for batch in flying if batch != 0]
        if not others:
            break
        batch = random.choice(others)
        flying.remove(batch)
        schedule.offer_gradient(batch)
    schedule.offer_gradient(0)
    assert schedule.next().lag <= math.ceil((window - 1) / accumulate)
