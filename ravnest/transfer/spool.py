"""Space for content that is put together from pieces: a file without a name if it is large, else memory.

The file goes when nobody reads it any more, also if the program is killed. It is read without a copy. All of
this may wait for the disk, so programs do it in a thread.
"""

import logging
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ravnest.protocol.blobs import PIECE_BYTES
from ravnest.protocol.tensors import Buffer

logger = logging.getLogger(__name__)

MOST_SPOOL_BYTES = 2**44  # nobody has more room


class Spool:
    """Room for so many bytes, written in any order; MemoryError if there is none. `content` is read-only."""

    def __init__(self, size_bytes: int, folder: str | Path | None = None) -> None:
        if not 1 <= size_bytes <= MOST_SPOOL_BYTES:
            raise MemoryError(f"no room for {size_bytes} bytes")
        self._lock = threading.Lock()  # the file has one position
        self._file = _reserve(size_bytes, folder) if size_bytes > PIECE_BYTES else None
        if self._file is not None:
            weakref.finalize(self, self._file.close)  # what is mapped stays
            mapped = mmap.mmap(self._file.fileno(), size_bytes, access=mmap.ACCESS_READ)
            self.content = memoryview(mapped)
        else:
            self._memory = np.empty(size_bytes, np.uint8).data
            self.content = self._memory.toreadonly()

    @property
    def is_on_disk(self) -> bool:
        """Whether it takes no memory."""
        return self._file is not None

    def write(self, offset: int, piece: Buffer) -> None:
        """Put a piece where it belongs; OSError if the disk does not take it after all."""
        if self._file is None:
            self._memory[offset : offset + len(piece)] = piece
            return
        with self._lock:
            self._file.seek(offset)
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]


def _reserve(size_bytes: int, folder: str | Path | None) -> BinaryIO | None:
    """Return a file of this size, or None if the disk has no room for it."""
    file = None
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it is kept open
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        else:
            file.truncate(size_bytes)
    except OSError as error:
        logger.warning("%d bytes are kept in memory, for the disk does not take them: %s", size_bytes, error)
        if file is not None:
            file.close()
        return None
    return file
