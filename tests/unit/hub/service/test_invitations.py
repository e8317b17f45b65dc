"""Admission: what lies in the token's secret, and what does not."""

import hmac
from hashlib import sha256

import msgspec

from ravnest.errors import ConfigError
from ravnest.hub.service.admission import Admission
from ravnest.hub.service.guests import MOST_STRIKES, GuestList, GuestsInMemory
from ravnest.net.identity import KeyPair, Token, derive_secret, greet, new_keys
from ravnest.net.relay import TICKET_BYTES, Relay
from ravnest.plan.types import Node
from ravnest.protocol.membership import PROTOCOL_VERSION, Hello
from ravnest.protocol.placement import Contact, RingOrder

HUB = new_keys()
TOKEN = Token((), HUB.public, b"s" * 16)


def ticket(admission: Admission, one: KeyPair, other: KeyPair) -> bytes:
    """Admit a peer and return its ticket for another."""
    assert admission.admit(one.peer, greet(TOKEN, one.public)) is None
    order = RingOrder(1, 1, (), (Contact("other", other.public.decode(), ()),))
    (contact,) = admission.give_tickets(one.peer, order).contacts
    return contact.ticket


def test_the_two_of_a_pair_get_one_ticket_also_after_a_restart() -> None:
    one, other = new_keys(), new_keys()
    before, after = (Admission(TOKEN, Relay(), hub_secret=HUB.secret) for _ in range(2))
    assert ticket(before, one, other) == ticket(before, other, one) == ticket(after, one, other)


def test_who_has_the_token_cannot_make_the_ticket_of_two_others() -> None:
    one, other = new_keys(), new_keys()
    pair = b"ravnest relay" + b"".join(sorted((one.public, other.public)))
    guessed = hmac.digest(TOKEN.secret, pair, sha256)[:TICKET_BYTES]
    assert ticket(Admission(TOKEN, Relay()), one, other) != guessed
    assert ticket(Admission(TOKEN, Relay(), hub_secret=HUB.secret), one, other) != guessed


NUMBER = b"anna\x00\x01\x02\x03"


class Door:
    """An admission with one guest, and a clock that a test sets."""

    def __init__(self, nodes: int | None = None, seconds: float | None = None) -> None:
        self.now = 0.0
        self.guests = GuestsInMemory()
        self.guests.change(lambda known: known.invite(NUMBER.hex(), "anna", self.now, seconds, nodes))
        facts = {"hub_secret": HUB.secret, "guests": self.guests, "wall_clock": lambda: self.now}
        self.admission = Admission(TOKEN, None, **facts)
        secret = derive_secret(HUB.secret, NUMBER)
        self.token = msgspec.structs.replace(TOKEN, secret=secret, invitation=NUMBER)

    def admit(self, keys: KeyPair, token: Token | None = None) -> str | None:
        return self.admission.admit(keys.peer, greet(token or self.token, keys.public))

    def join(self, keys: KeyPair) -> None:
        assert self.admit(keys) is None
        self.say_hello(keys)

    def say_hello(self, keys: KeyPair, *addresses: str) -> Hello | str:
        hello = Hello(PROTOCOL_VERSION, Node("n", 1e9, 1e9, 1e6, 1e6), addresses=addresses)
        return self.admission.introduce(keys.peer, hello, None, ())


def test_a_guest_comes_in_by_its_own_secret_alone() -> None:
    door, keys = Door(), new_keys()
    assert door.admit(keys) is None
    for forged in (
        msgspec.structs.replace(TOKEN, invitation=NUMBER),  # everybody's secret, another's number
        msgspec.structs.replace(door.token, invitation=b"other..."),
        msgspec.structs.replace(door.token, secret=derive_secret(TOKEN.secret, NUMBER)),
        msgspec.structs.replace(door.token, invitation=TOKEN.invitation),
    ):
        assert "not for this hub" in str(door.admit(keys, forged))


def test_the_secret_of_one_guest_does_not_open_the_invitation_of_another() -> None:
    door, other = Door(), b"bob\x00\x01\x02\x03\x04"
    door.guests.change(lambda known: known.invite(other.hex(), "bob", door.now, None, None))
    assert "not for this hub" in str(
        door.admit(new_keys(), msgspec.structs.replace(door.token, invitation=other))
    )


def test_one_node_more_than_invited_is_refused_and_one_that_comes_again_is_not() -> None:
    door, first, second = Door(nodes=1), new_keys(), new_keys()
    door.join(first)
    assert "is for 1 nodes" in str(door.admit(second))
    assert door.admit(first) is None
    door.admission.forget(first.peer)
    assert door.admit(second) is None


def test_what_was_let_in_before_the_others_joined_or_before_the_end_of_its_invitation_does_not_join() -> None:
    door, first, second = Door(nodes=1), new_keys(), new_keys()
    assert (door.admit(first), door.admit(second)) == (None, None)
    assert not isinstance(door.say_hello(first), str)
    assert "is for 1 nodes" in str(door.say_hello(second))
    door.admission.forget(first.peer)
    door.guests.change(lambda known: known.revoke("anna"))
    assert "withdrawn" in str(door.say_hello(second))


def test_others_are_not_told_of_addresses_that_no_pc_has() -> None:
    door, keys = Door(), new_keys()
    assert door.admit(keys) is None
    said = door.say_hello(keys, "tcp://169.254.169.254:80", "tcp://192.168.1.2:7700", "tcp://224.0.0.1:7700")
    assert isinstance(said, Hello)
    assert said.addresses == ("tcp://192.168.1.2:7700",)


def test_who_proves_nothing_has_no_guest_list_read() -> None:
    class Unread(GuestsInMemory):
        def read(self) -> GuestList:
            raise AssertionError("a file was read for a stranger")

    door = Admission(TOKEN, None, guests=Unread())
    keys = new_keys()
    forged = msgspec.structs.replace(TOKEN, secret=b"t" * 16)
    assert "not for this hub" in str(door.admit(keys.peer, greet(forged, keys.public)))


def test_an_invitation_that_ends_or_is_withdrawn_admits_nobody() -> None:
    door = Door(seconds=100.0)
    assert door.admit(new_keys()) is None
    door.now = 100.0
    assert "ended" in str(door.admit(new_keys()))
    door = Door()
    door.guests.change(lambda known: known.revoke("anna"))
    assert "withdrawn" in str(door.admit(new_keys()))
    assert door.admit(new_keys(), TOKEN) is None


def test_a_new_key_does_not_wash_off_the_strikes_of_a_guest() -> None:
    door = Door()
    for _ in range(MOST_STRIKES):
        keys = new_keys()
        door.join(keys)
        door.admission.ban(keys.peer, "garbage")
    assert "void after 3 faults" in str(door.admit(new_keys()))
    kicked = Door()
    for _ in range(MOST_STRIKES):
        keys = new_keys()
        kicked.join(keys)
        kicked.admission.ban(keys.peer, "not wanted", is_fault=False)
    assert kicked.admit(new_keys()) is None


def test_a_list_that_cannot_be_read_lets_nobody_in_and_ends_nothing() -> None:
    class Damaged(GuestsInMemory):
        def read(self) -> GuestList:
            raise ConfigError("guests.json is damaged")

    door = Admission(TOKEN, None, guests=Damaged())
    keys = new_keys()
    assert "cannot read its guest list" in str(door.admit(keys.peer, greet(TOKEN, keys.public)))
