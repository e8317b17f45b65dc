"""Where a run keeps its log and its checkpoints: its folder, or PostgreSQL and a bucket beside it.

`hub.json` remembers the addresses without passwords, so that commands beside the hub find the log. Whoever
opens shared stores takes their next fence, before anything is read of them.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import msgspec

from ravnest.config import TIMEOUTS, HubTimeouts, StoreTimeouts
from ravnest.errors import BucketError, ConfigError, StoreAway
from ravnest.hub.coordinator.events import JobGiven
from ravnest.hub.service.event_log import EventLog, EventStore, LogFolder, LogPlace, Show, read_watch
from ravnest.hub.service.postgres_address import PostgresAddress
from ravnest.hub.service.status import StatusTracker
from ravnest.requester.bucket_address import BucketAddress
from ravnest.requester.checkpoint_store import Checkpoints, open_checkpoints
from ravnest.requester.result import Result, keep_weights
from ravnest.requester.run_folder import HubFile, read_hub_file, set_aside

if TYPE_CHECKING:  # each needs a package that only some have
    from ravnest.hub.service.postgres_log import PostgresLog
    from ravnest.requester.bucket import Bucket
    from ravnest.requester.checkpoint_mirror import CheckpointMirror

logger = logging.getLogger(__name__)


class RunStores:
    """The stores of one training in a folder; None: nothing is kept. `resumes`: it goes on, if it can."""

    def __init__(self, folder: Path | None, *, resumes: bool) -> None:
        self._folder = folder
        self.resumes = resumes

    def open_checkpoints(
        self, kept_at: Path | None, key: bytes
    ) -> contextlib.AbstractContextManager[Checkpoints]:
        """Give the checkpoints that are here; with a folder, they last."""
        return open_checkpoints(kept_at, key)

    def deliver(self, file: Path, *, overwrite: bool) -> Callable[[Result], None]:
        """Return what puts weights where they are to go."""
        return partial(keep_weights, file=file, overwrite=overwrite)

    def find_past(self, job: JobGiven, timeouts: HubTimeouts) -> StatusTracker | None:
        """Return the hub of the log if it was at this job; StoreAway: nobody knows."""
        place = self._place()
        try:
            past = None if place is None else read_watch(place, timeouts)
        except StoreAway:  # or a new log would be begun because of a network that failed for a moment
            raise
        except ConfigError as error:
            logger.info("the log is not gone on with: %s", error)
            return None
        return past if past is not None and past.hub.is_at(job) else None

    def replay(self, timeouts: HubTimeouts, show: Show) -> None:
        """Show every event of the log."""
        if (place := self._place()) is not None:
            read_watch(place, timeouts, show)

    @contextlib.contextmanager
    def writing(self, *, is_new: bool, with_checkpoints: bool) -> Iterator[EventStore | None]:
        """Give the log to write to; what an earlier training left in it is set aside if this one is new."""
        if self._folder is None:
            yield None
            return
        if is_new:
            set_aside(self._folder, with_checkpoints=with_checkpoints)
        with EventLog(self._folder) as store:
            yield store

    def _place(self) -> LogPlace | None:
        return None if self._folder is None else LogFolder(self._folder)


class SharedStores(RunStores):
    """A log in PostgreSQL, and checkpoints in a bucket if there is one, beside those of the folder."""

    def __init__(
        self,
        folder: Path,
        log: "PostgresLog",
        place: LogPlace,
        mirror: "CheckpointMirror | None",
        *,
        resumes: bool,
    ) -> None:
        super().__init__(folder, resumes=resumes)
        self._folder: Path = folder
        self._log, self._log_place, self._mirror = log, place, mirror

    @contextlib.contextmanager
    def open_checkpoints(self, kept_at: Path | None, key: bytes) -> Iterator[Checkpoints]:
        """Give the checkpoints that count; those of the bucket come to this PC if the run goes on."""
        if self._mirror is not None and self.resumes:
            self._mirror.bring_back(self._folder, key)
        yield Checkpoints(self._folder, key=key, mirror=self._mirror)

    def deliver(self, file: Path, *, overwrite: bool) -> Callable[[Result], None]:
        """Return what puts weights where they are to go, and into the bucket, unless another hub is at it."""
        keep = super().deliver(file, overwrite=overwrite)

        def keep_both(result: Result) -> None:
            self._log.check()
            keep(result)
            if self._mirror is None:
                return
            try:
                logger.warning("note: the weights are in %s, too", self._mirror.send_result(file))
            except (BucketError, ConfigError) as error:
                logger.warning("the weights are on this PC, but not in the bucket: %s", error)

        return keep_both

    @contextlib.contextmanager
    def writing(self, *, is_new: bool, with_checkpoints: bool) -> Iterator[EventStore]:
        """Give the log to write to; the one before keeps its number if this one is new."""
        if is_new:
            set_aside(self._folder, with_checkpoints=with_checkpoints)
            self._log.begin(with_checkpoints=not with_checkpoints)
        yield self._log

    def _place(self) -> LogPlace:
        return self._log_place


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """Where a hub is to keep its log and its checkpoints beside its folder, as it was told."""

    log: PostgresAddress | None = None
    blobs: str = ""

    @classmethod
    def read(cls, store: str, blobs: str) -> Self:
        """Return checked addresses, or raise ConfigError."""
        if blobs and not store:
            raise ConfigError(
                "--blobs needs --store, too: without a log that others share, two hubs could write at once"
            )
        blobs = str(BucketAddress.read(blobs)) if blobs else ""  # before hub.json has it
        return cls(PostgresAddress(store) if store else None, blobs)

    def complete(self, hub: HubFile) -> Self:
        """Return what counts: what hub.json says, unless there is something else.

        The bucket goes with its log: who gives the log's address again, maybe with a password, means both.
        """
        if self.log is None:
            return self.read(hub.store, hub.blobs)
        if not self.blobs and str(self.log) == hub.store:
            return replace(self, blobs=self.read(hub.store, hub.blobs).blobs)
        return self

    def remember_in(self, hub: HubFile) -> HubFile:
        """Return a hub.json that says so, for stores that were found where they are to be."""
        store = "" if self.log is None else str(self.log)
        return msgspec.structs.replace(hub, store=store, blobs=self.blobs)


def open_stores(
    folder: Path | None, hub: HubFile, shared: SharedPlaces, timeouts: StoreTimeouts, *, resumes: bool
) -> RunStores:
    """Open the stores of a run. Shared ones are this hub's from now on, and no other's."""
    if shared.log is None:
        return RunStores(folder, resumes=resumes)
    if folder is None:
        raise ConfigError("a hub with --store needs a folder, too: its hub.json says which hub it is")
    postgres = _load_postgres()
    mirror = None
    log = postgres.PostgresLog(shared.log, hub.log_name, timeouts)
    if shared.blobs:
        bucket = _open_bucket(shared.blobs, timeouts)
        from ravnest.requester.checkpoint_mirror import CheckpointMirror

        mirror = CheckpointMirror(bucket, log)
    log.open(takes_over=resumes)
    place = postgres.PostgresPlace(shared.log, hub.log_name, timeouts)
    return SharedStores(folder, log, place, mirror, resumes=resumes)


def find_log(folder: Path, timeouts: StoreTimeouts = TIMEOUTS.store) -> LogPlace:
    """Return where the log of a run is, as its hub.json says."""
    hub = read_hub_file(folder)
    if not hub.store:
        return LogFolder(folder)
    place: LogPlace = _load_postgres().PostgresPlace(PostgresAddress(hub.store), hub.log_name, timeouts)
    return place


def _load_postgres() -> ModuleType:
    try:
        return importlib.import_module("ravnest.hub.service.postgres_log")
    except ImportError as error:
        raise ConfigError(
            f"a log in PostgreSQL needs psycopg ({error}): pip install 'ravnest[postgres]'"
        ) from None


def _open_bucket(address: str, timeouts: StoreTimeouts) -> "Bucket":
    try:
        from ravnest.requester.bucket import Bucket
    except ImportError as error:
        raise ConfigError(f"a bucket needs boto3 ({error}): pip install 'ravnest[s3]'") from None
    bucket = Bucket(address, timeouts)
    bucket.check()
    return bucket
