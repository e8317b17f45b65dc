"""axe-core looks at every view, in light and dark and at the width of a phone: no serious fault."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from support.lent_pc import LentPc, serving_page
from support.served_world import serving, trained_world

from ravnest.hub.coordinator.notices import Left, Missing, SampledText
from ravnest.web.web_server import show_link

GRAVE = ("serious", "critical")
LOOKS = [("light", 1360), ("dark", 1360), ("light", 390)]


def find_faults(page):
    """Return what axe-core finds that keeps people from using the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in GRAVE
    ]


def look(page, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 850})


@pytest.fixture(scope="module")
def world():
    found = trained_world("abcde")
    found.recorder.observe_notice(Missing("a", "its cable was cut", 3.0))
    found.recorder.observe_notice(Left("someone", "its provider takes it back"))
    found.recorder.observe_notice(SampledText(1, "Once ", "upon a time"))
    return found


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_no_view_of_the_dashboard_has_a_serious_fault(watched, world, scheme, width):
    faults = {}
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        look(page, scheme, width)
        expect(page.locator("a.stage").first).to_be_visible()
        name = page.locator("a.stage strong").first.text_content()
        for place in ("swarm", "training", "plan", "nodes", "events", f"node/{name}"):
            page.goto(f"{page.url.partition('#')[0]}#/{place}")
            expect(page.locator("main > *").first).to_be_visible()
            faults[place] = find_faults(page)
        page.goto(f"{page.url.partition('#')[0]}#/swarm")
        page.locator("#invite").click()
        page.get_by_role("button", name="QR code").click()
        faults["invite"] = find_faults(page)
        page.get_by_role("button", name="Close").click()
        page.locator("#stop").click()
        faults["stop"] = find_faults(page)
    assert {place: found for place, found in faults.items() if found} == {}


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_the_page_of_a_lent_pc_has_no_serious_fault(watched, scheme, width):
    lent = LentPc()
    lent.host()
    lent.recorder.news.append("said", "lending", "warning", "the hub is lost; dialling it again", 0.0)
    lent.train(20)
    with serving_page(lent) as (gate, _):
        page = watched.open(show_link(gate))
        look(page, scheme, width)
        expect(page.locator(".pipeline li")).to_have_count(3)
        faults = find_faults(page)
        page.locator("#finish").click()
        faults += find_faults(page)
    assert faults == []


def test_a_page_without_its_link_is_readable_too(watched):
    lent = LentPc()
    with serving_page(lent) as (gate, _):
        page = watched.open(f"http://127.0.0.1:{gate.port}/")
        expect(page.locator("h1")).to_have_text("This page needs its link")
        assert find_faults(page) == []
    watched.faults.clear()  # the browser tells of the refusal
