"""Events on their way to a store, and what is done when they are there: in order, and not before.

Rows have the numbers of the log, from 1. A store writes some at once (a group), and confirms up to a number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class LogRow:
    """An event as the log has it."""

    number: int
    kind: str
    body: bytes


class Unwritten:
    """What a log lacks after its first `num_written` events."""

    def __init__(self, num_written: int = 0) -> None:
        self._num_written = self._num_appended = num_written
        self._rows: deque[LogRow] = deque()
        self._awaiting: deque[tuple[int, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_written(self) -> int:
        """How many events the log has."""
        return self._num_written

    def append(self, kind: str, body: bytes) -> None:
        """Add an event behind all others."""
        self._num_appended += 1
        self._rows.append(LogRow(self._num_appended, kind, body))

    def after(self, act: Callable[[], None]) -> None:
        """Call this when all that was appended so far is written, and all that was given before is done."""
        if self._num_appended == self._num_written and not self._awaiting:
            act()
        else:
            self._awaiting.append((self._num_appended, act))

    def group(self, most_rows: int, most_bytes: int) -> list[LogRow]:
        """Return the next rows to write, at least one if there is any."""
        found: list[LogRow] = []
        for row in islice(self._rows, most_rows):
            most_bytes -= len(row.body)
            if found and most_bytes < 0:
                break
            found.append(row)
        return found

    def confirm(self, number: int) -> None:
        """Record that the log has all events up to this number, and do what waited for them."""
        assert self._num_written <= number <= self._num_appended, (self._num_written, number)
        self._num_written = number
        while self._rows and self._rows[0].number <= number:
            self._rows.popleft()
        while self._awaiting and self._awaiting[0][0] <= self._num_written:
            self._awaiting.popleft()[1]()
