"""Bytes on disk: foreign files, bounded and refused with a sentence, and large content of one's own.

Large content lies in files without a name, which go with the program. They are mapped, so they are read like
memory; `release_pages` gives the memory back that reading took.
"""

import errno
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from ravnest.errors import ConfigError
from ravnest.units import show_bytes


def read_bytes(name: str | Path, most_bytes: int, *, is_plain: bool = True) -> bytes:
    """Return what a file holds, or raise OSError. Only a plain file never waits as a pipe or device may."""
    with open(name, "rb", opener=_open_without_waiting if is_plain else None) as file:
        if is_plain and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {show_bytes(most_bytes)}")
    return content


def read_bounded(name: str | Path, most_bytes: int, *, is_plain: bool = True) -> bytes:
    """Return what a file holds, or raise the sentence that says why it cannot be read."""
    try:
        return read_bytes(name, most_bytes, is_plain=is_plain)
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; check its name and folder") from None
    except IsADirectoryError:
        raise ConfigError(f"{name} is a folder; give a file inside it") from None
    except PermissionError:
        raise ConfigError(f"{name} may not be read by this user; change its permissions") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give another file") from None


def map_file(name: str | Path) -> memoryview:
    """Return what a plain file holds without reading it, or raise OSError; it outlives the file's name."""
    with open(name, "rb", opener=_open_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if not found.st_size:
            return memoryview(b"")
        return memoryview(FileMap.of(file.fileno()))


class FileMap(mmap.mmap):
    """A whole file, read like memory; it keeps the file open, so that another process can be given it."""

    descriptor: int

    @classmethod
    def of(cls, descriptor: int, size_bytes: int = 0) -> Self:
        """Map an open file, all of it without a size; OSError or ValueError if that cannot be."""
        found = cls(descriptor, size_bytes, access=mmap.ACCESS_READ)
        found.descriptor = os.dup(descriptor)
        weakref.finalize(found, os.close, found.descriptor)
        return found


def find_file(content: bytes | bytearray | memoryview) -> int | None:
    """Return the descriptor of the file that this content is, from its first byte to its last."""
    mapped = memoryview(content).obj
    if isinstance(mapped, FileMap) and len(mapped) == memoryview(content).nbytes:
        return mapped.descriptor
    return None


def write_whole(file: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file whole or not at all, or raise OSError; a private one is for its user alone."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)
    mode = 0o600 if is_private else 0o666
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
            opened.write(content)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)  # what was half written when the disk was full


def release_pages(content: bytes | bytearray | memoryview) -> None:
    """Give back the memory that a mapped file takes; what is read again comes from the file again."""
    mapped = memoryview(content).obj
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def write_nameless(pieces: Iterable[bytes | bytearray | memoryview], folder: str | Path | None) -> memoryview:
    """Return content that is written piece by piece to a file without a name, or raise OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        return memoryview(FileMap.of(file.fileno()))


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
