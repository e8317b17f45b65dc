"""What only root can make: networks with a cable to here, and disks that are small or may not be written."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def call(words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words.split(), check=True, capture_output=True)


@contextmanager
def networks(num: int) -> Iterator[list[tuple[str, str]]]:
    """Make namespaces with a cable to here and no way to each other; give their names and our addresses.

    Our end of a cable has the name of its namespace, the other one is called `inside`.
    """
    made: list[tuple[str, str]] = []
    try:
        for number in range(num):
            name = f"rvn{os.getpid()}-{number}"
            net = f"198.{18 + number}.{os.getpid() % 250}"
            made.append((name, f"{net}.1"))
            for words in (
                f"ip netns add {name}",
                f"ip link add {name} type veth peer name inside netns {name}",
                f"ip address add {net}.1/30 dev {name}",
                f"ip link set {name} up",
                f"ip -netns {name} address add {net}.2/30 dev inside",
                f"ip -netns {name} link set inside up",
                f"ip -netns {name} link set lo up",
            ):
                call(words)
        yield made
    finally:
        for name, _ in made:
            for words in (f"ip link delete {name}", f"ip netns delete {name}"):
                subprocess.run(words.split(), check=False, capture_output=True)


@contextmanager
def unroutable(address: str) -> Iterator[None]:
    """Have no way from here to an address."""
    call(f"ip route add unreachable {address}/32")
    try:
        yield
    finally:
        call(f"ip route delete unreachable {address}/32")


@contextmanager
def home_network(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Make a namespace for each PC, all at one switch; give their names by those of the PCs."""
    switch, net = f"rvs{os.getpid()}", f"198.19.{os.getpid() % 250}"
    made = {name: f"rvp{os.getpid()}-{number}" for number, name in enumerate(names)}
    try:
        call(f"ip link add {switch} type bridge")
        call(f"ip link set {switch} up")
        for number, space in enumerate(made.values(), start=1):
            for words in (
                f"ip netns add {space}",
                f"ip link add {space} type veth peer name inside netns {space}",
                f"ip link set {space} master {switch}",
                f"ip link set {space} up",
                f"ip -netns {space} address add {net}.{number}/24 dev inside",
                f"ip -netns {space} link set inside up",
                f"ip -netns {space} link set lo up",
            ):
                call(words)
        yield made
    finally:
        for space in made.values():
            for words in (f"ip link delete {space}", f"ip netns delete {space}"):
                subprocess.run(words.split(), check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", switch], check=False, capture_output=True)


@contextmanager
def small_disk(place: Path, size: str = "1m") -> Iterator[Path]:
    """Make a folder with a file system of its own."""
    place.mkdir()
    call(f"mount -t tmpfs -o size={size} tmpfs {place}")
    try:
        yield place
    finally:
        call(f"umount -l {place}")


def let_write(disk: Path, is_allowed: bool) -> None:
    """Have a disk be written, or only be read."""
    call(f"mount -o remount,{'rw' if is_allowed else 'ro'} {disk}")


def fill(disk: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    full = disk / "full"
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return full
