"""Ctrl-C once stops politely, twice at once; and only the main thread takes it."""

import asyncio
import signal
import threading

import pytest

from ravnest.requester.session import Interrupts


def test_the_first_calls_stop_and_the_result_is_kept() -> None:
    async def work() -> str:
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        interrupts.stop = lambda: stopped.set_result("kept")
        signal.raise_signal(signal.SIGINT)
        return await stopped

    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert interrupts.run(work) == "kept"
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ends_at_once() -> None:
    asked = []

    async def work() -> None:
        interrupts.stop = lambda: asked.append(True)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        await asyncio.get_running_loop().create_future()

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.run(work)
    assert asked == [True]


def test_before_there_is_something_to_stop_the_first_ends_it() -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.get_running_loop().create_future()

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.run(work)


def test_what_ends_and_waits_for_a_thread_is_left_by_one_more() -> None:
    async def clean_up() -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            signal.raise_signal(signal.SIGINT)
            return "nobody was heard while it cleaned up"

    async def end() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))
        return "nobody was heard after its end"

    for work in (clean_up, end):
        with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
            interrupts.run(work)


def test_another_thread_leaves_signals_alone() -> None:
    seen = []

    def fit() -> None:
        async def work() -> object:
            return signal.getsignal(signal.SIGINT)

        with Interrupts() as interrupts:
            seen.append(interrupts.run(work))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert seen == [before]


def test_in_a_running_loop_as_of_a_notebook_it_runs_beside_and_takes_signals() -> None:
    async def work() -> str:
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        interrupts.stop = lambda: stopped.set_result("kept")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await stopped

    async def cell() -> str:
        return interrupts.run(work)  # as a cell calls `fit`, without await

    with Interrupts() as interrupts:
        assert asyncio.run(cell()) == "kept"
