"""Applies recorded histories to today's coordinator and says where it decides otherwise.

A file has one line of JSON after the other, in canonical form: `{"history": ...}` begins a history,
`{"event": ...}` is applied and the next line is what came of it; `{"restart": ...}` makes a new coordinator
of what was logged so far, `{"find_missing": ...}` asks who is waited for, and its answer is the next line.
"""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import Any

from replay.names import EVENTS, NAMES, ORDERS, Replayed
from replay.neutral import Codec, canonical

from ravnest.hub.coordinator.events import Received
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import StepReport

FOLDER = Path(__file__).parent / "histories"
_MOST_LINES, _MOST_LETTERS = 60, 2000  # of what is shown


class DiffersError(AssertionError):
    """Today's code decides otherwise than the code that was recorded."""


def make_codec() -> Codec:
    """Return what writes and reads all events and orders."""
    return Codec(NAMES, EVENTS, ORDERS)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of histories."""
    with lzma.open(path, "rt", encoding="ascii") as file:
        return file.read().splitlines()


def read_histories(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Return each history's name, and its lines after that."""
    name, lines = "", []
    for line in read_lines(path):
        if line.startswith('{"history"'):
            if name:
                yield name, lines
            name, lines = json.loads(line)["history"], []
        else:
            lines.append(line)
    yield name, lines


def write_answer(codec: Codec, orders: tuple[Any, ...], is_heard: bool, due: float | None) -> str:
    """Return what came of an event, as it is recorded; what is heard and not refused is in the log."""
    written = [codec.write(each) for each in orders]
    is_logged = is_heard and [each["type"] for each in written] != ["Refusal"]
    return canonical({"due": due, "is_logged": is_logged, "orders": written})


def is_logged(answer: str) -> bool:
    """Return whether the event of this answer is in the log."""
    return answer.partition(',"orders":')[0].endswith('"is_logged":true')


@dataclass
class Replay:
    """One history, line by line."""

    codec: Codec
    name: str
    logged: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # today: without reports
    num_logged: int = 0  # when it was recorded
    num_events: int = 0

    def __post_init__(self) -> None:
        self.coordinator = self._begin()

    def _begin(self) -> Replayed:
        return Replayed(self._watch)

    def _watch(self, event: Any, orders: tuple[Any, ...]) -> None:
        is_report = isinstance(event, Received) and isinstance(event.message, StepReport)
        is_refused = bool(orders) and isinstance(orders[0], Refusal)
        if not is_report and not is_refused and self.coordinator.concerns(event):
            self.logged.append((event, orders))

    def run(self, lines: list[str]) -> None:
        """Replay a whole history; raise DiffersError at the first difference."""
        for question, answer in zip(islice(lines, 0, None, 2), islice(lines, 1, None, 2), strict=True):
            self._step(json.loads(question), answer)

    def _step(self, question: dict[str, Any], recorded: str) -> None:
        if "event" in question:
            found = self._apply(question["event"], recorded)
        elif "restart" in question:
            found = self._restart()
        else:
            found = canonical(self.coordinator.find_missing(*question["find_missing"]))
        if found != recorded:
            raise DiffersError(self._show(question, recorded, found))

    def _apply(self, data: Any, recorded: str) -> str:
        self.num_events += 1
        try:
            event = self.codec.read(data)
            self.coordinator.begin(event)
            is_heard = self.coordinator.concerns(event)
            orders = self.coordinator.apply(event)
        except Exception as error:
            error.add_note(f"{self._where()}: {canonical(data)[:_MOST_LETTERS]}")
            raise
        if is_logged(recorded):
            self.num_logged += 1
        return write_answer(self.codec, orders, is_heard, self.coordinator.due)

    def _restart(self) -> str:
        """Go on with a new coordinator that was told what was logged; it has to order the same again."""
        self.coordinator = self._begin()
        for number, (event, orders) in enumerate(self.logged, 1):
            again = self.coordinator.replay(event)
            if again != orders:
                before, after = (canonical([self.codec.write(x) for x in each]) for each in (orders, again))
                where = {"logged event": number, "event": self.codec.write(event)}
                raise DiffersError(self._show(where, before, after))
        return canonical(self.num_logged)

    def _where(self) -> str:
        return f"history {self.name!r}, event {self.num_events}"

    def _show(self, question: dict[str, Any], recorded: str, found: str) -> str:
        texts = [
            json.dumps(json.loads(each), indent=1, sort_keys=True).splitlines() for each in (recorded, found)
        ]
        diff = list(unified_diff(*texts, "recorded", "now", lineterm="", n=4))
        more = [f"... and {len(diff) - _MOST_LINES} lines more"] if len(diff) > _MOST_LINES else []
        shown = [self._where(), canonical(question)[:_MOST_LETTERS], *diff[:_MOST_LINES], *more]
        return "\n".join(shown)
