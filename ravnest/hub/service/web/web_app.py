"""The dashboard's web application behind its Gate: a page and its files, `/api/v1` and `/metrics`.

Every answer has the same strict headers. Files of the page are read once; no path of a request is a path on
disk.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ravnest.errors import RavnestError
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.service.web.actions import (
    MOST_WISH_BYTES,
    GuestActions,
    HubActions,
    InviteWish,
    KickWish,
    RevokeWish,
    StopWish,
    Wish,
    carry_out,
    show_guests,
    show_line,
)
from ravnest.hub.service.web.documents import BesideDocument
from ravnest.hub.service.web.gate import HEADERS, Gate
from ravnest.hub.service.web.pages import Pages
from ravnest.hub.service.web.run_metrics import write_metrics

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
Handler = Callable[[Request], Awaitable[Response]]


_NO_GUESTS = "nobody can be invited: no hub is at work here, or its peers are its own"
_WISHES: dict[str, type[Wish]] = {
    "stop": StopWish,
    "invite": InviteWish,
    "revoke": RevokeWish,
    "kick": KickWish,
}


@dataclass(frozen=True, slots=True)
class WebParts:
    """What the application serves: a run, and what its hub lets people do (None: nothing)."""

    gate: Gate
    pages: Pages
    hub: HubActions | None = None
    read_beside: Callable[[], Awaitable[list[BesideDocument]]] | None = None  # other runs to compare with

    @property
    def guests(self) -> GuestActions | None:
        """What a hub offers that is open to others."""
        return None if self.hub is None else self.hub.guests


@dataclass(frozen=True, slots=True)
class _StaticFile:
    content: bytes
    kind: str
    tag: str


@cache
def _static_files() -> dict[str, _StaticFile]:
    """Return the files of the page by name."""
    found = {}
    for file in files("ravnest.hub.service.web").joinpath("static").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[file.name] = _StaticFile(content, kind, tag)
    return found


def make_app(parts: WebParts) -> ASGIApp:
    """Return the application."""
    answers = _Answers(parts)
    routes = [
        Route("/", answers.page),
        Route("/static/{name}", _serve_file),
        Route("/api/v1/run", answers.read_run),
        Route("/api/v1/news", answers.read_news),
        Route("/api/v1/curves", answers.read_curves),
        Route("/api/v1/stream", answers.stream),
        Route("/api/v1/invitation", answers.read_invitation),
        Route("/api/v1/beside", answers.read_beside),
        Route("/api/v1/guests", answers.read_guests),
        *(Route(f"/api/v1/{name}", answers.act_on(kind), methods=["POST"]) for name, kind in _WISHES.items()),
        Route("/metrics", answers.read_metrics),
    ]
    return _Guarded(Starlette(routes=routes), parts.gate)


class _Guarded:
    """Refuses what is not for us, and adds the headers to every answer."""

    def __init__(self, inner: ASGIApp, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        reason = self._gate.refuse_host(Request(scope).headers)
        refused = None if not reason else _say(421, reason)
        await (refused or self._inner)(scope, receive, send_guarded)


async def _serve_file(request: Request) -> Response:
    found = _static_files().get(request.path_params["name"])
    if found is None:
        return _say(404, "there is no such file")
    headers = {"Cache-Control": "no-cache", "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.kind)


class _Answers:
    """One method for each path."""

    def __init__(self, parts: WebParts) -> None:
        self._parts, self._gate, self._pages = parts, parts.gate, parts.pages

    def _admits(self, request: Request) -> bool:
        return self._gate.admits(request.headers, request.cookies, request.query_params.get("token", ""))

    async def page(self, request: Request) -> Response:
        """Serve the page; the link's token becomes a cookie."""
        name = "index.html" if self._admits(request) else "closed.html"
        file = _static_files()[name]
        status = 200 if name == "index.html" else 401
        answer = Response(file.content, status, {"Cache-Control": "no-store"}, file.kind)
        if status == 200 and "token" in request.query_params:
            answer.headers["Set-Cookie"] = self._gate.cookie
        return answer

    async def read_run(self, request: Request) -> Response:
        """Answer where the run stands."""
        if not self._admits(request):
            return _refuse()
        return _json((await self._pages.fresh()).run)

    async def read_news(self, request: Request) -> Response:
        """Answer the news after a number."""
        if not self._admits(request):
            return _refuse()
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 12:
            return _say(400, "`after` is the number of a piece of news, like ?after=120")
        return _json([each for each in (await self._pages.fresh()).news if each.number > int(after)])

    async def read_curves(self, request: Request) -> Response:
        """Answer all curves."""
        if not self._admits(request):
            return _refuse()
        return _json((await self._pages.fresh()).curves)

    async def read_invitation(self, request: Request) -> Response:
        """Answer the line that others paste to join."""
        if not self._admits(request):
            return _refuse()
        if self._parts.guests is None:
            return _say(404, _NO_GUESTS)
        return _json({"line": show_line(self._parts.guests.invitation())})

    async def read_beside(self, request: Request) -> Response:
        """Answer the curves of other runs, to be shown beside those of this one."""
        if not self._admits(request):
            return _refuse()
        return _json([] if self._parts.read_beside is None else await self._parts.read_beside())

    async def read_guests(self, request: Request) -> Response:
        """Answer who is invited, but not their tokens."""
        if not self._admits(request):
            return _refuse()
        if self._parts.guests is None:
            return _say(404, _NO_GUESTS)
        return _json(await asyncio.to_thread(show_guests, self._parts.guests))

    async def read_metrics(self, request: Request) -> Response:
        """Answer the metrics, for Prometheus."""
        if not self._admits(request):
            return _refuse()
        run = (await self._pages.fresh()).run
        return Response(write_metrics(run), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stream(self, request: Request) -> Response:
        """Answer with updates for as long as the page is open."""
        if not self._admits(request):
            return _refuse()
        if self._pages.is_full:
            return _say(503, "too many pages are open; close one")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._pages.follow(), headers=headers, media_type="text/event-stream")

    def act_on(self, kind: type[Wish]) -> Handler:
        """Return what carries out wishes of a kind."""

        async def act(request: Request) -> Response:
            reason = self._gate.refuse_action(request.headers, request.cookies)
            if reason:
                return _say(403, reason)
            body = await _read_body(request)
            try:
                wish = msgspec.json.decode(body or b"{}", type=kind)
            except msgspec.MsgspecError as error:
                return _say(400, f"that is no wish: {str(error)[:200]}")
            return await self._carry_out(wish)

        return act

    async def _carry_out(self, wish: Wish) -> Response:
        run = (await self._pages.fresh()).run
        if self._parts.hub is None or run is None or not run.is_live or run.phase is JobPhase.FINISHED:
            return _say(409, "no hub is at work here: the run has ended, or is only read")
        if isinstance(wish, StopWish) and not run.can_stop:
            return _say(409, "the run is being stopped already")
        if isinstance(wish, KickWish) and wish.node not in {node.name for node in run.nodes}:
            return _say(409, "there is no such node")
        try:
            outcome = await asyncio.to_thread(carry_out, wish, self._parts.hub)
        except RavnestError as error:
            return _say(409, str(error))
        return _say(404, _NO_GUESTS) if outcome is None else _json(outcome, 202)


async def _read_body(request: Request) -> bytes:
    """Return the body of a request, as far as one may be long; what is cut off cannot be read then."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_WISH_BYTES:
            return b"too long"
    return body


def _json(content: object, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _say(status: int, reason: str) -> Response:
    return _json({"error": reason}, status)


def _refuse() -> Response:
    return _say(401, "open the link that the hub printed, or send its token: Authorization: Bearer TOKEN")
