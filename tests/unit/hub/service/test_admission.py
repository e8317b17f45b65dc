"""Admission: what lies in the token's secret, and what does not."""

import hmac
from hashlib import sha256

from ravnest.hub.service.admission import Admission
from ravnest.net.identity import KeyPair, Token, new_keys, prove
from ravnest.net.relay import TICKET_BYTES, Relay
from ravnest.protocol.placement import Contact, RingOrder

HUB = new_keys()
TOKEN = Token((), HUB.public, b"s" * 16)


def ticket(admission: Admission, one: KeyPair, other: KeyPair) -> bytes:
    """Admit a peer and return its ticket for another."""
    assert admission.admit(one.peer, one.public + prove(TOKEN, one.public)) is None
    order = RingOrder(1, 1, (), (Contact("other", other.public.decode(), ()),))
    (contact,) = admission.give_tickets(one.peer, order).contacts
    return contact.ticket


def test_the_two_of_a_pair_get_one_ticket_also_after_a_restart() -> None:
    one, other = new_keys(), new_keys()
    before, after = (Admission(TOKEN, Relay(), ticket_secret=HUB.secret) for _ in range(2))
    assert ticket(before, one, other) == ticket(before, other, one) == ticket(after, one, other)


def test_who_has_the_token_cannot_make_the_ticket_of_two_others() -> None:
    one, other = new_keys(), new_keys()
    pair = b"ravnest relay" + b"".join(sorted((one.public, other.public)))
    guessed = hmac.digest(TOKEN.secret, pair, sha256)[:TICKET_BYTES]
    assert ticket(Admission(TOKEN, Relay()), one, other) != guessed
    assert ticket(Admission(TOKEN, Relay(), ticket_secret=HUB.secret), one, other) != guessed
