"""Links and content on virtual time: what takes how long, and what a death does to it."""

from dataclasses import replace

import pytest
from support.plan_world import SIMPLE, node, swarm_of

from ravnest.ids import HUB, NodeId
from ravnest.protocol.placement import BlobRef, Source
from ravnest.sim.lines import Lines
from ravnest.sim.timeline import Timeline
from ravnest.sim.transfers import Transfers, num_pieces

MB = 1e6
A, B, C = (NodeId(name) for name in "abc")


def make_lines(*, upload=10 * MB, is_reachable=True, hub_upload=0.0, relay=1 * MB):
    facts = {"upload_bytes_per_second": upload, "download_bytes_per_second": 20 * MB, "latency_seconds": 0.05}
    nodes = [node(name, is_reachable=is_reachable, **facts) for name in (A, B, C)]
    config = replace(SIMPLE, hub_bytes_per_second=hub_upload, relay_bytes_per_second=relay)
    timeline = Timeline()
    return timeline, Lines(timeline, swarm_of(*nodes), config)


def run(timeline):
    while timeline.next_at is not None:
        timeline.advance(timeline.next_at)


def test_things_happen_in_order_and_those_planned_first_come_first():
    timeline, seen = Timeline(), []
    timeline.at(2.0, seen.append, "c")
    timeline.at(1.0, seen.append, "a")
    timeline.after(1.0, seen.append, "b")
    assert timeline.next_at == 1.0
    run(timeline)
    assert seen == ["a", "b", "c"]
    assert not timeline.advance(5.0)
    assert timeline.now == 5.0
    timeline.at(1.0, seen.append, "late")
    timeline.advance(5.0)
    assert seen[-1] == "late"
    assert timeline.now == 5.0


def test_what_crosses_takes_the_slower_end_and_one_latency_and_waits_its_turn():
    timeline, lines = make_lines()
    arrived = []
    for name in ("first", "second"):
        lines.send(A, B, 10 * MB, lambda each: arrived.append((each, timeline.now)), name)
    run(timeline)
    assert arrived == [("first", pytest.approx(1.1)), ("second", pytest.approx(2.1))]


def test_two_that_nobody_can_dial_meet_at_the_hub_whose_line_all_share():
    timeline, lines = make_lines(is_reachable=False, relay=5 * MB, hub_upload=5 * MB)
    arrived = []
    for one, other in ((A, B), (C, B)):
        lines.send(one, other, 10 * MB, lambda: arrived.append(timeline.now))
    run(timeline)
    assert lines.is_relayed(A, B)
    assert arrived == [pytest.approx(2.1, abs=0.1), pytest.approx(4.1, abs=0.1)]
    assert lines.hub_relay.num_bytes == 20 * MB


def test_a_link_that_changes_does_so_for_what_comes_next_and_forgets_changes_before():
    timeline, lines = make_lines()
    arrived = []

    def send():
        lines.send(A, B, 10 * MB, lambda: arrived.append(timeline.now))

    send()
    for start, times in ((0.5, 0.01), (0.6, 0.1), (20.0, 1.0)):
        timeline.at(start, lines.change, A, times)
    for start in (1.1, 20.0):
        timeline.at(start, send)
    run(timeline)
    assert arrived == [pytest.approx(1.1), pytest.approx(11.2), pytest.approx(21.1)]
    assert lines.node(A).upload_bytes_per_second == 10 * MB


def fetch_all(timeline, lines, is_alive=lambda _: True):
    transfers, done = Transfers(timeline, lines, is_alive), {}
    blob = BlobRef("0" * 64, int(40 * MB))
    missed = []

    def fetch(name, others):
        source = Source(HUB, blob, others)
        transfers.fetch(name, (source,), lambda: done.setdefault(name, timeline.now), missed.append)

    fetch(A, ())
    fetch(B, (A,))
    fetch(C, (A, B))
    return transfers, done, missed


def test_the_hub_sends_first_weights_once_and_nodes_pass_them_on_while_they_arrive():
    timeline, lines = make_lines(hub_upload=4 * MB)
    _, done, _ = fetch_all(timeline, lines)
    run(timeline)
    assert lines.hub_bulk.num_bytes == pytest.approx(40 * MB)
    assert done[A] == pytest.approx(10.0, rel=0.05)
    assert max(done[B], done[C]) < done[A] + 2 * 40 / num_pieces(40 * MB) / 4 + 1.0, "not one after the other"


def test_who_waited_for_a_node_that_dies_gets_the_rest_elsewhere():
    timeline, lines = make_lines(hub_upload=4 * MB)
    alive = {A, B, C}
    transfers, done, missed = fetch_all(timeline, lines, alive.__contains__)
    timeline.at(4.0, alive.discard, A)
    timeline.at(4.0, transfers.forget, A)
    run(timeline)
    assert A not in done
    assert done.keys() == {B, C}
    assert not missed


def test_a_source_that_is_gone_is_named_and_what_is_whole_is_not_fetched_again():
    timeline, lines = make_lines()
    alive = {A, B, C}
    transfers, done, missed = Transfers(timeline, lines, alive.__contains__), [], []
    whole, other = BlobRef("1" * 64, int(MB)), BlobRef("2" * 64, int(MB))
    transfers.fetch(B, (Source(A, whole),), lambda: done.append(timeline.now), missed.append)
    run(timeline)
    began = timeline.now
    transfers.fetch(B, (Source(A, whole),), lambda: done.append(timeline.now), missed.append)
    run(timeline)
    assert done[1] == began
    alive.discard(A)
    transfers.fetch(B, (Source(A, other),), lambda: done.append(timeline.now), missed.append)
    run(timeline)
    assert missed == [A]
    assert len(done) == 2
