"""Who is who: key pairs, the peer id made from a public key, and the token that invites to a swarm.

A peer id is a hash of a CURVE public key, so whoever proves the key proves the id. Pure: bytes in, bytes out.
"""

import base64
import hmac
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
import zmq
from zmq.utils import z85

from ravnest.errors import ConfigError
from ravnest.net.transport import PeerId, PublicKey

PREFIX = "rvn1_"
SECRET_BYTES = 16
_ID_CHARACTERS = 20  # 100 bits
_LENGTH_BYTES = 2
_CHECKSUM_BYTES = 4


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


def peer_of(key: PublicKey) -> PeerId:
    """Return the id of the peer that holds this key."""
    return PeerId(_to_text(sha256(b"ravnest peer" + z85.decode(key)).digest())[:_ID_CHARACTERS])


class Token(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a provider needs to join: where the hub is, its key, and the secret that opens its door."""

    addresses: tuple[str, ...]
    hub_key: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Token(addresses={self.addresses}, hub={peer_of(PublicKey(self.hub_key))})"


def write_token(token: Token) -> str:
    """Return the token as one word that survives being read aloud: letters and digits, any case."""
    assert len(token.secret) == SECRET_BYTES
    assert token.addresses, "a token without an address leads nowhere"
    body = msgspec.msgpack.encode((token.addresses, z85.decode(token.hub_key), token.secret))
    body = len(body).to_bytes(_LENGTH_BYTES, "big") + body
    return PREFIX + _to_text(body + _checksum(body))


def read_token(text: str) -> Token:
    """Return what a token says, or raise ConfigError with what is wrong with it."""
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
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the token was made by another version of ravnest ({error}): update") from None
    if not token.addresses or len(token.hub_key) != 32 or len(token.secret) != SECRET_BYTES:
        raise ConfigError(
            "the token lacks an address, the hub's key or the secret: make a new one at the hub"
        )
    return Token(token.addresses, z85.encode(token.hub_key), token.secret)


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
