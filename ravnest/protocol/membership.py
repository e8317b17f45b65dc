"""Messages about membership: peers join, are measured, complain, leave."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from ravnest.ids import NodeId
from ravnest.plan.types import Node
from ravnest.protocol.placement import BlobRef

Rate = Annotated[float, Meta(gt=0, le=1e30)]
Span = Annotated[float, Meta(ge=0, le=1e6)]


class Fact(StrEnum):
    """What of a machine can be measured."""

    SPEED = "speed"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """The hub has a peer measured: it runs this small stage, times its link, or both."""

    blueprint: BlobRef | None
    times_link: bool


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a peer measured; None where it was not asked, or could not tell."""

    flops_per_second: Rate | None = None
    download_bytes_per_second: Rate | None = None
    latency_seconds: Span | None = None


Port = Annotated[int, Meta(ge=0, le=65535)]


PROTOCOL_VERSION = "0.1"  # of what programs say to each other


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer that was let in asks to join, and says what its machine has."""

    version: str
    node: Node
    addresses: tuple[str, ...] = ()  # where others can dial it
    guessed: tuple[Fact, ...] = ()  # facts that the provider has not stated, so that they are measured
    build_id: int = 0  # of the stage that it holds, if the hub has met it before


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hub takes a peer in, under this name; it relays at this port of its host, or not at all."""

    node: NodeId
    relay_port: Port = 0
    is_reachable: bool = True  # others can dial it, as far as the hub could find out


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is refused: a peer cannot join, or a blob is not here."""

    reason: str
    blob: str = ""  # which


@dataclass(frozen=True, slots=True)
class Leave:
    """A peer leaves: its provider wants that, or it will not run its stage."""

    build_id: int
    reason: str
    can_hand_over: bool = False  # it stays until the hub says Stop, so that nothing is lost


@dataclass(frozen=True, slots=True)
class Recounted:
    """A peer has said again, to a hub that was started anew, what that may not have heard."""

    build_id: int


@dataclass(frozen=True, slots=True)
class Complaint:
    """A neighbour sends what fits nothing: no stage can train beside it."""

    build_id: int
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The hub ends the job, and says why."""

    reason: str


MembershipMessage = Hello | Welcome | Refused | Leave | Recounted | Complaint | Stop
