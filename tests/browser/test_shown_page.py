"""Pages of runs that a scripted hub makes: hostile names, many nodes, a hub that goes, a run from its log."""

import sys

import pytest
from playwright.sync_api import expect
from support.hub_world import job
from support.plan_world import node
from support.served_world import HOSTILE, serving, trained_world
from support.watched_world import WatchedWorld

from ravnest.hub.coordinator.events import PauseAsked
from ravnest.hub.coordinator.notices import Checkpointed, Left, Missing, SampledText
from ravnest.hub.service.event_log import EventLog
from ravnest.hub.service.web.dashboard import LogDashboard, LogFollower
from ravnest.web.web_server import show_link

NUM_UPDATES = 12


def test_hostile_names_and_reasons_are_text_and_nothing_else(watched):
    world = trained_world([*HOSTILE, "good"])
    world.recorder.observe_notice(Missing(HOSTILE[0], HOSTILE[1], 3.0))
    for _ in range(3):
        world.recorder.observe_notice(Left("someone", HOSTILE[3]))
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        expect(page.locator("a.stage, a.chip", has_text="onerror").first).to_be_visible()
        expect(page.locator(".side")).to_contain_text(f"{HOSTILE[0]} is missing: {HOSTILE[1]}")
        expect(page.locator(".side li", has_text="someone left")).to_have_count(1)
        expect(page.locator(".side li", has_text="someone left")).to_contain_text("3 times: someone left")
        for place in ("training", "plan", "nodes", "events"):
            page.locator(f".tabs a[href='#/{place}']").click()
            expect(page.locator("main")).to_contain_text(HOSTILE[0])
            expect(page.locator("main script, main img, main svg")).to_have_count(0)
        for number, name in enumerate(HOSTILE):
            page.locator(".tabs a[href='#/nodes']").click()
            page.locator("tbody a", has_text=name).click()
            expect(page.locator(".node-head h1")).to_have_text(name)
            expect(page.locator(".timeline li").first).to_be_visible()
            assert page.url.startswith(f"http://127.0.0.1:{served.gate.port}/#/node/"), number
        expect(page.locator("main script, main img, main svg")).to_have_count(0)


def test_two_hundred_nodes_stay_fluent(watched):
    names = [f"pc-{number:03}" for number in range(200)]
    world = WatchedWorld(job(epochs=6), make_node=lambda name, *facts: node(name, *facts))
    world.join(*names, memory_mb=250.0)
    world.run_until(lambda: world.hub.clusters and world.hub.ledger.num_counted > 0)
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        num_stages = sum(len(each.nodes) for each in world.hub.clusters)
        expect(page.locator("a.stage")).to_have_count(num_stages)
        assert num_stages > 100
        thread, took = MainThread(page), []
        for _ in range(NUM_UPDATES):
            before, began_at = page.locator("body").get_attribute("data-updates"), thread.seconds
            num_seen = len(world.happened)
            world.run_until(lambda: world.is_finished or len(world.happened) > num_seen + 50)  # noqa: B023
            served.show()
            expect(page.locator(f"body:not([data-updates='{before}'])")).to_be_attached()
            took.append(1000.0 * (thread.seconds - began_at))
        took.sort()
        shown = f"{took[0]:.1f}, mostly {took[NUM_UPDATES // 2]:.1f} and at most {took[-1]:.1f} ms"
        sys.stderr.write(
            f"200 nodes take {shown} of the main thread's CPU per update, the test's looks included\n"
        )
        assert took[0] < 50.0, "the least: a core that others use too does less in a second"


class MainThread:
    """The CPU seconds of a page's main thread: scripts, styles, layout, painting."""

    def __init__(self, page):
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    @property
    def seconds(self) -> float:
        found = self._session.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in found if each["name"] == "TaskDuration")


def test_a_join_and_a_leave_are_seen_as_they_happen(watched):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        expect(page.locator("a.stage").first).to_be_visible()
        world.join("newcomer", memory_mb=250.0)
        world.run_until(lambda: "newcomer" in world.hub.membership)
        served.show()
        expect(page.locator(".chip, a.stage", has_text="newcomer")).to_be_visible()
        expect(page.locator(".side .tone-good", has_text="newcomer joined")).to_be_visible()
        expect(page.locator("#summary")).to_contain_text("6")
        world.leave("newcomer")
        world.run_until(lambda: "newcomer" not in world.hub.membership)
        served.show()
        expect(page.locator(".chip.is-gone", has_text="newcomer")).to_be_visible()


def test_a_guest_is_invited_and_revoked_and_a_node_sent_away(watched):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        expect(page.locator("a.stage").first).to_be_visible()
        page.locator("#invite").click()
        dialog = page.locator("dialog")
        expect(dialog.locator(".invitation")).to_have_text("ravnest join rvn1_everybody")
        expect(dialog).not_to_contain_text("null")
        dialog.get_by_role("button", name="QR code").click()
        expect(dialog.locator(".code svg")).to_be_visible()
        dialog.get_by_label("Name").fill("ana")
        dialog.get_by_label("Days").fill("2")
        dialog.get_by_role("button", name="Invite").click()
        expect(dialog.locator(".invitation").first).to_have_text("ravnest join rvn1_ana")
        expect(dialog.locator(".outcome")).to_contain_text("ana is invited")
        dialog.get_by_label("Name").fill("ana")
        dialog.get_by_role("button", name="Invite").click()
        expect(dialog.locator(".outcome")).to_contain_text("has an invitation")
        assert [fault for fault in watched.faults if "409" not in fault] == []
        watched.faults.clear()  # the browser tells of the refusal, too
        row = dialog.locator("tbody tr", has_text="ana")
        row.get_by_role("button", name="Withdraw").click()
        assert not served.guests.read().invitations[1].is_revoked, "it asks once"
        row.get_by_role("button", name="Really?").click()
        expect(row).to_contain_text("withdrawn")
        assert served.guests.read().invitations[1].is_revoked
        dialog.get_by_role("button", name="Close").click()

        page.locator("a.stage").first.click()
        name = page.locator(".node-head h1").text_content()
        page.get_by_role("button", name="Send away").click()
        dialog.get_by_role("button", name="Send away").click()
        expect(dialog.locator(".outcome")).to_contain_text(f"{name} is sent away")
        assert served.kicked == [(name, "the requester sent it away")]


def test_a_checkpoint_and_a_pause_are_asked_for_once_and_their_outcome_is_shown(watched):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        page.locator("#checkpoint").click()
        dialog = page.locator("dialog")
        assert served.asked == []
        dialog.get_by_role("button", name="Write it").click()
        expect(dialog.locator(".outcome")).to_contain_text("was told to write a checkpoint")
        assert served.asked == ["checkpoint"]
        world.recorder.observe_notice(Checkpointed(640, 0.5))
        served.show()
        expect(dialog.locator(".outcome")).to_contain_text("640")
        dialog.get_by_role("button", name="Close").click()
        page.locator("#pause").click()
        dialog.get_by_role("button", name="Pause").click()
        expect(dialog.locator(".outcome")).to_contain_text("was told to pause")
        assert served.asked == ["checkpoint", True]
        world.feed(PauseAsked(True, world.now))
        served.show()
        expect(page.locator("#phase")).to_have_text("paused")
        expect(page.locator("#pause")).to_have_text("Go on")


def test_the_plan_view_says_what_each_stage_takes_and_what_one_more_pc_would_bring(watched):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(f"{show_link(served.gate)}#/plan")
        num_stages = sum(len(each.nodes) for each in world.hub.clusters)
        expect(page.locator("tbody tr")).to_have_count(num_stages)
        expect(page.locator("main")).to_contain_text("bottleneck")
        expect(page.get_by_label("Memory, GB")).not_to_have_value("")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator(".outcome")).to_contain_text("It would be")
        page.get_by_label("Speed, GFLOP/s").fill("0")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator(".outcome")).to_contain_text("No answer: no PC is like that")
        watched.faults.clear()  # the browser tells of the refusal, too


def test_what_the_model_writes_is_shown_as_text(watched):
    world = trained_world("abcde")
    world.recorder.observe_notice(SampledText(1, "Once ", f"upon a time {HOSTILE[0]}"))
    with serving(world) as served:
        page = watched.open(f"{show_link(served.gate)}#/training")
        expect(page.locator(".texts p")).to_have_text(f"Once upon a time {HOSTILE[0]}")
        expect(page.locator("main img")).to_have_count(0)


def test_a_hub_that_goes_is_said_and_what_was_known_stays(watched):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        expect(page.locator("#link-state")).to_have_text("live")
        expect(page.locator("a.stage").first).to_be_visible()
    expect(page.locator("#link-state")).to_have_text("no answer; trying again")
    expect(page.locator("a.stage").first).to_be_visible()
    watched.faults.clear()  # the browser complains that nobody answers


def test_a_run_is_shown_from_its_log_and_nothing_can_be_done(watched, tmp_path):
    world = trained_world("abcde")
    world.run()
    with EventLog(tmp_path) as store:
        for event, orders in zip(world.log, world.answers, strict=True):
            if not orders or type(orders[0]).__name__ != "Refusal":
                store.append(event)
    with LogDashboard(LogFollower(tmp_path, lambda: False), "127.0.0.1:0") as opened:
        page = watched.open(opened.link)
        expect(page.locator("#phase")).to_have_text("finished")
        expect(page.locator("#link-state")).to_have_text("read-only")
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator("#invite")).to_be_hidden()
        page.locator(".tabs a[href='#/training']").click()
        expect(page.locator(".chart:has(h2:text-is('Loss')) canvas")).to_be_visible()
        expect(page.locator("#summary div", has_text="samples/s").last).to_contain_text("on average")
        expect(page.locator("main")).to_contain_text("A log has no lag")
        expect(page.locator("h2", has_text="Largest lag")).to_have_count(0)
        page.locator(".tabs a[href='#/plan']").click()
        measured = page.locator(".facts-list div", has_text="measured")
        expect(measured).to_contain_text("samples/s on average (")
        page.locator(".tabs a[href='#/events']").click()
        expect(page.locator(".timeline li", has_text="the job is done")).to_be_visible()


def test_another_run_is_shown_beside_it(watched, tmp_path):
    for name in ("one", "other"):
        world = trained_world("abcde")
        world.run()
        with EventLog(tmp_path / name) as store:
            for event, orders in zip(world.log, world.answers, strict=True):
                if not orders or type(orders[0]).__name__ != "Refusal":
                    store.append(event)
    one, other = (LogFollower(tmp_path / name, lambda: False) for name in ("one", "other"))
    with LogDashboard(one, "127.0.0.1:0", beside={HOSTILE[0]: other}) as opened:
        page = watched.open(f"{opened.link}#/training")
        chart = page.locator(".chart:has(h2:text-is('Loss'))")
        expect(chart.locator(".u-legend .u-label", has_text="training, <img").first).to_be_visible()
        expect(chart.locator(".u-legend .u-label", has_text="validation").last).to_be_visible()
        expect(page.locator("main img")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_follow_the_system_and_can_be_chosen(watched, scheme):
    world = trained_world("abcde")
    with serving(world) as served:
        page = watched.open(show_link(served.gate))
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("a.stage").first).to_be_visible()
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for _ in range(2 if scheme == "light" else 1):  # auto, light, dark
            page.locator("#theme").click()
        other = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shade != other
        page.reload()
        expect(page.locator("a.stage").first).to_be_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == other
