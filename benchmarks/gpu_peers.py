"""Peers of a benchmark on one GPU: how they share it, and when enough was measured of them."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import say
from benchmarks.swarm import Record

_SETTLED_SECONDS = 23.0  # four slices, after all stages run compiled
_CODES = "ravnest/compiled"  # where peers keep compiled code, of the folder for caches
_MPS = "nvidia-cuda-mps-control"
_TRY_GPU = "import torch; torch.zeros(1, device='cuda').item()"


class StopRule:
    """Stops a swarm some seconds after all its stages run compiled, at the latest when its time is over."""

    def __init__(self, record: Record, device: str, seconds: float) -> None:
        self._record, self._seconds, self._is_gpu = record, seconds, device != "cpu"
        self._started, self.seen = time.monotonic(), dict[str, Any]()
        self._folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _CODES
        self._known = set(self._folder.glob("*.json"))  # what peers find there they take over at once

    def stop_in_time(self, swarm: Any, ended: threading.Event) -> None:
        """Look twice a second; a peer that has left ends it, too."""
        while not ended.wait(0.5):
            if (reason := self._find_reason(swarm, time.monotonic())) is not None:
                swarm.stop(reason)
                return

    def _find_reason(self, swarm: Any, now: float) -> str | None:
        times = self._record.leaf_times
        if not times:  # the first update may be late; then at least some slices are measured
            return None
        trained, worked = now - times[0][0], now - self._started
        if not all(map(psutil.pid_exists, swarm.processes.values())):
            self.seen["left"] = f"a peer left {trained:.0f} s after the first loss"
            return str(self.seen["left"])
        num_new = len(set(self._folder.glob("*.json")) - self._known)
        if "compiled_seconds" not in self.seen and num_new >= len(self._record.cluster.stages):
            self.seen["compiled_seconds"] = worked
        is_late = worked > self._seconds - (10 if self._is_gpu else 0)
        is_settled = worked > self.seen.get("compiled_seconds", math.inf) + _SETTLED_SECONDS
        is_enough = trained > (15 if self._is_gpu else 2) and (is_late or is_settled)
        return "measured long enough" if is_enough else None


@contextlib.contextmanager
def shared_gpu(device: str, num_peers: int) -> Iterator[bool]:
    """Let the work of several peers run on the GPU at once, not in turns, where its driver brings that."""
    if device != "cuda" or num_peers == 1 or shutil.which(_MPS) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **places}
        works = _succeeds([_MPS, "-d"], environment) and _succeeds(
            [sys.executable, "-c", _TRY_GPU], environment
        )
        say(f"the GPU's work is {'shared' if works else 'not shared, in turns'}")
        os.environ.update(places if works else {})
        try:
            yield works
        finally:
            for name in places:
                os.environ.pop(name, None)
            _succeeds([_MPS], environment, b"quit\n")


def _succeeds(command: list[str], environment: dict[str, str], given: bytes = b"") -> bool:
    try:
        done = subprocess.run(
            command,
            input=given,
            env=environment,
            timeout=30,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a program that stays would keep it open
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
