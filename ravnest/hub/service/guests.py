"""The guest list: whom the requester has invited, until when, and with how many nodes.

An invitation has a number, which its token carries, and a name that people use. Whoever has the hub's own
token comes by the one invitation that names nobody. Strikes of a guest are on the list, so that a new key
does not wash them off. Pure: lists are values, time is an argument; `requester.guest_file` keeps them.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Protocol, Self

import msgspec
from msgspec import Meta

from ravnest.errors import ConfigError
from ravnest.foreign import is_printable_word
from ravnest.net.identity import EVERYBODY, INVITATION_BYTES

MOST_STRIKES = 3  # then the invitation is void
MOST_GUESTS = 10_000
_EVERYBODY_NAME = "everybody"
_LONGEST_NAME = 40

Number = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * INVITATION_BYTES}}}\Z")]
UnixTime = Annotated[float, Meta(ge=0, le=1e11)]  # in seconds


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One guest's invitation; without an end it is for ever, without a limit for any number of nodes."""

    number: Number
    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    invited_at: UnixTime = 0.0
    ends_at: UnixTime | None = None
    max_nodes: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    is_revoked: bool = False
    strikes: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=MOST_STRIKES)] = ()

    def reason_against(self, num_others: int, now: float) -> str | None:
        """Return why its next node may not come in, beside so many that are here."""
        if self.is_revoked:
            return "its invitation was withdrawn"
        if self.ends_at is not None and now >= self.ends_at:
            day = datetime.fromtimestamp(self.ends_at, UTC)
            return f"its invitation ended on {day:%Y-%m-%d %H:%M} UTC: ask for a new one"
        if len(self.strikes) >= MOST_STRIKES:
            return f"its invitation is void after {MOST_STRIKES} faults, the last: {self.strikes[-1]}"
        if self.max_nodes is not None and num_others >= self.max_nodes:
            return f"its invitation is for {self.max_nodes} nodes, and they are here"
        return None


EVERYBODYS = Invitation(EVERYBODY.hex(), _EVERYBODY_NAME)


class GuestList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All invitations of a hub. What changes it returns another list."""

    invitations: Annotated[tuple[Invitation, ...], Meta(max_length=MOST_GUESTS)] = (EVERYBODYS,)

    def find(self, number: str) -> Invitation | None:
        """Return the invitation with this number."""
        return next((each for each in self.invitations if each.number == number), None)

    def named(self, name: str) -> Invitation:
        """Return the invitation of this name that holds; raise the sentence that there is none."""
        for each in self.invitations:
            if each.name == name and not each.is_revoked:
                return each
        known = ", ".join(sorted(each.name for each in self.invitations if not each.is_revoked))
        raise ConfigError(f"no invitation is called {name!r}; there are: {known or 'none'}")

    def invite(self, number: str, name: str, now: float, seconds: float | None, nodes: int | None) -> Self:
        """Add an invitation under a name that no other one has."""
        if not name or len(name) > _LONGEST_NAME or not is_printable_word(name):
            raise ConfigError(
                f"an invitation cannot be called {name!r}; give a word of at most {_LONGEST_NAME} letters"
            )
        if any(each.name == name and not each.is_revoked for each in self.invitations):
            raise ConfigError(f"{name!r} has an invitation; withdraw it first, or choose another name")
        if len(self.invitations) >= MOST_GUESTS:
            raise ConfigError(f"{MOST_GUESTS} guests are the most that a hub can have")
        ends_at = None if seconds is None else now + seconds
        added = Invitation(number, name, now, ends_at, nodes)
        return msgspec.structs.replace(self, invitations=(*self.invitations, added))

    def revoke(self, name: str) -> Self:
        """Withdraw the invitation of this name."""
        return self._with(msgspec.structs.replace(self.named(name), is_revoked=True))

    def strike(self, number: str, reason: str) -> Self:
        """Remember what a node of a guest did wrong; nobody is struck for what everybody can do."""
        found = self.find(number)
        if found is None or number == EVERYBODYS.number or len(found.strikes) >= MOST_STRIKES:
            return self
        return self._with(msgspec.structs.replace(found, strikes=(*found.strikes, reason[:300])))

    def _with(self, changed: Invitation) -> Self:
        rows = tuple(changed if each.number == changed.number else each for each in self.invitations)
        return msgspec.structs.replace(self, invitations=rows)


class Guests(Protocol):
    """Where a hub's guest list is; other programs may change it, too."""

    def read(self) -> GuestList:
        """Return the list as it is now."""
        ...

    def change(self, how: Callable[[GuestList], GuestList]) -> GuestList:
        """Change the list, and return what it became."""
        ...


class GuestsInMemory:
    """The guest list of a hub without a folder."""

    def __init__(self) -> None:
        self._list = GuestList()

    def read(self) -> GuestList:
        """Return the list."""
        return self._list

    def change(self, how: Callable[[GuestList], GuestList]) -> GuestList:
        """Change the list."""
        self._list = how(self._list)
        return self._list
