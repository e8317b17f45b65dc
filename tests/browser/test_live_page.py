"""The dashboard of a real swarm in a real browser: topology, curves, a death and a recovery, reload, stop.

With RAVNEST_SCREENSHOTS=docs the pictures of the documentation are made anew.
"""

import asyncio
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

import ravnest as rv
from ravnest.requester.local_peers import Hardware
from tests.support.faults import MEMORY_BYTES, PLAN, make_job
from tests.support.forked import fork

NUM_PEERS, NUM_CLUSTERS = 7, 2  # of two or three stages each, and at least one spare
FLOPS_PER_SECOND = 5e7  # what is looked at need not be fast: this lets other tests compute
SHOTS = os.environ.get("RAVNEST_SCREENSHOTS")


class Swarm:
    """A hub with peers of its own that trains without an end in a thread, and its link."""

    def __init__(self) -> None:
        peers = [Hardware(MEMORY_BYTES, emulated_flops_per_second=FLOPS_PER_SECOND)] * NUM_PEERS
        plan = replace(PLAN, clusters=NUM_CLUSTERS)
        self.hub = rv.local(peers, plan=plan, tell=lambda _: None, dashboard="127.0.0.1:0")
        self.results: list[rv.Result] = []
        self.thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self):
        self.hub.__enter__()
        self.link = self.hub.dashboard
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.hub.stop("the test has seen enough")
        self.thread.join()
        self.hub.__exit__(None, None, None)

    def _train(self) -> None:
        job = make_job(name="points", metrics={"accuracy": accuracy})
        self.results.append(self.hub.fit(job))

    def kill(self, name: str) -> None:
        os.kill(self.hub.processes[name], signal.SIGKILL)


def accuracy(out, batch):
    return (out.argmax(-1) == batch["y"]).float().mean()


@pytest.fixture(scope="module")
def swarm(chromium):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", fork)
        with Swarm() as found:
            yield found


def take_picture(page, name: str, tmp_path: Path, epoch: int = 0) -> None:
    """Keep a picture; for the documentation not before an epoch, so that there is something to see."""
    if SHOTS and epoch:
        later = "|".join(map(str, range(epoch, epoch + 500)))  # an epoch may pass between two looks
        expect(page.locator("#summary")).to_contain_text(re.compile(f"epoch ({later}) of"))
    path = Path(SHOTS or tmp_path) / f"dashboard-{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < 200_000


def wait_for_training(page) -> None:
    expect(page.locator(".cluster.is-running")).to_have_count(NUM_CLUSTERS)
    expect(page.locator("a.stage.is-hosting .state", has_text="busy").first).to_be_visible()


def wait_for_more(page, selector: str) -> None:
    """Wait until a text has changed twice."""
    for _ in range(2):
        before = page.locator(selector).first.text_content()
        expect(page.locator(selector).first).not_to_have_text(before)


def count_events(page) -> int:
    shown = page.locator(".events .facts")
    expect(shown).to_contain_text("events")
    return int(re.search(r"of ([\d,]+) events", shown.text_content())[1].replace(",", ""))


def test_the_link_opens_the_swarm_and_its_curves_move(swarm, watched, tmp_path):
    page = watched.open(swarm.link)
    wait_for_training(page)
    assert "token" not in page.url, "it is in a cookie now, which scripts cannot read"
    assert page.evaluate("document.cookie") == ""
    num_stages = page.locator("a.stage").count()
    assert num_stages >= 2 * NUM_CLUSTERS
    expect(page.locator(".link")).to_have_count(num_stages - NUM_CLUSTERS)
    expect(page.locator(".link.is-flowing .flow").first).to_contain_text("B/s")
    expect(page.locator(".chips .chip", has_text="spare")).to_have_count(NUM_PEERS - num_stages)
    expect(page.locator("#job")).to_have_text("points")
    expect(page.locator("#phase")).to_have_text("training")
    wait_for_more(page, ".chart .u-legend .u-value")
    take_picture(page, "swarm", tmp_path, epoch=6)
    page.get_by_role("link", name="Training").click()
    expect(page.locator(".chart h2", has_text="accuracy")).to_be_visible()
    expect(page.locator(".rounds i").first).to_be_attached()
    wait_for_more(page, ".chart:has(h2:text-is('Loss')) .u-legend .u-value")
    expect(page.locator("tbody .bar-cell")).to_have_count(num_stages)
    page.get_by_label("time").check()
    expect(page.locator(".chart .u-legend .u-label", has_text="time").first).to_be_visible()
    take_picture(page, "training", tmp_path, epoch=14)


def test_the_plan_and_what_one_more_pc_would_bring(swarm, watched, tmp_path):
    page = watched.open(swarm.link)
    wait_for_training(page)
    page.get_by_role("link", name="Plan").click()
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".outcome")).to_contain_text("samples/s")
    expect(page.locator("tbody tr")).to_have_count(page.locator("tbody tr .bar").count())
    take_picture(page, "plan", tmp_path)


def test_the_page_works_on_a_phone_in_the_dark(swarm, chromium, watched, tmp_path):
    page = watched.open(swarm.link)
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    wait_for_training(page)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "nothing is wider than the phone"
    take_picture(page, "phone", tmp_path)


def test_a_kill_is_seen_as_a_death_and_a_recovery_and_a_reload_loses_nothing(swarm, watched, tmp_path):
    page = watched.open(swarm.link)
    wait_for_training(page)
    victim = page.locator("a.stage.is-hosting strong").nth(1).text_content()
    others = watched.open(swarm.link.split("?")[0])  # a second page, by the cookie alone
    wait_for_training(others)
    swarm.kill(victim)
    # On a busy PC it may have been missing before.
    expect(page.locator(f"a.stage[data-node='{victim}'].is-missing")).to_be_visible()
    take_picture(page, "death", tmp_path)
    expect(page.locator(".side .tone-bad", has_text=f"{victim} left").first).to_be_visible()
    expect(page.locator(".side .tone-good", has_text="trains again").first).to_be_visible()
    wait_for_training(page)
    expect(page.locator(f"a.stage[data-node='{victim}']")).to_have_count(0)
    expect(page.locator(".chip.is-gone strong", has_text=victim).first).to_be_visible()
    expect(others.locator(f"a.stage[data-node='{victim}']")).to_have_count(0)

    page.get_by_role("link", name="Events").click()
    page.get_by_label("Search in events").fill(victim)
    expect(page.locator(".timeline li", has_text=f"{victim} is missing").first).to_be_visible()
    page.get_by_label("only what went wrong").check()
    expect(page.locator(".timeline li.tone-good")).to_have_count(0)
    take_picture(page, "events", tmp_path)
    num_events = count_events(page)
    page.reload()
    assert count_events(page) >= num_events
    page.get_by_label("Search in events").fill(victim)
    page.locator(".timeline li", has_text=f"{victim} left").get_by_role("link", name=victim).first.click()
    expect(page.locator(".node-head .pill")).to_have_text("gone")
    expect(page.locator(".timeline li", has_text=f"{victim} joined").first).to_be_visible()


def test_a_node_has_a_page_of_its_own(swarm, watched, tmp_path):
    page = watched.open(swarm.link)
    wait_for_training(page)
    page.get_by_role("link", name="Nodes").click()
    row = page.locator("tbody tr", has_text="hosting").first
    name = row.locator("a").text_content()
    expect(row).to_contain_text("50.0 MFLOP/s")
    row.locator("a").click()
    expect(page.locator(".node-head h1")).to_have_text(name)
    expect(page.locator(".facts-list")).to_contain_text(["memory lent", "memory planned"])
    expect(page.locator(".facts-list", has_text="averages with")).to_contain_text("node")
    take_picture(page, "node", tmp_path)


def test_without_the_token_nothing_is_shown(swarm, chromium):
    context = chromium.new_context()
    page = context.new_page()
    place = "http://{}:{}".format(*urlsplit(swarm.link).netloc.split(":"))
    for link in (place, f"{place}/?token=wrong", f"{place}/#/swarm"):
        answer = page.goto(link)
        assert answer.status == 401
        expect(page.locator("h1")).to_have_text("This page needs its link")
    for path in ("api/v1/run", "api/v1/stream", "api/v1/invitation", "metrics"):
        assert context.request.get(f"{place}/{path}").status == 401
    assert context.request.post(f"{place}/api/v1/stop").status == 403
    context.close()


def test_stopping_asks_once_shows_the_outcome_and_keeps_the_weights(swarm, watched):
    page = watched.open(swarm.link)
    wait_for_training(page)
    page.locator("#stop").click()
    expect(page.locator("dialog")).to_contain_text("Stop the training?")
    page.locator("dialog").get_by_role("button", name="Train on").click()
    expect(page.locator("#phase")).to_have_text("training")
    page.locator("#stop").click()
    page.locator("dialog").get_by_role("button", name="Stop and keep").click()
    expect(page.locator("dialog .outcome")).to_contain_text("told to stop")
    page.locator("dialog").get_by_role("button", name="Close").click()
    expect(page.locator("#phase")).to_have_text("finished")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".side")).to_contain_text("the job is done")
    swarm.thread.join()
    assert swarm.results[0].metrics["val_accuracy"] > 0.5
    page.reload()
    expect(page.locator("#phase")).to_have_text("finished")
    expect(page.locator("#link-state")).to_have_text("read-only")
