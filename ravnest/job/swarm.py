"""A swarm for one job: the hub in this process, peers as programs of their own, here on this PC.

The peers run the same command as a provider's PC would, `ravnest join`, and are told what hardware to claim.
Driven by the requester's script and by the command `ravnest train`.
"""

import asyncio
import contextlib
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]
from torch import Tensor

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

logger = logging.getLogger(__name__)

LOCAL_PLAN = PlanConfig(
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
        self._kill()

    @property
    def processes(self) -> Mapping[NodeId, int]:
        """The ids of the peers' processes, while a job is trained."""
        return {name: process.pid for name, process in self._processes.items()}

    def fit(self, job: Job) -> Result:
        """Train a job to its end."""
        return asyncio.run(self._fit(job))

    async def _fit(self, job: Job) -> Result:
        keys, secret = new_keys(), os.urandom(SECRET_BYTES)
        server = Server(Token((), keys.public, secret), self._hear)
        pauses = random.SystemRandom()
        async with ZeroMqTransport(keys, pauses, _HERE, admit=server.admit) as transport:
            token = Token((transport.address,), keys.public, secret)
            async with self._peers(write_token(token)):
                given = await asyncio.to_thread(_prepare, job, self._plan, len(self._hardware))
                async with self._watched(server):
                    finish, contents = await server.run(transport, given.owner, given.job)
        return _assemble(job, given.captured, finish, contents)

    @contextlib.asynccontextmanager
    async def _peers(self, token: str) -> AsyncIterator[None]:
        """Start the peers; in the end see them go, or make them."""
        self._processes = {}
        try:
            for index, hardware in enumerate(self._hardware, 1):
                name = NodeId(f"node{index}")
                self._processes[name] = await _start_peer(token, name, hardware, len(self._hardware))
            yield
        except BaseException:
            self._kill()
            raise
        finally:
            running = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
            _, late = await asyncio.wait(running, timeout=_END_SECONDS)
            self._kill()
            if late:
                await asyncio.wait(late)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _hear(self, news: News) -> None:
        self._tell(news)
        if isinstance(news, Waiting):
            self._server.fail(PlanError(news.reason))  # nobody else will come

    @contextlib.asynccontextmanager
    async def _watched(self, server: Server) -> AsyncIterator[None]:
        """End the job when no peer is left."""
        self._server = server

        async def watch() -> None:
            for process in self._processes.values():
                await process.wait()
            server.fail(RavnestError("every peer has ended before the job was done; see what they said"))

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def local(
    nodes: int | Sequence[Hardware] = 4,
    *,
    plan: PlanConfig = LOCAL_PLAN,
    tell: Callable[[News], None] = narrate,
) -> LocalSwarm:
    """Return a swarm of so many peers on this PC, which share its memory, or of peers with this hardware."""
    if isinstance(nodes, int):
        if nodes < 1:
            raise ConfigError(f"nodes is {nodes}; give a whole number, 1 or more")
        share = _MEMORY_SHARE * psutil.virtual_memory().available / nodes
        nodes = [Hardware(share)] * nodes
    return LocalSwarm(tuple(nodes), plan, tell)


async def _start_peer(
    token: str, name: NodeId, hardware: Hardware, num_peers: int
) -> asyncio.subprocess.Process:
    options = {
        "--name": name,
        "--memory": f"{hardware.memory_bytes} B",
        "--flops": f"{hardware.flops_per_second} FLOP/s" if hardware.flops_per_second else None,
        "--listen": _HERE,
        "--bandwidth": _LOCAL_RATE,
        "--latency": _LOCAL_LATENCY,
        "--patience": _PATIENCE,
    }
    arguments = [part for key, value in options.items() if value is not None for part in (key, value)]
    threads = str(max(1, (os.cpu_count() or 1) // num_peers))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ravnest", "join", "--quiet", *arguments, token),
        env={"OMP_NUM_THREADS": threads, **os.environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    captured: Captured
    owner: JobOwner
    job: JobGiven


def _prepare(job: Job, plan: PlanConfig, num_nodes: int) -> _Given:
    """Capture and measure the model; this takes seconds and runs the requester's code."""
    if job.precision != "fp32":
        raise ConfigError(f"precision {job.precision} comes with the next version; leave it out")
    captured = job.capture()
    for note in captured.notes:
        logger.warning("note: %s", note)
    num_samples = len(job.samples)
    num_batches = job.epochs * -(-num_samples // job.batch_size)
    optimizer = job.settings(captured, num_batches)
    config = replace(plan, optimizer=_recipe(job, optimizer), predict_weights=optimizer.predicts)
    settings = JobSettings(
        num_samples=num_samples,
        num_validation=0 if job.val_samples is None else len(job.val_samples),
        batch_size=job.batch_size,
        epochs=job.epochs,
        rates=tuple(optimizer.learning_rate * factor for factor in factors(job.rates, num_batches)),
        seed=job.seed,
        average_every=job.average_every if isinstance(job.average_every, int) else None,
        expected_nodes=num_nodes,
    )
    profile = measure(captured.blueprint, job.batch_size)
    training = Training(optimizer, job.batch_size, config.activations, config.gradients)
    return _Given(captured, JobOwner(job, captured, training), JobGiven(profile, config, settings, now=0.0))


def _recipe(job: Job, settings: OptimizerSettings) -> Recipe:
    """Return what the planner takes the optimizer for: the hungriest of those that are used."""
    if isinstance(job.optimizer, Recipe):
        return job.optimizer
    rules = [group.rule for group in settings.groups]
    if any(isinstance(rule, Adam) for rule in rules):
        return Recipe.NADAM if any(isinstance(rule, NAdam) for rule in rules) else Recipe.ADAM
    if any(isinstance(rule, Muon) for rule in rules):
        return Recipe.MUON
    has_momentum = any(isinstance(rule, Sgd) and rule.momentum for rule in rules)
    return Recipe.MOMENTUM if has_momentum else Recipe.SGD


def _assemble(job: Job, captured: Captured, finish: Finish, contents: Sequence[bytes]) -> Result:
    state: dict[str, Tensor] = {}
    for part, content in zip(finish.parts, contents, strict=True):
        stage = slice_blueprint(captured.blueprint, part.start, part.stop)
        state |= from_safetensors(content, stage)
    history = tuple(_report(entry) for entry in finish.history)
    return Result(job.model, captured.blueprint, state, history)


def _report(entry: EpochDone | Evaluated) -> dict[str, float]:
    if isinstance(entry, EpochDone):
        numbers = {"num_samples": entry.num_samples, "num_dropped": entry.num_dropped, "loss": entry.loss}
    else:
        found = {"loss": entry.loss, **dict(entry.metrics)}
        numbers = {f"val_{name}": value for name, value in found.items()}
    given = {name: float(value) for name, value in numbers.items() if value is not None}
    return {"epoch": float(entry.epoch), **given}
