"""A run's folder: the hub's identity, its addresses, its process, its guests, and what the run leaves.

`hub.json` holds the hub's key and the secret of its invitation, so only its user may read it. A hub that
opens the folder again gives out the same invitation. The event log lies beside it, and `guests.json`, which a
hub and commands beside it read and change. No torch in here.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from secrets import token_bytes
from typing import Annotated

import msgspec
import psutil  # type: ignore[import-untyped]
from blake3 import blake3
from msgspec import Meta

from ravnest.disk import read_bytes, write_whole
from ravnest.errors import ConfigError, RavnestError
from ravnest.foreign import parse_json
from ravnest.hub.service.guests import GuestList, Guests
from ravnest.model.state.shards import find_written, has_weights
from ravnest.net.identity import (
    INVITATION_BYTES,
    SECRET_BYTES,
    KeyPair,
    Token,
    derive_secret,
    load_keys,
    new_keys,
    write_token,
)
from ravnest.requester.checkpoint_store import CHECKPOINTS

logger = logging.getLogger(__name__)

RUNS = Path("runs")
MODEL, BEST, EMA = "model.safetensors", "best.safetensors", "ema.safetensors"
# Of an adapted model (peft): a file, and folders.
ADAPTER, BEST_ADAPTER, EMA_ADAPTER = "adapter_model.safetensors", "best", "ema"
_FILE = "hub.json"
_MOST_BYTES = 1 << 16
_WAY_OUT = "give a folder that can be made, is yours and has room"
_PRIVATE = 0o700  # its log names providers, their keys and their addresses
_SAME_PROCESS_SECONDS = 2.0  # systems round the time a process was started at


class HubFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What hub.json says; the process is the last one that ran this hub."""

    secret_key: Annotated[bytes, Meta(max_length=64)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)] = ()
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    started_at: float = 0.0
    job: str = ""
    channel_port: Annotated[int, Meta(ge=0, le=65535)] = (
        0  # on loopback, where it hears its requester while it trains
    )
    store: Annotated[str, Meta(max_length=2048)] = ""  # where its log is, if not here; without a password
    blobs: Annotated[str, Meta(max_length=2048)] = ""  # where its checkpoints are, too

    def __repr__(self) -> str:
        return f"HubFile(addresses={self.addresses}, pid={self.pid}, job={self.job!r})"

    @property
    def keys(self) -> KeyPair:
        """The hub's key pair."""
        return load_keys(self.secret_key)

    @property
    def log_name(self) -> str:
        """What its log is called in a database that several hubs share."""
        return blake3(self.keys.public).hexdigest(16)

    @property
    def checkpoint_key(self) -> bytes:
        """What checkpoints in the same folder are signed with."""
        return blake3(self.secret_key, derive_key_context="ravnest checkpoints").digest()

    @property
    def token(self) -> Token:
        """What a provider needs to join."""
        return Token(self.addresses, self.keys.public, self.secret)

    @property
    def invitation(self) -> str:
        """The token as one word."""
        if not self.addresses:
            raise ConfigError("the hub has no address yet, so nobody can be invited; start it first")
        return write_token(self.token)

    @property
    def process(self) -> psutil.Process | None:
        """The process that runs this hub now, if that very one is still there."""
        return find_process(self.pid, self.started_at)


def find_process(pid: int, started_at: float) -> psutil.Process | None:
    """Return the process of this number, if it is the one that was started at this time and still runs."""
    try:
        found = psutil.Process(pid)
        is_same = abs(found.create_time() - started_at) < _SAME_PROCESS_SECONDS
        return found if is_same and found.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError, OverflowError):
        return None


def new_hub_file() -> HubFile:
    """Draw a key and a secret."""
    return HubFile(new_keys().secret, os.urandom(SECRET_BYTES))


def open_run(folder: Path) -> HubFile:
    """Make the folder or take the one that is there, unless a hub runs in it."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = read_hub_file(folder) if (folder / _FILE).exists() else new_hub_file()
        if found.process and found.pid != os.getpid():
            raise ConfigError(
                f"{folder} belongs to a hub that runs now (process {found.pid}); give another folder, "
                f"or end it with: ravnest stop {folder}"
            )
        write_hub_file(folder, found)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}; {_WAY_OUT}") from None
    return found


def check_unfinished(folder: Path) -> None:
    """Refuse a folder with a result, in which a new training is to begin."""
    if has_result(folder):
        way_on = 'or go on with it: --resume, in Python resume="auto"'
        raise ConfigError(f"{folder} holds a finished run; give another folder or move it away, {way_on}")


def has_result(folder: Path) -> bool:
    """Return whether a training has ended here and left weights, or an adapter."""
    return has_weights(folder / MODEL) or (folder / ADAPTER).exists()


def find_result(file: Path) -> Path:
    """Return what stands for a result on disk: the file, the index of its shards, or an adapter's folder."""
    is_adapter = file.name == MODEL and not has_weights(file) and file.with_name(ADAPTER).exists()
    return file.parent if is_adapter else find_written(file)


def set_aside(folder: Path, with_checkpoints: bool = True) -> None:
    """Move what an earlier training left out of the way; it is kept."""
    found = [file for file in folder.glob("hub.sqlite*") if file.is_file()]
    found += [place for place in folder.glob(CHECKPOINTS) if with_checkpoints]
    if found:
        earlier = make_earlier(folder)
        for file in found:
            file.replace(earlier / file.name)
        if with_checkpoints:
            logger.warning(
                "%s held a run that had not ended: it is kept in %s, and a new one begins; "
                "--resume would have gone on with it",
                folder,
                earlier.name,
            )


def make_earlier(folder: Path) -> Path:
    """Make a place in a folder for what is set aside."""
    names = (folder / f"earlier-{number}" for number in range(1, 10_000))
    made = next(name for name in names if not name.exists())
    made.mkdir()
    return made


def write_hub_file(folder: Path, content: HubFile) -> None:
    """Write hub.json whole or not at all; only its user may read it."""
    try:
        write_whole(folder / _FILE, msgspec.json.encode(content), is_private=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}; {_WAY_OUT}") from None


def read_hub_file(folder: Path) -> HubFile:
    """Return what a folder's hub.json says, or raise the sentence that says why it cannot."""
    file = folder / _FILE
    try:
        content = read_bytes(file, _MOST_BYTES)
        found = parse_json(content, str(file), _MOST_BYTES).read_as(HubFile)
        if not all(address.isprintable() for address in found.addresses):
            raise ConfigError("an address is no text")
        load_keys(found.secret_key)
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} holds no run of a hub; give a folder like runs/digits") from None
    except ConfigError:  # its words could quote the secret
        raise ConfigError(f"{file} is damaged; give another folder, or delete it") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; ask its owner") from None


def find_run(given: str | None) -> Path:
    """Return the folder that was named, or the newest under runs/."""
    if given is not None:
        return Path(given)
    found = sorted(RUNS.glob(f"*/{_FILE}"), key=lambda file: file.lstat().st_mtime)
    if not found:
        raise ConfigError(f"there is no run under {RUNS}/ here; name the folder of one")
    return found[-1].parent


def free_run(name: str) -> Path:
    """Return a folder under runs/ for a job of this name: the first that holds no finished or running one."""
    for folder in _name_runs(name):
        is_used = (folder / _FILE).exists() and read_hub_file(folder).process is not None
        if not is_used and not has_result(folder):
            return folder
    raise RavnestError(f"{RUNS} has no free folder for {name}; move some away")


def fresh_run(name: str, day: date) -> Path:
    """Make a folder under runs/ that was not there: for a job of this name, begun on this day."""
    for folder in _name_runs(f"{name}-{day.isoformat()}"):
        try:
            folder.mkdir(mode=_PRIVATE, parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            problem = f"the folder {folder} cannot be made: {error.strerror}"
            raise ConfigError(f"{problem}; work where you may write, or give --folder or --out") from None
    raise RavnestError(f"{RUNS} has no free folder for {name}; move some away")


def _name_runs(name: str) -> Iterator[Path]:
    """Yield NAME, NAME-2, NAME-3 and so on under runs/."""
    word = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "job"
    yield RUNS / word
    for number in range(2, 10_000):
        yield RUNS / f"{word}-{number}"


_MOST_DAYS, _MOST_NODES = 36_500, 1_000_000
_GUESTS_FILE, _LOCK = "guests.json", ".guests.lock"
_MOST_GUESTS_BYTES = 1 << 24


def invite_guest(guests: Guests, hub: HubFile, name: str, days: float | None, nodes: int | None) -> str:
    """Put a guest on the list of a hub; return its token as one word."""
    if days is not None and not 0 < days <= _MOST_DAYS:
        raise ConfigError(f"{days} days are no time; give a number above 0, or leave it out for no end")
    if nodes is not None and not 1 <= nodes <= _MOST_NODES:
        raise ConfigError(f"{nodes} is no number of nodes; give one from 1 on, or leave it out for any")
    number = token_bytes(INVITATION_BYTES)
    seconds = None if days is None else timedelta(days=days).total_seconds()
    now = time.time()  # noqa: TID251 - invitations end by the calendar
    hub.invitation  # noqa: B018 - refuses a hub that has no address yet
    guests.change(lambda known: known.invite(number.hex(), name, now, seconds, nodes))
    secret = derive_secret(hub.keys.secret, number)
    return write_token(msgspec.structs.replace(hub.token, secret=secret, invitation=number))


class GuestFile:
    """See hub.service.guests.Guests. Who changes the list holds a lock: no other program's change is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> GuestList:
        """Return the list of the folder; that of a hub which has invited nobody by name, if there is none."""
        file = self._folder / _GUESTS_FILE
        try:
            return parse_json(read_bytes(file, _MOST_GUESTS_BYTES), str(file), _MOST_BYTES).read_as(GuestList)
        except FileNotFoundError:
            return GuestList()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; ask its owner") from None

    def change(self, how: Callable[[GuestList], GuestList]) -> GuestList:
        """Change the list, one program after the other."""
        with self._locked():
            before = self.read()
            after = how(before)
            if after != before:
                self._write(after)
            return after

    def _write(self, content: GuestList) -> None:
        try:
            write_whole(
                self._folder / _GUESTS_FILE,
                msgspec.json.format(msgspec.json.encode(content)),
                is_private=True,
            )
        except OSError as error:
            raise ConfigError(
                f"the guest list in {self._folder} cannot be written: {error.strerror}"
            ) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            import fcntl
        except ImportError:  # Windows: commands there are typed by one person
            yield
            return
        try:
            descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the guest list in {self._folder} cannot be locked: {error.strerror}"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
