"""A web application behind a Gate: a page, its files, its stream, and whatever else it answers.

Every answer has the same strict headers. Files are read once; no path of a request is a path on disk.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ravnest.web.gate import HEADERS, Gate
from ravnest.web.pages import Pages

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_SHARED = "ravnest.web"  # the package with the files that all pages use
_MOST_WISH_BYTES = 4096
Handler = Callable[[Request], Awaitable[Response]]
_Wish = TypeVar("_Wish")


@dataclass(frozen=True, slots=True)
class Site:
    """An application and the pages that follow it."""

    app: ASGIApp
    pages: Pages[Any]


@dataclass(frozen=True, slots=True)
class _StaticFile:
    content: bytes
    kind: str
    tag: str


@cache
def _static_files(packages: tuple[str, ...]) -> dict[str, _StaticFile]:
    """Return the files in `static` of these packages, by name."""
    found = {}
    for file in (each for package in packages for each in files(package).joinpath("static").iterdir()):
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[file.name] = _StaticFile(content, kind, tag)
    return found


class SiteAnswers:
    """What every page of ours answers, and how it answers; `package` has the files of this one."""

    def __init__(self, gate: Gate, pages: Pages[Any], package: str) -> None:
        self._gate, self._pages = gate, pages
        self._files = _static_files((_SHARED, package))

    def make_site(self, routes: Sequence[Route]) -> Site:
        """Return the site: what is shown to everybody who is let in, and these routes."""
        usual = [
            Route("/", self._show_page),
            Route("/static/{name}", self._serve_file),
            Route("/api/v1/stream", self.guarded(self._stream)),
        ]
        return Site(_Guarded(Starlette(routes=[*usual, *routes]), self._gate), self._pages)

    def guarded(self, answer: Handler) -> Handler:
        """Return a handler that answers those who may read, and refuses the others."""

        async def answer_some(request: Request) -> Response:
            return await answer(request) if self._admits(request) else _refuse()

        return answer_some

    def acting(self, kind: type[_Wish], carry_out: Callable[[_Wish], Awaitable[Response]]) -> Handler:
        """Return a handler that carries out wishes of a kind, if the page itself sends them."""

        async def act(request: Request) -> Response:
            reason = self._gate.refuse_action(request.headers, request.cookies)
            if reason:
                return say(403, reason)
            body = await _read_body(request)
            try:
                wish = msgspec.json.decode(body or b"{}", type=kind)
            except ValueError as error:  # also text that is not UTF-8
                return say(400, f"that is no wish: {str(error)[:200]}")
            return await carry_out(wish)

        return act

    def _admits(self, request: Request) -> bool:
        return self._gate.admits(request.headers, request.cookies, request.query_params.get("token", ""))

    async def _show_page(self, request: Request) -> Response:
        """Serve the page; the link's token becomes a cookie."""
        is_let_in = self._admits(request)
        file = self._files["index.html" if is_let_in else "closed.html"]
        headers = {"Cache-Control": "no-store"}
        answer = Response(file.content, 200 if is_let_in else 401, headers, file.kind)
        if is_let_in and "token" in request.query_params:
            answer.headers["Set-Cookie"] = self._gate.cookie
        return answer

    async def _serve_file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            return say(404, "there is no such file")
        headers = {"Cache-Control": "no-cache", "ETag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.kind)

    async def _stream(self, _: Request) -> Response:
        """Answer with updates for as long as the page is open."""
        if self._pages.is_full:
            return say(503, "too many pages are open; close one")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._pages.follow(), headers=headers, media_type="text/event-stream")


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
        refused = None if not reason else say(421, reason)
        await (refused or self._inner)(scope, receive, send_guarded)


async def _read_body(request: Request) -> bytes:
    """Return the body of a request, as far as one may be long; what is cut off cannot be read then."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_WISH_BYTES:
            return b"too long"
    return body


def to_response(content: object, status: int = 200) -> Response:
    """Return an answer of JSON."""
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def say(status: int, reason: str) -> Response:
    """Return a refusal with its reason."""
    return to_response({"error": reason}, status)


def _refuse() -> Response:
    return say(401, "open the link that was printed, or send its token: Authorization: Bearer TOKEN")
