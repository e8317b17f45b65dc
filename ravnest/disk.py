"""Bytes of a foreign file: bounded in size, and a sentence where the file cannot be read."""

import errno
import os
import stat
from pathlib import Path

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


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
