"""Everything that must pass, in lanes side by side: two start programs and mostly wait, two compute.

A lane runs its commands one after the other and shows what each said when it ended. The first that fails ends
all lanes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Command = Sequence[str]

# All would share one cache. Ten minutes are against what hangs: a busy PC takes long for a test.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=600", "--durations=10")
DECIDING = ("tests/unit", "tests/properties")
WAITING = ("tests/integration", "tests/browser")
LEARNING = ("tests/integration/test_demo.py", "tests/integration/test_convergence.py")  # they compute, too


def leave_out(paths: Command) -> Command:
    return tuple(f"--ignore={each}" for each in paths)


def benchmark(name: str) -> Command:
    return (sys.executable, "-m", "benchmarks.run", name, "--quick", "--json")


LANES: dict[str, list[Command]] = {
    "waits": [
        (*PYTEST, *WAITING, *leave_out(LEARNING)),
        *map(benchmark, ("allreduce", "quality", "gallery")),
    ],
    "measures": [
        *map(benchmark, ("soak", "recovery", "pipeline", "dashboard", "memory")),
        (*PYTEST, *LEARNING),
    ],
    "decides": [
        ("scripts/check",),
        ("scripts/docs",),
        (*PYTEST, *DECIDING),
        *map(benchmark, ("plan", "noise", "trust", "hub")),
    ],
    "computes": [
        (*PYTEST, *leave_out(DECIDING + WAITING)),
        *map(benchmark, ("stages", "size", "capture", "families")),
    ],
}
# They let the others go first, who mostly wait; not by more, or a busy PC would leave them nothing at all.
PATIENT, NICENESS = {"decides", "computes"}, 5


class Lanes:
    """What runs now, and why it ended; what each command says lies in a folder until then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._is_over = False
        self.failed = ""

    def run(self, name: str, commands: Sequence[Command]) -> None:
        """Run the commands of a lane until one fails."""
        for command in commands:
            began_at = time.monotonic()
            path = self._folder / f"{name}.txt"
            if not self._start(name, command, path):
                return
            exit_code = self._running[name].wait()
            words = " ".join(command).removeprefix(f"{sys.executable} -m ")
            ended = f"{name}: {words}: exit code {exit_code} after {time.monotonic() - began_at:.0f} s"
            with self._lock:
                del self._running[name]
                print(f"{path.read_text(errors='replace')}{ended}", flush=True)
                if exit_code and not self._is_over:
                    self.failed = ended
            if exit_code:
                self.end()

    def _start(self, name: str, command: Command, path: Path) -> bool:
        with self._lock, path.open("wb") as file:
            if not self._is_over:
                self._running[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    # Lanes share two cores: a second thread of one would only take time from another.
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                    start_new_session=True,  # so that what a command started ends with it
                )
                if name in PATIENT:
                    os.setpriority(os.PRIO_PROCESS, self._running[name].pid, NICENESS)
            return not self._is_over

    def end(self) -> None:
        """End what runs, and start nothing more."""
        with self._lock:
            self._is_over = True
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    # Started in the background, a program is deaf to Ctrl-C, and so are all that it starts: tests send it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(LANES)) as pool:
        print(f"{len(LANES)} lanes; what they say so far is in {folder}", flush=True)
        lanes = Lanes(Path(folder))
        try:
            list(pool.map(lanes.run, LANES, LANES.values()))
        finally:
            lanes.end()
    print(f"failed: {lanes.failed}" if lanes.failed else "everything passed", flush=True)
    return 1 if lanes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
