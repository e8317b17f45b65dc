"""Everything that must pass, in six lanes side by side: a free lane takes the next command, long ones first.

So two cores are busy to the end. Each command is shown with what it said, its time and its seconds of a core
when it has ended. The first that fails ends all; with --go-on the others go on, and all that failed is named.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Command = Sequence[str]

# All would share one cache. Ten minutes are against what hangs: a busy PC takes long for a test.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=600")
LEARNING = ("tests/integration/test_demo.py", "tests/integration/test_convergence.py")  # they compute, too
ATTACKS = ("tests/attacks/test_programs.py",)  # a liar is waited for, which costs nothing
# They make networks of the same addresses, so one after the other.
NETWORKS = tuple(
    str(each)
    for each in sorted(Path("tests/integration").glob("*.py"))
    if "support.as_root" in each.read_text()
)


def leave_out(paths: Command) -> Command:
    return tuple(f"--ignore={each}" for each in paths)


def benchmark(name: str) -> Command:
    return (sys.executable, "-m", "benchmarks.run", name, "--quick", "--json")


# Benchmarks in no list are only loaded, by tests/unit/test_scenarios.py. Tests try what some of them measure:
# trust lie by lie in tests/attacks; finetune, convergence, stores and texts in tests/integration.

# Programs that mostly wait for each other, the longest first.
PROGRAMS: list[Command] = [
    (*PYTEST, "tests/integration", *leave_out((*LEARNING, *NETWORKS))),
    (*PYTEST, *NETWORKS),
    benchmark("soak"),
    (*PYTEST, *LEARNING, "tests/browser"),
    (*PYTEST, *ATTACKS),
    *map(
        benchmark, ("recovery", "pipeline", "allreduce", "quality", "gallery", "dashboard", "memory", "size")
    ),
]
# These compute all the time. Everything that is in no other command is in the first of their tests.
SUITES = ("tests/stages", "tests/unit", "tests/properties")
COMPUTING: list[Command] = [
    ("scripts/check",),
    (*PYTEST, *leave_out((*SUITES, *ATTACKS, "tests/integration", "tests/browser"))),
    *((*PYTEST, each) for each in SUITES),
    ("scripts/docs",),
    (sys.executable, "-m", "studies.run", "all", "--quick", "--json"),
    *map(benchmark, ("plan", "families", "capture", "noise", "stages", "hub")),
]
NUM_LANES = 6  # for two cores: most programs wait for each other half of their time
# They let the others go first, who mostly wait; not by more, or a busy PC would leave them nothing at all.
NICENESS = 5


class Lanes:
    """What runs now, and why it ended; what each command says lies in a folder until then."""

    def __init__(self, folder: Path, *, goes_on: bool = False) -> None:
        self._folder, self._goes_on = folder, goes_on
        self._lock = threading.Lock()
        self._left = (deque(PROGRAMS), deque(COMPUTING))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._is_over = False
        self.failed: list[str] = []

    def run(self, lane: int) -> None:
        """Run commands until none is left or one has failed; every other lane prefers those that compute."""
        while (command := self._take(lane % 2)) is not None:
            began_at = time.monotonic()
            path = self._folder / f"{lane}.txt"
            if not self._start(lane, command, path):
                return
            _, status, used = os.wait4(self._running[lane].pid, 0)
            exit_code = os.waitstatus_to_exitcode(status)
            words = " ".join(command).removeprefix(f"{sys.executable} -m ")
            ended = f"{words}: exit code {exit_code} after {time.monotonic() - began_at:.0f} s"
            with self._lock:
                self._running.pop(lane).returncode = exit_code
                cpu = f"{used.ru_utime + used.ru_stime:.0f} s of a core"
                print(f"{path.read_text(errors='replace')}{ended}, {cpu}", flush=True)
                if exit_code and not self._is_over:
                    self.failed.append(ended)
            if exit_code and not self._goes_on:
                self.end()

    def _take(self, kind: int) -> Command | None:
        with self._lock:
            left = self._left[kind] or self._left[1 - kind]
            return left.popleft() if left else None

    def _start(self, lane: int, command: Command, path: Path) -> bool:
        # Lanes share two cores: a second thread of one would only take time from another. And a hundred
        # programs need not compile the package again where the environment says that nobody keeps bytecode.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self._lock, path.open("wb") as file:
            if not self._is_over:
                self._running[lane] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # so that what a command started ends with it
                )
                if command in COMPUTING:
                    os.setpriority(os.PRIO_PROCESS, self._running[lane].pid, NICENESS)
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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_LANES) as pool:
        print(f"{NUM_LANES} lanes; what they say so far is in {folder}", flush=True)
        lanes = Lanes(Path(folder), goes_on="--go-on" in sys.argv[1:])
        try:
            list(pool.map(lanes.run, range(NUM_LANES)))
        finally:
            lanes.end()
    print("\n".join(f"failed: {each}" for each in lanes.failed) or "everything passed", flush=True)
    return 1 if lanes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
