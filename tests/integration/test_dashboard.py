"""The dashboard over real sockets: beside a hub in another thread, and as a program that reads a log."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from support.hub_world import job
from support.watched_world import WatchedWorld
from test_hub_command import RAVNEST

from ravnest.hub.coordinator.notices import Joined
from ravnest.hub.service.event_log import EventLog
from ravnest.hub.service.web.actions import HubActions
from ravnest.hub.service.web.dashboard import LiveDashboard
from ravnest.requester.run_folder import open_run


def get(link, path):
    place, token = link.split("/?token=")
    asked = urllib.request.Request(f"{place}/{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked) as answer:
        return answer.read()


def read_run(link):
    return json.loads(get(link, "api/v1/run"))


def make_world():
    world = WatchedWorld(job(epochs=4))
    world.join(*"abcde", memory_mb=250.0)
    return world.run()


def test_a_hub_is_shown_while_it_trains_after_it_has_ended_and_when_it_trains_again():
    world, stopped = make_world(), []

    async def train(opened):
        opened.begin()
        opened.observe_notice(Joined("a"))
        for event, orders in world.happened:
            opened.observe(world.tracker, event, orders)
        seen = await asyncio.to_thread(read_run, opened.link)
        opened.end()
        return seen

    with LiveDashboard(
        "127.0.0.1:0", hub=HubActions(stopped.append, lambda *_: None, lambda: None, lambda _: None)
    ) as opened:
        seen = asyncio.run(train(opened))
        assert (seen["number"], seen["is_live"], seen["can_invite"]) == (1, True, False)
        assert seen["training"]["num_samples"] == world.given.settings.num_total
        assert seen["wall_offset"] > 0
        ended = read_run(opened.link)  # the loop of the hub is gone, and what it said last is known
        assert (ended["is_live"], ended["can_stop"], ended["phase"]) == (False, False, "finished")
        assert json.loads(get(opened.link, "api/v1/news"))[0]["text"] == "a joined"
        assert b"ravnest_live 0.0" in get(opened.link, "metrics")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read_run(f"{opened.link}x")
        assert asyncio.run(train(opened))["number"] == 2
        told = json.loads(get(opened.link, "api/v1/news"))
        assert [each["kind"] for each in told] == ["Joined", "Finish"], "those of the second run alone"
    with pytest.raises(urllib.error.URLError):
        read_run(opened.link)
    assert stopped == []


def test_what_happened_before_the_hub_was_started_again_is_shown_too():
    world = make_world()

    async def go_on(opened):
        opened.begin()
        for event, orders in world.happened[:40]:
            opened.replay(world.tracker, event, orders)
        for event, orders in world.happened[40:]:
            opened.observe(world.tracker, event, orders)
        seen = await asyncio.to_thread(get, opened.link, "api/v1/news")
        opened.end()
        return seen

    with LiveDashboard(
        "127.0.0.1:0", hub=HubActions(lambda _: None, lambda *_: None, lambda: None, lambda _: None)
    ) as opened:
        told = [each["text"] for each in json.loads(asyncio.run(go_on(opened)))]
    assert "a joined" in told


def test_a_log_is_shown_by_a_program_until_ctrl_c(tmp_path):
    world = make_world()
    open_run(tmp_path)
    with EventLog(tmp_path) as store:
        for event, orders in zip(world.log, world.answers, strict=True):
            if not orders or type(orders[0]).__name__ != "Refusal":
                store.append(event)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.Popen([*RAVNEST, "dashboard", str(tmp_path), "--at", "127.0.0.1:0"], **pipes)
    try:
        link = program.stdout.readline().strip()
        run = read_run(link)
        assert (run["phase"], run["is_live"], run["can_stop"]) == ("finished", False, False)
        assert run["training"]["num_samples"] == world.given.settings.num_total
        program.send_signal(signal.SIGINT)
        said = program.communicate()[1]
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, "Traceback" in said) == (130, False), said


def test_a_folder_without_a_run_is_a_sentence(tmp_path):
    done = subprocess.run([*RAVNEST, "dashboard", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, "holds no run of a hub" in done.stderr) == (3, True), done.stderr
    both = (sys.executable, "-m", "ravnest", "hub", "job.py:job", "--dashboard", "--no-dashboard")
    done = subprocess.run(both, capture_output=True, text=True)
    assert (done.returncode, "one of the two" in done.stderr) == (2, True), done.stderr


def test_a_hub_without_a_page_loads_no_web_server():
    check = (
        "import sys, ravnest as rv\n"
        "with rv.Hub('127.0.0.1:0') as hub:\n"
        "    assert hub.dashboard is None\n"
        "    assert not {'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)\n"
        "with rv.Hub('127.0.0.1:0', dashboard='127.0.0.1:0') as hub:\n"
        "    assert hub.dashboard.startswith('http://127.0.0.1:')\n"
        "    assert 'starlette' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
