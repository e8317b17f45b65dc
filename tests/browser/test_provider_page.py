"""The page of a lent PC in a real browser: what runs, hostile names, taking the PC back."""

import os
from pathlib import Path

from playwright.sync_api import expect
from support.lent_pc import LentPc, lent_terms, serving_page
from support.small_swarm import make_job

from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.provider.lending_documents import LendingFacts
from ravnest.web.web_server import show_link

HOSTILE = ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>")


def hosted_stage():
    """Return three positions of a real model, as a hub sends them."""
    whole = make_job().capture().blueprint
    return b"{}\n" + write_blueprint(slice_blueprint(whole, 2, 5))


def picture(page, name):
    folder = os.environ.get("RAVNEST_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_it_shows_what_runs_here_for_whom_and_what_it_takes(watched):
    lent = LentPc()
    lent.host(blueprint=hosted_stage())
    lent.recorder.news.append("said", "lending", "plain", "joined as attic", 0.0)
    lent.recorder.news.append("said", "lending", "plain", "plan 1: positions 2 to 5", 0.0)
    lent.train(90)
    with serving_page(lent) as (gate, web):
        page = watched.open(show_link(gate))
        expect(page.locator("#phase")).to_have_text("hosting")
        assert "token" not in page.url
        expect(page.locator(".pipeline li")).to_have_text(["ana", "this PC", "cem"])
        expect(page.locator("main")).to_contain_text("positions 2 to 4 of")
        expect(page.locator("main")).to_contain_text("aten")
        expect(page.locator("main")).to_contain_text("203.0.113.7")
        expect(page.locator("#summary")).to_contain_text("50.0 kB/s")
        expect(page.locator(".chart canvas")).to_have_count(3)
        expect(page.locator(".news li")).to_have_count(2)
        picture(page, "lending")
        lent.train(30, sent=100_000)
        web.call(lambda pages: pages.receive(lent.update()))
        expect(page.locator("#summary")).to_contain_text("100 kB/s")


def test_nothing_of_a_hub_or_of_others_can_run_script(watched):
    lent = LentPc(lent_terms(name=HOSTILE[0], hub=HOSTILE[1], addresses=(HOSTILE[0],)))
    lent.host(pipeline=(HOSTILE[0], "attic", HOSTILE[1]))
    lent.recorder.news.append("said", "lending", "bad", f"the hub is lost: {HOSTILE[1]}", 0.0)
    lent.facts = LendingFacts(leaving=HOSTILE[0])
    with serving_page(lent) as (gate, _):
        page = watched.open(show_link(gate))
        expect(page.locator("#name")).to_have_text(HOSTILE[0])
        expect(page.locator(".pipeline")).to_contain_text(HOSTILE[1])
        expect(page.locator(".news li")).to_contain_text(HOSTILE[1])
        expect(page.locator("main script, main img, main svg")).to_have_count(0)


def test_it_asks_once_and_shows_the_outcome(watched):
    lent = LentPc()
    lent.host()
    with serving_page(lent) as (gate, web):
        page = watched.open(show_link(gate))
        dialog = page.locator("dialog")
        page.locator("#pause").click()
        assert lent.wanted == []
        dialog.get_by_role("button", name="Go on").click()
        assert lent.wanted == [], "it was asked, and the answer was no"
        page.locator("#pause").click()
        dialog.get_by_role("button", name="Pause").click()
        expect(dialog.locator(".outcome")).to_contain_text("hands over")
        assert lent.wanted == ["pause"]
        dialog.get_by_role("button", name="Close").click()
        lent.recorder.end_part()
        lent.facts = LendingFacts(True, "its provider paused it", "after: ravnest resume attic")
        web.call(lambda pages: pages.receive(lent.update()))
        expect(page.locator("main")).to_contain_text("Nothing runs here now: its provider paused it")
        expect(page.locator("#pause")).to_be_hidden()
        page.locator("#resume").click()
        dialog.get_by_role("button", name="Resume").click()
        expect(dialog.locator(".outcome")).to_contain_text("joins again")
        dialog.get_by_role("button", name="Close").click()
        page.locator("#finish").click()
        dialog.get_by_role("button", name="Finish").click()
        expect(dialog.locator(".outcome")).to_contain_text("the program ends")
        assert lent.wanted == ["pause", "resume", "finish"]
