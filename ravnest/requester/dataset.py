"""The requester's data as numbered samples, and samples as batches of fields.

Every sample has the same fields, types and shapes as the first batch; an error names the sample. Numbers and
lists become tensors. Text is refused, with the way to leave it out.
"""

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from ravnest.errors import ConfigError
from ravnest.model.capture.model_with_loss import name_fields
from ravnest.requester.padding import Padding, PaddingWish, pad_batch, pad_samples
from ravnest.requester.readers import Readers
from ravnest.requester.sample_stream import SampleParts, SampleStream, StreamLimits
from ravnest.units import show_value

logger = logging.getLogger(__name__)

SampleBatch = dict[str, Tensor] | tuple[Tensor, ...]

_GIVE = "give a dict of fields or a tuple (inputs..., target)"


@dataclass(frozen=True, slots=True)
class FieldType:
    """What one sample has under one name."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def put_together(numbers: Sequence[int], samples: Sequence[Any], what: str) -> SampleBatch:
    """Put samples together field by field; numbers and lists become tensors."""
    first = samples[0]
    kind: Any = Mapping if isinstance(first, Mapping) else tuple | list
    if not isinstance(first, kind) or (kind is not Mapping and len(first) < 2):
        raise ConfigError(f"a sample of the {what} is {show_thing(first)}; {_GIVE}")
    for number, sample in zip(numbers, samples, strict=True):
        if not isinstance(sample, kind) or _parts(sample) != _parts(first):
            other = f"other parts than sample {numbers[0]}"
            raise ConfigError(f"sample {number} of the {what} has {other}; give every sample the same")
    if isinstance(first, Mapping):
        return {
            name: _stack(numbers, [sample[name] for sample in samples], f"{name!r} of the {what}", repr(name))
            for name in first
        }
    columns = enumerate(zip(*samples, strict=True))
    return tuple(_stack(numbers, column, f"part {k} of the {what}", f"part {k}") for k, column in columns)


def check_ready(batch: Any, what: str) -> SampleBatch:
    """Return a batch that a DataLoader made, if it is one."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch)
    raise ConfigError(f"a batch of the DataLoader of the {what} is {show_thing(batch)}; {_GIVE}")


def show_thing(thing: object) -> str:
    """Return a thing as an error names it: a class, a small value, or something of a type."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    is_small = thing is None or isinstance(thing, bool | int | float | str | bytes)
    return show_value(thing) if is_small else f"of type {type(thing).__name__}"


def _parts(sample: Any) -> object:
    return sample.keys() if isinstance(sample, Mapping) else len(sample)


def _stack(numbers: Sequence[int], values: Sequence[Any], what: str, column: str) -> Tensor:
    tensors = [_to_tensor(value, what, column) for value in values]
    kind = FieldType(tensors[0].dtype, tuple(tensors[0].shape))
    for number, tensor in zip(numbers, tensors, strict=True):
        if tuple(tensor.shape) != kind.shape:
            shown = f"{kind.shape} in sample {numbers[0]} and {tuple(tensor.shape)} in sample {number}"
            raise ConfigError(f"{what} differs in shape ({shown}); pad or cut to one length")
        if tensor.dtype != kind.dtype:
            other = FieldType(tensor.dtype, kind.shape)
            shown = f"{kind} in sample {numbers[0]} and {other} in sample {number}"
            raise ConfigError(f"{what} differs in type ({shown}); give every sample the same")
    return torch.stack(tensors)


def _to_tensor(value: Any, what: str, column: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # A list that is no array of numbers becomes one of texts or objects, or none at all.
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.tensor(value)  # as_tensor warns of arrays that must not be written
    except (ValueError, TypeError):
        pass
    raise ConfigError(
        f"{what} is {show_value(value)}, not numbers; leave it out of the samples "
        f"(of a Hugging Face dataset: .remove_columns([{column}])) or turn it into numbers first"
    )


Numbers = NDArray[np.int64]
_Types = Mapping[str, FieldType]

_NUM_COMPARED = 64  # samples whose lengths are looked at, beside the first batch
_NUM_TRIED = 4  # places in the data where samples are compared with the first batch
_NO_WISH, _NO_LIMITS = PaddingWish(), StreamLimits()


class Samples:
    """Numbered samples; `what` is how messages call them. Batches may share memory with the data."""

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        what: str = "train data",
        is_padded: bool | None = None,
        limits: StreamLimits = _NO_LIMITS,
        padding: PaddingWish = _NO_WISH,
        like: "Samples | None" = None,
        num_readers: int | None = None,
    ) -> None:
        """Samples `like` others are padded to their lengths; of an iterable `limits` are read.

        So many processes read beside this one; without a number, as many as a DataLoader has.
        """
        self._what, self._batch_size, self._is_padded = what, batch_size, is_padded
        self._source = _open(data, what, limits)
        self._wish, self._like, self._padding = padding, like, None if like is None else like.padding
        self._first: SampleBatch | None = None
        self._lock = threading.RLock()  # a dataset need not bear two readers
        self._loader = data if isinstance(data, DataLoader) else None
        self._num_readers = num_readers
        self._readers: Readers | None = None
        self._has_readers = self._find_num_readers() > 0
        self.unreadable: dict[int, str] = {}  # samples that others were read for, and why

    def _find_num_readers(self) -> int:
        """Return how many processes read: of tensors and iterables none."""
        if not isinstance(self._source, _Items) or self._source.stream is not None:
            return 0
        of_loader = 0 if self._loader is None else self._loader.num_workers
        return of_loader if self._num_readers is None else self._num_readers

    def __len__(self) -> int:
        with self._lock:
            return len(self._source)

    @property
    def is_iterable(self) -> bool:
        """Whether the data has no numbers of its own."""
        return self._stream is not None

    @property
    def window(self) -> int:
        """How many samples are shuffled together, of an iterable that is read as training goes; 0: all."""
        with self._lock:
            return 0 if self._stream is None else self._stream.window

    @property
    def _stream(self) -> SampleStream | None:
        return self._source.stream if isinstance(self._source, _Items) else None

    def skip_to(self, number: int) -> None:
        """Go on with an iterable at this sample; those before it were trained by an earlier program."""
        with self._lock:
            _ = self.first_batch()
            if self._stream is not None and self._stream.window:
                self._stream.skip_to(number)

    def forget(self, number: int) -> None:
        """Keep the samples of an iterable before this one no longer than there is much room."""
        with self._lock:
            if self._stream is not None and self._stream.window:
                self._stream.forget(number)

    def first_batch(self) -> SampleBatch:
        """Return the first batch as capture wants it, a dict or a tuple; it is read once and kept."""
        with self._lock:
            if self._first is None:
                num_samples = self._source.reach(self._batch_size)
                if not num_samples:
                    raise ConfigError(f"the {self._what} is empty; give at least one sample")
                _ = self.padding
                self._first = self._source.read(np.arange(num_samples))
            return self._first

    @property
    def padding(self) -> Padding:
        """Which fields are padded to which length."""
        with self._lock:
            if isinstance(self._source, _Items):
                if self._padding is None:
                    self._padding = self._source.find_padding(self._wish, self._batch_size)
                self._source.padding = self._padding
            return self._padding or {}

    def types(self) -> dict[str, FieldType]:
        """Return the fields of a sample, as the first batch has them."""
        return _types(name_fields(self.first_batch(), self._is_padded))

    def batch(self, indices: Sequence[int] | Numbers) -> dict[str, Tensor]:
        """Return the samples of these numbers by field, or say which of them is unlike the first batch."""
        assert len(indices), "a batch has at least one sample"
        with self._lock:
            _ = self.first_batch()  # by which it is known what is padded
            fields = _Reading(self._source, self._is_padded)(indices)
        return self._check(indices, fields)

    def batches(
        self, groups: Iterable[Sequence[int]], *, replaces: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the samples of each group of numbers, in order; readers are some groups ahead.

        With `replaces`, others of its group take the place of a sample that cannot be read.
        """
        readers = self._open_readers()
        if readers is None:
            for group in groups:
                yield self._take(group, partial(self.batch, group), replaces)
            return
        rest = iter(groups)
        waiting = deque((group, readers.submit(group)) for group in islice(rest, readers.num_ahead))
        try:
            while waiting:
                group, found = waiting[0]
                fields = self._take(group, partial(self._receive, group, found), replaces)
                waiting.popleft()
                waiting.extend((group, readers.submit(group)) for group in islice(rest, 1))
                yield fields
        finally:
            for _, found in waiting:
                found.cancel()

    def _receive(self, numbers: Sequence[int], found: "Future[dict[str, Tensor]]") -> dict[str, Tensor]:
        return self._check(numbers, found.result())

    def _take(
        self, numbers: Sequence[int], read: Callable[[], dict[str, Tensor]], replaces: bool
    ) -> dict[str, Tensor]:
        try:
            return read()
        except Exception as error:  # whatever the code of a dataset raises
            if not replaces or self.is_iterable:
                raise
            return self._read_others(numbers, error)

    def _read_others(self, numbers: Sequence[int], error: Exception) -> dict[str, Tensor]:
        """Read those of the samples that can be read in the places of the others, if most of them can."""
        with self._lock:
            faults = {number: self._find_fault(number) for number in dict.fromkeys(numbers)}
            good = [number for number in numbers if not faults[number]]
            if len(good) == len(numbers) or 2 * len(good) < len(numbers):
                raise error
            for number, fault in faults.items():
                if fault and number not in self.unreadable:
                    self.unreadable[number] = fault
                    told = "sample %d of the %s cannot be read (%s); others of its batch take its place"
                    logger.warning(told, number, self._what, fault)
            places = enumerate(numbers)
            return self.batch([good[k % len(good)] if faults[number] else number for k, number in places])

    def _find_fault(self, number: int) -> str:
        try:
            self.batch([number])
        except Exception as error:  # whatever the code of a dataset raises
            told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            return told if isinstance(error, ConfigError) else f"{type(error).__name__}: {told:.200}"
        return ""

    def close_readers(self) -> None:
        """End the processes that read, if there are any; they begin again when they are needed."""
        with self._lock:
            if self._readers is not None:
                self._readers.close()
            self._readers = None

    def _open_readers(self) -> Readers | None:
        """Return the processes that read; those that only a DataLoader wants need not be possible."""
        with self._lock:
            _ = self.first_batch()  # readers get a copy of the data with its padding
            if self._readers is not None or not self._has_readers:
                return self._readers
            begin = None if self._loader is None else self._loader.worker_init_fn
            reading = _Reading(self._source, self._is_padded)
            try:
                self._readers = Readers(reading, self._find_num_readers(), self._what, begin)
            except ConfigError as error:
                if self._num_readers is not None:
                    raise
                self._has_readers = False
                told = "note: the %s is read in this process, without the workers of its DataLoader: %s"
                logger.warning(told, self._what, error)
            return self._readers

    def _check(self, numbers: Sequence[int] | Numbers, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        here = f"sample {numbers[0]} of the {self._what}"
        _compare(_types(fields), here, self.types(), "the first batch")
        return fields

    def check_some(self) -> None:
        """Raise ConfigError if some pairs of samples, here and there in the data, are unlike the first batch.

        A collate_fn that pads each batch to its own length is found so, before anybody trains.
        """
        with self._lock:
            num_samples = self._source.num_known
        places = sorted({part * (num_samples - 2) // _NUM_TRIED for part in range(_NUM_TRIED + 1)})
        for _ in self.batches([(number, number + 1) for number in places if number >= 0]):
            pass  # each is compared as it comes; so are readers tried

    def check_like(self, other: "Samples") -> None:
        """Raise ConfigError unless these samples have the fields, types and shapes of the others."""
        _compare(self.types(), f"the {self._what}", other.types(), f"the {other._what}")


def loader_batch_size(data: object) -> int | None:
    """Return the batch size that a DataLoader brings, if it is one and brings one."""
    size = getattr(data.batch_sampler, "batch_size", None) if isinstance(data, DataLoader) else None
    return size if isinstance(size, int) else None


def _types(fields: Mapping[str, Tensor]) -> dict[str, FieldType]:
    return {name: FieldType(field.dtype, tuple(field.shape[1:])) for name, field in fields.items()}


def _compare(found: _Types, here: str, expected: _Types, there: str) -> None:
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            one, other = found.get(name, "missing"), expected.get(name, "missing")
            fix = "give every sample the same fields, types and shapes"
            if isinstance(one, FieldType) and isinstance(other, FieldType) and one.dtype == other.dtype:
                way = f"pad={{{name!r}: VALUE}} and max_length=... pad them"
                fix = f"pad or cut all samples to one length; {way}"
            raise ConfigError(f"{name!r} is {one} in {here}, but {other} in {there}; {fix}")


class _Rows:
    """Tensors with one row per sample. `reach` says how many of the first n samples there are."""

    def __init__(self, data: Mapping[str, Any], what: str, *, is_tuple: bool) -> None:
        if not data:
            raise ConfigError(f"the {what} is an empty dict; give at least one tensor")
        self._tensors = {name: _to_rows(whole, name, what) for name, whole in data.items()}
        self._is_tuple = is_tuple
        sizes = {name: len(whole) for name, whole in self._tensors.items()}
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(f"the {what} has fields of unequal length ({shown}); give one row per sample")

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    @property
    def num_known(self) -> int:
        return len(self)

    def reach(self, num_samples: int) -> int:
        return min(num_samples, len(self))

    def read(self, numbers: Numbers) -> SampleBatch:
        is_slice = bool((np.diff(numbers) == 1).all())
        rows = slice(int(numbers[0]), int(numbers[-1]) + 1) if is_slice else torch.tensor(numbers)
        batch = {name: whole[rows] for name, whole in self._tensors.items()}
        return tuple(batch.values()) if self._is_tuple else batch


class _Items:
    """A dataset, or a stream that is kept: samples one by one, put together here or by `collate`."""

    def __init__(self, items: Any, what: str, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._items, self._what, self._collate = items, what, collate
        self.padding: Padding = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def stream(self) -> SampleStream | None:
        return self._items if isinstance(self._items, SampleStream) else None

    @property
    def num_known(self) -> int:
        return self._items.num_known if isinstance(self._items, SampleStream) else len(self)

    def reach(self, num_samples: int) -> int:
        if isinstance(self._items, SampleStream):
            return self._items.reach(num_samples)
        return min(num_samples, len(self))

    def find_padding(self, wish: PaddingWish, num_first: int) -> Padding:
        """Return what some samples need: the first ones, and others here and there."""
        num_samples = self.reach(num_first)
        if not num_samples:
            return {}
        num_known = self.num_known
        spread = (part * (num_known - 1) // _NUM_COMPARED for part in range(_NUM_COMPARED + 1))
        numbers = sorted({*range(num_samples), *spread})
        some = dict(zip(numbers, self._get(numbers), strict=True))
        if self._collate is not None:
            collate = self._collate
            return wish.of_batches(
                some, lambda: name_fields(check_ready(collate([some[0]]), self._what), None), self._read_all
            )
        return wish.find(some, self._read_all, self._what)

    def _read_all(self) -> Iterator[Any]:
        if isinstance(self._items, SampleStream) and self._items.window:
            problem = f"samples of the {self._what} differ in length, and it is read as training goes"
            raise ConfigError(f"{problem}, so the longest is not known; set max_length=...")
        return (self._items[index] for index in range(len(self)))

    def _get(self, indices: list[int]) -> list[Any]:
        at_once = getattr(self._items, "__getitems__", None)  # of torch and Hugging Face datasets
        return list(at_once(indices)) if at_once else [self._items[index] for index in indices]

    def read(self, numbers: Numbers) -> SampleBatch:
        indices = numbers.tolist()
        samples = self._get(indices)
        if self._collate is None:
            if self.padding:
                samples = pad_samples(samples, indices, self.padding, self._what)
            return put_together(indices, samples, self._what)
        batch = check_ready(self._collate(samples), self._what)
        if self.padding:
            full = pad_batch(name_fields(batch, None), self.padding, self._what)
            batch = full if isinstance(batch, dict) else tuple(full.values())
        size = len(next(iter(name_fields(batch, None).values())))
        if size != len(indices):
            problem = f"the collate_fn of the {self._what} made {size} samples of {len(indices)}"
            raise ConfigError(f"{problem}; make one of each")
        return batch


@dataclass(frozen=True, slots=True)
class _Reading:
    """How samples are read, here or in other processes: by number, as named fields."""

    source: _Rows | _Items
    is_padded: bool | None

    def __call__(self, indices: Sequence[int] | Numbers) -> dict[str, Tensor]:
        return name_fields(self.source.read(np.asarray(indices, dtype=np.int64)), self.is_padded)


def _open(data: Any, what: str, limits: StreamLimits) -> _Rows | _Items:
    if isinstance(data, DataLoader):
        return _open_loader(data, what, limits)
    if isinstance(data, Mapping):
        return _Rows(data, what, is_tuple=False)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return _Rows({f"part {k}": part for k, part in enumerate(data)}, what, is_tuple=True)
    return _Items(_numbered(data, what, limits), what)


def _numbered(data: Any, what: str, limits: StreamLimits, *, is_raw: bool = False) -> Any:
    """Return the data itself if it has a length and an index, else a stream of it."""
    is_known = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    if isinstance(data, str | bytes | Tensor | np.ndarray | type) or not is_known:
        fix = "give a dict of tensors, a dataset, an iterable of samples or a DataLoader"
        raise ConfigError(f"the {what} is {show_thing(data)}; {fix}")
    is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_indexed and not isinstance(data, IterableDataset):
        return data
    return SampleStream(data, what, limits, None if is_raw else partial(_take_apart, what))


def _take_apart(what: str, number: int, sample: Any) -> SampleParts:
    batch = put_together([number], [sample], what)
    if isinstance(batch, dict):
        return {name: column[0] for name, column in batch.items()}
    return tuple(column[0] for column in batch)


def _open_loader(loader: "DataLoader[Any]", what: str, limits: StreamLimits) -> _Rows | _Items:
    if loader.batch_sampler is None:
        return _Items(_numbered(_Unbatched(loader, what), what, limits), what)
    if not isinstance(loader.dataset, IterableDataset):
        _check_sampler(loader, what)
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    is_raw = collate is not None  # its samples may be anything
    return _Items(_numbered(loader.dataset, what, limits, is_raw=is_raw), what, collate)


def _check_sampler(loader: "DataLoader[Any]", what: str) -> None:
    """Refuse a sampler that leaves samples out: without it, they would be trained on."""
    batches: Any = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    is_whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if not is_whole or getattr(sampler, "replacement", False):
        problem = f"the DataLoader of the {what} chooses samples by {type(sampler).__name__}"
        fix = (
            "for a part of a dataset give torch.utils.data.Subset(dataset, indices), else the dataset itself"
        )
        raise ConfigError(f"{problem}, but the order is ours; {fix}")


@dataclass(frozen=True, slots=True)
class _Unbatched:
    """The samples of a loader whose dataset has ready batches."""

    loader: "DataLoader[Any]"
    what: str

    def __iter__(self) -> Iterator[Any]:
        for ready in self.loader:
            batch = check_ready(ready, self.what)
            fields = name_fields(batch, None)
            for parts in zip(*fields.values(), strict=True):
                yield dict(zip(fields, parts, strict=True)) if isinstance(batch, dict) else parts


def _to_rows(whole: Any, name: str, what: str) -> Tensor:
    if isinstance(whole, np.ndarray) and whole.ndim and whole.dtype.kind in "biuf":
        with warnings.catch_warnings(action="ignore"):  # the array is read-only, and stays unchanged
            return torch.from_numpy(np.ascontiguousarray(whole, whole.dtype.newbyteorder("=")))
    if isinstance(whole, Tensor) and whole.ndim:
        return whole
    found = show_thing(whole)
    if isinstance(whole, Tensor | np.ndarray):
        found = f"an array of {whole.dtype}" if whole.ndim else "a single number"
    fix = "give tensors whose first size is the samples, or one dataset instead of the dict"
    raise ConfigError(f"the {what} has {name!r}, {found}; {fix}")
