"""`ravnest join --page` as a real program: what it shows, and that the page takes the PC back."""

import json
import os
import subprocess
import sys
import threading
import urllib.request

import pytest
from support.small_swarm import END_SECONDS, ENDLESS, JOIN, MEMORY_BYTES, PLAN, ROOT, joining, make_job

import ravnest as rv
from ravnest.hub.coordinator.notices import Notice, Trained
from ravnest.provider.lending_page import UseReader


@pytest.fixture(autouse=True)
def _folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def read_lending(link):
    place, token = link.split("/?token=")
    asked = urllib.request.Request(f"{place}/api/v1/lending", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked) as answer:
        return json.loads(answer.read())


def want(link, word):
    place, token = link.split("/?token=")
    port = place.rpartition(":")[2]
    headers = {"Cookie": f"ravnest_{port}={token}", "Origin": place}
    asked = urllib.request.Request(f"{place}/api/v1/{word}", b"{}", headers, method="POST")
    with urllib.request.urlopen(asked) as answer:
        return json.loads(answer.read())["outcome"]


def next_line(lines, words):
    """Return the next line with these words."""
    return next(line for line in lines if words in line)


def test_the_page_shows_what_runs_and_takes_the_pc_back():
    seen, is_training = {}, threading.Event()

    def provide(peer):
        """Look and act as a provider would; the hub trains meanwhile."""
        try:
            link = next_line(peer.stderr, "take it back, at").split()[-1]
            assert is_training.wait(END_SECONDS)
            seen["hosting"] = read_lending(link)
            seen["pause"] = want(link, "pause")
            next_line(peer.stderr, "waits: its provider paused it")
            seen["waiting"] = read_lending(link)
            seen["resume"] = want(link, "resume")
            next_line(peer.stderr, "joined as pc")
            seen["finish"] = want(link, "finish")
            seen["rest"] = peer.stderr.read()
            seen["code"] = peer.wait(END_SECONDS)
        finally:
            hub.stop()

    def hear(news: Notice) -> None:
        if isinstance(news, Trained):
            is_training.set()

    options = [
        "--name",
        "pc",
        "--memory",
        f"{MEMORY_BYTES} B",
        "--flops",
        "9 GFLOP/s",
        "--page",
        "127.0.0.1:0",
    ]
    with rv.Hub("127.0.0.1:0", plan=PLAN, tell=hear) as hub, joining(hub.token, [], []):
        environment = {**os.environ, "RAVNEST_TOKEN": hub.invitation, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [*JOIN, *options], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as peer:
            try:
                provider = threading.Thread(target=provide, args=(peer,))
                provider.start()
                hub.fit(make_job(epochs=ENDLESS), nodes=3)
                provider.join()
            finally:
                peer.kill()
    check_what_was_seen(seen)


def check_what_was_seen(seen):
    hosting, waiting = seen["hosting"], seen["waiting"]
    assert (hosting["phase"], hosting["is_connected"]) == ("hosting", True)
    assert "pc" in hosting["stage"]["pipeline"]
    assert hosting["traffic"]["received_bytes"] > 100_000, "its weights came over the network"
    assert (waiting["phase"], waiting["reason"]) == ("waiting", "its provider paused it")
    assert (waiting["stage"], waiting["can_resume"]) == (None, True)
    assert "hands over" in seen["pause"]
    assert "ended: its provider takes it back" in seen["rest"]
    assert seen["code"] == 143


def test_what_the_program_takes_is_of_it_and_its_children():
    reader = UseReader()
    alone = reader.read(0.0)
    assert alone.cores is None
    program = (
        "import sys; held = bytes(range(256)) * 250_000; sys.stdout.write('.'); sys.stdout.flush(); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.read(1) == b"."
        both = reader.read(1.0)
        child.communicate(b"\n")
    assert both.cores > 0.0
    assert both.memory_bytes > alone.memory_bytes + 50e6
