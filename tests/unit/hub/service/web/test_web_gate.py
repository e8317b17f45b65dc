"""Who may see the dashboard and who may act; what the web application answers to everybody else."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from support.watched_world import AT_WORK, WatchedWorld, request

import ravnest
from ravnest.config import TIMEOUTS
from ravnest.errors import ConfigError
from ravnest.hub.service.guests import GuestsInMemory
from ravnest.hub.service.web.actions import GuestActions, HubActions
from ravnest.hub.service.web.snapshot import RunReplica, UpdateCutter
from ravnest.hub.service.web.web_app import WebParts, make_run_site
from ravnest.hub.service.web.what_if import pose_what_if
from ravnest.net.identity import INVITATION_BYTES
from ravnest.web.gate import Gate
from ravnest.web.pages import MOST_PAGES, Pages, choose_pause
from ravnest.web.web_server import bind_address, is_for_others, make_gate, show_link

GATE = Gate("right-token", 7780)
COOKIE = f"ravnest_7780={GATE.token}"
OWN_PAGE = {"cookie": COOKIE, "origin": "http://127.0.0.1:7780"}


class Asked:
    """Pages of a run at work, and what they asked of the hub."""

    def __init__(self, facts=AT_WORK):
        world = WatchedWorld()
        world.join(*"abc", memory_mb=250.0)
        world.run_until(lambda: world.hub.clusters and world.hub.ledger.num_counted)
        self.stopped, self.world, self.facts = [], world, facts
        self.cutter = UpdateCutter(world.recorder)
        self.pages = Pages(RunReplica(), self.ask, TIMEOUTS.program)
        self.kicked, self.asked, self.list = [], [], GuestsInMemory()
        guests = GuestActions(lambda: "rvn1_word", self.invite, self.revoke, self.list.read)
        hub = HubActions(
            self.stopped.append,
            lambda *facts: self.kicked.append(facts),
            lambda: self.asked.append("checkpoint"),
            guests,
        )
        self.app = make_run_site(WebParts(GATE, self.pages, hub, pose=self.pose)).app

    async def pose(self, guest):
        return pose_what_if(self.world.recorder, guest)

    def invite(self, name, days, nodes):
        number = name.encode().hex().ljust(2 * INVITATION_BYTES, "0")
        self.list.change(lambda known: known.invite(number, name, 0.0, days, nodes))
        return f"rvn1_{name}"

    def revoke(self, name):
        self.list.change(lambda known: known.revoke(name))

    async def ask(self, always):
        self.pages.receive(self.cutter.cut(self.facts))
        return False


@pytest.fixture(scope="module")
def asked():
    return Asked()


# Reading.


@pytest.mark.parametrize(
    "path", ["run", "news", "curves", "stream", "invitation", "guests", "beside", "what-if"]
)
def test_the_api_is_closed_without_the_token(asked, path):
    for headers in ({}, {"cookie": "ravnest_7780=wrong"}, {"authorization": "Bearer wrong"}):
        answer = request(asked.app, f"/api/v1/{path}", **headers)
        assert answer.status == 401
        assert "link that was printed" in answer.json["error"]
    assert request(asked.app, f"/api/v1/{path}?token=wrong").status == 401
    assert request(asked.app, "/metrics").status == 401


def test_the_link_opens_the_page_and_leaves_a_cookie_that_only_this_page_sends(asked):
    answer = request(asked.app, f"/?token={GATE.token}")
    assert answer.status == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert request(asked.app, "/", cookie=COOKIE).status == 200
    assert request(asked.app, "/?token=wrong").status == 401
    assert "set-cookie" not in request(asked.app, "/?token=wrong").headers
    assert b"needs its link" in request(asked.app, "/").body


def test_the_api_answers_documents_of_version_1(asked):
    headers = {"authorization": f"Bearer {GATE.token}"}
    run = request(asked.app, "/api/v1/run", **headers)
    assert (run.status, run.json["schema"]) == (200, "ravnest.dashboard/1")
    assert run.headers["cache-control"] == "no-store"
    news = request(asked.app, "/api/v1/news", **headers).json
    assert [each["number"] for each in news] == list(range(1, len(news) + 1))
    assert request(asked.app, "/api/v1/news?after=2", **headers).json == news[2:]
    assert request(asked.app, "/api/v1/news?after=-1", **headers).status == 400
    invitation = request(asked.app, "/api/v1/invitation", **headers).json
    assert invitation["line"] == "ravnest join rvn1_word"
    assert invitation["code"]["size"] >= 21
    assert request(asked.app, "/metrics", **headers).body.startswith(b"# HELP ravnest_live")


def test_names_of_other_sites_are_refused_and_addresses_are_not(asked):
    for host in ("evil.example", "127.0.0.1.evil.example:7780", "", "localhost.evil.example"):
        answer = request(asked.app, f"/api/v1/run?token={GATE.token}", host=host)
        assert answer.status == 421, host
        assert request(asked.app, "/static/app.js", host=host).status == 421
    for host in ("127.0.0.1:9000", "localhost", "[::1]:7780", "192.0.2.7:7780"):
        assert request(asked.app, f"/api/v1/run?token={GATE.token}", host=host).status == 200, host
    named = Gate("t", 7780, "Hub.Example.org")
    assert named.refuse_host({"host": "hub.example.org:7780"}) == ""
    assert named.refuse_host({"host": "example.org:7780"})


def test_every_answer_has_the_strict_headers(asked):
    for path in ("/", "/static/app.js", "/static/none.js", "/api/v1/run", "/nothing"):
        headers = request(asked.app, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    for path in ("/static/../web_app.py", "/static/%2e%2e/web_app.py", "/static/web_app.py", "/static/"):
        assert request(asked.app, path).status == 404


def test_the_files_of_the_page_are_there_and_are_not_sent_twice(asked):
    answer = request(asked.app, "/static/app.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    again = request(asked.app, "/static/app.js", if_none_match=answer.headers["etag"])
    assert (again.status, again.body) == (304, b"")


# Acting.


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {GATE.token}", "origin": "http://127.0.0.1:7780"},
        {"cookie": COOKIE},
        {"cookie": COOKIE, "origin": "http://evil.example"},
        {"cookie": COOKIE, "origin": "http://127.0.0.1:9999"},
        {"cookie": COOKIE, "origin": "null"},
        {**OWN_PAGE, "cookie": "ravnest_7780=wrong"},
        {**OWN_PAGE, "sec_fetch_site": "cross-site"},
    ],
)
def test_only_the_page_itself_may_stop_a_run(asked, headers):
    assert request(asked.app, "/api/v1/stop", "POST", **headers).status == 403
    assert asked.stopped == []


def test_stopping_is_an_action_with_an_outcome(asked):
    assert request(asked.app, "/api/v1/stop", **OWN_PAGE).status == 405
    answer = request(asked.app, "/api/v1/stop", "POST", **OWN_PAGE)
    assert (answer.status, "told to stop" in answer.json["outcome"]) == (202, True)
    assert asked.stopped == ["stopped from the dashboard"]
    asked.world.stop()
    again = request(asked.app, "/api/v1/stop", "POST", **OWN_PAGE)
    assert (again.status, len(asked.stopped)) == (409, 1)


def send(asked, path, wish, **headers):
    return request(
        asked.app, f"/api/v1/{path}", "POST", body=json.dumps(wish).encode(), **OWN_PAGE, **headers
    )


def test_guests_are_invited_and_revoked_by_name_and_their_tokens_are_shown_once():
    asked = Asked()
    made = send(asked, "invite", {"name": "ana", "days": 2.0, "nodes": 3})
    assert (made.status, made.json["line"]) == (202, "ravnest join rvn1_ana")
    again = send(asked, "invite", {"name": "ana"})
    assert (again.status, "has an invitation" in again.json["error"]) == (409, True)
    listed = request(asked.app, "/api/v1/guests", cookie=COOKIE)
    assert [(each["name"], each["max_nodes"]) for each in listed.json] == [("everybody", None), ("ana", 3)]
    assert b"rvn1" not in listed.body
    assert b"number" not in listed.body
    assert request(asked.app, "/api/v1/guests").status == 401
    assert send(asked, "revoke", {"name": "ana"}).status == 202
    assert asked.list.read().invitations[1].is_revoked
    assert send(asked, "revoke", {"name": "bob"}).status == 409


def test_a_node_is_sent_away_only_if_it_is_here():
    asked = Asked()
    assert send(asked, "kick", {"node": "nobody"}).status == 409
    assert send(asked, "kick", {"node": "a"}).status == 202
    assert asked.kicked == [("a", "the requester sent it away")]


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        ("invite", {}),
        ("invite", {"name": "x" * 201}),
        ("invite", {"name": "ana", "days": "soon"}),
        ("invite", {"name": "ana", "more": 1}),
        ("kick", {"node": "a" * 5000}),
        ("kick", []),
        ("stop", {"now": True}),
    ],
)
def test_a_wish_that_fits_nothing_is_refused(path, wish):
    asked = Asked()
    assert send(asked, path, wish).status == 400
    assert request(asked.app, "/api/v1/kick", "POST", body=b'{"node": "\xff"}', **OWN_PAGE).status == 400
    assert asked.stopped == asked.kicked == []


def test_what_one_more_pc_would_bring_is_asked_in_numbers(asked):
    path = "/api/v1/what-if?memory=2.5e8&flops=1e12&bandwidth=1e7"
    found = request(asked.app, path, cookie=COOKIE)
    assert found.status == 200
    assert found.json["then_samples_per_second"] > 0
    for wrong in ("", "?memory=8e9", "?memory=x&flops=1&bandwidth=1", "?memory=nan&flops=nan&bandwidth=nan"):
        assert request(asked.app, f"/api/v1/what-if{wrong}", cookie=COOKIE).status == 400


def test_a_checkpoint_is_asked_for():
    asked = Asked()
    answer = send(asked, "checkpoint", {})
    assert (answer.status, asked.asked) == (202, ["checkpoint"])
    assert "it says when it is on disk" in answer.json["outcome"]


@pytest.mark.parametrize("path", ["invite", "revoke", "kick", "stop", "checkpoint"])
def test_no_action_is_open_to_others(asked, path):
    body = json.dumps({"name": "ana", "node": "a"}).encode()
    for headers in ({}, {"cookie": COOKIE, "origin": "http://evil.example"}):
        assert request(asked.app, f"/api/v1/{path}", "POST", body=body, **headers).status == 403


def test_a_run_that_is_only_read_has_no_action():
    reading = Asked()
    app = make_run_site(WebParts(GATE, reading.pages)).app
    assert request(app, "/api/v1/stop", "POST", **OWN_PAGE).status == 409
    assert request(app, "/api/v1/invitation", cookie=COOKIE).status == 404


# Following.


def test_a_page_gets_the_whole_and_then_what_is_new():
    async def follow():
        asked = Asked()
        stream = asked.pages.follow()
        whole = await anext(stream)
        num_told = len(asked.world.news)
        asked.world.run_until(lambda: len(asked.world.news) > num_told)
        update = await anext(stream)
        await stream.aclose()
        return whole, update

    whole, update = asyncio.run(follow())
    assert whole.startswith(b'data: {"run":')
    assert whole.endswith(b"\n\n")
    assert b'"is_whole":true' in whole
    assert b'"is_whole":false' in update


def test_a_page_that_reads_too_slowly_gets_the_whole_anew():
    async def follow():
        asked = Asked()
        stream = asked.pages.follow()
        await anext(stream)
        for _ in range(50):
            await asked.ask(True)
        late = await anext(stream)
        await stream.aclose()
        return late

    assert b'"is_whole":true' in asyncio.run(follow())


def test_there_are_two_updates_per_second_and_fewer_where_they_take_long():
    assert choose_pause(0.001, TIMEOUTS.program) == 0.5
    assert choose_pause(0.2, TIMEOUTS.program) == pytest.approx(20.0), "a hundredth of the hub's time"

    async def follow():
        asked = []

        async def ask(always):
            asked.append(always)
            return False

        served = Asked()
        pages = Pages(RunReplica(), ask, TIMEOUTS.program)
        stream = pages.follow()
        pages.receive(served.cutter.cut(AT_WORK))
        await anext(stream)
        for _ in range(50):
            pages.receive(served.cutter.cut(AT_WORK))
        num_asked = len(asked)
        await stream.aclose()
        pages.end()
        return num_asked

    assert asyncio.run(follow()) == 1, "once for the whole; the next is asked for when the pause is over"


def test_pages_are_told_when_the_hub_ends_and_there_are_never_too_many():
    async def follow():
        asked = Asked()
        streams = [asked.pages.follow() for _ in range(MOST_PAGES)]
        for stream in streams:
            await anext(stream)
        is_full = asked.pages.is_full
        asked.pages.end()
        rest = [each async for each in streams[0]]
        for stream in streams[1:]:
            await stream.aclose()
        return is_full, rest, asked.pages.is_full

    is_full, rest, is_full_later = asyncio.run(follow())
    assert (is_full, is_full_later) == (True, False)
    assert b'"is_live":false' in rest[-1]


# Where it listens.


def test_a_taken_port_is_a_sentence_and_the_usual_one_may_be_taken():
    with bind_address("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*; choose another"):
            bind_address(f"127.0.0.1:{port}")
        gate = make_gate(taken, f"localhost:{port}")
    assert show_link(gate, f"localhost:{port}").startswith(f"http://localhost:{port}/?token=")
    assert "0.0.0.0" not in show_link(Gate("t", 7780), "0.0.0.0:7780")
    assert is_for_others("0.0.0.0:7780")
    assert is_for_others("hub.example.org:7780")
    assert not is_for_others("localhost:7780")
    assert not is_for_others("")
    assert len(gate.token) >= 32
    with bind_address("") as one, bind_address("") as other:
        assert one.getsockname()[0] == other.getsockname()[0] == "127.0.0.1"
        assert one.getsockname()[1] != other.getsockname()[1]


# The page's own files.

PACKAGE = Path(ravnest.__file__).parent
STATIC = PACKAGE / "web" / "static"
OURS = [file for file in sorted(PACKAGE.rglob("static/*.*")) if not file.name.startswith("uPlot")]


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_no_file_of_the_page_makes_html_of_text_or_has_scripts_within(file):
    text = file.read_text()
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|\son\w+=\"|https?://(?!www\.w3)"
    assert re.findall(banned, text) == []
    assert "<script>" not in text
    assert 'style="' not in text


def test_the_chart_library_came_with_its_licence():
    assert "Leon Sorokin" in (STATIC / "uPlot.LICENSE.txt").read_text()
    assert "Permission is hereby granted" in (STATIC / "uPlot.LICENSE.txt").read_text()
