"""The dashboard of a run that has ended, or of a hub in another program: its log is read, and nothing else.

A log that grows is read on while a page is open. A damaged one is shown up to the damage, with the reason.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from ravnest.config import TIMEOUTS, Timeouts
from ravnest.errors import ConfigError
from ravnest.hub.service.event_log import LogReplay
from ravnest.hub.service.web.documents import BesideDocument, UpdateDocument
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.snapshot import HubFacts, RunReplica, UpdateCutter, make_document
from ravnest.hub.service.web.web_app import WebParts, make_run_site
from ravnest.hub.service.web.what_if import WhatIf, pose_what_if
from ravnest.plan.types import Node
from ravnest.web.pages import Pages
from ravnest.web.site import Site
from ravnest.web.web_server import WebServer, bind_address, make_gate, show_link

logger = logging.getLogger(__name__)


class LogFollower:
    """Reads a folder's log, each time from where it was; one thread at a time."""

    def __init__(self, folder: Path, is_running: Callable[[], bool], timeouts: Timeouts = TIMEOUTS) -> None:
        self._folder, self._is_running, self._timeouts = folder, is_running, timeouts
        self._num_runs = 0
        self._begin()

    def _begin(self) -> None:
        self._num_runs += 1
        self._fault = ""
        self._recorder = RunRecorder(self._num_runs)
        self._cutter = UpdateCutter(self._recorder)
        self._replay = LogReplay(self._folder, self._timeouts.hub, self._recorder.replay)
        self._was_running: bool | None = None

    def read(self, always: bool) -> UpdateDocument | None:
        """Read what is new in the log; return None if that is nothing, unless an answer is needed always."""
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
