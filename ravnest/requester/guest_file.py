"""The guest list of a run's folder: `guests.json`, which a hub and commands beside it read and change.

Whoever changes it holds a lock, so that no change of another program is lost. It is written whole or not at
all, and only its user may read it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from secrets import token_bytes

import msgspec

from ravnest.disk import read_bytes, write_whole
from ravnest.errors import ConfigError
from ravnest.foreign import parse_json
from ravnest.hub.service.guests import GuestList, Guests
from ravnest.net.identity import INVITATION_BYTES, derive_secret, write_token
from ravnest.requester.run_folder import HubFile

_MOST_DAYS, _MOST_NODES = 36_500, 1_000_000
_FILE, _LOCK = "guests.json", ".guests.lock"
_MOST_BYTES = 1 << 24


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
    """See hub.service.guests.Guests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> GuestList:
        """Return the list of the folder; that of a hub which has invited nobody by name, if there is none."""
        file = self._folder / _FILE
        try:
            return parse_json(read_bytes(file, _MOST_BYTES), str(file), _MOST_BYTES).read_as(GuestList)
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
                self._folder / _FILE, msgspec.json.format(msgspec.json.encode(content)), is_private=True
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
