"""What this program takes of the PC at this moment: memory, cores, and the GPU it computes on.

A GPU is asked for by NVIDIA's own program, since torch may run in another process than this one.
"""

import shutil
import subprocess

import psutil  # type: ignore[import-untyped]

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.provider.lending_documents import GpuUse, MachineUse

_GPU_PROGRAM = "nvidia-smi"
_GPU_FIELDS = "name,utilization.gpu,memory.used,memory.total,temperature.gpu"
_MIB = 1 << 20


class UseReader:
    """Reads what is used since the last time; one thread at a time."""

    def __init__(self, device: str = "cpu", timeouts: ProgramTimeouts = TIMEOUTS.program) -> None:
        self._timeouts = timeouts
        self._gpu = device.partition(":")[2] or "0" if device.startswith("cuda") else None
        self._process = psutil.Process()
        self._known: dict[tuple[int, float], float] = {}  # CPU seconds by process
        self._read_at: float | None = None

    def read(self, now: float) -> MachineUse:
        """Return what is used now; shares are of the time since the last call."""
        memory, seconds = 0.0, 0.0
        found: dict[tuple[int, float], float] = {}
        for each in (self._process, *self._process.children(recursive=True)):
            try:
                with each.oneshot():
                    times, key = each.cpu_times(), (each.pid, each.create_time())
                    memory += each.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
            found[key] = times.user + times.system
            seconds += found[key] - self._known.get(key, 0.0 if self._known else found[key])
        since = self._read_at
        cores = None if since is None else max(0.0, seconds) / max(1e-3, now - since)
        shares = psutil.cpu_percent(interval=None) / 100.0
        self._known, self._read_at = found, now
        total = float(psutil.virtual_memory().total)
        num_cores = psutil.cpu_count() or 1
        return MachineUse(
            memory, total, cores, num_cores, None if since is None else shares, self._read_gpu()
        )

    def _read_gpu(self) -> GpuUse | None:
        program = None if self._gpu is None else shutil.which(_GPU_PROGRAM)
        if program is None:
            return None
        command = [
            program,
            f"--id={self._gpu}",
            f"--query-gpu={_GPU_FIELDS}",
            "--format=csv,noheader,nounits",
        ]
        try:
            done = subprocess.run(  # noqa: S603 - a number and our own words
                command, capture_output=True, timeout=self._timeouts.gpu_answer_seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return parse_gpu(done.stdout.decode(errors="replace")) if done.returncode == 0 else None


def parse_gpu(text: str) -> GpuUse | None:
    """Return what a line of NVIDIA's program says; what it does not know is None."""
    parts = [part.strip() for part in text.partition("\n")[0].rsplit(",", 4)]
    if len(parts) != 5:
        return None
    share, used, total, celsius = map(_number, parts[1:])
    if used is None or total is None:
        return None
    return GpuUse(parts[0], None if share is None else share / 100.0, used * _MIB, total * _MIB, celsius)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
