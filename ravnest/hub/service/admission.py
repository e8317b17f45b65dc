"""Admission: which peers may join and stay, under which name, and which pairs may meet through the relay.

What a peer says of itself is believed only within bounds: others are told its name and addresses. What it
measured of itself is completed with the time of the link from it to the hub. A peer that floods the hub with
messages, or with ones that nobody awaits, or that complains about everybody, must go.
"""

import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from itertools import count
from secrets import token_bytes

import msgspec

from ravnest.config import RESERVE
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.events import Probed
from ravnest.hub.coordinator.membership import is_sensible
from ravnest.hub.service.guests import Guests, GuestsInMemory
from ravnest.ids import HUB, NodeId
from ravnest.net.identity import (
    EVERYBODY,
    ReadGreeting,
    Token,
    derive_secret,
    is_plausible,
    peer_of,
    prove,
    read_greeting,
)
from ravnest.net.relay import TICKET_BYTES, Relay
from ravnest.net.transport import PeerId, PublicKey
from ravnest.plan.types import Node
from ravnest.protocol.membership import PROTOCOL_VERSION, Complaint, Hello, ProbeReport, Welcome
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.link_probe import LinkTimes

logger = logging.getLogger(__name__)

_LONGEST_NAME = 40
_LONGEST_ADDRESS = 80
_MOST_ADDRESSES = 6
_MOST_COMPLAINTS = 3
_NOT_INVITED = "its token is not for this hub, or no longer: ask for a new one"


def _wall_clock() -> float:
    return time.time()  # noqa: TID251 - invitations end by the calendar


class Spending(StrEnum):
    """What a message costs."""

    ARRIVED = "sends more messages than any peer has to"
    IN_VAIN = "keeps sending what nobody awaits"


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many messages at once, and so many per second after that."""

    burst: float
    per_second: float


# A peer that was away says again what it did, and a hub that ends or plans anew awaits nothing of that.
_IN_VAIN = Allowance(2 * RESERVE.most_repeated, 20)
ALLOWANCES = {Spending.ARRIVED: Allowance(50_000, 5_000), Spending.IN_VAIN: _IN_VAIN}


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float

    def spend(self, allowance: Allowance, now: float) -> bool:
        """Spend one; return whether there was one left."""
        gained = max(0.0, now - self.filled_at) * allowance.per_second
        self.level = min(allowance.burst, self.level + gained) - 1
        self.filled_at = now
        return self.level >= 0


class FloodGuard:
    """Feed it every message; it returns why a peer must go. Pure: time is an argument.

    One token bucket per peer and kind: it holds a burst and fills at a steady rate. The rates are far above
    what any honest peer was seen to send. A message in vain fits no lease, round or order: a few come late
    after a plan has changed, thousands come from a peer that means harm.
    """

    def __init__(self, allowances: dict[Spending, Allowance] | None = None) -> None:
        self._allowances = ALLOWANCES if allowances is None else allowances
        self._buckets: dict[str, dict[Spending, _Bucket]] = {}

    def record(self, peer: str, spending: Spending, now: float) -> str | None:
        """Count a message; return the reason to ban its sender, if it is one too many."""
        allowance = self._allowances[spending]
        buckets = self._buckets.setdefault(peer, {})
        bucket = buckets.setdefault(spending, _Bucket(allowance.burst, now))
        return None if bucket.spend(allowance, now) else f"it {spending.value}"

    def forget(self, peer: str) -> None:
        """Forget a peer that has gone."""
        self._buckets.pop(peer, None)


class Admission:
    """Admits peers that know an invitation's secret, and names them. The transport calls `admit`."""

    def __init__(
        self,
        token: Token,
        relay: Relay | None,
        version: str = PROTOCOL_VERSION,
        *,
        hub_secret: bytes = b"",
        guests: Guests | None = None,
        wall_clock: Callable[[], float] = _wall_clock,
    ) -> None:
        self._token, self._version = token, version
        # Tickets and invitations come from what no token tells: whoever has one could else make others.
        self._hub_secret = hub_secret or token_bytes(TICKET_BYTES)
        self._guests: Guests = GuestsInMemory() if guests is None else guests
        self._wall_clock = wall_clock
        self._invited: dict[PeerId, str] = {}  # the number of its invitation
        self._relay = relay
        self.names: dict[PeerId, NodeId] = {}  # of peers that have joined
        self._peers: dict[NodeId, PeerId] = {}  # the same by name
        self._keys: dict[PeerId, PublicKey] = {}
        self._banned: dict[PeerId, str] = {}
        self._contacts: dict[PeerId, dict[PeerId, bytes]] = {}  # in its last order, with the pair's ticket
        self._complaints: Counter[PeerId] = Counter()
        self._floods = FloodGuard()

    def admit(self, peer: PeerId, greeting: bytes) -> str | None:
        """Return why a peer may not join; None if it knows the secret of its invitation."""
        found = read_greeting(bytes(greeting))
        if found is None or peer_of(found.key) != peer:
            return "its greeting is not that of this version of ravnest"
        if not hmac.compare_digest(found.proof, self._expect(found)):  # before a stranger has a file read
            return _NOT_INVITED
        if peer in self._banned:
            return f"it was sent away: {self._banned[peer]}"
        reason = self._reason_against(peer, found.invitation.hex())
        if reason is None:
            self._keys[peer], self._invited[peer] = found.key, found.invitation.hex()
        return reason

    def _reason_against(self, peer: PeerId, number: str) -> str | None:
        """Return why a peer may not come in by the invitation with this number."""
        try:
            invitation = self._guests.read().find(number)
        except ConfigError as error:
            logger.warning("nobody can be let in: %s", error)
            return "the hub cannot read its guest list: tell its owner"
        if invitation is None:
            return _NOT_INVITED
        num_others = len(set(self.invited_by(number)) - {peer})
        return invitation.reason_against(num_others, self._wall_clock())

    def _expect(self, greeting: ReadGreeting) -> bytes:
        token = self._token
        if greeting.invitation != EVERYBODY:
            secret = derive_secret(self._hub_secret, greeting.invitation)
            token = msgspec.structs.replace(token, secret=secret)
        return prove(token, greeting.key)

    def invited_by(self, number: str) -> tuple[PeerId, ...]:
        """Return the peers that joined by this invitation."""
        return tuple(peer for peer in self.names if self._invited.get(peer) == number)

    def ban(self, peer: PeerId, reason: str, *, is_fault: bool = True) -> None:
        """Never admit this key again; its guest gets a strike for a fault."""
        self._banned[peer] = reason
        number = self._invited.get(peer)
        if is_fault and number is not None:
            try:
                self._guests.change(lambda guests: guests.strike(number, reason))
            except ConfigError as error:
                logger.warning("a strike is not on the guest list: %s", error)

    def find(self, name: NodeId) -> PeerId | None:
        """Return the peer that goes by a name."""
        return self._peers.get(name)

    def key(self, peer: PeerId) -> str:
        """Return the public key of a peer that was admitted."""
        return self._keys[peer].decode()

    def introduce(
        self, peer: PeerId, hello: Hello, before: NodeId | None, others: Collection[NodeId]
    ) -> Hello | str:
        """Name a peer as before, or like nobody else; return what is believed of it, or why it must go.

        `others` are members with other keys. They need not be here: a hub that was away waits for them.
        """
        if hello.version != self._version:
            spoken = f"it speaks version {hello.version} of ravnest, this hub {self._version}"
            return f"{spoken}: update the older one"
        if not is_sensible(hello.node):
            return "no machine is like what it says of itself: check what --memory, --flops and others claim"
        # Others may have joined by its invitation, or it was withdrawn, since this peer was let in.
        if reason := self._reason_against(peer, self._invited[peer]):
            return reason
        plain = "".join(letter for letter in hello.node.name if letter.isprintable())[:_LONGEST_NAME]
        names = (f"{plain or 'peer'}{'-' * bool(size)}{peer[:size]}" for size in count(0, 4))
        taken = {HUB, *self.names.values(), *others}
        name = self.names[peer] = before or next(NodeId(each) for each in names if each not in taken)
        self._peers[name] = peer
        short = (each for each in hello.addresses if len(each) <= _LONGEST_ADDRESS)
        addresses = tuple(each for each in short if is_plausible(each))
        return replace(hello, node=replace(hello.node, name=name), addresses=addresses[:_MOST_ADDRESSES])

    def welcome(self, node: Node) -> Welcome:
        """Return what a peer that has joined is told."""
        return Welcome(node.name, self._relay.port if self._relay is not None else 0, node.is_reachable)

    def forget(self, peer: PeerId) -> NodeId | None:
        """Forget a peer; return its name if it had joined. Before it comes again it must be admitted."""
        self._floods.forget(peer)
        self._set_contacts(peer, {})
        for known in (self._keys, self._invited, self._contacts):
            known.pop(peer, None)
        name = self.names.pop(peer, None)
        if name is not None:
            del self._peers[name]
        return name

    def give_tickets(self, peer: PeerId, order: PlanOrder | RingOrder) -> PlanOrder | RingOrder:
        """Return a peer's order with the tickets for its neighbours; those of its last order are void."""
        keys = [PublicKey(each.key.encode()) for each in order.contacts]
        tickets = [self._derive(self._keys[peer], key) for key in keys]
        self._set_contacts(peer, dict(zip(map(peer_of, keys), tickets, strict=True)))
        contacts = zip(order.contacts, tickets, strict=True)
        return replace(order, contacts=tuple(replace(each, ticket=ticket) for each, ticket in contacts))

    def charge(self, peer: PeerId, spending: Spending, now: float) -> str | None:
        """Count a message of a peer; return why it must go, if it is one too many."""
        return self._floods.record(peer, spending, now)

    def judge(self, peer: PeerId, complaint: Complaint) -> PeerId | None:
        """Return the peer that is to go: the neighbour complained of, or one that complains too often.

        Nobody can tell which is right, so the neighbour may come again.
        """
        accused = self.find(complaint.node)
        if accused is None or accused not in self._contacts.get(peer, {}):
            return None
        self._complaints[peer] += 1
        return accused if self._complaints[peer] <= _MOST_COMPLAINTS else peer

    def _set_contacts(self, peer: PeerId, contacts: dict[PeerId, bytes]) -> None:
        before, self._contacts[peer] = self._contacts.get(peer, {}), contacts
        if self._relay is not None:
            for ticket in before.values():
                if ticket not in contacts.values():
                    self._relay.remove(ticket)
            for ticket in contacts.values():
                self._relay.add(ticket)

    def _derive(self, one: PublicKey, other: PublicKey) -> bytes:
        if self._relay is None:
            return b""
        pair = b"".join(sorted((one, other)))
        return hmac.digest(self._hub_secret, b"ravnest relay" + pair, sha256)[:TICKET_BYTES]


class ProbeReports:
    """Completes one report of a peer for each probe that was ordered."""

    def __init__(self, exchange: Exchange, apply: Callable[[Probed], None]) -> None:
        self._exchange = exchange
        self._apply = apply
        self._awaited: set[NodeId] = set()

    def await_from(self, name: NodeId) -> None:
        """Expect a report: a probe was ordered."""
        self._awaited.add(name)

    def complete(self, name: NodeId, report: ProbeReport, clock: Callable[[], float]) -> None:
        """Time the link from a peer that has timed the link to it, then apply what was measured."""
        if name not in self._awaited:
            return
        self._awaited.remove(name)

        def say(link: LinkTimes | None) -> None:
            upload = link.bytes_per_second if link else None
            download, latency = report.download_bytes_per_second, report.latency_seconds
            self._apply(Probed(name, report.flops_per_second, upload, download, latency, clock()))

        if report.download_bytes_per_second is None:
            say(None)
        else:
            self._exchange.time_link(name, clock, say)
