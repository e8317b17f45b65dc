"""What people can do with a hub from its page: the wishes a page may send, and what the hub offers.

A wish is read strictly and within bounds. Everything a hub offers may be called by any thread, and may take
as long as a disk does. A RavnestError says why something was not done. What an invited guest pastes is drawn
as a code, for a phone that carries it to another PC.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import segno
from msgspec import Meta

from ravnest.hub.service.guests import GuestList
from ravnest.hub.service.web.documents import GuestDocument


@dataclass(frozen=True, slots=True)
class CodeDocument:
    """A square of `size` modules without its quiet border; `path` draws the dark ones, each of side 1."""

    size: int
    path: str


def draw_code(text: str) -> CodeDocument:
    """Return the code of a text; of an invitation it has about sixty modules."""
    matrix = segno.make_qr(text, error="m").matrix
    runs = [
        f"M{start} {row}h{stop - start}v1h-{stop - start}z"
        for row, modules in enumerate(matrix)
        for start, stop in _find_runs(modules)
    ]
    return CodeDocument(len(matrix), "".join(runs))


def _find_runs(modules: bytearray) -> list[tuple[int, int]]:
    """Return where dark modules begin and end."""
    padded = (0, *modules, 0)
    edges = [place for place in range(len(modules) + 1) if bool(padded[place]) != bool(padded[place + 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


_STOPPED = "stopped from the dashboard"
_SENT_AWAY = "the requester sent it away"
Word = Annotated[str, Meta(min_length=1, max_length=200)]


class StopWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End the training and keep what was trained."""


class InviteWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Invite one guest by name, for so many days and nodes; None: without an end, any number."""

    name: Word
    days: float | None = None
    nodes: int | None = None


class RevokeWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Withdraw an invitation by its name."""

    name: Word


class KickWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Send a node away."""

    node: Word


class CheckpointWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write what was trained down now."""


class TrainingPauseWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pause the training, or go on with it."""

    is_paused: bool


Wish = StopWish | InviteWish | RevokeWish | KickWish | CheckpointWish | TrainingPauseWish


@dataclass(frozen=True, slots=True)
class GuestActions:
    """What a hub offers that is open to others."""

    invitation: Callable[[], str]  # for everybody who has it
    invite: Callable[[str, float | None, int | None], str]  # one guest, who gets this token
    revoke: Callable[[str], None]
    guests: Callable[[], GuestList]


@dataclass(frozen=True, slots=True)
class HubActions:
    """What a hub offers; one whose peers are its own has no guests."""

    stop: Callable[[str], None]
    kick: Callable[[str, str], None]
    checkpoint: Callable[[], None]
    pause: Callable[[bool], None]
    guests: GuestActions | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a wish; the line is what an invited guest pastes."""

    outcome: str
    line: str = ""
    code: CodeDocument | None = None  # of the line


def carry_out(wish: Wish, hub: HubActions) -> Outcome | None:
    """Do what somebody wants; None if this hub does not offer it."""
    match wish:
        case StopWish():
            hub.stop(_STOPPED)
            return Outcome("the hub was told to stop; it averages, evaluates and keeps the weights")
        case KickWish(node):
            hub.kick(node, _SENT_AWAY)
            return Outcome(
                f"{node} is sent away; it may come back with another key until you withdraw its invitation"
            )
        case CheckpointWish():
            hub.checkpoint()
            return Outcome("the hub was told to write a checkpoint; it says when it is on disk")
        case TrainingPauseWish(is_paused):
            hub.pause(is_paused)
            then = "nodes finish what they have and wait" if is_paused else "nodes get work again"
            return Outcome(f"the hub was told to {'pause' if is_paused else 'go on'}; {then}")
        case InviteWish(name, days, nodes) if hub.guests is not None:
            line = show_line(hub.guests.invite(name, days, nodes))
            return Outcome(f"{name} is invited", line, draw_code(line))
        case RevokeWish(name) if hub.guests is not None:
            hub.guests.revoke(name)
            return Outcome(f"the invitation of {name} is withdrawn; the nodes that came with it leave")
    return None


def show_line(token: str) -> str:
    """Return what a provider pastes."""
    return f"ravnest join {token}"


def show_guests(guests: GuestActions) -> list[GuestDocument]:
    """Return the guest list as people see it; numbers of invitations are nobody's business."""
    return [
        GuestDocument(each.name, each.invited_at, each.ends_at, each.max_nodes, each.is_revoked, each.strikes)
        for each in guests.guests().invitations
    ]
