"""What the compute process does with frames of its agent: look at this PC, close the fences, compute.

A thread takes frames as they come; the first thread handles them in order, and does the stage's work between
them. Nothing that others sent comes before the fences are closed: the agent's StartOrder is in front of it.
"""

import logging
import os
import queue
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ravnest.errors import RavnestError
from ravnest.peer.capabilities import can_run_bf16, can_run_bf16_forked, limit_gpu_memory, warm_up
from ravnest.peer.compute import begin_loading_compiler, survey, work_through, write_saved
from ravnest.peer.compute_channel import FrameChannel
from ravnest.peer.compute_frames import (
    Alive,
    BorderItem,
    ControlOrder,
    FencesClosed,
    Frame,
    Remark,
    StartOrder,
    StatusQuery,
    SurveyOrder,
    pack_item,
    unpack_order,
)
from ravnest.peer.compute_protocol import ComputeFailed, ToCompute
from ravnest.peer.fences import PROGRAMS, Fence, FenceWishes, close_late, describe_fences
from ravnest.peer.machine import keep_few_arenas, return_freed_memory
from ravnest.peer.stage_builder import StageBuilder
from ravnest.peer.stage_host import SavedStage, StageHost

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 46  # the agent has bounded what it takes from others
_ROOM, _OWN_BYTES, _THREAD_BYTES = 1.1, 256 << 20, 16 << 20  # plans are right to a tenth; libraries grow, too


class _RemarkHandler(logging.Handler):
    """Passes what is logged on to the agent's log."""

    def __init__(self, channel: FrameChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(pack_item(Remark(min(record.levelno, 100), record.getMessage())))
        except Exception:  # as all handlers do: what logs goes on
            self.handleError(record)


class _Service:
    """One end of the border, with a stage behind it."""

    def __init__(self, end_of_pair: socket.socket, wishes: FenceWishes, fences: Sequence[Fence]) -> None:
        self._wishes, self._fences = wishes, fences
        self._items: queue.SimpleQueue[ToCompute | ControlOrder | None] = queue.SimpleQueue()
        self._channel = FrameChannel(
            end_of_pair, self._receive, self._end, most_bytes=_MOST_BYTES, takes_files=True
        )
        self._clock = time.monotonic  # noqa: TID251 - the program's own clock

    def run(self) -> int:
        """Follow the agent's orders; return the exit code."""
        keep_few_arenas()  # before there is a second thread
        self._channel.start()
        logging.getLogger().addHandler(_RemarkHandler(self._channel))
        logging.captureWarnings(True)
        try:
            warm_up()
            self._work(self._prepare())
            return 0
        except RavnestError as error:
            self._send([ComputeFailed.of(error)])
            return 0
        except Exception as error:  # an operation may raise anything; the agent reads the last line
            traceback.print_exc()
            told = (str(error).strip().splitlines() or [""])[0]
            os.write(2, f"{type(error).__name__}: {told:.300}\n".encode())
            return 1
        finally:
            self._channel.finish()

    def _receive(self, frame: Frame) -> None:
        self._items.put(unpack_order(frame))

    def _end(self, reason: str) -> None:
        """End with the agent, also in the middle of an operation."""
        if reason:
            os.write(2, f"the border to the agent is broken: {reason}\n".encode(errors="replace"))
        os._exit(1 if reason else 0)

    def _send(self, items: Iterable[BorderItem]) -> None:
        for item in items:
            self._channel.send(pack_item(item))

    def _prepare(self) -> StartOrder:
        """Answer what is asked of this PC, until there is a start."""
        while True:
            match self._items.get():
                case SurveyOrder() as order:
                    self._send([survey(order)])
                case StartOrder() as order:
                    return order
                case StatusQuery(number):
                    self._send([Alive(number)])
                case _:
                    raise RavnestError("what others sent came before the start")

    def _work(self, order: StartOrder) -> None:
        limits = order.setup.limits
        logging.getLogger("ravnest").setLevel(order.log_level)
        return_freed_memory(limits.memory_bytes)
        if limits.device.startswith("cuda"):
            limit_gpu_memory(limits.device, limits.memory_bytes)
        begin_loading_compiler(order.setup)
        own = _OWN_BYTES + torch.get_num_threads() * _THREAD_BYTES
        late = close_late(self._wishes, _ROOM * limits.memory_bytes + own)
        self._send([FencesClosed(*describe_fences([*self._fences, *late]))])
        is_closed = any(each.holds for each in late if each.name == PROGRAMS)
        probe = can_run_bf16_forked if is_closed else can_run_bf16
        builder = StageBuilder(limits, self._clock, probe=probe, timeouts=order.timeouts)
        host = StageHost(builder, self._clock)
        with ThreadPoolExecutor(1) as writer:  # one: snapshots are written in the order they were made

            def send(found: Iterable[Any]) -> None:
                for each in found:
                    if isinstance(each, SavedStage):
                        writer.submit(write, each)
                    else:
                        self._channel.send(pack_item(each))

            def write(saved: SavedStage) -> None:
                try:
                    self._send([write_saved(order.setup.folder, saved)])
                except Exception as error:  # the hub asks others when it does not come
                    told = "the snapshot %d cannot be written: %s: %s"
                    logger.warning(told, saved.order.number, type(error).__name__, error)

            def handle(item: ToCompute | ControlOrder) -> Iterable[Any]:
                match item:
                    case StatusQuery(number):
                        return [Alive(number)]
                    case SurveyOrder() | StartOrder():
                        raise RavnestError("compute has started already")
                    case _:
                        return host.handle(item)

            work_through(self._items, host, handle, self._clock, send)


def serve_agent(end_of_pair: socket.socket, wishes: FenceWishes, fences: Sequence[Fence]) -> int:
    """Compute for an agent until it ends; return the exit code."""
    return _Service(end_of_pair, wishes, fences).run()
