"""Frames over a socket between agent and compute: one thread sends, one receives, neither side waits.

The socket is one of a pair that the agent makes, so nothing lies in a folder and nothing is left behind by a
process that is killed. Content that is a file already crosses as its descriptor, where the system can pass
one on, and is mapped on the other side: weights of a stage are in memory once.
"""

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

from ravnest.disk import FileMap, find_file
from ravnest.errors import ProtocolError
from ravnest.peer.compute_frames import MOST_FILES, Frame, FrameReader, IncomingFrame, write_prefix
from ravnest.protocol.tensors import Buffer

_CAN_PASS_FILES = hasattr(socket, "send_fds")
_LEAST_FILE_BYTES = 1 << 20  # smaller ones are copied as fast
_MOST_PIECES = 64  # in one call: the system has a limit


class FrameChannel:
    """One end. `receive` is called in a thread for each frame, `end` once, with what is wrong, or nothing."""

    def __init__(
        self,
        end_of_pair: socket.socket,
        receive: Callable[[Frame], None],
        end: Callable[[str], None],
        *,
        most_bytes: int,
        takes_files: bool,
    ) -> None:
        self._socket = end_of_pair
        self._receive, self._end = receive, end
        self._reader = FrameReader(most_bytes)
        self._takes_files = takes_files and _CAN_PASS_FILES
        self._fault = ""  # why nothing can be sent any more
        self._files: deque[int] = deque()  # descriptors that have come
        self._waiting: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"border {name}", daemon=True)
            for name, work in (("in", self._receive_all), ("out", self._send_all))
        ]

    @property
    def is_running(self) -> bool:
        """Whether it was started."""
        return self._threads[0].ident is not None

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def bound(self, most_bytes: int) -> None:
        """Take frames of so many bytes from now on."""
        self._reader.most_bytes = most_bytes

    def send(self, frame: Frame) -> None:
        """Send a frame after all before it; never waits."""
        self._waiting.put(frame)

    def finish(self) -> None:
        """Return when all that was to be sent is sent, or nobody takes it."""
        self._waiting.put(None)
        self._threads[1].join()

    def close(self) -> None:
        """End both threads, and wait for them."""
        self._waiting.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if self.is_running and thread is not threading.current_thread():
                thread.join()
        self._socket.close()
        self._drop_files()

    def _send_all(self) -> None:
        try:
            while (frame := self._waiting.get()) is not None:
                self._send_one(frame)
                frame = None  # its buffers may be large
        except OSError:  # the thread that receives knows why
            pass
        except Exception as error:  # whoever waits for an answer must hear of it
            self._fault = f"{type(error).__name__}: {error!s:.200}"
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_one(self, frame: Frame) -> None:
        files = self._find_files(frame)
        inside = (each for index, each in enumerate(frame.buffers) if index not in files)
        first = memoryview(write_prefix(frame, frozenset(files)) + frame.head)
        if files:
            first = first[socket.send_fds(self._socket, [first], list(files.values())) :]
        pieces = [first, *(memoryview(each).cast("B") for each in inside if len(each))]
        while pieces := [piece for piece in pieces if len(piece)]:
            if not _CAN_PASS_FILES:
                pieces[0] = pieces[0][self._socket.send(pieces[0]) :]
                continue
            num_sent = self._socket.sendmsg(pieces[:_MOST_PIECES])
            for place, piece in enumerate(pieces[:_MOST_PIECES]):
                pieces[place], num_sent = piece[num_sent:], max(0, num_sent - len(piece))

    def _find_files(self, frame: Frame) -> dict[int, int]:
        """Return which buffers cross as descriptors."""
        if not _CAN_PASS_FILES:
            return {}
        found = {
            index: descriptor
            for index, buffer in enumerate(frame.buffers)
            if len(buffer) >= _LEAST_FILE_BYTES and (descriptor := find_file(buffer)) is not None
        }
        return dict(list(found.items())[:MOST_FILES])

    def _receive_all(self) -> None:
        reason = ""
        try:
            while num_bytes := self._receive_some():
                found = self._reader.receive(num_bytes)
                if found is not None:
                    self._receive(self._complete(found))
                    found = None
            if not self._reader.is_between:
                reason = "it ends in the middle of a frame"
        except ProtocolError as error:
            reason = str(error)
        except ConnectionError:
            pass
        except Exception as error:  # also for lack of memory: nobody else sees that nothing comes any more
            reason = f"{type(error).__name__}: {error!s:.200}"
        self._end(self._fault or reason)

    def _receive_some(self) -> int:
        if not self._takes_files:
            return self._socket.recv_into(self._reader.room)
        room = self._reader.room
        space = socket.CMSG_LEN(MOST_FILES * 4)
        num_bytes, ancillary, _, _ = self._socket.recvmsg_into([room], space)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                count = len(data) // 4
                self._files.extend(memoryview(data)[: 4 * count].cast("i").tolist())
        return num_bytes

    def _complete(self, found: IncomingFrame) -> Frame:
        """Return a frame with the files that came beside it."""
        if not found.num_files:
            return found.with_files(())
        if len(self._files) < found.num_files:
            raise ProtocolError(f"a frame comes without {found.num_files - len(self._files)} of its files")
        return found.with_files([self._map(size) for size in found.sizes if size is not None])

    def _map(self, size_bytes: int) -> Buffer:
        descriptor = self._files.popleft()
        try:
            if os.fstat(descriptor).st_size < size_bytes or not size_bytes:
                raise ProtocolError(f"a file has less than the {size_bytes} bytes that are announced")
            return memoryview(FileMap.of(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def _drop_files(self) -> None:
        while self._files:
            os.close(self._files.popleft())
