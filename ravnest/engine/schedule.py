"""What a stage does next: the zero-bubble rule, without tensors and without a clock.

A stage never waits for one particular microbatch. It runs what has arrived: gradients first, since they free
memory and lower lag, then inputs while the window allows. The window slides over the order of admission. So
one late gradient holds back new microbatches, and lag stays bounded in any order of return. An exact update
with all its microbatches waits until it is made, and nothing goes forward before.
"""

from dataclasses import dataclass
from enum import StrEnum

from ravnest.ids import MicrobatchId


class Work(StrEnum):
    """The two kinds of work a stage does."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work; `lag` counts the updates made since this microbatch went forward."""

    work: Work
    microbatch: MicrobatchId
    lag: int = 0
    is_update: bool = False  # this backward completes an update: step after it


@dataclass(slots=True)
class _Flight:
    place: int  # in the order of admission
    version: int  # of the weights its forward saw


class StageSchedule:
    """Orders the work of one stage and remembers which weight version each microbatch saw."""

    def __init__(
        self,
        window: int,
        accumulate: int = 1,
        synchronous: bool = False,
        version: int = 0,
        is_exact: bool = False,
    ) -> None:
        self._version = version
        self._num_backwards = 0  # in the update under way; of an exact one, microbatches dropped too
        self._is_exact = is_exact
        self._finished: set[MicrobatchId] = set()  # in the exact update under way
        self._last_finished = -1  # of updates before: later microbatches have higher numbers
        self._num_expected: int | None = None  # in the exact update under way, if it is a short one
        self._next_place = 0
        # Dictionaries keep the order of arrival and let a microbatch be forgotten from the middle.
        self._inputs: dict[MicrobatchId, None] = {}
        self._gradients: dict[MicrobatchId, None] = {}
        self._in_flight: dict[MicrobatchId, _Flight] = {}
        self.resize(window, accumulate, synchronous)

    @property
    def version(self) -> int:
        """Updates this stage has made."""
        return self._version

    @property
    def num_in_flight(self) -> int:
        """Batches that went forward and wait for their backward."""
        return len(self._in_flight)

    @property
    def num_accumulated(self) -> int:
        """Backwards already summed into the update under way."""
        return self._num_backwards

    @property
    def is_lockstep(self) -> bool:
        """Whether no microbatch sees weights older than those its update changes."""
        return self._is_exact or self._is_synchronous or self._window == 1

    @property
    def is_exact(self) -> bool:
        """Whether updates wait to be made, and dropped microbatches count in them as trained ones do."""
        return self._is_exact

    @property
    def is_complete(self) -> bool:
        """Whether an exact update has all its microbatches and waits to be made."""
        return self._is_exact and self._num_backwards >= self._num_needed

    def set_exact(self, is_exact: bool) -> None:
        """Let updates wait from now on, or no more."""
        self._is_exact = is_exact
        self._num_expected = None
        self._finished.clear()

    def expect(self, num_microbatches: int | None) -> None:
        """Let the exact update under way have so many microbatches; None: as many as any."""
        self._num_expected = num_microbatches

    def end_exact(self) -> None:
        """Count the exact update that waited: it is made."""
        self._version += 1
        self._num_backwards, self._num_expected = 0, None
        self._last_finished = max(self._finished, default=self._last_finished)
        self._finished.clear()

    def offer_input(self, microbatch: MicrobatchId) -> str | None:
        """Queue a microbatch for its forward; return why not, if refused."""
        if microbatch in self._inputs or microbatch in self._in_flight:
            return f"microbatch {microbatch} is here already: the second copy is dropped"
        self._inputs[microbatch] = None
        return None

    def offer_gradient(self, microbatch: MicrobatchId) -> str | None:
        """Queue a microbatch for its backward; return why not, if refused."""
        if microbatch not in self._in_flight:
            return f"microbatch {microbatch} is not in flight here: its gradient is dropped"
        if microbatch in self._gradients:
            return f"microbatch {microbatch} has its gradient already: the second copy is dropped"
        self._gradients[microbatch] = None
        return None

    def next(self, may_forward: bool = True) -> Task | None:
        """Hand out the next task, or None when nothing runnable has arrived."""
        if self._gradients:
            return self._start_backward(next(iter(self._gradients)))
        microbatch = self.next_input
        if may_forward and microbatch is not None and self._has_room():
            return self._start_forward(microbatch)
        return None

    @property
    def next_input(self) -> MicrobatchId | None:
        """The microbatch that goes forward next: the first that came, or by number in exact updates."""
        return min(self._inputs) if self._is_exact and self._inputs else next(iter(self._inputs), None)

    def forget(self, microbatch: MicrobatchId) -> str | None:
        """Drop a microbatch that is lost or re-run elsewhere, wherever it is; its place becomes free."""
        self._finish(microbatch)  # also one that never came here
        if microbatch in self._inputs:
            del self._inputs[microbatch]
            return None
        if microbatch not in self._in_flight:
            return f"microbatch {microbatch} is not here: nothing to forget"
        self._gradients.pop(microbatch, None)
        gone = self._in_flight.pop(microbatch)
        # It will never cause an update, so those behind it move up without loosening the bound.
        self._next_place -= 1
        for flight in self._in_flight.values():
            if flight.place > gone.place:
                flight.place -= 1
        return None

    def resize(self, window: int, accumulate: int, synchronous: bool) -> None:
        """Change the bounds; what is in flight stays, new forwards wait until it fits."""
        assert window >= 1, f"a window of {window} lets no microbatch in"
        assert accumulate >= 1, f"an update needs a microbatch, not {accumulate}"
        self._window = window
        self._accumulate = accumulate
        self._is_synchronous = synchronous

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for its forward or its backward."""
        return not self._inputs and not self._in_flight

    def close_update(self) -> bool:
        """Make an update of what is summed so far; return whether there was something. No exact one is."""
        if self._is_exact:
            return False
        is_open = self._num_backwards > 0
        self._version += is_open
        self._num_backwards = 0
        return is_open

    @property
    def _num_needed(self) -> int:
        return self._accumulate if self._num_expected is None else self._num_expected

    def _finish(self, microbatch: MicrobatchId) -> None:
        """Count a microbatch in the exact update under way, once: other stages may drop what is done here."""
        if not self._is_exact:
            self._last_finished = max(self._last_finished, microbatch)
        elif microbatch > self._last_finished and microbatch not in self._finished:
            self._finished.add(microbatch)
            self._num_backwards += 1

    def _has_room(self) -> bool:
        num_started = self._num_backwards + len(self._in_flight)
        if self._is_exact and num_started >= self._num_needed:
            return False
        if not self._in_flight:
            return True
        oldest = next(iter(self._in_flight.values()))
        if self._next_place - oldest.place >= self._window:
            return False
        # Synchronous: all that is in flight must fit in the update under way, so none sees the next.
        return not self._is_synchronous or num_started < self._accumulate

    def _start_forward(self, microbatch: MicrobatchId) -> Task:
        del self._inputs[microbatch]
        self._in_flight[microbatch] = _Flight(self._next_place, self._version)
        self._next_place += 1
        return Task(Work.FORWARD, microbatch)

    def _start_backward(self, microbatch: MicrobatchId) -> Task:
        del self._gradients[microbatch]
        lag = self._version - self._in_flight.pop(microbatch).version
        self._finish(microbatch)
        if self._is_exact:
            return Task(Work.BACKWARD, microbatch, lag)
        self._num_backwards += 1
        # At least: a smaller `accumulate` may have come in the middle of the update.
        is_update = self._num_backwards >= self._accumulate
        if is_update:
            self._version += 1
            self._num_backwards = 0
        return Task(Work.BACKWARD, microbatch, lag, is_update)
