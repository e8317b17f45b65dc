"""Readers: processes that read samples beside the hub, so that slow decoding holds nothing up.

Each gets the data once, at its start, and then reads one microbatch after the other. Readers are started
afresh, never forked: this process has threads. They send back numbers, no objects.
"""

import contextlib
import multiprocessing
import queue
import random
import signal
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ravnest.config import TIMEOUTS
from ravnest.errors import CaptureError, ConfigError
from ravnest.requester.users_code import users_code

Read = Callable[[Sequence[int]], dict[str, Tensor]]

_NAME = "ravnest reader"
_PLACE = "the data"
_IMPORTABLE = "define the dataset in a file that can be imported"
_NO_READERS = "num_workers=0 reads in this process"


class _Field(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Reply(msgspec.Struct, array_like=True):
    fault: str  # why nothing could be read, or nothing
    fields: list[_Field]


class Readers:
    """Processes that each have a copy of `read`, the function that reads the samples of some numbers.

    `begin` is called in each of them with its number. `what` is how messages call the data.
    """

    def __init__(
        self, read: Read, num_readers: int, what: str, begin: Callable[[int], object] | None = None
    ) -> None:
        """Start the processes; raise ConfigError if they cannot have the data."""
        self._readers: list[_Reader] = []
        self._free: queue.SimpleQueue[_Reader] = queue.SimpleQueue()
        try:
            for number in range(num_readers):
                reader = _Reader(read, number, what, begin)
                self._readers.append(reader)
                self._free.put(reader)
            self._readers[0].wait_until_ready()
        except BaseException:
            _end(self._readers)
            raise
        self._threads = ThreadPoolExecutor(num_readers, _NAME)
        self._finish = weakref.finalize(self, _end, self._readers)

    @property
    def num_ahead(self) -> int:
        """How many microbatches are worth asking for before one is needed."""
        return 2 * len(self._readers)

    def submit(self, numbers: Sequence[int]) -> "Future[dict[str, Tensor]]":
        """Have these samples read by the next reader that is free."""
        return self._threads.submit(_read_by_free, self._free, numbers)

    def close(self) -> None:
        """End the processes."""
        self._finish()
        self._threads.shutdown(wait=False, cancel_futures=True)


def leave_if_reader() -> None:
    """End a reader that runs the requester's script up to its training, while it imports what it needs."""
    if multiprocessing.current_process().name.startswith(_NAME):
        raise SystemExit(1)  # the process that started it says what to do


class _Reader:
    """One process, as the process that started it sees it."""

    def __init__(
        self, read: Read, number: int, what: str, begin: Callable[[int], object] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._what, self._is_ready = what, False
        self._connection, there = context.Pipe()
        seed = torch.initial_seed() + number + 1
        arguments = (there, read, begin, number, seed)
        self._process = context.Process(target=_serve, args=arguments, name=f"{_NAME} {number}", daemon=True)
        try:
            self._process.start()
        except Exception as error:  # whatever pickling it raises
            self._connection.close()
            problem = f"the {what} cannot be given to other processes ({type(error).__name__}: {error})"
            raise ConfigError(f"{problem}; {_IMPORTABLE}, without lambdas, or: {_NO_READERS}") from None
        finally:
            there.close()

    def wait_until_ready(self) -> None:
        """Return when the process has the data."""
        if self._is_ready:
            return
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            problem = f"a process that reads the {self._what} ended at its start ({self._show_end()})"
            fix = f'keep what trains under `if __name__ == "__main__":` and {_IMPORTABLE}; {_NO_READERS}'
            raise ConfigError(f"{problem}; {fix}") from None
        self._is_ready = True

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the fields of these samples."""
        self.wait_until_ready()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode([int(number) for number in numbers]))
            reply = msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Reply)
            fields = {field.name: self._receive(field) for field in reply.fields}
        except (EOFError, OSError):
            shown = ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
            problem = f"a process that reads the {self._what} ended at samples {shown} ({self._show_end()})"
            fix = f"give fewer num_workers if memory was short; {_NO_READERS}"
            raise ConfigError(f"{problem}; {fix}") from None
        if reply.fault:
            raise ConfigError(reply.fault)
        return fields

    def _receive(self, field: _Field) -> Tensor:
        dtype = getattr(torch, field.dtype)
        content = bytearray(int(np.prod(field.shape)) * dtype.itemsize)
        self._connection.recv_bytes_into(content)
        if not content:
            return torch.empty(field.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(field.shape)

    def _show_end(self) -> str:
        self._process.join(TIMEOUTS.program.reader_end_seconds)
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def end(self) -> None:
        """End the process, at once."""
        self._process.terminate()
        with contextlib.suppress(OSError):
            self._connection.close()


def _read_by_free(free: "queue.SimpleQueue[_Reader]", numbers: Sequence[int]) -> dict[str, Tensor]:
    reader = free.get()
    try:
        return reader.read(numbers)
    finally:
        free.put(reader)


def _end(readers: Sequence[_Reader]) -> None:
    for reader in readers:
        reader.end()


def _serve(
    connection: Connection, read: Read, begin: Callable[[int], object] | None, number: int, seed: int
) -> None:
    """Read what is asked for, until nobody is there to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the hub, which finishes what is under way
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # else all readers would draw the same numbers
    random.seed(seed)  # noqa: TID251 - the requester's dataset may draw from it
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as well
    fault = "" if begin is None else _call(begin, number)[0]
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"ready")
        while True:
            numbers = msgspec.msgpack.decode(connection.recv_bytes(), type=list[int])
            found: dict[str, Tensor] = {}
            why = fault
            if not fault:
                why, found = _call(read, numbers)
            _send(connection, why, found)


def _call(function: Callable[[Any], Any], argument: Any) -> tuple[str, Any]:
    """Return what is wrong, if anything, and what the function returned."""
    try:
        with users_code(_PLACE):
            return "", function(argument)
    except (ConfigError, CaptureError) as error:
        return str(error).removeprefix(f"{_PLACE}: "), {}


def _send(connection: Connection, fault: str, fields: dict[str, Tensor]) -> None:
    found = {name: field.detach().cpu().contiguous() for name, field in fields.items()}
    described = [
        _Field(name, str(field.dtype).removeprefix("torch."), tuple(field.shape))
        for name, field in found.items()
    ]
    connection.send_bytes(msgspec.msgpack.encode(_Reply(fault, described)))
    for field in found.values():
        connection.send_bytes(field.view(-1).view(torch.uint8).numpy().data)
