"""Links with a rate on one PC: every node in a network namespace of its own, joined by a switch.

What a node sends and what it receives each pass a token bucket (`tc tbf`), whoever it talks to: a node's
connections share its link, as at home. Needs root; without it `benchmarks.links` is the way.
"""

import ctypes
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

INTERFACE = "up0"
_CLONE_NEWNET = 0x40000000
_NETWORK = "10.99.0.0/16"
_NOBODY = "02:00:00:00:00:01"  # a network card that there is not
_PACKET_SHARE = 1448 / 1514  # of an Ethernet frame that is TCP's payload; buckets count whole frames
_BURST_BYTES = 256 * 1024  # a few packets as large as the kernel makes them, or cutting them costs CPU
_QUEUE_SECONDS = 0.05  # what may wait at a slow end, as in a small router


@dataclass(frozen=True, slots=True)
class Rate:
    """What a node's link carries each way, in bytes of payload per second."""

    upload: float
    download: float


def may_be_used() -> bool:
    """Whether namespaces and buckets can be made here."""
    if os.geteuid() != 0:
        return False
    try:
        with Namespaces({"probe": Rate(1e6, 1e6)}):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Namespaces:
    """One namespace per name; use it as a context manager, and `enter` in the process of a node."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self._rates = dict(rates)
        self._prefix = f"rv{os.getpid() % 100_000}"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Return the IP address of a node."""
        number = list(self._rates).index(name) + 1
        return f"10.99.{number // 250}.{number % 250 + 1}"

    def path(self, name: str) -> str:
        """Return what `enter` takes."""
        return f"/var/run/netns/{self._prefix}-{name}"

    def cut(self, name: str) -> None:
        """Pull a node's cable out of the switch."""
        self._plug(name, "down")

    def heal(self, name: str) -> None:
        """Put it back."""
        self._plug(name, "up")

    def _plug(self, name: str, state: str) -> None:
        port = f"p{list(self._rates).index(name)}"
        _ip("-n", f"{self._prefix}-switch", "link", "set", port, state)

    def part(self, one: str, other: str) -> None:
        """Let what two nodes send each other lead nowhere, without a word, as on the internet."""
        for near, far in ((one, other), (other, one)):
            where = (self.address(far), "lladdr", _NOBODY, "dev", INTERFACE, "nud", "permanent")
            _ip("-n", f"{self._prefix}-{near}", "neighbour", "replace", *where)

    def rejoin(self, one: str, other: str) -> None:
        """Let two nodes reach each other again."""
        for near, far in ((one, other), (other, one)):
            _ip("-n", f"{self._prefix}-{near}", "neighbour", "delete", self.address(far), "dev", INTERFACE)

    def _make(self) -> None:
        switch = self._add("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, (name, rate) in enumerate(self._rates.items()):
            space, port = self._add(name), f"p{number}"
            _ip("-n", space, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", space, "address", "add", f"{self.address(name)}/16", "dev", INTERFACE)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            for link in (INTERFACE, "lo"):
                _ip("-n", space, "link", "set", link, "up")
            # What a system has by default may be bbr, which shares badly where distances are microseconds.
            _ip("-n", space, "route", "replace", _NETWORK, "dev", INTERFACE, "congctl", "cubic")
            _limit(space, INTERFACE, rate.upload)
            _limit(switch, port, rate.download)

    def _add(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        _ip("netns", "add", space)
        self._made.append(space)
        return space

    def _remove(self) -> None:
        for space in self._made:
            _ip("netns", "delete", space)
        self._made.clear()


def enter(path: str) -> None:
    """Move this process to a namespace; before it starts a thread."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(path) as space:
        if library.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def _limit(space: str, interface: str, bytes_per_second: float) -> None:
    bits = round(8 * bytes_per_second / _PACKET_SHARE)
    bucket = ("rate", f"{bits}bit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_SECONDS}s")
    _call("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
