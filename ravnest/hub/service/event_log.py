"""Where a hub keeps its events: the interface, and SQLite in the folder of a run.

There an appended event outlives a kill -9 of the hub, and others may read meanwhile. A power cut may cost
the last moments, never the order. To append waits for no disk: a thread moves SQLite's journal into the log
now and then. A coordinator that is told its events again is the coordinator that was. Rows are msgpack of
known records; nothing else in the file is read.
"""

import contextlib
import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.errors import ConfigError, ProtocolError, RavnestError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, JobGiven, Received
from ravnest.hub.coordinator.notices import LogGoesOn, LogWaits
from ravnest.hub.service.status import NO_JOB, Status, StatusTracker
from ravnest.ids import NodeId
from ravnest.protocol import messages

logger = logging.getLogger(__name__)

LOG_SCHEMA = 4  # it changes when old events cannot be read any more, or mean something else
_LOG, _LOCK = "hub.sqlite", "hub.lock"
_EVENTS = "CREATE TABLE events (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL)"
MOST_EVENT_BYTES = 64 << 20
_TIDY_EVERY = 1_000  # events: some megabytes of SQLite's journal, read again by whoever opens the log
_TABLES = f"""
BEGIN;
{_EVENTS};
PRAGMA user_version = {LOG_SCHEMA};
COMMIT;
"""
_READS_WHAT_IS_LEFT = "PRAGMA writable_schema = ON"  # of a file cut short; the connection cannot write
Show = Callable[[StatusTracker, Event, tuple[Action, ...]], None]
_KINDS = {kind.__name__: kind for kind in Event.__args__}
_AGAIN = "start the hub again with --resume: what it has logged is kept, and peers wait a minute for it"
_FULL = f"the disk is full; make room and {_AGAIN}"
_CLOSED = "it cannot be written; choose another folder, or change its permissions"
_ADVICE = {
    "is full": _FULL,
    "disk I/O": f"the disk does not do what it should; have a look at it and {_AGAIN}",
    "readonly": _CLOSED,
    "unable to open": _CLOSED,
    "not a database": f"{_LOG} is damaged or of another program; move it away, or choose another folder",
    "malformed": f"{_LOG} is damaged; move it away, or choose another folder",
    "locked": "another hub is running there; stop that one, or choose another folder",
}


def write_event(event: Event) -> tuple[str, bytes]:
    """Return an event as the log has it: its kind, and msgpack; a peer's message as wire packs it."""
    plain = (event.sender, messages.pack(event.message), event.now) if isinstance(event, Received) else event
    return type(event).__name__, msgspec.msgpack.encode(plain)


def read_event(kind: str, body: bytes) -> Event:
    """Return the event of a row of the log; ValueError or ProtocolError if it is none."""
    if kind == Received.__name__:
        sender, header, now = msgspec.msgpack.decode(body, type=tuple[str, bytes, float])
        return Received(NodeId(sender), messages.unpack(header), now)
    if kind not in _KINDS:
        raise ValueError(f"no event is called {kind!r:.40}")
    event: Event = msgspec.msgpack.decode(body, type=_KINDS[kind])
    return event


def read_row(number: int, kind: str, body: bytes, where: object) -> Event:
    """Return the event of a row of the log, or raise ConfigError with the number of a damaged one."""
    try:
        return read_event(kind, body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ProtocolError) as problem:
        reason = f"event {number} of its log is damaged: {str(problem)[:200]!r}"
        raise ConfigError(f"{where}: {reason}") from None


class EventStore(Protocol):
    """Keeps the events of one hub in order. One hub writes; ConfigError says what is wrong with the store.

    What follows from an event is done by `after_written`, so nobody hears of what a restarted hub would not
    know.
    """

    writes_at_once: bool  # `append` returns when the event outlives the hub's process

    def append(self, event: Event) -> None:
        """Append an event; it may still be on its way to the store when this returns."""

    def after_written(self, act: Callable[[], None]) -> None:
        """Call this, in the order given, when all that was appended outlives the hub's process."""

    async def write(self, tell: Callable[[LogWaits | LogGoesOn], None]) -> None:
        """Write what is appended; tell when that has to wait, and when it goes on."""

    async def wait_for_room(self) -> None:
        """Wait while too much is on its way to the store."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """Return all events in order, or those after the first so many."""

    def close(self) -> None:
        """Close the log, so that others may write."""


class WritesAtOnce:
    """The part of an EventStore that has nothing to do where `append` writes."""

    writes_at_once = True

    def after_written(self, act: Callable[[], None]) -> None:
        """Call this: all that was appended is written."""
        act()

    async def write(self, tell: Callable[[LogWaits | LogGoesOn], None]) -> None:
        """Return: nothing waits."""

    async def wait_for_room(self) -> None:
        """Return: nothing waits."""


class LogPlace(Protocol):
    """Where a log lies, for whoever only reads it; as text it is what people call it."""

    def read(self, after: int) -> contextlib.AbstractContextManager[Iterator[Event]]:
        """Give the events after the first so many."""

    def identify(self) -> object | None:
        """Return what tells this log from another one in its place; None: there is none."""


class EventLog(WritesAtOnce):
    """An EventStore in SQLite, in a run folder. Use it as a context manager, or `open` and `close` it."""

    def __init__(
        self,
        folder: Path,
        is_read_only: bool = False,
        in_background: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._folder = folder
        self._is_read_only = is_read_only
        self._in_background = in_background  # None: a thread of its own
        self._num_appended = 0
        self._connections = contextlib.ExitStack()

    def open(self) -> Self:
        """Open the log, or begin one, or raise ConfigError with what is wrong with the folder."""
        with _explained(self._folder), contextlib.ExitStack() as opened:
            if self._is_read_only:
                self._database = _read_only(self._folder / _LOG)
                opened.callback(self._database.close)
            else:
                self._open_to_write(opened)
            self._check_schema()
            self._connections = opened.pop_all()
        return self

    def close(self) -> None:
        """Close the log, so that others may write."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, event: Event) -> None:
        """Append an event; when this returns, it outlives the hub's process."""
        with _explained(self._folder):
            self._database.execute("INSERT INTO events (kind, body) VALUES (?, ?)", write_event(event))
        self._num_appended += 1
        if self._num_appended % _TIDY_EVERY == 0:
            self._start(self._tidy)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Return all events in order, or those after the first so many."""
        chosen = "SELECT number, kind, body FROM events WHERE number > ? ORDER BY number"
        with _explained(self._folder):
            for number, kind, body in self._database.execute(chosen, (after,)):
                yield read_row(number, kind, body, self._folder)

    def _open_to_write(self, opened: contextlib.ExitStack) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # A lock on the log itself would keep readers out; the system frees this one when the process ends.
        lock = sqlite3.connect(self._folder / _LOCK, timeout=0.0, isolation_level=None)
        opened.callback(lock.close)
        lock.execute("BEGIN EXCLUSIVE")
        self._database = sqlite3.connect(self._folder / _LOG, isolation_level=None)
        opened.callback(self._database.close)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA wal_autocheckpoint = 0")  # it would wait for the disk while it appends
        thread = opened.enter_context(ThreadPoolExecutor(1, "ravnest-log"))
        self._start = self._in_background or thread.submit
        if not self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._database.executescript(_TABLES)

    def _tidy(self) -> None:
        """Move the journal into the log, and wait for the disk."""
        try:
            with contextlib.closing(sqlite3.connect(self._folder / _LOG, isolation_level=None)) as database:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:  # what was appended is there; the next event meets the disk, too
            logger.warning("the journal of the log grows: %s", error)

    def _check_schema(self) -> None:
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        tables = self._database.execute("SELECT sql FROM sqlite_master WHERE name = 'events'").fetchall()
        if found == 0 or (found == LOG_SCHEMA and tables != [(_EVENTS,)]):  # a view could run for ever
            raise ConfigError(f"{self._folder}: {_ADVICE['not a database']}")
        if found != LOG_SCHEMA:
            raise ConfigError(
                f"{self._folder}: its log is of version {found}, this ravnest reads version {LOG_SCHEMA}; "
                "use the ravnest that began it, or begin a new run in another folder"
            )


class LogFolder:
    """The LogPlace of a run whose log is in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    @contextlib.contextmanager
    def read(self, after: int) -> Iterator[Iterator[Event]]:
        """Give the events after the first so many."""
        with EventLog(self._folder, is_read_only=True) as store:
            yield store.events(after)

    def identify(self) -> object | None:
        """Return what tells this file from another of its name; None: it is not there."""
        try:
            found = (self._folder / _LOG).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


class LogReplay:
    """Replays a log, each time from where it was; `show` sees each event with its actions."""

    def __init__(
        self, where: Path | LogPlace, timeouts: HubTimeouts = TIMEOUTS.hub, show: Show | None = None
    ) -> None:
        self._place = LogFolder(where) if isinstance(where, Path) else where
        self._timeouts, self._show = timeouts, show
        self._found = self._place.identify()
        self._num_read = 0
        self.tracker: StatusTracker | None = None  # none while the log has no job

    @property
    def is_replaced(self) -> bool:
        """Whether another log is there by now: a new run was begun."""
        return self._place.identify() not in (None, self._found)

    def read_on(self) -> int:
        """Apply the events that are new, and return their number; ConfigError says what is wrong with one."""
        before = self._num_read
        with self._place.read(self._num_read) as events:
            for event in events:
                if self.tracker is None:
                    if not isinstance(event, JobGiven):
                        raise ConfigError(f"{self._place}: its log does not begin with a job")
                    with _refused_if_unfit(event, f"{self._place}: "):
                        self.tracker = StatusTracker(Coordinator(event, self._timeouts))
                with _refused_if_unfit(event, f"{self._place}: "):
                    actions = self.tracker.hub.apply(event)
                    self.tracker.observe(event, actions)
                    if self._show is not None:
                        self._show(self.tracker, event, actions)
                self._num_read += 1
        return self._num_read - before


def read_watch(
    where: Path | LogPlace, timeouts: HubTimeouts = TIMEOUTS.hub, show: Show | None = None
) -> StatusTracker | None:
    """Return the coordinator of this log with its status; None while the log has no job."""
    replay = LogReplay(where, timeouts, show)
    replay.read_on()
    return replay.tracker


def read_status(where: Path | LogPlace) -> Status:
    """Return where the run of this log stands, whether its hub is running or not."""
    watch = read_watch(where)
    with _refused_if_unfit(None, f"{where}: "):
        return NO_JOB if watch is None else watch.status()


def _read_only(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(
            f"{path.parent}: there is no log of a hub; give the folder of a run in which nodes had joined"
        )
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        database.execute(_READS_WHAT_IS_LEFT)
        database.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:  # in a folder that cannot be written, of a hub that has ended
        database.close()
        database = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
    database.execute(_READS_WHAT_IS_LEFT)
    database.execute("PRAGMA trusted_schema = OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_EVENT_BYTES)
    return database


@contextlib.contextmanager
def _refused_if_unfit(event: Event | None, where: str = "") -> Iterator[None]:
    """Refuse a log whose events no hub can have met; the coordinator trusts its own log."""
    try:
        yield
    except RavnestError:
        raise
    except Exception as error:
        kind = "the end" if event is None else type(event).__name__
        reason = f"its log does not fit together ({kind}: {type(error).__name__})"
        raise ConfigError(f"{where}{reason}; move it away, or choose another folder") from error


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into a sentence for the person who started the hub."""
    try:
        yield
    except sqlite3.Error as error:
        reason = f"{_ADVICE['malformed']} ({str(error)[:100]!r})"
        advice = next((text for sign, text in _ADVICE.items() if sign in str(error)), reason)
        raise ConfigError(f"{folder}: {advice}") from error
    except UnicodeDecodeError as error:  # of SQLite's own words, which quote the file
        raise ConfigError(f"{folder}: {_ADVICE['malformed']}") from error
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ConfigError(f"{folder}: {_FULL if is_full else f'{_CLOSED} ({error.strerror})'}") from error
