"""Addresses as people write them, HOST:PORT, and as the network takes them, tcp://HOST:PORT."""

import ipaddress
import re
import socket

import psutil  # type: ignore[import-untyped]

from ravnest.errors import ConfigError, LinkError

_ADDRESS = re.compile(
    r"(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5}|\*)"
)
_EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104 - told from other hosts, not bound


def read_address(text: str, *, is_door: bool = False) -> str:
    """Return an address in full; only one to listen at may leave its port open (`*` or 0)."""
    try:
        host, port = split_address(text.strip())
    except LinkError as error:
        raise ConfigError(str(error)) from None
    if port == 0 and not is_door:
        raise ConfigError(f"{text!r} names no port, so nobody can dial it; one looks like 192.0.2.7:7700")
    if is_everywhere(host) and not is_door:
        raise ConfigError(f"{text!r} names no host, so nobody can dial it; one looks like 192.0.2.7:7700")
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


def is_everywhere(host: str) -> bool:
    """Return whether who listens at this host does so in all networks of this PC."""
    return host in _EVERYWHERE


def dialled_from_here(door: str) -> str:
    """Return where programs of this PC reach what listens at this address."""
    host, port = split_address(door)
    return write_address("127.0.0.1" if is_everywhere(host) else host, port)


def dialled_from_elsewhere(door: str) -> tuple[str, ...]:
    """Return where others may reach what listens at this address, this PC's own programs last."""
    host, port = split_address(door)
    if not is_everywhere(host):
        return (door,)
    return tuple(write_address(each, port) for each in (*local_hosts(), "127.0.0.1"))


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
