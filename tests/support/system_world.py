"""A hub and its peers in one process on virtual time: the programs themselves, without threads and sockets.

What computes lives on the event loop and takes the virtual time it is told to. Keys, delays and the order of
everything follow from the seed, so a run is the same each time. `python -m tests.support.system_world`
writes the golden curves anew.
"""

import asyncio
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zmq.utils import z85

import ravnest as rv
from ravnest.config import Averaging, PlanConfig, SearchBudget
from ravnest.errors import LinkError, RavnestError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, JobGiven, Notify, Received, SendFields
from ravnest.hub.coordinator.notices import EpochDone, Evaluated, Notice, PlanFormed, WorkLost
from ravnest.hub.coordinator.planner import FormPlan, SearchPlanner
from ravnest.hub.service.event_log import EventStore
from ravnest.hub.service.server import HubParts, Server
from ravnest.ids import LeaseId, NodeId
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.stage.dry_run import Footprint, dry_run
from ravnest.model.stage.profile import count_flops
from ravnest.net.identity import SECRET_BYTES, KeyPair, Token, load_keys
from ravnest.net.memory import MemoryNetwork, MemoryTransport, Wire, run_virtual
from ravnest.net.transport import PeerId
from ravnest.peer.agent import Agent, Offer
from ravnest.peer.compute_protocol import (
    ComputeFailed,
    ComputeSetup,
    Delivered,
    FromCompute,
    ProviderLimits,
    ToCompute,
)
from ravnest.peer.stage_builder import StageBuilder, StageTools
from ravnest.peer.stage_host import SavedStage, StageHost, write_snapshot
from ravnest.plan.types import Node, Plan
from ravnest.protocol import messages
from ravnest.protocol.averaging import RoundCommit
from ravnest.protocol.membership import Fact
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.training import LeaseDone
from ravnest.requester.checkpoint_store import Checkpoints
from ravnest.requester.first_weights import find_first_weights
from ravnest.requester.live_texts import LiveTexts
from ravnest.requester.owner import JobOwner, Recorded
from ravnest.requester.prepare import PreparedJob
from ravnest.requester.prepare import prepare as prepare_job
from ravnest.requester.result import Result
from ravnest.requester.session import LOCAL_PLAN
from tests.support.inline import InlineExecutor

logger = logging.getLogger(__name__)

GOLDEN = Path(__file__).parents[1] / "golden" / "system.json"
# Memory is what the model needs, and no more; and there are two clusters.
PLAN = replace(
    LOCAL_PLAN, overhead_bytes=0.0, clusters=2, averaging=Averaging.OVERLAPPED, microbatch_seconds=0.0
)
SETTLE_SECONDS = 5.0
SPEED = 2e7  # FLOP/s at a speed of 1
QUICK = SearchBudget(clusters=120, quick_clusters=30, complete_nodes=0)  # enough for six nodes


class Post(MemoryTransport):
    """Shows the world each message on its way out; the world says after which seconds copies of it leave."""

    def __init__(self, world: "World", name: NodeId, keys: KeyPair, admit: Any = None) -> None:
        super().__init__(world.network, keys, Random(world.random.random()), name, admit=admit)
        self._world, self._name, self._peer = world, name, keys.peer
        self._later: set[asyncio.Task[None]] = set()

    @property
    def peer(self) -> PeerId:
        return self._peer  # asked for with every frame, and not quickly found

    async def send(self, to: PeerId, service: Any, header: bytes, buffers: Sequence[Any] = ()) -> None:
        for seconds in self._world.leave(self._name, to, header, buffers):
            if seconds:
                kept = [bytes(buffer) for buffer in buffers]
                task = self._loop.create_task(self._send_later(seconds, to, service, header, kept))
                self._later.add(task)
                task.add_done_callback(self._later.discard)
            else:
                await super().send(to, service, header, buffers)

    async def _send_later(self, seconds: float, to: PeerId, *message: Any) -> None:
        await asyncio.sleep(seconds)
        with suppress(LinkError):  # the other is gone by now
            await super().send(to, *message)

    async def __aexit__(self, *given: object) -> None:
        for task in self._later:
            task.cancel()
        await super().__aexit__(*given)


class InlineCompute:
    """Where the host of a peer lives on virtual time: one piece of work a turn, and it takes its time."""

    def __init__(
        self,
        watch: Callable[[ToCompute], None],
        note: Callable[[ToCompute, StageHost], None],
        before: Callable[[ToCompute | None, StageHost], None] = lambda *_: None,
    ) -> None:
        self._watch, self._note, self._before = watch, note, before
        self._frozen_until = 0.0
        self._items: deque[ToCompute] = deque()
        self._next: asyncio.Handle | None = None
        self._spent = 0.0  # seconds, by the piece of work under way
        self._is_busy = False
        self._closed = asyncio.Event()

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """See peer.compute_protocol.Compute."""
        self._loop = asyncio.get_running_loop()
        builder = StageBuilder(setup.limits, self._clock, self._spend, tools=CACHED_TOOLS)
        self._host = StageHost(builder, self._clock)
        self._setup, self._deliver = setup, deliver
        self._turn_at(self._loop.time())
        await self._closed.wait()

    def put(self, item: ToCompute) -> None:
        """Take an item, after the piece of work under way."""
        self._watch(item)
        self._items.append(item)
        if not self._is_busy:
            self._turn_at(self._loop.time())

    def freeze(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._frozen_until = self._loop.time() + seconds
        self._turn_at(self._frozen_until)

    def close(self) -> None:
        """Do nothing more."""
        self._closed.set()
        if self._next is not None:
            self._next.cancel()

    def _clock(self) -> float:
        return self._loop.time() + self._spent

    def _spend(self, seconds: float) -> None:
        self._spent += seconds

    def _turn_at(self, when: float) -> None:
        if self._next is not None:
            self._next.cancel()
        if not self._closed.is_set():
            self._next = self._loop.call_at(max(when, self._frozen_until), self._turn)

    def _turn(self) -> None:
        """Do one thing, and what is next when its time has passed."""
        self._is_busy, self._spent = False, 0.0
        try:
            is_idle = self._work()
        except RavnestError as error:
            self._deliver(ComputeFailed.of(error))
            self.close()
            return
        deadline = self._host.deadline
        if not is_idle:
            self._is_busy = True
            self._turn_at(self._clock())
        elif deadline is not None:
            self._turn_at(deadline)
        self._spent = 0.0

    def _work(self) -> bool:
        """Do what was asked for, else what the host has to do; return whether it has nothing."""
        self._before(self._items[0] if self._items else None, self._host)
        if self._items:
            item = self._items.popleft()
            self._send(self._host.handle(item))
            self._note(item, self._host)
            return False
        self._send(self._host.tick(self._clock()))
        work = self._host.next_work()
        self._send(work or ())
        return work is None

    def _send(self, found: Iterable[FromCompute | SavedStage]) -> None:
        """Let each item leave at the time it is ready."""
        for each in found:
            item = write_snapshot(self._setup.folder, each) if isinstance(each, SavedStage) else each
            self._loop.call_at(self._clock(), self._leave, item)

    def _leave(self, item: FromCompute) -> None:
        if not self._closed.is_set():
            self._deliver(item)


@dataclass(frozen=True)
class Pc:
    """What a peer of the world has."""

    memory_bytes: float
    speed: float = 1.0
    is_hidden: bool = False  # nobody can dial it


@dataclass(frozen=True)
class Ended:
    """What became of a run: a result, or the reason it waits; news with their virtual times."""

    result: Result | None
    told: tuple[tuple[float, Notice], ...]
    seconds: float
    counts: Counter[int]  # how often each sample was trained
    alive: tuple[NodeId, ...]

    @property
    def news(self) -> list[Notice]:
        """What people were told."""
        return [news for _, news in self.told]

    def of(self, kind: type) -> list[Any]:
        """Return the news of a kind."""
        return [news for news in self.news if isinstance(news, kind)]

    @property
    def plan(self) -> Plan:
        """The first plan."""
        return self.of(PlanFormed)[0].plan

    @property
    def losses(self) -> list[float]:
        """The training loss of each epoch."""
        return [news.loss for news in sorted(self.of(EpochDone), key=lambda news: news.epoch)]

    @property
    def validation(self) -> list[float]:
        """The validation loss after each epoch."""
        return [news.loss for news in self.of(Evaluated)]


class Ledger:
    """Counts, beside the hub's books, how often each sample was trained by whoever still matters."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._leases: dict[LeaseId, list[int]] = {}

    def note(self, event: Event, orders: Iterable[Action]) -> None:
        """Look at what happened to the hub and what it ordered."""
        match event:
            case Received(_, LeaseDone(lease=lease)) if not any(isinstance(each, Refusal) for each in orders):
                self.counts.update(self._leases.pop(lease))
        for order in orders:
            match order:
                case SendFields(lease=lease, is_evaluation=False, samples=samples):
                    self._leases[lease] = [sample for batch in samples for sample in batch]
                case Notify(WorkLost()):
                    self.counts.clear()


class Anchors:
    """What the owners of each segment hold after each round that committed, as digests by owner."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], dict[NodeId, str]] = {}  # by round and segment

    def note(self, name: NodeId, item: ToCompute, host: StageHost) -> None:
        """Look at a host that has just heard of a commit."""
        if host.stage is None or not isinstance(item, Delivered) or not isinstance(item.message, RoundCommit):
            return
        averager = host.stage.averager
        if averager.anchor_state.anchor_round != item.message.round_id:
            return
        for segment, averaged in averager.segments.items():
            digest = sha256(b"".join(x.numpy().tobytes() for x in averaged.anchors.values())).hexdigest()
            self.held.setdefault((item.message.round_id, segment), {}).setdefault(name, digest)


Watch = Callable[["World", NodeId, ToCompute], None]
Before = Callable[[NodeId, ToCompute | None, StageHost], None]
Leaving = Callable[["World", NodeId, NodeId, Message], Sequence[float]]
Hear = Callable[["World", Notice], None]


@dataclass
class World:
    """One job's hub, and peers that come and go."""

    job: rv.Job
    pcs: Sequence[Pc]
    plan: PlanConfig = PLAN
    wire: Wire = field(default_factory=Wire)
    seed: int = 0
    limit_seconds: float = 600.0
    checkpoint_every: float | None = None
    microbatches: int = 1  # that a batch is cut into; 0: as the hub likes
    watch: Watch = lambda *_: None
    before: Before = lambda *_: None  # node, what it was asked for, its host: before each piece of work
    hear: Hear = lambda *_: None
    leaving: Leaving | None = None  # sender, receiver, message: when copies of it leave
    store: EventStore | None = None  # of the hub
    form_plan: FormPlan | None = None  # in place of the search
    guessed: tuple[Fact, ...] = ()  # by all peers
    keeper: Checkpoints | None = None  # of the owner
    reserve_seconds: float = 0.0  # of work that clusters have ahead

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(self.wire)
        self.random = Random(self.seed)
        self.ledger, self.anchors = Ledger(), Anchors()
        self._told: list[tuple[float, Notice]] = []
        self._bugs: list[Exception] = []
        self._keys: dict[NodeId, KeyPair] = {}
        self._names: dict[PeerId, NodeId] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._computes: dict[NodeId, InlineCompute] = {}
        self._away_seconds: float | None = None

    def run(self) -> Ended:
        """Train the job to its end, or until the limit."""
        result = run_virtual(self._run())
        if self._bugs:
            raise self._bugs[0]
        return Ended(result, tuple(self._told), self._told[-1][0], self.ledger.counts, self._alive_at_end)

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return asyncio.get_running_loop().time()

    @property
    def texts(self) -> LiveTexts:
        """What the clusters write, on the event loop of the world."""
        return LiveTexts(self.given, self._server.generation, self._server.record_texts, _inline)

    @property
    def alive(self) -> tuple[NodeId, ...]:
        """The peers whose process runs."""
        return tuple(self._tasks)

    def peer(self, name: str) -> PeerId:
        """Return who a node is on the network."""
        return self._keys[NodeId(name)].peer

    def join(self, pc: Pc) -> NodeId:
        """Start another peer."""
        name = NodeId(f"node{len(self._keys)}")  # the hub is one of them
        keys = self._know(name)
        self._tasks[name] = asyncio.create_task(self._live(name, keys, pc))
        return name

    def kill(self, name: NodeId, *, is_silent: bool = False) -> None:
        """End a peer's process: kill -9, or a power cut, of which nobody hears."""
        if task := self._tasks.pop(name, None):
            self.network.kill(self.peer(name), is_silent=is_silent)
            asyncio.get_running_loop().call_soon(task.cancel)

    def isolate(self, name: NodeId, seconds: float, *, resets: bool = True) -> None:
        """Let nothing pass to or from a peer for a while; then its connections are reset, or go on."""
        self.network.partition([self.peer(name)])

        def heal() -> None:
            self.network.partition()
            for other in self._keys if resets else ():
                self.network.cut(self.peer(name), self.peer(other))

        asyncio.get_running_loop().call_later(seconds, heal)

    def kill_hub(self, away_seconds: float) -> None:
        """End the hub's process; after a while one comes back that has its log."""
        self._away_seconds = away_seconds
        self.network.kill(self.peer("hub"))
        asyncio.get_running_loop().call_soon(self._main.cancel)

    def stop(self) -> None:
        """End the job early, as Ctrl-C does."""
        self._server.stop("enough")

    def freeze(self, name: NodeId, seconds: float) -> None:
        """Stop a peer's process for a while: it neither computes nor talks."""
        self._computes[name].freeze(seconds)
        self.isolate(name, seconds, resets=False)

    def leave(self, sender: NodeId, to: PeerId, header: bytes, buffers: Sequence[Any]) -> Sequence[float]:
        """Return when copies of a message leave."""
        if self.leaving is None:
            return (0.0,)
        return self.leaving(self, sender, self._names[to], messages.unpack(header, buffers))

    def _know(self, name: NodeId) -> KeyPair:
        keys = self._keys[name] = make_keys(f"{self.seed} {name}")
        self._names[keys.peer] = name
        return keys

    def _tell(self, news: Notice) -> None:
        self._told.append((self.now, news))
        here = set(self._server._admission.names.values())
        assert self._server._outbox.receivers <= here, "nothing is left of who has gone"
        if isinstance(news, Recorded):
            self.given.owner.record(news)
        self.hear(self, news)

    async def _run(self) -> Result | None:
        keys = self._know(NodeId("hub"))
        self._token = Token(("hub",), keys.public, bytes(SECRET_BYTES))
        given = self.given = prepare(self.job, self.plan, self.keeper)
        chosen = {"expected_nodes": len(self.pcs), "microbatches": self.microbatches}
        chosen |= {"checkpoint_every": self.checkpoint_every, "reserve_seconds": self.reserve_seconds}
        job = replace(given.job, settings=replace(given.job.settings, **chosen))
        parts = HubParts(SearchPlanner(QUICK, self.form_plan), watch=self.ledger.note)
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        is_over = False
        while not is_over:
            hub = Coordinator(job)
            for event in () if self.store is None else self.store.events():
                hub.apply(event)
            is_over = await self._serve(keys, job, hub, parts)
        return given.owner.result

    async def _serve(self, keys: KeyPair, job: JobGiven, hub: Coordinator, parts: HubParts) -> bool:
        """Run a hub until the job ends, or it is killed; return whether the job has ended."""
        is_first, self._away_seconds = not hub.has_begun, None
        facts = (self._token, self._tell, _inline)
        server = self._server = Server(*facts, store=self.store, hub=hub, parts=parts)
        try:
            async with Post(self, NodeId("hub"), keys, server.admit) as transport:
                for pc in self.pcs if is_first else ():
                    self.join(pc)
                try:
                    async with asyncio.timeout(self.limit_seconds):
                        await server.run(transport, self.given.owner, job)
                finally:
                    if self._away_seconds is None:
                        self._end()
        except TimeoutError:
            self.given.owner.result = None
        except asyncio.CancelledError:
            if self._away_seconds is None:
                raise
            self._main.uncancel()
            await asyncio.sleep(self._away_seconds)
            self.network.revive(keys.peer)
            return False
        return True

    def _end(self) -> None:
        self.ended_at = self.now
        self._alive_at_end = self.alive
        for name in self.alive:
            self.kill(name)

    async def _live(self, name: NodeId, keys: KeyPair, pc: Pc) -> None:
        node = Node(name, pc.memory_bytes, pc.speed * SPEED, 1e9, 1e9, self.wire.delay_seconds / 2)
        # Preflight frees nothing and sees a whole batch, so it asks for more memory than the plan does.
        limits = ProviderLimits(16 * pc.memory_bytes, emulated_flops_per_second=pc.speed * SPEED)
        node = replace(node, is_reachable=not pc.is_hidden)
        offer = Offer(node, limits, () if pc.is_hidden else (name,), guessed=self.guessed)
        compute = self._computes[name] = InlineCompute(
            lambda item: self.watch(self, name, item),
            partial(self.anchors.note, name),
            partial(self.before, name),
        )
        try:
            async with Post(self, name, keys) as transport:
                await Agent(self._token, keys, offer, compute, transport, InlineExecutor()).run()
        except RavnestError as error:
            logger.info("%s ends: %s", name, error)
        except Exception as error:  # a bug: the whole run shall fail of it
            self._bugs.append(error)
        self._tasks.pop(name, None)


async def _inline(function: Callable[..., Any], *given: object) -> Any:
    return function(*given)


@cache
def make_keys(name: str) -> KeyPair:
    """Return the keys that a name stands for, always the same."""
    return load_keys(z85.encode(sha256(name.encode()).digest()))


def _preflight(blueprint: Blueprint, batch_size: int, **limits: float) -> Footprint:
    return _preflight_once(write_blueprint(blueprint), batch_size, **limits)


def _count_flops(blueprint: Blueprint, batch_size: int) -> tuple[float, float, float]:
    return _count_flops_once(write_blueprint(blueprint), batch_size)


# Every world builds the same few stages again and again, and these two take longest of it.
@cache
def _preflight_once(content: bytes, batch_size: int, **limits: float) -> Footprint:
    return dry_run(read_blueprint(content), batch_size, **limits)


@cache
def _count_flops_once(content: bytes, batch_size: int) -> tuple[float, float, float]:
    return count_flops(read_blueprint(content), batch_size)


CACHED_TOOLS = StageTools(_preflight, _count_flops)


@cache
def _prepare_once(job: rv.Job, plan: PlanConfig) -> PreparedJob:
    return prepare_job(job, plan, 0, SETTLE_SECONDS)


def prepare(job: rv.Job, plan: PlanConfig, keeper: Checkpoints | None = None) -> PreparedJob:
    """Capture and measure a job, once for all worlds; each has an owner of its own."""
    given = _prepare_once(job, plan)
    facts = (job, given.captured, given.owner._training, given.owner.fingerprint, keeper)
    owner = JobOwner(*facts, first=find_first_weights(job, given.captured, None))
    return replace(given, owner=owner)


WIDTH, NUM_CLASSES, NUM_VALIDATION = 32, 4, 96
SMALL, LARGE, LAME = Pc(100e3), Pc(150e3), Pc(5.8e3, 0.5)
SIX = (SMALL, SMALL, SMALL, LARGE, LARGE, LAME)  # a cluster of three, one of two, and a spare


def make_points(num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return points around one centre per class, near enough to each other to be told apart only mostly."""
    centres = torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return {"x": centres[labels] + 1.2 * torch.randn(num_samples, 16, generator=generator), "y": labels}


def make_images(num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return small images with one bright quarter per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    images = torch.randn(num_samples, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += 0.8
    return {"x": images, "y": labels}


def make_mlp(num_layers: int = 5, dropout: float = 0.1) -> nn.Module:
    """Return layers of one width; with dropout every mask depends on the batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, WIDTH), nn.ReLU()]
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))


def make_cnn() -> nn.Module:
    """Return a small digits network: convolutions with batch norm, dropout before the head."""
    torch.manual_seed(0)
    channels, layers = (1, 8, 16, 16), []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, NUM_CLASSES)]
    return nn.Sequential(*layers, *head)


def cross_entropy(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["y"])


@cache
def make_job(kind: str, **options: Any) -> rv.Job:
    """Return a job of a few epochs with validation; the same one for the same options."""
    given = {"epochs": 3, "average_every": 4, "learning_rate": 1e-2, "optimizer": "adamw", **options}
    make = make_images if kind == "cnn" else make_points
    model = make_cnn() if kind == "cnn" else make_mlp(2 if kind == "tiny" else 5)
    num_samples = given.pop("num_samples", 384)
    validation = make(NUM_VALIDATION, 2) if given.pop("validates", True) else None
    return rv.Job(
        model, make(num_samples, 1), val_data=validation, batch_size=16, loss=cross_entropy, **given
    )


def golden_worlds() -> dict[str, World]:
    """Return the runs whose losses are kept."""
    images = [Pc(340e3, 5.0)] * 3 + [Pc(510e3, 5.0)] * 2 + [LAME]
    little = [Pc(90e3)] * 3 + [Pc(180e3)] * 2 + [LAME]
    return {
        "mlp": World(make_job("mlp"), SIX),
        "cnn": World(make_job("cnn", num_samples=256), images),
        "microbatches": World(make_job("mlp", num_samples=128, epochs=2), little, microbatches=0),
    }


def write_golden() -> None:
    """Write the golden curves anew."""
    curves = {}
    for name, world in golden_worlds().items():
        ended = world.run()
        curves[name] = {"losses": ended.losses, "validation": ended.validation}
    GOLDEN.write_text(json.dumps(curves, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_golden()
