"""`ravnest hub` as a program of its own that suffers a fault at a moment named by what happens in it.

It is forked from a process that has torch loaded, and its folder is known before it is started, so that peers
can be told where it will be.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ravnest.hub.coordinator.events import Action, Event, Notify
from ravnest.hub.monitors.monitors import Watch
from ravnest.requester.run_folder import open_run

JOB = """
from tests.support.faults import make_job
job = make_job(**{options})
"""


@dataclass(frozen=True)
class Fault:
    """What happens to a hub when it has taken so many things of a kind, since it did those of another."""

    kind: type
    act: Callable[[Path], object]
    count: int = 1
    after: type | None = None

    def listen(self, folder: Path) -> Watch:
        """Return what hears the hub and acts."""
        num_seen, has_begun = 0, self.after is None

        def listen(event: Event, orders: tuple[Action, ...]) -> None:
            nonlocal num_seen, has_begun
            for thing in (event, *orders):
                inner = thing.notice if isinstance(thing, Notify) else getattr(thing, "message", thing)
                has_begun = has_begun or isinstance(inner, self.after or ())
                num_seen += has_begun and isinstance(inner, self.kind)
                if num_seen == self.count and isinstance(inner, self.kind):
                    self.act(folder)

        return listen


@dataclass(frozen=True)
class Ended:
    """How a hub ended: by which exit code or signal, after how long, and what it wrote."""

    code: int
    seconds: float
    answers: str
    said: str


class Listener(Protocol):
    """Hears a hub in its own process; it crosses to it with its fields."""

    def listen(self, folder: Path) -> Watch:
        """Return what hears every event with its orders."""


def kill_itself(_: Path) -> None:
    """Die without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself(_: Path) -> None:
    """Be stopped, as by `ravnest stop`."""
    os.kill(os.getpid(), signal.SIGINT)


class HubProgram:
    """A hub for a job of `tests.support.faults`, in a folder that it goes on in."""

    def __init__(self, place: Path, folder: Path, nodes: int, *, door: str = "", **job: Any) -> None:
        self._place, self._folder = place, folder
        self.door = door or _find_door()
        (place / "job.py").write_text(JOB.format(options=job))
        place_of_job = f"{place / 'job.py'}:job"
        options = ("--listen", self.door, "--nodes", str(nodes), "--folder", str(folder), "--json")
        self._words = ("hub", place_of_job, *options)
        self._context = multiprocessing.get_context("forkserver")

    def invite(self) -> str:
        """Return the invitation of the hub that will be started."""
        found = open_run(self._folder)
        return msgspec.structs.replace(found, addresses=(f"tcp://{self.door}",)).invitation

    def run(self, *options: str, fault: Fault | None = None, beside: Sequence[Listener] = ()) -> Ended:
        """Run it until it ends; all that listen count from its start."""
        files = [self._place / "hub-answers.txt", self._place / "hub-said.txt"]
        listeners = [*beside, *([] if fault is None else [fault])]
        # The process that it is forked from may be older than what the environment says now of a bucket.
        given = ((*self._words, *options), files, self._folder, listeners, dict(os.environ))
        process = self._context.Process(target=_run, args=given, daemon=True)
        began_at = time.monotonic()
        process.start()
        process.join()
        assert process.exitcode is not None
        texts = [file.read_text() for file in files]
        return Ended(process.exitcode, time.monotonic() - began_at, *texts)


def _find_door() -> str:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{door.getsockname()[1]}"


def _run(
    words: tuple[str, ...],
    files: list[Path],
    folder: Path,
    listeners: list[Listener],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    for number, path in enumerate(files, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    from ravnest.cli.common import CommandParts
    from ravnest.cli.main import program
    from ravnest.hub.service.server import HubParts

    heard = [each.listen(folder) for each in listeners]

    def watch(event: Event, orders: tuple[Action, ...]) -> None:
        for listen in heard:
            listen(event, orders)

    parts = HubParts(watch=watch if listeners else None)
    program(words, prog_name="ravnest", obj=CommandParts(hub=parts))
