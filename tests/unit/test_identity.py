"""Keys, ids and the token: what a typing error leads to."""

import pytest

from ravnest.errors import ConfigError
from ravnest.net.identity import Token, is_same_secret, load_keys, new_keys, peer_of, read_token, write_token

KEYS = new_keys()
TOKEN = Token(("tcp://192.0.2.7:7700", "tcp://[2001:db8::7]:7700"), KEYS.public, b"sixteen bytes ab")


def test_an_id_belongs_to_a_key():
    assert KEYS.peer == peer_of(KEYS.public)
    assert len(KEYS.peer) == 20
    assert KEYS.peer.isalnum()
    assert new_keys().peer != KEYS.peer


def test_a_kept_secret_gives_the_same_identity():
    assert load_keys(KEYS.secret) == KEYS


@pytest.mark.parametrize("secret", [b"", b"short", b"\xff" * 40, b"~" * 40])
def test_a_damaged_secret_is_named(secret):
    with pytest.raises(ConfigError, match="damaged"):
        load_keys(secret)


def test_secrets_are_not_shown():
    assert KEYS.secret.decode() not in repr(KEYS)
    assert "sixteen" not in repr(TOKEN)


def test_a_token_says_what_was_put_in():
    text = write_token(TOKEN)
    assert text.startswith("rvn1_")
    assert read_token(text) == TOKEN
    assert read_token(f"  {text.upper()}\n") == TOKEN


TEXT = write_token(TOKEN)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "starts with ''"),
        ("hello", "starts with 'hello'"),
        (TEXT[5:], "instead of 'rvn1_'"),
        ("rvn1_", "truncated"),
        ("rvn1_a", "truncated"),
        (TEXT[:-1], "truncated"),
        (TEXT[:-20], "truncated"),
        (TEXT[:30], "truncated"),
        (TEXT[:40] + ("a" if TEXT[40] != "a" else "b") + TEXT[41:], "checksum"),
        (TEXT + "aaaaaaaa", "checksum"),
        (TEXT[:40] + "0" + TEXT[41:], "contains '0'"),
        (TEXT[:40] + "é" + TEXT[41:], "contains 'é'"),
    ],
)
def test_what_is_wrong_with_a_token_is_said(text, reason):
    with pytest.raises(ConfigError, match=reason):
        read_token(text)


def test_a_token_without_an_address_is_refused():
    text = write_token(Token(("x",), KEYS.public, TOKEN.secret))
    assert read_token(text).addresses == ("x",)


def test_secrets_are_compared():
    assert is_same_secret(b"abc", b"abc")
    assert not is_same_secret(b"abc", b"abd")
    assert not is_same_secret(b"abc", b"")
