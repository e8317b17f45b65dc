"""Peers that a hub starts on its own PC, and the port it listens at.

The port is bound before a model is captured, so that a taken port is found early.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from ravnest.config import TIMEOUTS, CompileMode, ProgramTimeouts
from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.net.identity import is_everywhere, split_address, write_address


def claim_port(address: str) -> str:
    """Return the address with a free port if it left that open; raise ConfigError if it cannot be had."""
    host, port = split_address(address)
    place = None if is_everywhere(host) else host
    try:
        found = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as tried:
            if os.name == "posix":  # elsewhere this would let two share a port
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(found[4])
            return write_address(host, tried.getsockname()[1])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        fix = "choose another port or stop who has it, and an address of this PC"
        raise ConfigError(f"cannot listen at {host}:{port}: {reason}; {fix}") from None


HERE = "tcp://127.0.0.1:*"
_RATE = "1 GB/s"
_LATENCY = "100 us"
_MEMORY_SHARE = 0.5  # of what is free, for all peers together
_GPU_SHARE, _CONTEXT_BYTES = 0.9, 6e8  # of a GPU: seldom anything else runs there


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a peer claims to have; it measures the rest. An emulated peer is as slow as it claims."""

    memory_bytes: float
    flops_per_second: float | None = None
    emulated_flops_per_second: float | None = None
    device: str = "cpu"
    compile_mode: CompileMode = CompileMode.AUTO
    is_fenced: bool = True  # its compute is a process of its own


def share_memory(num_peers: int, device: str = "cpu") -> tuple[Hardware, ...]:
    """Return the hardware of so many peers that share what memory this PC, or its GPUs, have free.

    With "cuda" they share all GPUs, in turn; with "cuda:1" this one.
    """
    if isinstance(num_peers, bool) or num_peers < 1:
        raise ConfigError(f"nodes is {num_peers}; give a whole number, 1 or more")
    if not device.startswith("cuda"):
        share = _MEMORY_SHARE * psutil.virtual_memory().available / num_peers
        return (Hardware(share, device=device),) * num_peers
    return tuple(_share_gpus(num_peers, device))


def _share_gpus(num_peers: int, device: str) -> list[Hardware]:
    import torch  # a hub whose peers compute on the CPU does not ask for GPUs

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = [f"cuda:{number}" for number in range(num_gpus)]
    chosen = known if device == "cuda" else [name for name in known if name == device]
    if not chosen:
        raise ConfigError(f'device is "{device}", but torch sees {", ".join(known) or "no GPU"} on this PC')
    places = [chosen[number % len(chosen)] for number in range(num_peers)]
    free = {name: float(torch.cuda.mem_get_info(name)[0]) for name in set(places)}
    # A program takes some of its GPU beside its tensors: its context, and code.
    return [
        Hardware(_GPU_SHARE * free[name] / places.count(name) - _CONTEXT_BYTES, device=name)
        for name in places
    ]


class LocalPeers:
    """The processes of the peers on this PC."""

    def __init__(self, hardware: Sequence[Hardware], timeouts: ProgramTimeouts = TIMEOUTS.program) -> None:
        self._timeouts = timeouts
        self.hardware = tuple(hardware)
        self._processes: dict[NodeId, asyncio.subprocess.Process] = {}

    @property
    def processes(self) -> Mapping[NodeId, int]:
        """Their ids by the peers' names, while they run."""
        return {name: process.pid for name, process in self._processes.items()}

    @contextlib.asynccontextmanager
    async def running(self, token: str) -> AsyncIterator[None]:
        """Start the peers; at the end wait until they end, then kill the rest."""
        self._processes = {}
        try:
            for index, hardware in enumerate(self.hardware, 1):
                name = NodeId(f"node{index}")
                self._processes[name] = await _start(token, name, hardware, len(self.hardware))
            yield
        except BaseException:
            self.kill()
            raise
        finally:
            running = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
            _, late = (
                await asyncio.wait(running, timeout=self._timeouts.local_end_seconds) if running else ((), ())
            )
            self.kill()
            if late:
                await asyncio.wait(late)

    async def all_ended(self) -> None:
        """Return when all processes have ended."""
        for process in self._processes.values():
            await process.wait()

    async def first_ended(self) -> NodeId:
        """Return the name of the first whose process has ended."""
        waiting = {asyncio.create_task(each.wait()): name for name, each in self._processes.items()}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return waiting[done.pop()]
        finally:
            for task in waiting:
                task.cancel()

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


async def _start(token: str, name: NodeId, hardware: Hardware, num_peers: int) -> asyncio.subprocess.Process:
    emulated = hardware.emulated_flops_per_second
    claimed = hardware.flops_per_second or emulated
    options = {
        "--name": name,
        "--memory": f"{hardware.memory_bytes} B",
        "--flops": f"{claimed} FLOP/s" if claimed else None,
        "--emulate": f"{emulated} FLOP/s" if emulated else None,
        "--device": hardware.device,
        "--compile": hardware.compile_mode,
        "--compute": None if hardware.is_fenced else "thread",
        "--listen": HERE,
        "--bandwidth": _RATE,
        "--latency": _LATENCY,
        "--on-battery": "go",  # the requester knows
    }
    arguments = [part for key, value in options.items() if value is not None for part in (key, value)]
    threads = str(max(1, (os.cpu_count() or 1) // num_peers))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # The hub answers once it has captured the model: that takes a busy PC minutes.
        *("-m", "ravnest", "join", "--quiet", "--hub-process", str(os.getpid()), *arguments),
        env={"OMP_NUM_THREADS": threads, **os.environ, "RAVNEST_TOKEN": token},  # unseen by `ps`
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        # Ctrl-C is for the hub, which then lets the peers finish.
        start_new_session=os.name == "posix",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
