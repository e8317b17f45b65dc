"""Keys, ids, addresses and the token: what a typing error leads to."""

import pytest

from ravnest.errors import ConfigError
from ravnest.net.identity import (
    Token,
    dialled_from_elsewhere,
    dialled_from_here,
    is_loopback,
    is_plausible,
    is_plausible_number,
    load_keys,
    local_hosts,
    new_keys,
    peer_of,
    prove,
    read_address,
    read_token,
    split_address,
    write_address,
    write_token,
)

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


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.7:7700", "tcp://192.0.2.7:7700"),
        (" tcp://hub.example.org:7700\n", "tcp://hub.example.org:7700"),
        ("[2001:db8::7]:7700", "tcp://[2001:db8::7]:7700"),
        ("tcp://[::ffff:192.0.2.7]:7700", "tcp://192.0.2.7:7700"),
    ],
)
def test_an_address_is_written_in_full(text, address):
    assert read_address(text) == read_address(text, is_own=True) == address
    assert write_address(*split_address(address)) == address


@pytest.mark.parametrize(
    "text", ["", "hub", "hub:", ":7700", "http://hub:7700", "hub:70000", "a b:1", "::1:7700"]
)
def test_what_is_no_address_is_said_so(text):
    with pytest.raises(ConfigError, match="is no address; one looks like"):
        read_address(text)


def test_an_address_that_others_cannot_dial_is_said_so():
    with pytest.raises(ConfigError, match="no address that others dial"):
        read_address("169.254.10.1:7700")
    assert read_address("169.254.10.1:7700", is_own=True)


def test_only_a_door_may_leave_host_or_port_open():
    assert read_address("0.0.0.0:0", is_own=True) == read_address("0.0.0.0:*", is_own=True)
    for text in ("192.0.2.7:0", "192.0.2.7:*", "0.0.0.0:7700", "[::]:7700", "*:7700"):
        with pytest.raises(ConfigError, match="nobody can dial it"):
            read_address(text)


def test_a_door_to_everywhere_is_dialled_at_the_addresses_of_this_pc():
    told = dialled_from_elsewhere("tcp://0.0.0.0:77", lambda: ("192.0.2.7", "198.51.100.7"))
    assert told == ("tcp://192.0.2.7:77", "tcp://198.51.100.7:77", "tcp://127.0.0.1:77")
    assert [is_loopback(each) for each in told] == [False, False, True]
    assert dialled_from_elsewhere("tcp://192.0.2.7:77") == ("tcp://192.0.2.7:77",)
    assert dialled_from_here("tcp://[::]:77") == "tcp://127.0.0.1:77"
    assert dialled_from_here("tcp://192.0.2.7:77") == "tcp://192.0.2.7:77"
    assert is_loopback("tcp://localhost:77")
    assert not is_loopback("a word")


PLACES = [
    "10.0.0.1",
    "192.168.1.2",
    "100.64.0.1",
    "8.8.8.8",
    "127.0.0.1",
    "[::1]",
    "[fd00::1]",
    "[64:ff9b::808:808]",
]
NOWHERE = ["0.0.0.0", "169.254.169.254", "224.0.0.1", "255.255.255.255", "240.0.0.1"]
NOWHERE += ["[::]", "[fe80::1]", "[ff02::1]", "[::ffff:169.254.169.254]"]


@pytest.mark.parametrize("host", [*PLACES, "hub.example.org"])
def test_what_may_be_a_pc_is_plausible(host):
    assert is_plausible(f"tcp://{host}:7700")
    assert not is_plausible(f"tcp://{host}:0")


@pytest.mark.parametrize("host", NOWHERE)
def test_strangers_cannot_have_groups_or_services_dialled(host):
    assert not is_plausible(f"tcp://{host}:7700")
    assert not is_plausible_number(host.strip("[]"))


def test_the_addresses_of_this_pc_lead_from_elsewhere():
    assert not any(is_loopback(write_address(host, 77)) for host in local_hosts())


def test_a_proof_is_of_one_secret_one_hub_and_one_key() -> None:
    keys, hub = new_keys(), new_keys()
    token = Token((), hub.public, b"s" * 16)
    others = [
        prove(Token((), hub.public, b"t" * 16), keys.public),
        prove(Token((), new_keys().public, b"s" * 16), keys.public),
        prove(token, new_keys().public),
    ]
    assert prove(token, keys.public) == prove(Token(("anywhere",), hub.public, b"s" * 16), keys.public)
    assert prove(token, keys.public) not in others
