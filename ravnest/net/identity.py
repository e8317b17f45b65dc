"""Identities: key pairs, the peer id made of a public key, tokens that invite to a swarm, and addresses.

A peer id is a hash of a CURVE public key, so the proof of the key proves the id. Pure: bytes in, bytes out.
"""

import base64
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Annotated

import msgspec
import psutil  # type: ignore[import-untyped]
import zmq
from msgspec import Meta
from zmq.utils import z85

from ravnest.errors import ConfigError, LinkError
from ravnest.net.transport import PeerId, PublicKey

PREFIX = "rvn1_"
SECRET_BYTES = 16
INVITATION_BYTES = 8
EVERYBODY = bytes(INVITATION_BYTES)  # the invitation that names nobody
KEY_BYTES, PROOF_BYTES = 40, 32
_ID_CHARACTERS = 20  # 100 bits
_MOST_KNOWN = 16_384  # ids that need not be computed again: a hub tells each key to many
_LENGTH_BYTES = 2
_CHECKSUM_BYTES = 4
_MOST_CHARACTERS = 1 << 17  # its length in bytes has two bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair as ZeroMQ writes it: 40 characters each."""

    public: PublicKey
    secret: bytes = field(repr=False)

    @property
    def peer(self) -> PeerId:
        return peer_of(self.public)


def new_keys() -> KeyPair:
    """Draw a fresh key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(PublicKey(public), secret)


def load_keys(secret: bytes) -> KeyPair:
    """Return the pair that belongs to a kept secret key."""
    try:
        return KeyPair(PublicKey(zmq.curve_public(secret)), secret)
    except (zmq.ZMQError, ValueError, KeyError):
        raise ConfigError("the secret key is damaged: delete it to get a new identity") from None


@lru_cache(maxsize=_MOST_KNOWN)
def peer_of(key: PublicKey) -> PeerId:
    """Return the id of the peer that holds this key."""
    return PeerId(_to_text(sha256(b"ravnest peer" + z85.decode(key)).digest())[:_ID_CHARACTERS])


class Token(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a provider needs to join: the hub's addresses, its key, and the secret that admits to it.

    The secret belongs to an invitation, which the hub may end.
    """

    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)]
    hub_key: bytes
    secret: bytes
    invitation: bytes = EVERYBODY

    def __repr__(self) -> str:
        return f"Token(addresses={self.addresses}, hub={peer_of(PublicKey(self.hub_key))})"


def prove(token: Token, key: PublicKey) -> bytes:
    """Return what shows the hub that the owner of a key knows the token's secret."""
    return hmac.digest(token.secret, b"ravnest join" + token.hub_key + key, sha256)


def greet(token: Token, key: PublicKey) -> bytes:
    """Return what the owner of a key says first to the hub: its key, its invitation, its proof."""
    return key + token.invitation + prove(token, key)


@dataclass(frozen=True, slots=True)
class ReadGreeting:
    """A greeting in its parts, of which nothing is proven yet."""

    key: PublicKey
    invitation: bytes
    proof: bytes


def read_greeting(greeting: bytes) -> ReadGreeting | None:
    """Return the parts of a greeting; None if it is none of this version."""
    if len(greeting) != KEY_BYTES + INVITATION_BYTES + PROOF_BYTES:
        return None
    rest = greeting[KEY_BYTES:]
    return ReadGreeting(PublicKey(greeting[:KEY_BYTES]), rest[:INVITATION_BYTES], rest[INVITATION_BYTES:])


def derive_secret(hub_secret: bytes, invitation: bytes) -> bytes:
    """Return the secret of an invitation, which nobody can tell from that of another."""
    return hmac.digest(hub_secret, b"ravnest invitation" + invitation, sha256)[:SECRET_BYTES]


def write_token(token: Token) -> str:
    """Return the token as one word that survives being read aloud: letters and digits, any case."""
    assert len(token.secret) == SECRET_BYTES
    assert token.addresses, "a token without an address leads nowhere"
    body = msgspec.msgpack.encode(
        (token.addresses, z85.decode(token.hub_key), token.secret, token.invitation)
    )
    body = len(body).to_bytes(_LENGTH_BYTES, "big") + body
    return PREFIX + _to_text(body + _checksum(body))


def read_token(text: str) -> Token:
    """Return what a token says, or raise ConfigError with what is wrong with it."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"the token has {len(text)} characters: copy one line from the hub, and no more")
    word = "".join(text.split()).lower()
    if not word.startswith(PREFIX):
        raise ConfigError(
            f"the token starts with {word[:5]!r} instead of {PREFIX!r}: copy the whole line from the hub"
        )
    data = _from_text(word.removeprefix(PREFIX))
    num_bytes = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big") + _CHECKSUM_BYTES
    if len(data) < max(num_bytes, _LENGTH_BYTES + _CHECKSUM_BYTES):
        raise ConfigError("the token is truncated: its end is missing, copy the whole line from the hub")
    body = data[:-_CHECKSUM_BYTES]
    if len(data) > num_bytes or not hmac.compare_digest(_checksum(body), data[-_CHECKSUM_BYTES:]):
        raise ConfigError(
            "the token has a typing error: its checksum does not match, copy it again from the hub"
        )
    try:
        token = msgspec.msgpack.decode(body[_LENGTH_BYTES:], type=Token)
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8
        raise ConfigError(f"the token was made by another version of ravnest ({error}): update") from None
    if not all(address.isprintable() for address in token.addresses):
        raise ConfigError("the token has an address that cannot be printed: make a new one at the hub")
    sizes = (len(token.hub_key), len(token.secret), len(token.invitation))
    if not token.addresses or sizes != (32, SECRET_BYTES, INVITATION_BYTES):
        raise ConfigError(
            "the token lacks an address, the hub's key or the secret: make a new one at the hub"
        )
    return Token(token.addresses, z85.encode(token.hub_key), token.secret, token.invitation)


def _checksum(data: bytes) -> bytes:
    return sha256(b"ravnest token" + data).digest()[:_CHECKSUM_BYTES]


def _to_text(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _from_text(text: str) -> bytes:
    for character in text:
        if character not in "abcdefghijklmnopqrstuvwxyz234567":
            raise ConfigError(
                f"the token contains {character!r}, which no token does: copy it again from the hub"
            )
    whole = len(text) - (
        1 if len(text) % 8 in (1, 3, 6) else 0
    )  # a lost character must not be an error of its own
    return base64.b32decode(text[:whole].upper() + "=" * (-whole % 8))


_ADDRESS = re.compile(
    r"(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5}|\*)"
)
_EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104 - told from other hosts, not bound


def read_address(text: str, *, is_own: bool = False) -> str:
    """Return an address in full; only an own one, to listen at, may leave its port open (`*` or 0)."""
    try:
        host, port = split_address(text.strip())
    except LinkError as error:
        raise ConfigError(str(error)) from None
    if port == 0 and not is_own:
        raise ConfigError(f"{text!r} names no port, so nobody can dial it; one looks like 192.0.2.7:7700")
    if is_everywhere(host) and not is_own:
        raise ConfigError(f"{text!r} names no host, so nobody can dial it; one looks like 192.0.2.7:7700")
    if not is_own and is_number(host) and not is_plausible_number(host):
        raise ConfigError(f"{text!r} is no address that others dial: give one of a network, or a name")
    return write_address(host, port)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port (0: any), or raise LinkError; ZeroMQ itself would take port 99999 for 34463."""
    match = _ADDRESS.fullmatch(address)
    port = int(match["port"].replace("*", "0")) if match else 0
    if match is None or port > 65535:
        raise LinkError(
            f"{address!r} is no address; one looks like 192.0.2.7:7700 or tcp://hub.example.org:7700"
        )
    host = match["host"] or match["ipv6"].removeprefix("::ffff:")  # IPv4, as an IPv6 socket has it
    return host, port


def write_address(host: str, port: int) -> str:
    """Return the address of a host's port."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{port or '*'}"


def is_loopback(address: str) -> bool:
    """Return whether an address leads to the very PC that dials it."""
    try:
        host, _ = split_address(address)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (LinkError, ValueError):  # a name, or a word of a network without addresses
        return False


def is_number(host: str) -> bool:
    """Return whether a host is given by its number, and no name that has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_plausible(address: str) -> bool:
    """Return whether others may reach a PC there; a name may turn out to stand for a number that is not.

    Strangers choose what hub and peers dial: groups, a cloud's own services (169.254.169.254) and whatever
    listens in all networks of this PC are not for them.
    """
    try:
        host, port = split_address(address)
    except LinkError:  # a word of a network without addresses; what is none is refused when it is dialled
        return True
    return port > 0 and (not is_number(host) or is_plausible_number(host))


def is_plausible_number(host: str) -> bool:
    """Return whether a PC may have this number in a network, or in itself."""
    number = ipaddress.ip_address(host)
    if isinstance(number, ipaddress.IPv6Address):
        number = number.ipv4_mapped or number
    is_special = number.is_multicast or number.is_unspecified or number.is_link_local
    return not is_special and not (number.version == 4 and number.is_reserved)


def is_everywhere(host: str) -> bool:
    """Return whether a program that listens at this host does so in all networks of this PC."""
    return host in _EVERYWHERE


def dialled_from_here(listening: str) -> str:
    """Return where programs of this PC reach what listens at this address."""
    host, port = split_address(listening)
    return write_address("127.0.0.1" if is_everywhere(host) else host, port)


def dialled_from_elsewhere(
    listening: str, find_hosts: Callable[[], tuple[str, ...]] | None = None
) -> tuple[str, ...]:
    """Return where others may reach what listens at this address, this PC's own programs last."""
    host, port = split_address(listening)
    if not is_everywhere(host):
        return (listening,)
    return tuple(write_address(each, port) for each in (*(find_hosts or local_hosts)(), "127.0.0.1"))


def local_hosts() -> tuple[str, ...]:
    """Return the IPv4 addresses of this PC in its networks."""
    stats = psutil.net_if_stats()
    found = (
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in stats and stats[name].isup and each.family == socket.AF_INET
    )
    hosts = ((host, ipaddress.ip_address(host)) for host in found)
    return tuple(text for text, host in hosts if not host.is_loopback and not host.is_link_local)
