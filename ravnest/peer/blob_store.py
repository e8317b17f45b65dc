"""The snapshots that a peer keeps, in files of a temporary folder that are read without a copy.

It keeps the newest ones it made itself, and one backup for others. Where the disk takes none they stay in
memory. Threads that only write put them there; the event loop reads them.
"""

import logging
import mmap
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from ravnest.peer.compute_protocol import WrittenBlob
from ravnest.protocol.blobs import PIECE_BYTES
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.blobs import Blob, hash_pieces, name_hashes, name_pieces

logger = logging.getLogger(__name__)

_NUM_OWN = 3


class BlobStore:
    """Blobs by hash. As a context manager it has a folder; otherwise it has only memory."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._has_warned = False
        self._own: dict[str, Blob] = {}  # oldest first
        self._backup: dict[str, Blob] = {}

    def __enter__(self) -> Self:
        with suppress(OSError):  # said when something is to be kept
            self._folder = tempfile.TemporaryDirectory(prefix="ravnest-", ignore_cleanup_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._own, self._backup = {}, {}
        if self._folder is not None:
            self._folder.cleanup()

    def get(self, blob: str) -> Blob | None:
        """Return a blob that is here."""
        return self._own.get(blob) or self._backup.get(blob)

    def __contains__(self, blob: object) -> bool:
        return blob in self._own or blob in self._backup

    def values(self) -> tuple[Blob, ...]:
        """Return all blobs that are here."""
        return (*self._own.values(), *self._backup.values())

    def __setitem__(self, blob: str, found: Blob) -> None:
        """Keep a snapshot made here, and drop the fourth before it."""
        self._add(blob, self._own[blob] if blob in self._own else self._write(blob, found))

    def adopt(self, written: WrittenBlob) -> bool:
        """Keep a snapshot that compute has written; return whether it is here."""
        content: Buffer | None = written.content
        hashes = written.hashes
        if content is not None:
            self._warn(written.fault)
        else:
            try:
                content = self._map(written.ref.blob)
            except (OSError, ValueError) as error:
                logger.warning("the snapshot %s is lost: %s", written.ref.blob[:12], error)
                return False
        self._add(written.ref.blob, Blob(content, hashes or hash_pieces(content)))
        return True

    def _add(self, blob: str, found: Blob) -> None:
        if blob in self._own:
            del self._own[blob]  # it is the newest again
        self._own[blob] = found
        for old in [*self._own][:-_NUM_OWN]:
            del self._own[old]
            self._remove(old)

    def keep_backup(self, content: Buffer) -> None:
        """Keep the snapshot of another peer instead of the one before; large ones are in a file already."""
        hashes = hash_pieces(content)
        blob = name_hashes(hashes, len(content)).blob
        found = self.get(blob) or Blob(content, hashes)
        is_large = len(content) > PIECE_BYTES
        before, self._backup = self._backup, {blob: found if is_large else self._write(blob, found)}
        for old in before:
            self._remove(old)

    def _write(self, blob: str, found: Blob) -> Blob:
        try:
            _path(self.folder, blob).write_bytes(found.content)
            return Blob(self._map(blob), found.hashes)
        except (OSError, ValueError) as error:  # ValueError: what is empty cannot be mapped
            self._warn(error)
            self._remove(blob)
            return found

    @property
    def folder(self) -> str | None:
        """Where its files are, if it has any."""
        return None if self._folder is None else self._folder.name

    def _map(self, blob: str) -> Buffer:
        """Return a file's content. Where it can its name goes now, so that a killed peer leaves no file."""
        path = _path(self.folder, blob)
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        with suppress(OSError):
            path.unlink()
        return mapped

    def _warn(self, error: Exception | str) -> None:
        if not self._has_warned:
            logger.warning("snapshots stay in memory, for the disk does not take them: %s", error)
        self._has_warned = True

    def _remove(self, blob: str) -> None:
        """Remove a file that is not needed; pieces of it on their way stay as they are."""
        if self._folder is not None and blob not in self:
            with suppress(OSError):
                Path(self._folder.name, blob).unlink(missing_ok=True)


def write_blob(folder: str | None, make: Callable[[], Iterable[Buffer]]) -> WrittenBlob:
    """Write content to a file named by its hash, piece by piece; where that fails, return it in memory."""
    try:
        path = _path(folder, "unfinished")
        try:
            with path.open("wb") as file:
                ref, hashes = name_pieces(make(), file.write)
            path.replace(path.with_name(ref.blob))
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        content = b"".join(make())
        hashes = hash_pieces(content)
        return WrittenBlob(name_hashes(hashes, len(content)), content, str(error), hashes)
    return WrittenBlob(ref, hashes=hashes)


def _path(folder: str | None, blob: str) -> Path:
    if folder is None:
        raise FileNotFoundError(f"no folder could be made in {tempfile.gettempdir()}")
    return Path(folder, blob)
