"""Samples of an iterable, kept in a file without a name: as many as the disk has room for.

Training reads samples in any order and again, so what can be read only once is kept. Numbers lie in the file
as they are; nothing in it is code.
"""

import shutil
import tempfile
import weakref
from array import array
from collections.abc import Mapping
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from ravnest.errors import ConfigError
from ravnest.units import show_bytes

SampleParts = Mapping[str, Tensor] | tuple[Tensor, ...]

_SPARED_BYTES = 1 << 30  # of the disk, for everything else
_LOOK_BYTES = 1 << 26  # so often the room on the disk is looked at


class _Part(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class SampleSpool:
    """Samples by number, appended one by one, while the disk has room."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._file: BinaryIO | None = None
        self._ends = array("q", [0])
        self._heads: list[bytes] = []  # how samples look, each kind once
        self._kinds = array("q")
        self._looked_at = 0

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def num_bytes(self) -> int:
        """What all samples take on disk."""
        return self._ends[-1]

    def append(self, sample: SampleParts) -> None:
        """Keep a sample, or say that there is no room for it."""
        named = sample if isinstance(sample, Mapping) else {f"{place}": x for place, x in enumerate(sample)}
        parts = [
            _Part(name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in named.items()
        ]
        head = msgspec.msgpack.encode((isinstance(sample, Mapping), parts))
        content = b"".join(
            x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in named.values()
        )
        self._check_room(len(content))
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the spool
            weakref.finalize(self, self._file.close)
        try:
            self._file.seek(self.num_bytes)
            self._file.write(content)
        except OSError as error:
            reason = error.strerror or "it cannot be written"
            raise self.refuse(reason, len(self), self.num_bytes) from None
        if not self._heads or self._heads[-1] != head:
            self._heads.append(head)
        self._kinds.append(len(self._heads) - 1)
        self._ends.append(self.num_bytes + len(content))

    def __getitem__(self, index: int) -> SampleParts:
        start, stop = self._ends[index], self._ends[index + 1]
        assert self._file is not None
        self._file.seek(start)
        content = self._file.read(stop - start)
        is_mapping, parts = msgspec.msgpack.decode(
            self._heads[self._kinds[index]], type=tuple[bool, list[_Part]]
        )
        found, place = {}, 0
        for part in parts:
            dtype = getattr(torch, part.dtype)
            tensor = torch.empty(part.shape, dtype=dtype)
            size = tensor.numel() * tensor.element_size()
            if size:
                own = torch.frombuffer(bytearray(content[place : place + size]), dtype=torch.uint8)
                tensor.view(-1).view(torch.uint8).copy_(own)
            found[part.name], place = tensor, place + size
        return found if is_mapping else tuple(found.values())

    def _check_room(self, num_more: int) -> None:
        needed = self.num_bytes + num_more
        if needed >= self._looked_at:
            self._looked_at = needed + _LOOK_BYTES
            if shutil.disk_usage(tempfile.gettempdir()).free < _SPARED_BYTES:
                raise self.refuse("the disk is nearly full", len(self), self.num_bytes)

    def refuse(self, reason: str, num_samples: int, num_bytes: int) -> ConfigError:
        """Return the error of a stream that cannot be kept."""
        read = f"{num_samples:,} samples ({show_bytes(num_bytes)})"
        fix = "give max_steps=..., a dataset with a length and an index, or another folder: TMPDIR=..."
        return ConfigError(
            f"the {self._what} is an iterable, to be kept on disk, after {read} {reason}; {fix}"
        )
