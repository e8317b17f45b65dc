"""A web server in a thread of its own, with its own event loop: a page never waits in another loop.

The port is bound before the thread starts, so that a taken one is found early.
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from ravnest.config import ProgramTimeouts
from ravnest.errors import ConfigError
from ravnest.net.identity import is_everywhere, is_loopback, local_hosts, split_address
from ravnest.web.gate import Gate
from ravnest.web.pages import Pages
from ravnest.web.site import Site

_MOST_CONNECTIONS = 128
_MOST_HEADER_BYTES = 16_384
USUAL_PORT = 7780


def bind_address(
    address: str, usual_port: int = USUAL_PORT, what: str = "dashboard", way_out: str = ", or --no-dashboard"
) -> socket.socket:
    """Return a socket at HOST:PORT; without an address at the usual port of this PC, or any free one."""
    if not address:
        try:
            return _bind("127.0.0.1", usual_port)
        except OSError:
            return _bind("127.0.0.1", 0)
    host, port = split_address(address)
    try:
        return _bind(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: that is no name of a host, such as a..b
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else str(error)
        fix = f"choose another HOST:PORT{way_out}"
        raise ConfigError(f"the {what} cannot listen at {host}:{port}: {reason}; {fix}") from None


def _bind(host: str, port: int) -> socket.socket:
    place = None if is_everywhere(host) else host
    family, kind, proto, _, name = socket.getaddrinfo(
        place, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, proto)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(name)
        bound.listen(_MOST_CONNECTIONS)  # until then another program could bind it too
    except OSError:
        bound.close()
        raise
    return bound


def make_gate(bound: socket.socket, address: str) -> Gate:
    """Return a gate with a new token, for what listens at this socket."""
    host = split_address(address)[0] if address else ""
    return Gate(secrets.token_urlsafe(24), bound.getsockname()[1], "" if is_everywhere(host) else host)


def show_link(gate: Gate, address: str = "") -> str:
    """Return the link to open; what listens in all networks is reached by an address of this PC."""
    host = gate.host_name or "127.0.0.1"
    if address and is_everywhere(split_address(address)[0]):
        host = next(iter(local_hosts()), host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{gate.port}/?token={gate.token}"


def is_for_others(address: str) -> bool:
    """Return whether other PCs can reach what listens at this address."""
    return bool(address) and not is_loopback(address)


class WebServer:
    """Serves a site in a thread until it is closed; `make_site` is called in that thread."""

    def __init__(
        self,
        bound: socket.socket,
        make_site: Callable[[], Site],
        timeouts: ProgramTimeouts,
    ) -> None:
        self._bound, self._make_site, self._timeouts = bound, make_site, timeouts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._pages: Pages[Any] | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ravnest-page", daemon=True)

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()
        self._is_ready.wait(self._timeouts.page_answer_seconds)

    def call(self, work: Callable[[Pages[Any]], None]) -> None:
        """Let the web's thread do something with its pages, soon; nothing if it has ended."""
        loop, pages = self._loop, self._pages
        if loop is not None and pages is not None:
            try:
                loop.call_soon_threadsafe(work, pages)
            except RuntimeError:  # it has just ended
                return

    def close(self) -> None:
        """Say to all pages that nothing more comes, and end."""
        self.call(self._end)
        self._thread.join(self._timeouts.page_end_seconds)
        self._bound.close()

    def _end(self, pages: Pages[Any]) -> None:
        pages.end()
        if self._server is not None:
            self._server.should_exit = True

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        site = self._make_site()
        config = uvicorn.Config(
            site.app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._loop, self._pages = asyncio.get_running_loop(), site.pages
        self._is_ready.set()
        await self._server.serve(sockets=[self._bound])
