"""A hub's events in PostgreSQL, so that a hub on another machine goes on with them.

Every hub that opens a run takes its next fence, a number. Whatever is written carries the fence in the same
statement, which locks the row that has it: a hub with an older fence writes nothing, and is told so. Events
are written in groups, one statement each, while the hub goes on; what follows from an event waits until its
group is written. While the server cannot be reached, all of that waits.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import LiteralString, NoReturn

import psycopg
from psycopg import errors

from ravnest.config import StoreTimeouts
from ravnest.errors import ConfigError, FencedOff, StoreAway
from ravnest.hub.coordinator.events import Event
from ravnest.hub.coordinator.notices import LogGoesOn, LogWaits
from ravnest.hub.service.event_log import LOG_SCHEMA, MOST_EVENT_BYTES, read_row, write_event
from ravnest.hub.service.postgres_address import PostgresAddress
from ravnest.hub.service.unwritten import LogRow, Unwritten
from ravnest.units import show_seconds

logger = logging.getLogger(__name__)

_MOST_ROWS, _MOST_BYTES = 500, 8 << 20  # of a group
_MOST_WAITING = 2_000  # events; a hub that has more on their way hears nobody
_AGAIN = "start the hub again with --resume: what is logged is kept, and peers wait some minutes for it"
_MAKE_TABLES = """
SELECT pg_advisory_xact_lock(7281900);
CREATE TABLE IF NOT EXISTS ravnest_hubs (
    hub text PRIMARY KEY,
    fence bigint NOT NULL,
    run bigint NOT NULL,
    schema integer NOT NULL,
    holder text NOT NULL,
    held_since timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS ravnest_events (
    hub text NOT NULL,
    run bigint NOT NULL,
    number bigint NOT NULL,
    fence bigint NOT NULL,
    kind text NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (hub, run, number)
);
CREATE TABLE IF NOT EXISTS ravnest_checkpoints (
    hub text NOT NULL,
    run bigint NOT NULL,
    number bigint NOT NULL,
    fence bigint NOT NULL,
    manifest text NOT NULL,
    PRIMARY KEY (hub, run, number)
);
"""
_TAKE_OVER = """
INSERT INTO ravnest_hubs AS known (hub, fence, run, schema, holder, held_since)
VALUES (%(hub)s, 1, 1, %(schema)s, %(holder)s, now())
ON CONFLICT (hub) DO UPDATE SET fence = known.fence + 1, holder = %(holder)s, held_since = now()
RETURNING fence, run
"""
# FOR SHARE waits for a hub that takes over just now, and that one waits for this: one of them is first.
_APPEND = """
WITH holder AS (SELECT run FROM ravnest_hubs WHERE hub = %(hub)s AND fence = %(fence)s FOR SHARE)
INSERT INTO ravnest_events (hub, run, number, fence, kind, body)
SELECT %(hub)s, holder.run, row.number, %(fence)s, row.kind, row.body FROM holder,
unnest(%(numbers)s::bigint[], %(kinds)s::text[], %(bodies)s::bytea[]) AS row(number, kind, body)
"""
_BEGIN = """
WITH holder AS (
    UPDATE ravnest_hubs SET run = run + 1, schema = %(schema)s WHERE hub = %(hub)s AND fence = %(fence)s
    RETURNING run
), moved AS (
    UPDATE ravnest_checkpoints AS kept SET run = holder.run FROM holder
    WHERE %(with_checkpoints)s AND kept.hub = %(hub)s AND kept.run = %(run)s
)
SELECT run FROM holder
"""
# A number may be there: of a checkpoint that came back damaged from the bucket, and is written anew.
_REGISTER = """
WITH holder AS (SELECT run FROM ravnest_hubs WHERE hub = %(hub)s AND fence = %(fence)s FOR SHARE)
INSERT INTO ravnest_checkpoints (hub, run, number, fence, manifest)
SELECT %(hub)s, holder.run, %(number)s, %(fence)s, %(manifest)s FROM holder
ON CONFLICT (hub, run, number) DO UPDATE SET fence = excluded.fence, manifest = excluded.manifest
"""
_DROP = """
WITH holder AS (SELECT run FROM ravnest_hubs WHERE hub = %(hub)s AND fence = %(fence)s FOR SHARE),
gone AS (
    DELETE FROM ravnest_checkpoints AS kept USING holder
    WHERE kept.hub = %(hub)s AND kept.run = holder.run AND kept.number = ANY(%(numbers)s::bigint[])
)
SELECT run FROM holder
"""
# The lock waits for what an earlier connection of this hub still writes; the next statement sees it.
_LOOK = "SELECT run FROM ravnest_hubs WHERE hub = %(hub)s AND fence = %(fence)s FOR UPDATE"
_LAST = """
SELECT (SELECT coalesce(max(number), 0) FROM ravnest_events AS event
        WHERE event.hub = known.hub AND event.run = known.run)
FROM ravnest_hubs AS known WHERE hub = %(hub)s AND fence = %(fence)s
"""
_READ = """
SELECT number, kind, CASE WHEN octet_length(body) <= %s THEN body ELSE ''::bytea END
FROM ravnest_events WHERE hub = %s AND run = %s AND number > %s ORDER BY number
"""
_WAITED_FOR = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction, OSError)


@dataclass(frozen=True, slots=True)
class RegisteredCheckpoint:
    """A checkpoint that the holder of a fence has written whole, and the hash of its manifest's file."""

    number: int
    fence: int
    manifest: str


class PostgresPlace:
    """The LogPlace of a run whose log is in PostgreSQL."""

    def __init__(self, address: PostgresAddress, hub: str, timeouts: StoreTimeouts) -> None:
        self._address, self._hub, self._timeouts = address, hub, timeouts

    def __str__(self) -> str:
        return str(self._address)

    @contextlib.contextmanager
    def read(self, after: int) -> Iterator[Iterator[Event]]:
        """Give the events after the first so many."""
        with _explained(self._address), self._connected() as connection:
            run = _find_run(connection, self._address, self._hub)
            yield iter(()) if run is None else _read(connection, self._address, self._hub, run, after)

    def identify(self) -> object | None:
        """Return what tells this log from another one in its place; None: there is none."""
        with _explained(self._address), self._connected() as connection:
            return _find_run(connection, self._address, self._hub)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection]:
        with _dial(self._address, self._timeouts, "ravnest reader") as connection:
            connection.read_only = True
            yield connection


class PostgresLog:
    """An EventStore in PostgreSQL, of the hub with this key. Use it as a context manager, or `open` it."""

    writes_at_once = False

    def __init__(self, address: PostgresAddress, hub: str, timeouts: StoreTimeouts) -> None:
        self._address, self._hub, self._timeouts = address, hub, timeouts
        self._application = f"ravnest {hub}"
        self._unwritten = Unwritten()
        self._has_rows, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._run = self.fence = 0

    def __str__(self) -> str:
        return str(self._address)

    def open(self, *, takes_over: bool) -> None:
        """Take the next fence, and wait a little for a server that is just starting.

        Without `takes_over`, nothing is waited for, and ConfigError says that another hub is at work.
        """
        with _explained(self._address), self._connected_soon(takes_over) as connection:
            if connection.execute("SELECT to_regclass('ravnest_checkpoints')").fetchone() == (None,):
                connection.execute(_MAKE_TABLES)  # all or nothing: without values it is one message
            if not takes_over:
                self._refuse_if_held(connection)
            else:  # before its hub is fenced off by one that cannot read it
                _find_run(connection, self._address, self._hub)
            facts = {"hub": self._hub, "schema": LOG_SCHEMA, "holder": _name_holder()}
            found = connection.execute(_TAKE_OVER, facts).fetchone()
            assert found is not None
            self.fence, self._run = found
            last = connection.execute(_LAST, {"hub": self._hub, "fence": self.fence}).fetchone()
            if last is None:
                self._refuse(connection)
            self._unwritten = Unwritten(int(last[0]))

    def begin(self, *, with_checkpoints: bool) -> None:
        """Begin an empty log; the one before is kept under its number. Checkpoints may stay in use."""
        facts = {"hub": self._hub, "fence": self.fence, "run": self._run, "schema": LOG_SCHEMA}
        facts["with_checkpoints"] = with_checkpoints
        with _explained(self._address), self._connected() as connection:
            found = connection.execute(_BEGIN, facts).fetchone()
            if found is None:
                self._refuse(connection)
            self._run = found[0]
        self._unwritten = Unwritten()

    def append(self, event: Event) -> None:
        """Append an event; it is on its way when this returns."""
        self._unwritten.append(*write_event(event))
        self._has_rows.set()
        if len(self._unwritten) >= _MOST_WAITING:
            self._has_room.clear()

    def after_written(self, act: Callable[[], None]) -> None:
        """Call this, in the order given, when all that was appended is committed."""
        self._unwritten.after(act)

    async def wait_for_room(self) -> None:
        """Wait while the server cannot be reached, or much is on its way."""
        await self._has_room.wait()

    async def write(self, tell: Callable[[LogWaits | LogGoesOn], None]) -> None:
        """Write until cancelled. Wait for a server that is away; FencedOff or ConfigError end it."""
        loop = asyncio.get_running_loop()
        away_since: float | None = None

        def say_back() -> None:
            nonlocal away_since
            if len(self._unwritten) < _MOST_WAITING:
                self._has_room.set()
            if away_since is not None:
                tell(LogGoesOn(loop.time() - away_since))
                away_since = None

        while True:
            try:
                await self._write_on(say_back)
            except (*_WAITED_FOR, errors.UniqueViolation, TimeoutError) as error:
                reason = self._describe(error)
            except psycopg.Error as error:
                raise ConfigError(f"{self._address}: {self._describe(error)}; {_AGAIN}") from None
            if away_since is None:
                away_since = loop.time()
                self._has_room.clear()
                tell(LogWaits(reason, self._timeouts.patience_seconds))
            seconds = loop.time() - away_since
            if seconds > self._timeouts.patience_seconds:
                problem = f"PostgreSQL could not be reached for {seconds:.0f} s ({reason})"
                raise ConfigError(f"{self._address}: {problem}; have a look at it and {_AGAIN}")
            await _pause(self._timeouts.pause_seconds)

    async def _write_on(self, say_back: Callable[[], None]) -> None:
        """Connect, find out what the log has of what was sent before, and write group after group."""
        async with asyncio.timeout(self._timeouts.connect_seconds):
            connection = await psycopg.AsyncConnection.connect(
                **self._address.options(self._timeouts, self._application), autocommit=True
            )
        try:
            async with asyncio.timeout(self._timeouts.answer_seconds):
                self._confirm(await self._look(connection))
            while True:
                if not self._unwritten:  # only a write shows that it can write
                    say_back()
                    await self._has_rows.wait()
                async with asyncio.timeout(self._timeouts.answer_seconds):
                    number = await self._write_group(connection)
                self._confirm(number)
                say_back()
        finally:
            await connection.close()

    async def _look(self, connection: psycopg.AsyncConnection) -> int:
        """Return the number of the last event; no lock stays if this hub stands still in between."""
        facts = {"hub": self._hub, "fence": self.fence}
        await connection.execute(_LOOK, facts)
        last = await (await connection.execute(_LAST, facts)).fetchone()
        if last is None:
            await self._refuse_later(connection)
        if last[0] < (before := self._unwritten.num_written):
            problem = f"the log has {last[0]} events, and had {before}: was it set back to a copy of before?"
            raise ConfigError(f"{self._address}: {problem} What was done since is not in it; {_AGAIN}")
        return int(last[0])

    async def _write_group(self, connection: psycopg.AsyncConnection) -> int:
        rows = self._unwritten.group(_MOST_ROWS, _MOST_BYTES)
        done = await connection.execute(_APPEND, self._facts(rows), prepare=True)
        if done.rowcount != len(rows):
            await self._refuse_later(connection)
        return rows[-1].number

    def _facts(self, rows: list[LogRow]) -> dict[str, object]:
        columns = {"numbers": [x.number for x in rows], "kinds": [x.kind for x in rows]}
        return {"hub": self._hub, "fence": self.fence, **columns, "bodies": [x.body for x in rows]}

    def _confirm(self, number: int) -> None:
        self._unwritten.confirm(number)
        if not len(self._unwritten):
            self._has_rows.clear()

    def events(self, after: int = 0) -> Iterator[Event]:
        """Return all events in order, or those after the first so many."""
        with _explained(self._address), self._connected() as connection:
            yield from _read(connection, self._address, self._hub, self._run, after)

    def close(self) -> None:
        """Nothing is open beside `write`."""

    def check(self) -> None:
        """Raise FencedOff if another hub has taken the run over. Any thread may call it.

        A server that is away is waited for as long as `write` waits, then StoreAway says so.
        """
        num_tries = math.ceil(self._timeouts.patience_seconds / self._timeouts.pause_seconds)
        for number in range(num_tries):
            try:
                return self._check()
            except StoreAway as error:
                if not number:
                    logger.warning("it is not known who holds the run: %s; trying again", error)
                threading.Event().wait(self._timeouts.pause_seconds)
        return self._check()

    def _check(self) -> None:
        with _explained(self._address), self._connected() as connection:
            held = "SELECT 1 FROM ravnest_hubs WHERE hub = %s AND fence = %s"
            if connection.execute(held, (self._hub, self.fence)).fetchone() is None:
                self._refuse(connection)

    def register(self, number: int, manifest: str) -> None:
        """Record that a checkpoint is whole, or raise FencedOff. Any thread may call it."""
        facts = {"hub": self._hub, "fence": self.fence, "number": number, "manifest": manifest}
        with _explained(self._address), self._connected() as connection:
            if connection.execute(_REGISTER, facts).rowcount != 1:
                self._refuse(connection)

    def unregister(self, numbers: list[int]) -> None:
        """Forget checkpoints that are about to be removed. Any thread may call it."""
        facts = {"hub": self._hub, "fence": self.fence, "numbers": numbers}
        with _explained(self._address), self._connected() as connection:
            if connection.execute(_DROP, facts).fetchone() is None:
                self._refuse(connection)

    def checkpoints(self) -> list[RegisteredCheckpoint]:
        """Return the checkpoints of this run, the oldest first. Any thread may call it."""
        return self._find_checkpoints("run = %s")

    def earlier_checkpoints(self) -> list[RegisteredCheckpoint]:
        """Return those of the runs before, which were kept. Any thread may call it."""
        return self._find_checkpoints("run < %s")

    def _find_checkpoints(self, which: LiteralString) -> list[RegisteredCheckpoint]:
        chosen = "SELECT number, fence, manifest FROM ravnest_checkpoints WHERE hub = %s AND "
        with _explained(self._address), self._connected() as connection:
            found = connection.execute(chosen + which + " ORDER BY number", (self._hub, self._run)).fetchall()
        return [RegisteredCheckpoint(*each) for each in found]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection]:
        with _dial(self._address, self._timeouts, "ravnest helper") as connection:
            yield connection

    @contextlib.contextmanager
    def _connected_soon(self, is_patient: bool) -> Iterator[psycopg.Connection]:
        """Connect, as soon as a server is up that a power cut may have ended together with the hub."""
        num_tries = (
            math.ceil(self._timeouts.start_seconds / self._timeouts.pause_seconds) if is_patient else 0
        )
        for left in range(num_tries, 0, -1):
            try:
                with _dial(self._address, self._timeouts, "ravnest helper"):
                    break
            except psycopg.OperationalError as error:
                if left == num_tries:
                    seconds = show_seconds(self._timeouts.start_seconds)
                    reason = self._address.redact(str(error))
                    logger.warning("%s: %s; trying again for %s", self._address, reason, seconds)
                threading.Event().wait(self._timeouts.pause_seconds)
        with self._connected() as connection:
            yield connection

    def _refuse_if_held(self, connection: psycopg.Connection) -> None:
        """Refuse to begin beside a hub of this key that is connected."""
        others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        found = connection.execute(others, (self._application,)).fetchone()
        if found is not None and found[0]:
            holder = self._find_holder(connection)
            raise ConfigError(
                f"{self._address}: the hub with this hub.json is at work{holder}; stop it, or take its run "
                "over with --resume"
            )

    def _find_holder(self, connection: psycopg.Connection) -> str:
        held = connection.execute(_HELD, (self._hub,)).fetchone()
        return "" if held is None else _show_holder(held[0])

    def _refuse(self, connection: psycopg.Connection) -> NoReturn:
        self._fence_off(self._find_holder(connection))

    async def _refuse_later(self, connection: psycopg.AsyncConnection) -> NoReturn:
        held = await (await connection.execute(_HELD, (self._hub,))).fetchone()
        self._fence_off("" if held is None else _show_holder(held[0]))

    def _fence_off(self, holder: str) -> NoReturn:
        raise FencedOff(
            f"another hub has taken this run over{holder}: this one may write nothing more and ends; "
            "leave the run to the other, or take it back with --resume"
        )

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return "PostgreSQL does not answer"
        return self._address.redact(str(error))


_HELD = "SELECT holder FROM ravnest_hubs WHERE hub = %s"


def _name_holder() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _show_holder(holder: str) -> str:
    return f" ({''.join(x for x in holder if x.isprintable())[:200]})"


def _read(
    connection: psycopg.Connection, address: PostgresAddress, hub: str, run: int, after: int
) -> Iterator[Event]:
    with connection.transaction(), connection.cursor("ravnest_events", binary=True) as cursor:
        cursor.itersize = 1_000
        for number, kind, body in cursor.execute(_READ, (MOST_EVENT_BYTES, hub, run, after)):
            yield read_row(number, kind, body, address)


@contextlib.contextmanager
def _dial(
    address: PostgresAddress, timeouts: StoreTimeouts, application: str
) -> Iterator[psycopg.Connection]:
    """Connect; no statement waits longer for a lock or for an answer than one of the log may."""
    with psycopg.connect(**address.options(timeouts, application), autocommit=True) as connection:
        milliseconds = str(round(1000 * timeouts.answer_seconds))
        connection.execute("SELECT set_config('statement_timeout', %s, false)", (milliseconds,))
        yield connection


async def _pause(seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()


def _find_run(connection: psycopg.Connection, address: PostgresAddress, hub: str) -> int | None:
    """Return the number of a hub's last run; None: it has none. Refuse a log of another ravnest."""
    try:
        known = "SELECT run, schema FROM ravnest_hubs WHERE hub = %s"
        found = connection.execute(known, (hub,)).fetchone()
    except errors.UndefinedTable:
        return None
    if found is None:
        return None
    if found[1] != LOG_SCHEMA:
        raise ConfigError(
            f"{address}: its log is of version {found[1]}, this ravnest reads version {LOG_SCHEMA}; use the "
            "ravnest that began it, or begin a new run without --resume"
        )
    return int(found[0])


@contextlib.contextmanager
def _explained(address: PostgresAddress) -> Iterator[None]:
    """Turn an error of the server into a sentence for the person who started the hub."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        reason = address.redact(str(error))
        raise StoreAway(
            f"{address} cannot be used: {reason}; start PostgreSQL, or see what it says"
        ) from None
    except errors.InsufficientPrivilege as error:
        reason = address.redact(str(error))
        raise ConfigError(f"{address}: {reason}; let this user make tables there, or give another") from None
    except psycopg.Error as error:
        raise ConfigError(f"{address}: {address.redact(str(error))}; is it a database of Ravnest?") from None
