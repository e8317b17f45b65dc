"""Slow links in user space: a program that passes TCP connections on at a rate, after a delay.

Machines without `tc netem` cannot delay packets, so connections are made through this program, which runs in
a process of its own: each connection is a link with a rate and a one-way delay in each direction. It also
sees what really travels: every byte after encryption.
"""

import asyncio
import math
import subprocess
import sys
import threading
from collections import Counter
from types import TracebackType
from typing import Self

_READ_BYTES = 64 * 1024
_QUEUE_SECONDS = 0.02  # what may wait at the slow end of a link, as in a small router


class Links:
    """Starts the program; `through(address)` returns where to dial instead. Use it as a context manager."""

    def __init__(self, bytes_per_second: float = math.inf, delay_seconds: float = 0.0) -> None:
        self._arguments = [str(bytes_per_second), str(delay_seconds)]
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()  # the hub's loop asks, and whoever counts

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.links", *self._arguments]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(timeout=10)

    def through(self, address: str) -> str:
        """Return an address that leads to this one over a slow link."""
        if address not in self._known:
            self._known[address] = self._ask(address)
        return self._known[address]

    def num_bytes(self, address: str) -> int:
        """Return the bytes that went to this address and came back from it so far."""
        return int(self._ask(f"count {address}"))

    def _ask(self, line: str) -> str:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        with self._lock:
            self._program.stdin.write(line + "\n")
            self._program.stdin.flush()
            return self._program.stdout.readline().strip()


class _Program:
    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self._rate = bytes_per_second
        self._delay = delay_seconds
        self._counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer questions from stdin until it is closed."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := (await lines.readline()).decode().strip():
            word, _, rest = line.rpartition(" ")
            print(self._counts[rest] if word == "count" else await self._listen(rest), flush=True)

    async def _listen(self, address: str) -> str:
        host, _, port = address.removeprefix("tcp://").rpartition(":")

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there_reader, there_writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:  # nobody is there any more: whoever dials finds this out as on a real link
                writer.close()
                return
            for pair in ((reader, there_writer), (there_reader, writer)):
                for work in self._carry(address, *pair):
                    task = asyncio.create_task(work)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0, limit=_READ_BYTES)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _carry(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):  # type: ignore[no-untyped-def]
        """Return the two halves of one direction: what fills the link and what comes out of it."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def fill() -> None:
            free_at = 0.0
            try:
                while data := await reader.read(_READ_BYTES):
                    self._counts[address] += len(data)
                    free_at = max(free_at, loop.time()) + len(data) / self._rate
                    under_way.put_nowait((free_at + self._delay, data))
                    if (wait := free_at - loop.time() - _QUEUE_SECONDS) > 0:
                        await asyncio.sleep(wait)
            except ConnectionError:
                pass
            under_way.put_nowait((0.0, b""))

        async def empty() -> None:
            try:
                while True:
                    due, data = await under_way.get()
                    if not data:
                        break
                    if (wait := due - loop.time()) > 0:
                        await asyncio.sleep(wait)
                    writer.write(data)
                    await writer.drain()
            except ConnectionError:
                pass
            writer.close()

        return fill(), empty()


if __name__ == "__main__":
    asyncio.run(_Program(float(sys.argv[1]), float(sys.argv[2])).serve())
