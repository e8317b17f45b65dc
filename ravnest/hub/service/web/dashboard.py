"""The dashboard: of a hub at work, and of a run that has ended or whose hub is another program.

Beside a hub, its thread records and the web's thread shows. What is done per happening in the hub's event
loop is a few additions. A document is made there only while a page is open or somebody asks, and not more
often than pages allow. Else the log of a folder is read, and nothing else: one that grows is read on while a
page is open, a damaged one is shown up to the damage, with the reason.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from ravnest.config import TIMEOUTS, ProgramTimeouts, Timeouts
from ravnest.errors import ConfigError, StoreAway
from ravnest.hub.coordinator.events import Action, Event
from ravnest.hub.coordinator.notices import Notice
from ravnest.hub.coordinator.planner import SEARCH_PLANNER, Planner
from ravnest.hub.service.event_log import LogPlace, LogReplay
from ravnest.hub.service.status import StatusTracker
from ravnest.hub.service.web.actions import HubActions
from ravnest.hub.service.web.documents import BesideDocument, UpdateDocument
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.snapshot import HubFacts, RunReplica, UpdateCutter, make_document
from ravnest.hub.service.web.web_app import WebParts, make_run_site
from ravnest.hub.service.web.what_if import WhatIf, pose_what_if
from ravnest.plan.types import Node
from ravnest.web.pages import Pages
from ravnest.web.site import Site
from ravnest.web.web_server import WebServer, bind_address, is_for_others, make_gate, show_link


class LiveDashboard:
    """Open it beside a hub; `begin` and `end` frame each training, in the hub's event loop."""

    def __init__(
        self,
        address: str,
        hub: HubActions,
        planner: Planner = SEARCH_PLANNER,
        timeouts: ProgramTimeouts = TIMEOUTS.program,
    ) -> None:
        self._address = address
        bound = bind_address(address)
        self._gate = make_gate(bound, address)
        self._hub, self._timeouts = hub, timeouts
        self._planner = planner
        self._web = WebServer(bound, self._make_site, timeouts)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the hub, while it trains
        self._num_runs = 0
        self._recorder = RunRecorder(0)
        self._cutter = UpdateCutter(self._recorder)
        self._wall_offset: float | None = None
        self._is_changed = self._is_asked = False

    @property
    def link(self) -> str:
        """What to open in a browser; whoever has it can see and stop the run."""
        return show_link(self._gate, self._address)

    @property
    def is_for_others(self) -> bool:
        """Whether other PCs can reach it."""
        return is_for_others(self._address)

    def __enter__(self) -> Self:
        self._web.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._web.close()

    def begin(self) -> None:
        """Show a new run from now on; call it in the hub's event loop."""
        self._loop = asyncio.get_running_loop()
        self._num_runs += 1
        self._recorder = RunRecorder(self._num_runs)
        self._cutter = UpdateCutter(self._recorder)
        self._wall_offset = None
        self._note_change()

    def end(self) -> None:
        """Show the run as it ended; no more of it comes."""
        self._loop = None
        self._push(is_live=False)

    def replay(self, tracker: StatusTracker, event: Event, actions: tuple[Action, ...]) -> None:
        """Take what happened before the hub was started again."""
        self._recorder.replay(tracker, event, actions)

    def observe(self, tracker: StatusTracker, event: Event, actions: tuple[Action, ...]) -> None:
        """Take a happening."""
        if self._wall_offset is None:
            self._wall_offset = _wall_clock() - event.now
        self._recorder.observe(tracker, event, actions)
        self._note_change()

    def observe_notice(self, notice: Notice) -> None:
        """Take a notice."""
        self._recorder.observe_notice(notice)
        self._note_change()

    def _note_change(self) -> None:
        self._is_changed = True
        if self._is_asked:
            self._push(is_live=True)

    def _push(self, is_live: bool) -> None:
        began_at = _clock()
        facts = HubFacts(is_live, is_live, is_live and self._hub.guests is not None, self._wall_offset)
        update = self._cutter.cut(facts)
        self._is_changed = self._is_asked = False
        seconds = _clock() - began_at
        self._web.call(lambda pages: _receive(pages, update, seconds))

    async def _ask(self, always: bool) -> bool:
        """Ask the hub for an update; return whether there is a hub to ask. Called by the web's thread."""
        loop = self._loop
        if loop is None:
            return False
        with contextlib.suppress(RuntimeError):  # its loop has just ended
            loop.call_soon_threadsafe(self._answer, always)
            return True
        return False

    def _answer(self, always: bool) -> None:
        self._is_asked = True
        if (always or self._is_changed) and self._loop is not None:
            self._push(is_live=True)

    def _make_site(self) -> Site:
        pages = Pages(RunReplica(), self._ask, self._timeouts)
        return make_run_site(WebParts(self._gate, pages, self._hub, pose=self._pose, planner=self._planner))

    async def _pose(self, guest: Node) -> WhatIf | None:
        """Have the hub's thread gather the facts; without one, nothing changes them any more."""
        loop = self._loop
        if loop is None:
            return pose_what_if(self._recorder, guest)

        async def gather() -> WhatIf | None:
            return pose_what_if(self._recorder, guest)

        gathering = asyncio.run_coroutine_threadsafe(gather(), loop)
        try:
            async with asyncio.timeout(self._timeouts.page_answer_seconds):
                return await asyncio.wrap_future(gathering)
        except (TimeoutError, RuntimeError):
            return None


def _receive(pages: Pages[RunReplica], update: UpdateDocument, seconds: float) -> None:
    pages.receive(update, seconds)


def _clock() -> float:
    return time.perf_counter()  # noqa: TID251 - what an update costs decides how often there is one


def _wall_clock() -> float:
    return time.time()  # noqa: TID251 - people want to know when


logger = logging.getLogger(__name__)


class LogFollower:
    """Reads a log, each time from where it was; one thread at a time."""

    def __init__(
        self, where: Path | LogPlace, is_running: Callable[[], bool], timeouts: Timeouts = TIMEOUTS
    ) -> None:
        self._where, self._is_running, self._timeouts = where, is_running, timeouts
        self._num_runs = 0
        self._begin()

    def _begin(self) -> None:
        recorder = RunRecorder(self._num_runs + 1)
        self._replay = LogReplay(self._where, self._timeouts.hub, recorder.replay)
        self._recorder, self._cutter = recorder, UpdateCutter(recorder)
        self._num_runs += 1
        self._fault = ""
        self._was_running: bool | None = None

    def read(self, always: bool) -> UpdateDocument | None:
        """Read what is new in the log; return None if that is nothing, unless an answer is needed always."""
        with contextlib.suppress(StoreAway):  # until it is back, what was read of it stays
            if self._replay.is_replaced:
                self._begin()
        is_running = self._is_at_work()
        is_changed = self._read_on() or is_running != self._was_running
        self._was_running = is_running
        return self._cutter.cut(HubFacts(is_live=is_running)) if is_changed or always else None

    def _is_at_work(self) -> bool:
        try:
            return self._is_running()
        except ConfigError:  # the folder was moved away; what was read of it stays on the page
            return False

    def pose(self, guest: Node) -> WhatIf | None:
        """Return the question what one more PC would bring."""
        return pose_what_if(self._recorder, guest)

    def _read_on(self) -> bool:
        if self._fault:
            return False
        try:
            return self._replay.read_on() > 0
        except StoreAway:
            return False
        except ConfigError as error:
            self._fault = str(error)
        try:
            make_document(self._recorder, HubFacts())
        except Exception as error:  # a hub that met what cannot be is in no state to be shown
            logger.info("the run is not shown: %r", error)
            self._recorder = RunRecorder(self._num_runs)
            self._cutter = UpdateCutter(self._recorder)
        self._recorder.news.say("Damaged", "bad", self._fault, self._recorder.now)
        return True


class LogDashboard:
    """Shows the run of a folder, read-only; and beside it the curves of other runs, by name."""

    def __init__(
        self,
        follower: LogFollower,
        address: str = "",
        timeouts: Timeouts = TIMEOUTS,
        beside: Mapping[str, LogFollower] = MappingProxyType({}),
    ) -> None:
        self._address = address
        bound = bind_address(address)
        self._gate = make_gate(bound, address)
        self._follower = follower
        self._beside = {name: (other, RunReplica()) for name, other in beside.items()}
        self._reading = asyncio.Lock()
        self._pages = Pages(RunReplica(), self._ask, timeouts.program)
        self._web = WebServer(bound, self._make_site, timeouts.program)

    @property
    def link(self) -> str:
        """What to open in a browser."""
        return show_link(self._gate, self._address)

    def __enter__(self) -> Self:
        self._web.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._web.close()

    async def _ask(self, always: bool) -> bool:
        """Read on, in a thread: a long log takes seconds. No answer is to be waited for after that."""
        began_at = asyncio.get_running_loop().time()
        async with self._reading:
            update = await asyncio.to_thread(self._follower.read, always)
        self._pages.receive(update, asyncio.get_running_loop().time() - began_at)
        return False

    def _make_site(self) -> Site:
        return make_run_site(
            WebParts(self._gate, self._pages, read_beside=self._read_beside, pose=self._pose)
        )

    async def _pose(self, guest: Node) -> WhatIf | None:
        async with self._reading:
            return self._follower.pose(guest)

    async def _read_beside(self) -> list[BesideDocument]:
        async with self._reading:
            return await asyncio.to_thread(self._read_others)

    def _read_others(self) -> list[BesideDocument]:
        found = []
        for name, (follower, replica) in self._beside.items():
            update = follower.read(always=False)
            if update is not None:
                replica.apply(update)
            run = replica.run
            if run is not None:
                found.append(BesideDocument(name, run.is_live, run.started_at, replica.curves))
        return found
