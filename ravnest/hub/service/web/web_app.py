"""The dashboard's site: what `/api/v1` and `/metrics` answer about a run, and what its page may do."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ravnest.errors import RavnestError
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.coordinator.planner import SEARCH_PLANNER, Planner
from ravnest.hub.service.web.actions import (
    CheckpointWish,
    GuestActions,
    HubActions,
    InviteWish,
    KickWish,
    RevokeWish,
    StopWish,
    TrainingPauseWish,
    Wish,
    carry_out,
    draw_code,
    show_guests,
    show_line,
)
from ravnest.hub.service.web.documents import BesideDocument
from ravnest.hub.service.web.run_metrics import write_metrics
from ravnest.hub.service.web.snapshot import RunReplica
from ravnest.hub.service.web.what_if import WhatIf, answer_what_if, make_guest
from ravnest.plan.types import Node
from ravnest.web.gate import Gate
from ravnest.web.pages import Pages
from ravnest.web.site import Site, SiteAnswers, say, to_response

_NO_PC = "no PC is like that; ask like ?memory=8e9&flops=1e12&bandwidth=5e6: bytes, FLOP/s and bytes/s"
_NO_GUESTS = "nobody can be invited: no hub is at work here, or its peers are its own"
_WISHES: dict[str, type[Wish]] = {
    "stop": StopWish,
    "invite": InviteWish,
    "revoke": RevokeWish,
    "kick": KickWish,
    "checkpoint": CheckpointWish,
    "pause": TrainingPauseWish,
}


@dataclass(frozen=True, slots=True)
class WebParts:
    """What the site shows: a run, and what its hub lets people do (None: nothing)."""

    gate: Gate
    pages: Pages[RunReplica]
    hub: HubActions | None = None
    read_beside: Callable[[], Awaitable[list[BesideDocument]]] | None = None  # other runs to compare with
    pose: Callable[[Node], Awaitable[WhatIf | None]] | None = None  # what one more PC would bring
    planner: Planner = SEARCH_PLANNER

    @property
    def guests(self) -> GuestActions | None:
        """What a hub offers that is open to others."""
        return None if self.hub is None else self.hub.guests


def make_run_site(parts: WebParts) -> Site:
    """Return the dashboard of a run."""
    usual, answers = SiteAnswers(parts.gate, parts.pages, "ravnest.hub.service.web"), _RunAnswers(parts)
    read = {
        "/api/v1/run": answers.read_run,
        "/api/v1/news": answers.read_news,
        "/api/v1/curves": answers.read_curves,
        "/api/v1/invitation": answers.read_invitation,
        "/api/v1/beside": answers.read_beside,
        "/api/v1/what-if": answers.read_what_if,
        "/api/v1/guests": answers.read_guests,
        "/metrics": answers.read_metrics,
    }
    acts = {f"/api/v1/{name}": usual.acting(kind, answers.carry_out) for name, kind in _WISHES.items()}
    return usual.make_site(
        [
            *(Route(path, usual.guarded(answer)) for path, answer in read.items()),
            *(Route(path, act, methods=["POST"]) for path, act in acts.items()),
        ]
    )


class _RunAnswers:
    """One method for each path."""

    def __init__(self, parts: WebParts) -> None:
        self._parts, self._pages = parts, parts.pages
        self._planning = asyncio.Lock()

    async def read_run(self, _: Request) -> Response:
        """Answer where the run stands."""
        return to_response((await self._pages.fresh()).run)

    async def read_news(self, request: Request) -> Response:
        """Answer the news after a number."""
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 12:
            return say(400, "`after` is the number of a piece of news, like ?after=120")
        return to_response([each for each in (await self._pages.fresh()).news if each.number > int(after)])

    async def read_curves(self, _: Request) -> Response:
        """Answer all curves."""
        return to_response((await self._pages.fresh()).curves)

    async def read_invitation(self, _: Request) -> Response:
        """Answer the line that others paste to join."""
        if self._parts.guests is None:
            return say(404, _NO_GUESTS)
        line = show_line(self._parts.guests.invitation())
        return to_response({"line": line, "code": draw_code(line)})

    async def read_beside(self, _: Request) -> Response:
        """Answer the curves of other runs, to be shown beside those of this one."""
        return to_response([] if self._parts.read_beside is None else await self._parts.read_beside())

    async def read_what_if(self, request: Request) -> Response:
        """Answer what one more PC would bring; one question at a time."""
        guest = _read_guest(request)
        if guest is None:
            return say(400, _NO_PC)
        question = None if self._parts.pose is None else await self._parts.pose(guest)
        if question is None:
            return say(409, "there is no job yet to plan for")
        async with self._planning:
            return to_response(await asyncio.to_thread(answer_what_if, question, self._parts.planner))

    async def read_guests(self, _: Request) -> Response:
        """Answer who is invited, but not their tokens."""
        if self._parts.guests is None:
            return say(404, _NO_GUESTS)
        return to_response(await asyncio.to_thread(show_guests, self._parts.guests))

    async def read_metrics(self, _: Request) -> Response:
        """Answer the metrics, for Prometheus."""
        run = (await self._pages.fresh()).run
        return Response(write_metrics(run), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def carry_out(self, wish: Wish) -> Response:
        """Do what the page wants, or say why not."""
        run = (await self._pages.fresh()).run
        if self._parts.hub is None or run is None or not run.is_live or run.phase is JobPhase.FINISHED:
            return say(409, "no hub is at work here: the run has ended, or is only read")
        if isinstance(wish, StopWish) and not run.can_stop:
            return say(409, "the run is being stopped already")
        if isinstance(wish, KickWish) and wish.node not in {node.name for node in run.nodes}:
            return say(409, "there is no such node")
        try:
            outcome = await asyncio.to_thread(carry_out, wish, self._parts.hub)
        except RavnestError as error:
            return say(409, str(error))
        return say(404, _NO_GUESTS) if outcome is None else to_response(outcome, 202)


def _read_guest(request: Request) -> Node | None:
    """Return the PC that a request describes; None if there is no such PC."""
    given = request.query_params
    try:
        return make_guest(*(float(given[name]) for name in ("memory", "flops", "bandwidth")))
    except (KeyError, ValueError):
        return None
