"""An iterable as numbered samples: read as far as asked, and kept, on disk or as they are in memory.

Where the number of updates is known, a long one is read as it goes: its samples are shuffled within windows,
so training asks for numbers near each other. What is trained for good is let go once much is kept. A stream
that ends too early is read again, from its own beginning or from what is kept.
"""

import shutil
import sys
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

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
    """Samples by number in a file without a name, appended one by one, while the disk has room.

    Training reads samples in any order and again, so what can be read only once is kept. Numbers lie in the
    file as they are; nothing in it is code.
    """

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


_MOST_BYTES = 2 << 30  # of samples that have to be kept in memory
_KEPT_BYTES = 4 << 30  # so much may stay on disk after it was trained
_NUM_SPOOLS = 16  # pieces of what is kept on disk: one is let go as a whole
_PACE = 2  # samples read ahead for each that is asked for
_OBJECT_BYTES, _NUMBER_BYTES = 500, 32  # what Python needs around a tensor, and for a number


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much of an iterable is read and kept; None: as much as there is, and as memory or the disk bear.

    So many samples are shuffled together as the `window` says, if there are more; 0: it is read whole.
    """

    most_samples: int | None = None
    most_bytes: int | None = None
    window: int = 0


class SampleStream:
    """Samples of an iterable by number; `to_parts` makes numbers of one, without it they stay as they are."""

    def __init__(
        self,
        data: Iterable[Any],
        what: str,
        limits: StreamLimits,
        to_parts: Callable[[int, Any], SampleParts] | None,
    ) -> None:
        self._data, self._what, self._limits, self._to_parts = data, what, limits, to_parts
        self._rest: Iterator[Any] | None = None
        self._kept: _OnDisk | _InMemory = (
            _InMemory(what, limits) if to_parts is None else _OnDisk(what, limits)
        )
        self._error: Exception | None = None
        self._length: int | None = None  # of the stream, once it has ended for good
        self._is_long: bool | None = None

    def __len__(self) -> int:
        if self.window:
            assert self._limits.most_samples is not None
            return self._limits.most_samples
        return self.reach(sys.maxsize)

    @property
    def window(self) -> int:
        """How many samples are shuffled together; 0: all of them, and all are kept."""
        window, most = self._limits.window, self._limits.most_samples
        if not window or most is None or most <= window:
            return 0
        if self._is_long is None:
            self._is_long = self.reach(window + 1) > window
        return window if self._is_long else 0

    @property
    def num_known(self) -> int:
        """How many samples were read so far; there may be more."""
        return self._kept.stop

    def __getitem__(self, number: int) -> Any:
        window = self.window
        known = self.reach(number + 1)
        if window and self._length is None:
            ahead = min(self.num_known + _PACE, (number // window + 2) * window)
            self.reach(max(ahead, number + 1))
        if number >= known and self._length:
            number %= self._length
        return self._kept[number]

    def reach(self, num_samples: int) -> int:
        """Read on until there are this many samples, or no more; return how many there are."""
        if self._error is not None:  # after it a generator looks as if it had ended
            raise self._error
        most = self._limits.most_samples
        if most is not None:
            window = self._limits.window or 1
            num_samples = min(num_samples, -(-most // window) * window)
        try:
            self._read_to(num_samples, self._keep)
        except Exception as error:
            self._error = error
            raise
        return min(num_samples, self._kept.stop)

    def skip_to(self, number: int) -> None:
        """Read over all samples before this one: they were trained earlier, by a program that has ended."""
        self._kept.drop(number, is_all=True)
        self._read_to(number, lambda _: self._kept.pass_over())

    def forget(self, number: int) -> None:
        """Let go what comes before this sample, if much is kept: it is trained for good."""
        if self._length is None:  # else what is kept is read again
            self._kept.drop(number, is_all=False)

    def _read_to(self, stop: int, take: Callable[[Any], None]) -> None:
        """Read until there are so many samples."""
        if self._rest is None:
            self._rest = iter(self._data)
        num_before = self._kept.stop
        while self._kept.stop < stop and self._length is None:
            for sample in self._rest:
                take(sample)
                if self._kept.stop >= stop:
                    return
            self._end_pass(self._kept.stop > num_before)
            num_before = self._kept.stop

    def _end_pass(self, has_read: bool) -> None:
        """Begin the iterable again where training needs more of it than it has; else it has ended."""
        again = iter(self._data) if self._is_long and has_read else self._rest
        if again is not self._rest and again is not self._data:
            self._rest = again
            return
        self._length = self._kept.stop
        if self._is_long and self._kept.start:
            most = self._limits.most_samples
            problem = f"the {self._what} ended after {self._length:,} samples, and training needs {most:,}"
            fix = "set a lower max_steps, or give an object whose __iter__ begins again"
            raise ConfigError(f"{problem}; {fix}")

    def _keep(self, sample: Any) -> None:
        self._kept.append(sample if self._to_parts is None else self._to_parts(self._kept.stop, sample))


class _OnDisk:
    """Samples [start, stop) in some spools, of which the oldest can be let go."""

    def __init__(self, what: str, limits: StreamLimits) -> None:
        self._what, self._limits = what, limits
        self._spools: list[SampleSpool] = []
        self._starts: list[int] = []
        self.start = self.stop = 0

    @property
    def _num_bytes(self) -> int:
        return sum(spool.num_bytes for spool in self._spools)

    def append(self, sample: SampleParts) -> None:
        most = self._limits.most_bytes
        size = (most or _KEPT_BYTES) // _NUM_SPOOLS
        if not self._spools or (self._limits.window and self._spools[-1].num_bytes >= size):
            self._spools.append(SampleSpool(self._what))
            self._starts.append(self.stop)
        num_before = self._num_bytes
        self._spools[-1].append(sample)
        self.stop += 1
        # Of a window the oldest spools can be let go, so that the disk alone is the limit.
        if not self._limits.window and most is not None and self._num_bytes > most:
            raise self._spools[-1].refuse("that is enough", self.stop - 1, num_before)

    def pass_over(self) -> None:
        self.start = self.stop = self.stop + 1

    def __getitem__(self, number: int) -> SampleParts:
        if number < self.start:
            raise _lost(self._what, number)
        place = bisect_right(self._starts, number) - 1
        return self._spools[place][number - self._starts[place]]

    def drop(self, number: int, *, is_all: bool) -> None:
        most = 0 if is_all else self._limits.most_bytes or _KEPT_BYTES
        stops = [*self._starts[1:], self.stop]
        while self._spools and stops[0] <= number and self._num_bytes > most:
            self.start = stops.pop(0)
            del self._spools[0], self._starts[0]


class _InMemory:
    """Samples [start, stop) as they are: a collate_fn reads them, and they may be anything."""

    def __init__(self, what: str, limits: StreamLimits) -> None:
        self._what, self._most_bytes = what, limits.most_bytes or _MOST_BYTES
        self._samples: dict[int, Any] = {}
        self._num_bytes = self.start = self.stop = 0

    def append(self, sample: Any) -> None:
        self._samples[self.stop] = sample
        self._num_bytes += _bytes_of(sample)
        self.stop += 1
        if self._num_bytes > self._most_bytes:
            read = f"{len(self._samples):,} samples ({show_bytes(self._num_bytes)})"
            fix = "give max_steps=... and a smaller shuffle_window, a dataset with a length and an index"
            fix = f"{fix}, or cut it: itertools.islice(samples, 100_000)"
            raise ConfigError(
                f"the {self._what} is an iterable, to be kept in memory, with no end after {read}; {fix}"
            )

    def pass_over(self) -> None:
        self.start = self.stop = self.stop + 1

    def __getitem__(self, number: int) -> Any:
        if number < self.start:
            raise _lost(self._what, number)
        return self._samples[number]

    def drop(self, number: int, *, is_all: bool) -> None:
        most = 0 if is_all else self._most_bytes // 2
        while self.start < min(number, self.stop) and self._num_bytes > most:
            self._num_bytes -= _bytes_of(self._samples.pop(self.start))
            self.start += 1


def _lost(what: str, number: int) -> ConfigError:
    problem = f"sample {number} of the {what} was read before and is not kept any more"
    return ConfigError(f"{problem}; begin a new run, or give a dataset with a length and an index")


def _bytes_of(value: Any) -> int:
    if isinstance(value, dict):
        return _OBJECT_BYTES + sum(map(_bytes_of, value.values()))
    if isinstance(value, tuple | list):
        return _OBJECT_BYTES + sum(map(_bytes_of, value))
    if isinstance(value, str | bytes):
        return _NUMBER_BYTES + len(value)
    num_bytes = getattr(value, "nbytes", None)  # of tensors and arrays
    return _OBJECT_BYTES + num_bytes if isinstance(num_bytes, int) else _NUMBER_BYTES
