"""A swarm for one job: the hub in this process, peers as programs of their own, here on this PC.

The peers run the same command as a provider's PC would, `ravnest join`, and are told what hardware to claim.
Driven by the requester's script and by the command `ravnest train`.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import psutil

from ravnest.config import Averaging, PlanConfig, WireFormat
from ravnest.config import Optimizer as Recipe
from ravnest.engine.optimizers import Adam, Muon, NAdam, OptimizerSettings, Sgd
from ravnest.engine.training import Training
from ravnest.errors import ConfigError, PlanError, RavnestError
from ravnest.hub.events import EpochDone, Evaluated, Finish, JobGiven, JobSettings, News, Waiting
from ravnest.hub.news import show_news
from ravnest.hub.server import Server
from ravnest.job.job import Job
from ravnest.job.owner import JobOwner
from ravnest.job.rates import factors
from ravnest.job.result import Result
from ravnest.model.capture import Captured
from ravnest.model.flat import from_safetensors
from ravnest.model.line import slice_blueprint
from ravnest.model.measure import measure
from ravnest.net.identity import SECRET_BYTES, Token, new_keys, write_token
from ravnest.net.zeromq import ZeroMqTransport
from ravnest.plan.types import NodeId

_EXACT = PlanConfig(
    activations=WireFormat.FP32,  # on one PC bytes cost nothing
    gradients=WireFormat.FP32,
    deltas=WireFormat.FP32,
    averaging=Averaging.BLOCKING,
)
_HERE = "tcp://127.0.0.1:*"
_LOCAL_RATE = "1 GB/s"
_LOCAL_LATENCY = "100 us"
_PATIENCE = "10 s"
_END_SECONDS = 5.0
_MEMORY_SHARE = 0.5  # of what is free, for all peers together


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a peer claims to have; what is left out it measures."""

    memory_bytes: float
    flops_per_second: float | None = None


def narrate(news: News) -> None:
    """Say on stderr, in one line, what happened."""
    sys.stderr.write(show_news(news) + "\n")


class LocalSwarm:
    """Peers on this PC. Use it as a context manager; leaving it ends them."""

    def __init__(self, nodes: Sequence[Hardware], plan: PlanConfig, tell: Callable[[News], None]) -> None:
        self._hardware = nodes
        self._plan = plan
        self._tell = tell
        self._processes: dict[NodeId, asyncio.subprocess.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    @property
    def processes(self) -> Mapping[NodeId, int]:
        """The ids of the peers' processes, while a job is trained."""
        return {name: process.pid for name, process in self._processes.items()}

    def fit(self, job: Job) -> Result:
        """Train a job to its end."""
        return asyncio.run(self._fit(job))

    async def _fit(self, job: Job) -> Result:
        keys, secret = new_keys(), os.urandom(SECRET_BYTES)
        door = _Door()
        async with ZeroMqTransport(keys, random.Random(secret), _HERE, admit=door.admit) as transport:
            token = Token((transport.address,), keys.public, secret)
            async with self._peers(write_token(token)):
                captured = await asyncio.to_thread(job.capture)
                given, owner = _prepare(job, captured, self._plan, len(self._hardware))
                server = Server(token, owner, self._hear)
                door.server = self._server = server
                watching = asyncio.create_task(self._watch())
                try:
                    finish, contents = await server.run(transport, given)
                finally:
                    watching.cancel()
        return _assemble(job, captured, finish, contents)

    def _hear(self, news: News) -> None:
        self._tell(news)
        if isinstance(news, Waiting) and len(self._processes) == len(self._hardware):
            self._server.fail(PlanError(news.reason))  # nobody else will come

    async def _watch(self) -> None:
        """End the job when no peer is left."""
        for process in self._processes.values():
            await process.wait()
        self._server.fail(RavnestError("every peer has ended before the job was done; see what they said"))
