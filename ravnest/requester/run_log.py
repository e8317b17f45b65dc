"""The log files of a run: every notice and every line of the program, with times, in files of bounded size.

A thread writes them, so that no disk holds up the hub. Where nothing can be written, the run goes on. The
event log (hub.sqlite) is what a hub goes on from; these files are for people.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import DashboardOpened, Notice, Trained
from ravnest.units import show_plainly

LOG_FILE = "hub.log"
_MOST_BYTES, _NUM_OLD = 4 << 20, 2  # of one file; files before it
_PACKAGE = "ravnest"


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - progress is written now and then


class _PlainLine(logging.Formatter):
    """One line, whatever a name or a message has in it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return show_plainly(super().format(record))


class _ForgivingFile(RotatingFileHandler):
    """Gives up with its first error: a full disk is told of elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging calls it so
        self.setLevel(logging.CRITICAL + 1)


class _Forwarded(QueueHandler):
    """Passes records on to the file; warnings reach stderr as they would without it."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        last = logging.lastResort
        if not logging.getLogger().handlers and last is not None and record.levelno >= last.level:
            last.handle(record)


class RunLog:
    """Writes the log of a folder while it is open; show it every notice."""

    def __init__(
        self, timeouts: ProgramTimeouts = TIMEOUTS.program, clock: Callable[[], float] = _clock
    ) -> None:
        self._pause_seconds, self._clock = timeouts.progress_every_seconds, clock
        self._said_at = float("-inf")
        self._is_open = False
        self._records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()

    @contextlib.contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Write into a folder until the end of the context."""
        try:
            file = _ForgivingFile(
                folder / LOG_FILE, maxBytes=_MOST_BYTES, backupCount=_NUM_OLD, encoding="utf-8"
            )
        except OSError:  # whoever needs the folder says so
            yield
            return
        file.setFormatter(_PlainLine())
        listener, forwarded = QueueListener(self._records, file), _Forwarded(self._records)
        logger = logging.getLogger(_PACKAGE)
        listener.start()
        logger.addHandler(forwarded)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            logger.removeHandler(forwarded)
            listener.stop()
            file.close()

    def observe_notice(self, notice: Notice) -> None:
        """Write a notice down, whatever the levels are; progress only now and then, the page's link never."""
        if not self._is_open or isinstance(notice, DashboardOpened):
            return  # whoever has its link can stop the run
        if isinstance(notice, Trained):
            now = self._clock()
            if now < self._said_at + self._pause_seconds:
                return
            self._said_at = now
        facts = (f"{_PACKAGE}.notices", logging.INFO, "", 0, show_notice(notice), (), None)
        self._records.put(logging.LogRecord(*facts))


class LogReader:
    """Reads the log of a folder from its oldest line on, each time from where it was."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOG_FILE
        if not self._file.exists():
            raise ConfigError(f"{folder} has no {LOG_FILE}: no hub has worked there, or an older one did")
        self._place = 0
        self._inode: int | None = None

    def read_all(self) -> list[str]:
        """Return every line that is kept."""
        lines: list[str] = []
        for number in range(_NUM_OLD, 0, -1):
            with contextlib.suppress(OSError):
                lines += (
                    self._file.with_name(f"{LOG_FILE}.{number}").read_text("utf-8", "replace").splitlines()
                )
        return [*lines, *self.read_new()]

    def read_new(self) -> list[str]:
        """Return the lines that came since the last time; after a change of files, those of the new one."""
        with contextlib.suppress(OSError), self._file.open("rb") as file:
            found = self._file.stat()
            if found.st_ino != self._inode or found.st_size < self._place:
                self._inode, self._place = found.st_ino, 0
            file.seek(self._place)
            whole = file.read().rpartition(b"\n")[0]
            if not whole:
                return []
            self._place += len(whole) + 1
            return whole.decode("utf-8", "replace").splitlines()
        return []
