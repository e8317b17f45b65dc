"""A session trains one job after another: the hub runs in this process, peers run anywhere.

`Hub` is open to everybody with its invitation. `local` is a hub that starts its own peers on this PC. The
first Ctrl-C during a training ends it early and keeps the weights, the second ends it now. Only the main
thread receives signals; in other threads nothing is changed.
"""

import asyncio
import contextlib
import contextvars
import logging
import os
import random
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]

from ravnest.config import PlanConfig, WireChoice, WireFormat
from ravnest.errors import ConfigError, PlanError, RavnestError
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event
from ravnest.hub.coordinator.notices import (
    CaptureStep,
    CheckpointIsResult,
    DashboardOpened,
    HubListens,
    ModelCaptured,
    Notice,
    PlanFormed,
    Waiting,
)
from ravnest.hub.coordinator.planner import NOBODY
from ravnest.hub.service.admission import Admission
from ravnest.hub.service.guests import Guests, GuestsInMemory
from ravnest.hub.service.server import HUB_LIMITS, HUB_PARTS, HubParts, Server
from ravnest.hub.service.status import HubStream, StatusTracker
from ravnest.ids import NodeId
from ravnest.model.blueprint.program import PARAMETER
from ravnest.net.identity import Token, dialled_from_elsewhere, read_address
from ravnest.net.zeromq import ZeroMqTransport, allow_many_files
from ravnest.requester.callbacks import Callback, Callbacks, LagNote, Narrator
from ravnest.requester.generation import read_sampling
from ravnest.requester.hub_channel import (
    ChannelServer,
    CheckpointRequest,
    HubRequest,
    KickRequest,
    RevokeRequest,
    TextRequest,
)
from ravnest.requester.job import Job
from ravnest.requester.live_texts import LiveTexts, ResultTexts, Texts
from ravnest.requester.local_peers import HERE, Hardware, LocalPeers, claim_port, share_memory
from ravnest.requester.notebook_progress import find_notebook
from ravnest.requester.owner import Recorded
from ravnest.requester.prepare import PreparedJob, prepare
from ravnest.requester.readers import leave_if_reader
from ravnest.requester.result import Result, check_place
from ravnest.requester.run_folder import (
    MODEL,
    GuestFile,
    HubFile,
    check_unfinished,
    invite_guest,
    new_hub_file,
    open_run,
    write_hub_file,
)
from ravnest.requester.run_log import RunLog
from ravnest.requester.run_stores import RunStores, SharedPlaces, open_stores

if TYPE_CHECKING:  # a hub without a page loads no web server
    from ravnest.hub.service.web.dashboard import LiveDashboard

_Value = TypeVar("_Value")


class Interrupts:
    """Runs a coroutine; `stop` is what the first Ctrl-C calls, once there is something to stop."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self._num_taken = 0
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._before or signal.default_int_handler)

    def run(self, work: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value:
        """Run to the end, or raise KeyboardInterrupt."""

        async def main() -> _Value:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            return await work()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            run: Callable[[Coroutine[Any, Any, _Value]], _Value] = asyncio.run
        else:  # a notebook runs one here; ours gets a thread of its own
            run = _run_beside
        try:
            return run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _take(self, _signal: int, _frame: FrameType | None) -> None:
        self._num_taken += 1
        task = getattr(self, "_task", None)
        if task is None or task.done() or task.cancelling():  # it may wait for a thread that never ends
            raise KeyboardInterrupt
        if self._num_taken == 1 and self.stop is not None:
            self._loop.call_soon_threadsafe(self.stop)
        else:
            self._loop.call_soon_threadsafe(task.cancel)


def _run_beside(work: Coroutine[Any, Any, _Value]) -> _Value:
    """Run a coroutine in another thread to its end; signals are taken meanwhile."""
    with ThreadPoolExecutor(1, "ravnest") as pool:  # what it shows belongs to the cell that called
        return pool.submit(contextvars.copy_context().run, asyncio.run, work).result()


logger = logging.getLogger(__name__)

SWARM_PLAN = PlanConfig()
LOCAL_PLAN = PlanConfig(
    activations=WireChoice.FP32,  # on one PC bytes cost nothing
    gradients=WireChoice.FP32,
    deltas=WireFormat.FP32,
)
# Half the bytes: four stages of one GPU made 0.08 of a bare loop with fp32, 0.29 with 4.5 bits, compiled.
LOCAL_GPU_PLAN = replace(LOCAL_PLAN, activations=WireChoice.BF16, gradients=WireChoice.BF16)
_PORT = "0.0.0.0:7700"
_NEVER_SETTLES = 1e9  # seconds: a hub with a number of nodes waits for all of them
_STOPPED = "Ctrl-C: what is under way is finished; Ctrl-C again ends now and loses it"


class Hub:
    """The meeting place of a swarm: it invites peers, plans, serves data and keeps the result.

    It listens at HOST:PORT during `fit`; `public` is the address that others dial, if it differs. A `folder`
    keeps its identity, its log and its result, so that it invites with the same token again. `peers` start on
    this PC with each job, beside those that join. `tell` gets notices in place of stderr, or of what a
    notebook shows below its cell; `look` gets the status after every event. `dashboard` serves a page on this
    PC (True) or at HOST:PORT; its link is told. `store` is a PostgreSQL database for its log, `blobs` a
    bucket for its checkpoints, too (docs/stores.md). `parts` replaces the planner, timeouts and the like.
    """

    def __init__(  # noqa: PLR0913 - the front door: few give more than two of them
        self,
        listen: str = _PORT,
        *,
        public: str | Sequence[str] = (),
        folder: str | os.PathLike[str] | None = None,
        plan: PlanConfig = SWARM_PLAN,
        peers: Sequence[Hardware] = (),
        tell: Callback | None = None,
        look: Callable[[StatusTracker], None] | None = None,
        dashboard: bool | str = False,
        store: str = "",
        blobs: str = "",
        parts: HubParts = HUB_PARTS,
    ) -> None:
        self._shared = SharedPlaces.read(store, blobs)
        self._listen = read_address(listen, is_own=True)
        public = (public,) if isinstance(public, str) else public
        self._public = tuple(read_address(address) for address in public)
        self._folder = None if folder is None else Path(folder)
        self._plan = plan
        self._peers = LocalPeers(peers, parts.timeouts.program)
        is_asked = tell is not None or look is not None
        shown = None if is_asked else find_notebook(parts.timeouts.program)
        self._tell: Callback = tell or shown or Narrator(parts.timeouts.program)
        self._look = look if shown is None else shown.look
        self._shown: contextlib.AbstractContextManager[object] = shown or contextlib.nullcontext()
        self._parts, self._timeouts = parts, parts.timeouts
        self._is_open_to_others = True
        self._wishes: list[Callable[[Server], None]] = []  # of what the training under way is to do
        self._look_at_wishes: Callable[[], None] | None = None  # while a job is trained
        self._guests: Guests = GuestsInMemory() if self._folder is None else GuestFile(self._folder)
        self._dashboard_place = dashboard
        self._dashboard: LiveDashboard | None = None
        self._opened = contextlib.ExitStack()  # for as long as the hub is
        self.stream = HubStream()  # of every job that it fits
        self._file: HubFile | None = None
        self._texts: Texts | None = None  # of the job that is trained, or of the last result
        self._log = RunLog(parts.timeouts.program)

    def __enter__(self) -> Self:
        leave_if_reader()
        self._listen = claim_port(self._listen)
        addresses = self._public or dialled_from_elsewhere(self._listen)
        found = new_hub_file() if self._folder is None else open_run(self._folder)
        self._shared = self._shared.complete(found)
        self._file = msgspec.structs.replace(found, addresses=addresses)
        if self._folder is not None:
            self._opened.enter_context(self._log.writing(self._folder))
        self._open_dashboard()
        self._note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peers.kill()
        self._opened.close()
        if self._file and self._folder:
            with contextlib.suppress(ConfigError):  # its process has gone, anybody can see that
                write_hub_file(self._folder, msgspec.structs.replace(self._file, pid=0))

    @property
    def token(self) -> Token:
        """What a provider needs to join."""
        return self._open_file.token

    @property
    def invitation(self) -> str:
        """The token as the word to paste after `ravnest join`."""
        return self._open_file.invitation

    @property
    def dashboard(self) -> str | None:
        """The link to the hub's page, while the hub is open, if it has one."""
        return None if self._dashboard is None else self._dashboard.link

    @property
    def processes(self) -> Mapping[NodeId, int]:
        """The ids of the processes of its own peers, while a job is trained."""
        return self._peers.processes

    def fit(
        self,
        job: Job,
        *,
        nodes: int | None = None,
        out: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        resume: str | None = None,
    ) -> Result:
        """Train a job to its end; Ctrl-C once ends it early and keeps what was trained.

        Training begins with so many `nodes`. With 0 it begins when no node came for some seconds and their
        memory is enough. The weights go to `out`, a safetensors file or a folder, or into the hub's folder.
        Checkpoints lie there too; with `resume="auto"` training goes on from the last one, also after it was
        stopped or had ended, with more epochs. The weights of then are replaced in the end.
        """
        if resume not in (None, "auto"):
            raise ConfigError(f'resume is {resume!r}; give "auto", or leave it out to begin anew')
        if self._folder is not None and resume is None:
            check_unfinished(self._folder)
        place = out if out is not None or self._folder is None else self._folder / MODEL
        file = None if place is None else check_place(place, may_exist=resume is not None)
        nodes = len(self._peers.hardware) if nodes is None else nodes
        if isinstance(nodes, bool) or nodes < 0:
            raise ConfigError(f"nodes is {nodes}; give a whole number, 0 or more")
        kept_at = self._folder or (None if out is None else Path(out))
        key = b"" if self._folder is None else self._open_file.checkpoint_key
        places = (self._folder, self._open_file, self._shared, self._timeouts.store)
        stores = open_stores(*places, resumes=resume is not None)
        self._file = self._shared.remember_in(self._open_file)  # now that they are there
        self._note(job.name or "")
        with stores.open_checkpoints(kept_at, key) as keeper, job.reading():
            start = keeper.find() if resume else None
            for fault in keeper.faults:
                logger.warning("%s", fault)
            if start is None and file is not None:
                check_place(file)  # else a result would be replaced by one that does not go on from it
            deliver = None if file is None else stores.deliver(file, overwrite=start is not None)
            settle = _NEVER_SETTLES if nodes else self._timeouts.program.settle_seconds
            setup = partial(prepare, job, self._plan, nodes, settle, keeper, start, deliver)
            with Interrupts() as interrupts, self._shown:
                num_awaited = nodes if self._is_open_to_others else 0
                callbacks = [LagNote(job.optimizer), *callbacks]
                hear = Callbacks([self._tell, self._log.observe_notice, *callbacks], num_awaited, self.stop)
                self._wishes.clear()
                if start is not None and start.books.num_counted == (num_total := job.num_total):
                    given = setup()
                    if self._find_past(given, stores) is None:  # else its peers are to be told, too
                        hear(CheckpointIsResult(num_total, num_total))
                        return given.owner.keep_saved()
                return interrupts.run(lambda: self._fit(setup, hear, interrupts, stores))

    def generate(
        self, prompt: str | Sequence[int], *, is_chat: bool = False, **sampling: Any
    ) -> Iterator[str]:
        """Yield what the model of the job writes after a prompt, piece by piece; any thread may call it.

        While `fit` runs, the text comes from a running cluster, which trains on. After it, the result writes
        it on this PC. `sampling` is max_tokens, temperature, top_p and seed.
        """
        chosen = read_sampling(sampling)
        if self._texts is None:
            raise ConfigError(
                "there is no model to write with; generate while hub.fit(job) runs, or after it"
            )
        return self._texts.write(prompt, chosen, is_chat=is_chat, hear=lambda _: None)

    def stop(self, reason: str = "the hub was told to stop") -> None:
        """End the training under way early and keep what was trained; any thread may call it."""
        self._wish(lambda server: server.stop(reason))

    def checkpoint(self) -> None:
        """Write a checkpoint now; any thread may call it. A notice says what came of it."""
        self._wish(lambda server: server.checkpoint())

    def pause(self, is_paused: bool = True) -> None:
        """Pause the training, or go on with `pause(False)`; any thread may call it. Nodes stay and wait."""
        self._wish(lambda server: server.pause(is_paused))

    def invite(self, name: str, *, days: float | None = None, nodes: int | None = None) -> str:
        """Return a token for one guest, which you can withdraw alone: see `revoke`."""
        return invite_guest(self._guests, self._open_file, name, days, nodes)

    def revoke(self, name: str) -> None:
        """Withdraw the invitation of a guest; its nodes leave. The name of the hub's own is "everybody"."""
        number = self._guests.read().named(name).number
        self._guests.change(lambda guests: guests.revoke(name))
        self._wish(lambda server: server.send_guests_away(number, "its invitation was withdrawn"))

    def kick(self, node: str, reason: str = "the requester sent it away") -> None:
        """Send a node away, now and for good; its provider can join with another key until you `revoke`."""
        self._wish(lambda server: server.kick(NodeId(node), reason))

    def _check_here(self, node: str) -> None:
        """Refuse to send a node away that is not here."""
        here = sorted(self._watch.hub.membership)
        if node not in here:
            raise ConfigError(f"no node is called {node!r}; there are: {', '.join(here) or 'none'}")

    def _wish(self, wish: Callable[[Server], None]) -> None:
        """Have the hub's own thread do something, as soon as a job is trained."""
        self._wishes.append(wish)
        if self._look_at_wishes is not None:
            self._look_at_wishes()

    async def _fit(
        self, setup: Callable[..., PreparedJob], hear: Callbacks, interrupts: Interrupts, stores: RunStores
    ) -> Result:
        keys, pauses = self._open_file.keys, random.SystemRandom()
        allow_many_files()
        async with contextlib.AsyncExitStack() as open_things:
            self._begin_dashboard(open_things, hear)
            relay = self._parts.make_relay(self._timeouts.net) if self._is_open_to_others else None
            admission = Admission(
                self.token, relay, self._parts.version, hub_secret=keys.secret, guests=self._guests
            )
            limits = replace(HUB_LIMITS, timeouts=self._timeouts.net)
            transport = ZeroMqTransport(keys, pauses, self._listen, limits, admit=admission.admit)
            await open_things.enter_async_context(transport)
            if relay is not None:
                await open_things.enter_async_context(relay.listen(self._listen))
                hear(HubListens(self._listen))
            await open_things.enter_async_context(self._peers.running(self.invitation))
            given = await self._prepare(setup, hear)  # peers that dial now are answered; they join after it
            hear.add(given.owner.record, Recorded)
            past = await asyncio.to_thread(self._find_past, given, stores) if stores.resumes else None
            if past is not None and self._dashboard is not None:
                stores.replay(self._timeouts.hub, self._dashboard.replay)
            coordinator = Coordinator(given.job, self._timeouts.hub)
            self._watch = StatusTracker(coordinator) if past is None else past
            writing = stores.writing(is_new=past is None, with_checkpoints=given.job.books is None)
            store = open_things.enter_context(writing)
            hub = self._watch.hub
            open_things.callback(self.stream.subscribe(lambda event, actions: self._see(event, actions)))
            parts = replace(self._parts, watch=self.stream.publish, folder=self._parts.folder or self._folder)
            server = Server(
                self.token, hear, relay=relay, store=store, hub=hub, parts=parts, admission=admission
            )
            live = self._texts = LiveTexts(given, server.generation, server.record_texts)
            hear.add(live.sample)
            await asyncio.to_thread(live.check_prompts)
            async with self._watched(server, hear), self._heeding_wishes(server), self._open_to_readers(live):
                interrupts.stop = lambda: server.stop(_STOPPED)
                try:
                    ended = await server.run(transport, given.owner, given.job)
                finally:
                    self._texts = None
        result = given.owner.find_result(ended.is_best, hub.drops.found)
        self._texts = ResultTexts(given, result)
        return result

    async def _prepare(self, setup: Callable[..., PreparedJob], hear: Callbacks) -> PreparedJob:
        """Capture the model in a thread, so that heartbeats are answered meanwhile; tell of each step."""
        loop = asyncio.get_running_loop()
        started_at, name = loop.time(), self._open_file.job

        def tell(step: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, for Ctrl-C
                loop.call_soon_threadsafe(hear, CaptureStep(name, step))

        given = await asyncio.to_thread(partial(setup, tell=tell))
        blueprint = given.captured.blueprint
        num_parameters = sum(prod(entry.shape) for entry in blueprint.state if entry.kind == PARAMETER)
        hear(ModelCaptured(name, loop.time() - started_at, num_parameters, blueprint.num_positions))
        return _with_secret_draws(given)

    def _find_past(self, given: PreparedJob, stores: RunStores) -> StatusTracker | None:
        """Return the hub of the log if it was at this job; peers of its own are gone with it."""
        past = stores.find_past(given.job, self._timeouts.hub) if self._is_open_to_others else None
        if past is not None:
            given.owner.retell(past.hub.ledger.history)
        return past

    def _see(self, event: Event, orders: tuple[Action, ...]) -> None:
        self._watch.observe(event, orders)
        if self._dashboard is not None:
            self._dashboard.observe(self._watch, event, orders)
        if self._look is not None:
            self._look(self._watch)
        if self._parts.watch is not None:
            self._parts.watch(event, orders)

    @contextlib.asynccontextmanager
    async def _heeding_wishes(self, server: Server) -> AsyncIterator[None]:
        """Carry out wishes: later, because a callback is called within an event."""
        loop = asyncio.get_running_loop()

        def pass_on() -> None:
            while self._wishes:  # the server has begun: it runs up to its first wait before this
                self._wishes.pop(0)(server)

        def look() -> None:
            with contextlib.suppress(RuntimeError):  # the training has just ended
                loop.call_soon_threadsafe(pass_on)

        self._look_at_wishes = look
        look()
        try:
            yield
        finally:
            self._look_at_wishes = None

    @contextlib.asynccontextmanager
    async def _open_to_readers(self, live: LiveTexts) -> AsyncIterator[None]:
        """Let other programs of the requester ask for something; hub.json says where."""
        if self._folder is None:
            yield
            return

        def answer(asked: HubRequest) -> AsyncGenerator[tuple[int, str], None]:
            match asked:
                case TextRequest():
                    names = ("max_tokens", "temperature", "top_p", "seed")
                    sampling = read_sampling({name: getattr(asked, name) for name in names})
                    return live.stream(asked.prompt, sampling, is_chat=asked.is_chat)
                case RevokeRequest():
                    return _do_for_requester(partial(self.revoke, asked.name))
                case KickRequest():
                    self._check_here(asked.node)
                    return _do_for_requester(partial(self.kick, asked.node))
                case CheckpointRequest():
                    return _do_for_requester(self.checkpoint)

        channel = ChannelServer(self._open_file.keys.secret, answer, self._timeouts.program)
        async with channel.listening() as port:
            self._note(channel_port=port)
            try:
                yield
            finally:
                with contextlib.suppress(ConfigError):  # a full disk has its own sentence
                    self._note()

    @contextlib.asynccontextmanager
    async def _watched(self, server: Server, hear: Callbacks) -> AsyncIterator[None]:
        """Without other peers to wait for, end the job when ours are too few or gone."""
        if self._is_open_to_others:
            yield
            return

        def give_up(news: Notice) -> None:
            if isinstance(news, Waiting) and news.reason != NOBODY:  # of that `watch` hears
                server.fail(PlanError(news.reason))

        async def watch() -> None:
            await self._peers.all_ended()
            server.fail(RavnestError("every peer has ended before the job was done; see what they said"))

        async def watch_start() -> None:
            name = await self._peers.first_ended()
            if not has_plan:  # whose memory all of them are to share
                server.fail(RavnestError(f"{name} has ended before training began; see what it said"))

        has_plan: list[Notice] = []
        hear.add(give_up)
        hear.add(lambda news: has_plan.append(news) if isinstance(news, PlanFormed) else None)
        watching = [asyncio.create_task(each()) for each in (watch, watch_start)]
        try:
            yield
        finally:
            for each in watching:
                each.cancel()

    def _open_dashboard(self) -> None:
        if self._dashboard_place is False:
            return
        from ravnest.hub.service.web.actions import GuestActions, HubActions
        from ravnest.hub.service.web.dashboard import LiveDashboard

        place = "" if self._dashboard_place is True else read_address(self._dashboard_place, is_own=True)
        guests = GuestActions(
            invitation=lambda: self.invitation,
            invite=lambda name, days, nodes: self.invite(name, days=days, nodes=nodes),
            revoke=self.revoke,
            guests=self._guests.read,
        )
        others = guests if self._is_open_to_others else None
        offered = HubActions(self.stop, self.kick, self.checkpoint, self.pause, others)
        opened = LiveDashboard(place, offered, self._parts.planner, self._timeouts.program)
        self._dashboard = self._opened.enter_context(opened)

    def _begin_dashboard(self, open_things: contextlib.AsyncExitStack, hear: Callbacks) -> None:
        if self._dashboard is not None:
            self._dashboard.begin()
            open_things.callback(self._dashboard.end)
            hear(DashboardOpened(self._dashboard.link, self._dashboard.is_for_others))
            hear.add(self._dashboard.observe_notice)

    @property
    def _open_file(self) -> HubFile:
        if self._file is None:
            raise ConfigError("the hub is not open; use it as `with rv.Hub(...) as hub:`")
        return self._file

    def _note(self, job: str = "", channel_port: int = 0) -> None:
        """Write the hub's process, its job and where it hears its requester into the folder."""
        me, job = psutil.Process(), job or self._open_file.job
        found = msgspec.structs.replace(
            self._open_file, pid=me.pid, started_at=me.create_time(), job=job, channel_port=channel_port
        )
        self._file = found
        if self._folder is not None:
            write_hub_file(self._folder, found)


async def _do_for_requester(wish: Callable[[], None]) -> AsyncGenerator[tuple[int, str], None]:
    """Carry out a wish; there is nothing to say about it, or a sentence is raised."""
    wish()
    yield -1, ""


def _with_secret_draws(given: PreparedJob) -> PreparedJob:
    """Return a job whose lots no peer can foresee; the log has their seed."""
    settings = replace(given.job.settings, draw_seed=secrets.randbits(62))
    return replace(given, job=replace(given.job, settings=settings))


def local(
    nodes: int | Sequence[Hardware] = 4,
    *,
    device: str = "cpu",
    folder: str | os.PathLike[str] | None = None,
    plan: PlanConfig | None = None,
    tell: Callback | None = None,
    look: Callable[[StatusTracker], None] | None = None,
    dashboard: bool | str = False,
    parts: HubParts = HUB_PARTS,
) -> Hub:
    """Return a hub with so many peers on this PC, which share its memory, or with peers of this hardware.

    With `device="cuda"` the peers share its GPUs and their memory, with "cuda:1" this one.
    """
    peers = share_memory(nodes, device) if isinstance(nodes, int) else tuple(nodes)
    if plan is None:
        plan = LOCAL_GPU_PLAN if any(peer.device.startswith("cuda") for peer in peers) else LOCAL_PLAN
    hub = Hub(
        HERE, folder=folder, plan=plan, peers=peers, tell=tell, look=look, dashboard=dashboard, parts=parts
    )
    hub._is_open_to_others = False
    return hub
