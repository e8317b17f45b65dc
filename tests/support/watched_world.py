"""A hub with scripted peers whose run is recorded for the dashboard, and requests to its web application."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from support.hub_world import HubWorld

from ravnest.hub.service.status import StatusTracker
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.hub.service.web.snapshot import HubFacts, make_document

AT_WORK = HubFacts(is_live=True, can_stop=True, can_invite=True, wall_offset=0.0)


class WatchedWorld(HubWorld):
    """Has a recorder that is shown everything, notices included."""

    def _begin(self):
        super()._begin()
        self.tracker, self.recorder = StatusTracker(self.hub), RunRecorder()

    def note(self, event, orders):
        super().note(event, orders)
        self.tracker.observe(event, orders)
        self.recorder.replay(self.tracker, event, orders)

    def document(self, facts=AT_WORK):
        return make_document(self.recorder, facts)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return msgspec.json.decode(self.body)


def request(app, path, method="GET", body=b"", **headers):
    """Return what a web application answers; `cookie_x` stands for the header cookie-x."""
    given = {"host": "127.0.0.1:7780"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(_request(app, path, method, given, body))


async def _request(app, path, method, headers, body):
    url = urlsplit(path)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7780),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))
