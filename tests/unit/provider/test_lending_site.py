"""Who may see a provider's page, and what it may do; what the PC is doing, as its programs say."""

import pytest
from support.lent_pc import LentPc
from support.watched_world import request

from ravnest.config import TIMEOUTS
from ravnest.provider.lending_documents import LendingFacts
from ravnest.provider.lending_page import UseReader, parse_gpu
from ravnest.provider.lending_site import LendingReplica, make_lending_site
from ravnest.web.gate import Gate
from ravnest.web.pages import Pages

GATE = Gate("right-token", 7780)
COOKIE = f"ravnest_7780={GATE.token}"
OWN_PAGE = {"cookie": COOKIE, "origin": "http://127.0.0.1:7780"}


@pytest.fixture
def lent():
    found = LentPc()
    found.host()
    found.train(3)
    found.app = make_lending_site(GATE, found.pages, found.control).app
    return found


def test_it_is_closed_without_its_token(lent):
    for path in ("lending", "news", "stream"):
        assert request(lent.app, f"/api/v1/{path}").status == 401
    assert request(lent.app, "/").status == 401
    assert request(lent.app, "/", host="evil.example").status == 421
    assert request(lent.app, f"/?token={GATE.token}").status == 200


def test_it_answers_a_document_of_version_1_and_shares_the_files_of_all_pages(lent):
    answer = request(lent.app, "/api/v1/lending", cookie=COOKIE)
    assert answer.json["schema"] == "ravnest.lending-page/1"
    assert (answer.json["phase"], answer.json["terms"]["name"]) == ("hosting", "attic")
    for name in ("style.css", "charts.js", "dom.js", "lending.js"):
        assert request(lent.app, f"/static/{name}").status == 200
    assert request(lent.app, "/static/swarm.js").status == 404, "that is of the dashboard"


def test_a_provider_pauses_resumes_and_finishes_once(lent):
    assert request(lent.app, "/api/v1/pause", "POST", **OWN_PAGE).status == 202
    assert lent.wanted == ["pause"]
    assert request(lent.app, "/api/v1/resume", "POST", **OWN_PAGE).status == 409
    lent.facts = LendingFacts(is_paused=True)
    assert request(lent.app, "/api/v1/pause", "POST", **OWN_PAGE).status == 409
    told = request(lent.app, "/api/v1/resume", "POST", **OWN_PAGE)
    assert "joins again" in told.json["outcome"]
    assert "program ends" in request(lent.app, "/api/v1/finish", "POST", **OWN_PAGE).json["outcome"]
    lent.facts = LendingFacts(is_ending=True)
    assert request(lent.app, "/api/v1/finish", "POST", **OWN_PAGE).status == 409
    assert lent.wanted == ["pause", "resume", "finish"]


@pytest.mark.parametrize("word", ["pause", "resume", "finish"])
def test_nobody_else_may_act(lent, word):
    others = (
        {},
        {"cookie": COOKIE},
        {"cookie": COOKIE, "origin": "http://evil.example"},
        {"authorization": f"Bearer {GATE.token}", "origin": "http://127.0.0.1:7780"},
    )
    for headers in others:
        assert request(lent.app, f"/api/v1/{word}", "POST", **headers).status == 403
    assert request(lent.app, f"/api/v1/{word}", "POST", body=b'{"now":1}', **OWN_PAGE).status == 400
    assert lent.wanted == []


def test_a_program_that_starts_has_no_action_yet():
    async def ask(_):
        return False

    lent = LentPc()
    app = make_lending_site(GATE, Pages(LendingReplica(), ask, TIMEOUTS.program), lent.control).app
    assert request(app, "/api/v1/pause", "POST", **OWN_PAGE).status == 409


def test_a_gpu_is_read_from_a_line_and_what_it_does_not_know_is_none():
    found = parse_gpu("NVIDIA H200, 87, 1024, 143771, 45\n")
    assert (found.name, found.share, found.used_bytes, found.celsius) == ("NVIDIA H200", 0.87, 1 << 30, 45.0)
    assert parse_gpu("A, B, [N/A], 10, 20, [N/A]").share is None
    assert parse_gpu("A, 1, [N/A], 20, 3") is None
    assert parse_gpu("no devices were found") is None
    assert UseReader("cpu").read(0.0).gpu is None
