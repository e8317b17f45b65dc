"""Hashes that bind a member to what it will send: one root for many chunks, and a short path for each.

Digests are the leaves of a tree of pairs. Its depth follows from their number, and which side of each pair a
leaf is on follows from its place, so one root has room for one content of each chunk.
"""

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

_DIGEST_BYTES = 16
_NOTHING = bytes(_DIGEST_BYTES)  # fills a tree up


def digest_content(content: Any) -> bytes:
    """Return the digest of a chunk's bytes: a leaf."""
    return blake3(b"leaf").update(content).digest(_DIGEST_BYTES)


class HashTree:
    """The tree over leaves in this order."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = [[*leaves, *[_NOTHING] * (2 ** _depth(len(leaves)) - len(leaves))]]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            self._levels.append([_join(below[k], below[k + 1]) for k in range(0, len(below), 2)])

    @property
    def root(self) -> bytes:
        """The hash that stands for all leaves."""
        return self._levels[-1][0]

    def find_path(self, place: int) -> tuple[bytes, ...]:
        """Return what one needs beside a leaf to come to the root."""
        return tuple(level[(place >> depth) ^ 1] for depth, level in enumerate(self._levels[:-1]))


def follow_path(leaf: bytes, place: int, count: int, path: Sequence[bytes]) -> tuple[bytes, Sequence[bytes]]:
    """Return the root that a leaf at this place of so many leads to, and what is left of the path."""
    depth = _depth(count)
    for beside in path[:depth]:
        leaf = _join(beside, leaf) if place % 2 else _join(leaf, beside)
        place //= 2
    return (leaf if len(path) >= depth else b""), path[depth:]


def _depth(count: int) -> int:
    return max(count - 1, 0).bit_length()


def _join(left: bytes, right: bytes) -> bytes:
    return blake3(b"pair" + left + right).digest(_DIGEST_BYTES)
