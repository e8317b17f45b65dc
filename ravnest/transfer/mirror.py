"""A mirror: weights that lie behind URLs, each tensor a range of bytes with its hash.

The list of a mirror is JSON that the requester chose. What comes from its servers is bounded by the list, and
used only after its hash was compared. A cut transfer goes on where it was cut.
"""

import contextlib
import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import msgspec
from blake3 import blake3
from msgspec import Meta

from ravnest.config import TIMEOUTS
from ravnest.disk import read_bounded, release_pages, write_nameless
from ravnest.errors import WeightsError
from ravnest.foreign import decode_json
from ravnest.model.state.shards import find_files, open_weights
from ravnest.protocol.tensors import ITEM_BYTES, MOST_TENSOR_ITEMS, Buffer, StoredType
from ravnest.units import show_bytes

_MOST_LIST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_NUM_TRIES = 3  # without a byte in between
_NUM_KEPT = 4  # tensors that stay in files, for readers that read them piece by piece
_Size = Annotated[int, Meta(ge=0, le=2**48)]
_CUT = (OSError, http.client.HTTPException)  # urllib's own errors are OSErrors


class MirrorTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies: the bytes of it in a file behind a URL, and their BLAKE3 hash."""

    url: Annotated[str, Meta(max_length=400, pattern="^https?://[!-~]+$")]
    start: _Size
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=64)]
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def type(self) -> StoredType:
        """What the tensor is but for its values."""
        return StoredType(self.dtype, self.shape)


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: dict[str, MirrorTensor]


def read_mirror(file: Path) -> dict[str, MirrorTensor]:
    """Return what a mirror's list says, or raise a sentence that says what is wrong with it."""
    content = read_bounded(file, _MOST_LIST_BYTES)
    found = decode_json(content, _List, str(file), _MOST_LIST_BYTES, WeightsError).tensors
    for name, tensor in found.items():
        num_items = 1
        for size in tensor.shape:
            num_items *= max(size, 1)
        if tensor.dtype not in ITEM_BYTES or num_items > MOST_TENSOR_ITEMS:
            shown = f"{tensor.dtype[:20]!r} {list(tensor.shape)!s:.60}"
            raise WeightsError(f"{file}: {name[:100]!r} is {shown}, which no tensor is; fetch the list again")
        if not urlsplit(tensor.url).hostname:
            raise WeightsError(f"{file}: {name[:100]!r} has a URL without a host; fetch the list again")
    if not found:
        raise WeightsError(f"{file} lists no tensors; fetch it again")
    return found


def write_mirror(place: Path, url: str) -> bytes:
    """Return the list of a mirror that will serve the files of `place`, weights on this disk, below `url`."""
    tensors = {}
    for file in find_files(place):
        found = open_weights(file)
        start = file.stat().st_size - sum(len(tensor.buffer) for tensor in found)
        for tensor in found:
            where = f"{url.rstrip('/')}/{quote(file.name)}"
            facts = (where, start, tensor.dtype, tensor.shape, blake3(tensor.buffer).hexdigest())
            release_pages(tensor.buffer)
            tensors[tensor.name] = MirrorTensor(*facts)
            start += len(tensor.buffer)
    return msgspec.json.format(msgspec.json.encode(_List(tensors)), indent=1)


class MirrorSource:
    """The tensors of a mirror, each fetched when it is asked for; `folder` is where they lie meanwhile."""

    def __init__(
        self,
        tensors: Mapping[str, MirrorTensor],
        folder: Path | None = None,
        timeout_seconds: float = TIMEOUTS.program.mirror_seconds,
    ) -> None:
        self._tensors, self._folder, self._timeout = dict(tensors), folder, timeout_seconds
        self.types: Mapping[str, StoredType] = {name: x.type for name, x in tensors.items()}
        self._opener = _make_opener()
        self._lock = threading.Lock()
        self._kept: dict[str, Buffer] = {}  # the oldest first

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them; or raise WeightsError."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = self._fetch(name)
                for old in [*self._kept][:-_NUM_KEPT]:
                    del self._kept[old]
            return memoryview(self._kept[name])[start:stop]

    def _fetch(self, name: str) -> Buffer:
        tensor, digest = self._tensors[name], blake3()
        size_bytes = tensor.type.size_bytes
        if not size_bytes:
            return b""

        def check() -> Iterator[bytes]:
            for piece in self._download(tensor, size_bytes):
                digest.update(piece)
                yield piece

        try:
            content = write_nameless(check(), self._folder)
        except OSError as error:
            problem = f"{name!r} of the mirror cannot be kept: {error.strerror or error}"
            raise WeightsError(f"{problem}; make room for {show_bytes(size_bytes)}") from None
        if digest.hexdigest() != tensor.hash:
            problem = f"{tensor.url} does not hold {name!r} as the mirror's list says: its hash is another"
            raise WeightsError(f"{problem}; use another mirror")
        return content

    def _download(self, tensor: MirrorTensor, size_bytes: int) -> Iterator[bytes]:
        """Yield exactly so many bytes, over as many connections as it takes."""
        num_come, num_tries, reason = 0, 0, ""
        while num_come < size_bytes:
            before = num_come
            try:
                for piece in self._range(tensor.url, tensor.start + num_come, size_bytes - num_come):
                    num_come += len(piece)
                    yield piece
                reason = "it ends too early"
            except _CUT as error:
                reason = str(error) or type(error).__name__
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
            num_tries = num_tries + 1 if num_come == before else 0
            if num_come < size_bytes and num_tries == _NUM_TRIES:
                problem = f"{tensor.url} does not give bytes from {tensor.start + num_come} on: {reason:.200}"
                raise WeightsError(f"{problem}; try again later, or use another mirror")

    def _range(self, url: str, start: int, size_bytes: int) -> Iterator[bytes]:
        """Yield what one connection gives of a range, and no more than was asked for."""
        asked = {"Range": f"bytes={start}-{start + size_bytes - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers=asked)  # noqa: S310 - the opener knows no other scheme
        with contextlib.closing(self._opener.open(request, timeout=self._timeout)) as answer:
            given = answer.headers.get("Content-Range", "")
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT or not given.startswith(f"bytes {start}-"):
                problem = f"{url} gives no ranges of bytes (it answers {answer.status})"
                raise WeightsError(f"{problem}; use a server that does")
            left = size_bytes
            while left and (piece := answer.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
                yield piece


def _make_opener() -> urllib.request.OpenerDirector:
    """Return an opener for HTTP and HTTPS alone: no file of this PC, whatever a server redirects to."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
