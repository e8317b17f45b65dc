"""What a provider lends, with real programs: cores, upload over real sockets, a PC that comes and goes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from support.small_swarm import END_SECONDS, JOIN, PLAN, ROOT, check_books, joining, make_job

import ravnest as rv
from ravnest.cli.lending_loop import DAY_MINUTES, PAUSE, show_minute
from ravnest.hub.coordinator.notices import Joined, Left, Notice
from ravnest.net.congestion import UPLOAD_BURST_SECONDS, affordable_chunk_bytes
from ravnest.net.identity import Token, new_keys, write_token
from ravnest.net.transport import Delivery, Service, TransportLimits
from ravnest.net.zeromq import ZeroMqTransport

HERE = "tcp://127.0.0.1:*"
RATE = 2e6


@pytest.fixture(autouse=True)
def _folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps programs to cores")
def test_every_thread_is_kept_to_the_cores_that_are_lent() -> None:
    check = """
import os, torch
from ravnest.peer.machine import limit_cpu
torch.ones(300, 300) @ torch.ones(300, 300)
known = os.sched_getaffinity(0)
said = limit_cpu("1")
threads = [int(each) for each in os.listdir("/proc/self/task")]
assert {len(os.sched_getaffinity(each)) for each in threads} == {1}
assert min(os.getpriority(os.PRIO_PROCESS, each) for each in threads) >= 10
assert said == f"1 of {len(known)} cores, behind all other programs", said
"""
    subprocess.run([sys.executable, "-c", check], check=True)


class Counting(ZeroMqTransport):
    """Notes when it sent how much."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[tuple[float, int]] = []

    def _try_send(self, connection, frames) -> bool:
        self.sent.append((self._loop.time(), sum(map(len, frames))))
        return super()._try_send(connection, frames)


def test_over_real_sockets_all_links_together_send_at_the_rate() -> None:
    keys = [new_keys() for _ in range(3)]

    async def main() -> None:
        limits = TransportLimits(upload_bytes_per_second=RATE)
        async with (
            Counting(keys[0], Random(0), None, limits) as sender,
            ZeroMqTransport(keys[1], Random(1), HERE) as one,
            ZeroMqTransport(keys[2], Random(2), HERE) as two,
        ):
            for node in (sender, one, two):
                node.allow(each.public for each in keys)
            for other in (one, two):
                sender.dial(other.peer, [other.address])
                await sender.send(other.peer, Service.BLOB, b"blob", [bytes(int(RATE / 2))])
            async with asyncio.timeout(END_SECONDS):
                for other in (one, two):
                    while not isinstance(await other.receive(), Delivery):
                        pass
            assert sum(size for _, size in sender.sent) > RATE
            slack = UPLOAD_BURST_SECONDS * RATE + 2 * affordable_chunk_bytes(RATE)
            for first, (began, _) in enumerate(sender.sent):
                total = 0
                for now, size in sender.sent[first:]:
                    total += size
                    assert total <= RATE * (now - began) + slack

    asyncio.run(main())


def tell(word: str, name: str) -> None:
    command = [sys.executable, "-m", "ravnest", word, name, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert [peer["name"] for peer in json.loads(done.stdout)["peers"]] == [name]


@pytest.mark.skipif(PAUSE is None, reason="this system has no such signals")
def test_outside_its_hours_a_pc_waits_and_hears_what_its_provider_says() -> None:
    now = time.localtime()
    start, stop = (
        show_minute((now.tm_hour * 60 + now.tm_min + later) % DAY_MINUTES) for later in (12 * 60, 13 * 60)
    )
    token = write_token(Token(("tcp://127.0.0.1:9",), new_keys().public, bytes(16)))
    options = ["--memory", "1 GB", "--name", "pc", "--on-battery", "go", "--upload", "20 Mbit/s"]
    options += ["--hours", f"{start}-{stop}"]
    environment = {**os.environ, "RAVNEST_TOKEN": token}
    with subprocess.Popen(
        [*JOIN, *options], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stderr is not None
        try:
            said = iter(peer.stderr)
            lent = f"and no more than: 20 Mbit/s of upload, from {start} to {stop}"
            assert next(said).strip() == f"lends 1 GB of memory and 1 GFLOP/s (as claimed) as pc, {lent}"
            outside = f"waits: it is only lent from {start} to {stop}; it joins at {start}, Ctrl-C ends it"
            paused = "waits: its provider paused it; it joins after: ravnest resume pc, Ctrl-C ends it"
            assert [next(said).strip() for _ in range(3)][-1] == outside
            tell("pause", "pc")
            assert next(said).strip() == paused
            tell("resume", "pc")
            assert next(said).strip() == outside
            tell("finish", "pc")
            assert [line.strip() for line in said] == ["ended: its provider takes it back"]
            assert peer.wait(END_SECONDS) == 143
        finally:
            peer.kill()


@pytest.mark.skipif(PAUSE is None, reason="this system has no such signals")
def test_a_paused_pc_leaves_the_swarm_comes_back_and_trains_within_its_limits() -> None:
    told: list[Notice] = []
    pauses: list[threading.Thread] = []

    def note(news: Notice) -> None:
        told.append(news)
        word = {Joined: "pause", Left: "resume"}.get(type(news))
        if word is not None and [type(each) for each in told].count(type(news)) == 1:
            pauses.append(threading.Thread(target=tell, args=(word, "node0")))
            pauses[-1].start()  # the hub does not wait for it
        elif isinstance(news, Joined) and len(second) == 0:
            second.append(
                stack.enter_context(joining(hub.token, ["--name", "other", "--upload", "20 Mbit/s"]))
            )

    second: list[object] = []
    limits = ["--cpu", "1", "--upload", "20 Mbit/s", "--on-battery", "go"]
    with rv.Hub("127.0.0.1:0", plan=PLAN, tell=note) as hub, ExitStack() as stack:
        (peer,) = stack.enter_context(joining(hub.token, limits))
        hub.fit(make_job(), nodes=2)
        said = peer.communicate(timeout=END_SECONDS)[1]
    for pause in pauses:
        pause.join()
    left = [(news.node, news.reason) for news in told if isinstance(news, Left)]
    assert left[0] == ("node0", "its provider paused it")
    assert [news.node for news in told if isinstance(news, Joined)][:2] == ["node0", "node0"]
    assert said.count("joined as node0") >= 2
    check_books(told)
