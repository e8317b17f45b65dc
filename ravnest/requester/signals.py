"""Ctrl-C during a training: the first one ends it early and keeps the weights, the second ends it now.

Only the main thread receives signals; in other threads nothing is changed.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

_Value = TypeVar("_Value")


class Interrupts:
    """Runs a coroutine; `stop` is what the first Ctrl-C calls, once there is something to stop."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self._num_taken = 0
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._before or signal.default_int_handler)

    def run(self, work: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value:
        """Run to the end, or raise KeyboardInterrupt."""

        async def main() -> _Value:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            return await work()

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        self._num_taken += 1
        task = getattr(self, "_task", None)
        if task is None:
            raise KeyboardInterrupt
        if self._num_taken == 1 and self.stop is not None:
            self._loop.call_soon_threadsafe(self.stop)
        else:
            self._loop.call_soon_threadsafe(task.cancel)
