"""Peers are measured before they are planned with: what nobody has stated, within reason, not for long."""

import math
from dataclasses import replace

import pytest
import torch
from support.hub_world import HubWorld, Trouble, check_replay, job
from support.plan_world import node

from ravnest.cli.join import _Listening, _make_offer, _Stated
from ravnest.config import TIMEOUTS
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.events import MakeParts, MakePlan, Probed, Send
from ravnest.hub.coordinator.notices import Measured, PlanFormed, show_notice
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.hub.service.admission import ProbeReports
from ravnest.ids import HUB, NodeId
from ravnest.peer import capabilities
from ravnest.protocol.blobs import BlobPart, BlobRequest
from ravnest.protocol.membership import Fact, ProbeOrder, ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.transfer.blobs import Blobs, name_blob
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.link_probe import LinkProbe, LinkTimes, ballast, name_ballast
from ravnest.transfer.outbox import Outgoing

ALL = tuple(Fact)
A = NodeId("a")


def orders_of(world: HubWorld, kind: type) -> list:
    return [order for orders in world.answers for order in orders if isinstance(order, kind)]


def sent(world: HubWorld) -> list[tuple[str, ProbeOrder]]:
    return [
        (each.to, each.message) for each in orders_of(world, Send) if isinstance(each.message, ProbeOrder)
    ]


def probe(world: HubWorld, *facts: float | None, name: NodeId = A) -> tuple:
    return world.feed(Probed(name, *facts, world.now))


def test_a_plan_is_made_of_what_was_measured() -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=ALL))
    world.join(*"abc")
    world.run()
    assert world.is_finished
    (asked,) = orders_of(world, MakePlan)
    said = node("a", 150.0)
    measured = {"upload_bytes_per_second": 5e8, "download_bytes_per_second": 6e8}
    expected = replace(said, flops_per_second=said.flops_per_second / 2, **measured)
    assert asked.nodes == tuple(replace(expected, name=NodeId(name)) for name in "abc")
    assert [news.node.name for news in world.told(Measured)] == [*"abc"]
    text = "a was measured: 50 GFLOP/s, 4 Gbit/s up, 4.8 Gbit/s down, 0.001 ms away"
    assert show_notice(world.told(Measured)[0]) == text
    check_replay(world)


def test_all_run_the_same_piece_of_the_model_its_busiest_position() -> None:
    given = job(expected_nodes=3)
    flops = (1e9, 1e9, 3e9, 1e9, 1e9, 1e9)
    world = HubWorld(
        replace(given, profile=replace(given.profile, forward_flops=flops)), Trouble(guessed=ALL)
    )
    world.join(*"abc")
    world.run_until(lambda: world.told(PlanFormed))
    assert orders_of(world, MakeParts)[0] == MakeParts(2, 3)
    assert orders_of(world, MakeParts).count(MakeParts(2, 3)) == 1
    orders = sent(world)
    assert [to for to, _ in orders] == [*"abc"]
    assert {order.times_link for _, order in orders} == {True}
    assert len({order.blueprint for _, order in orders}) == 1


@pytest.mark.parametrize("fact", ALL)
def test_what_was_stated_is_not_measured(fact: Fact) -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=(fact,)))
    world.join(*"abc")
    world.run_until(lambda: world.told(PlanFormed))
    (asked,), said = orders_of(world, MakePlan), node("a", 150.0)
    found = asked.nodes[0]
    assert (found.flops_per_second == said.flops_per_second) is (fact is not Fact.SPEED)
    assert (found.upload_bytes_per_second == 1e9) is (fact is not Fact.BANDWIDTH)
    assert (found.download_bytes_per_second == 1e9) is (fact is not Fact.BANDWIDTH)
    order = sent(world)[0][1]
    assert (order.blueprint is not None) is (fact is Fact.SPEED)
    assert order.times_link is (fact is not Fact.SPEED)


def test_nobody_waits_where_all_is_stated() -> None:
    world = HubWorld(job(expected_nodes=3))
    world.join(*"abc")
    world.run_until(lambda: orders_of(world, MakePlan))
    assert world.now == 0.0
    assert not sent(world)
    assert not orders_of(world, MakeParts)


def test_who_does_not_answer_is_believed_after_a_while_and_people_are_told() -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=ALL, silent=1.0))
    world.join(*"abc")
    world.run_until(lambda: orders_of(world, MakePlan))
    assert world.now == TIMEOUTS.hub.probe_seconds
    assert orders_of(world, MakePlan)[0].nodes[0] == node("a", 150.0)
    text = show_notice(world.told(Measured)[0])
    assert text.startswith("a was not measured within 15 s, so what it says of itself counts: 100 GFLOP/s")
    assert "came too late" in probe(world, 1e9, 1e6, 1e6, 0.01)[0].reason


def test_who_dies_while_it_is_measured_is_not_waited_for() -> None:
    world = HubWorld(job(expected_nodes=0, settle_seconds=1.0), Trouble(guessed=ALL, silent=1.0))
    world.join("a")
    world.kill("a", at=2.0)
    world.run()
    assert world.now < TIMEOUTS.hub.probe_seconds
    assert not orders_of(world, MakePlan)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", range(3))
def test_nonsense_is_refused(nonsense: float, place: int) -> None:
    world = HubWorld(job(), Trouble(guessed=ALL, silent=1.0))
    world.join("a")
    world.run(until=1.0)
    facts = [1e9, 1e6, 1e6, 0.01]
    facts[place] = nonsense
    (refusal,) = probe(world, *facts)
    assert isinstance(refusal, Refusal)
    assert "no machine is like" in refusal.reason
    assert not world.told(Measured)
    assert "nobody asked" in probe(world, 1e9, 1e6, 1e6, 0.01, name=NodeId("z"))[0].reason


def test_what_is_measured_is_believed_within_bounds_and_in_part() -> None:
    world = HubWorld(job(), Trouble(guessed=ALL, silent=1.0))
    world.join("a", "b")
    world.run(until=1.0)
    probe(world, 1e29, 1.0, 1e29, 1e5)
    probe(world, None, 2e6, 3e6, 0.02, name=NodeId("b"))
    first, second = world.told(Measured)
    low, high, latency = (
        first.node.upload_bytes_per_second,
        first.node.flops_per_second,
        first.node.latency_seconds,
    )
    assert 1.0 < low < 1e5
    assert 1e14 < high < 1e29
    assert 1.0 < latency < 1e5
    assert second.node.flops_per_second == node("b").flops_per_second
    assert second.node.upload_bytes_per_second == 2e6
    assert "could not measure all" in second.fault


def test_who_comes_while_others_train_is_measured_before_the_next_plan() -> None:
    world = HubWorld(job(expected_nodes=2))
    world.join("a", "b", memory_mb=250.0)
    world.run_until(lambda: world.hub.phase is JobPhase.TRAINING)
    world.trouble.guessed = ALL
    world.join("c", memory_mb=250.0)
    world.run(until=world.now + 1.0)
    assert [to for to, _ in sent(world)] == ["c"]
    for name in "ab":
        world.kill(name)
    world.join("d", memory_mb=250.0)
    world.run()
    assert world.is_finished
    assert sorted(to for to, _ in sent(world)) == ["c", "d"]


class Wire:
    """Two programs with a link between them: latency and bandwidth, and a clock that only it moves."""

    def __init__(self, latency: float, rate: float) -> None:
        self.now, self.latency, self.rate = 0.0, latency, rate
        self.near, self.far = LinkProbe(), Exchange(Blobs(), self._carry)
        self.num_bytes = 0

    def time(self) -> LinkTimes:
        found: list[LinkTimes] = []
        self.requests = [self.near.start(A, lambda: self.now, found.append)]
        while self.requests:
            assert self.far.receive(HUB, self.requests.pop().message, ()) is None
        (times,) = found
        return times

    def _carry(self, answer: Outgoing) -> None:
        piece = answer.message
        assert isinstance(piece, BlobPart)
        assert answer.to == HUB
        self.num_bytes += piece.size_bytes
        self.now += 2 * self.latency + piece.size_bytes / self.rate
        taken = self.near.receive(A, piece)
        assert taken is not None
        self.requests += taken


@pytest.mark.parametrize("latency", [0.0, 1e-4, 0.01, 0.2])
@pytest.mark.parametrize("rate", [1e4, 1e5, 1e6, 1e7, 1e8])
def test_a_link_is_timed_as_it_is(latency: float, rate: float) -> None:
    wire = Wire(latency, rate)
    times = wire.time()
    assert times.latency_seconds == pytest.approx(latency + 0.5 / rate)
    assert times.bytes_per_second == pytest.approx(rate, rel=0.01)
    assert wire.now < TIMEOUTS.hub.probe_seconds / 2


def test_a_slow_link_is_not_timed_with_much() -> None:
    slow, fast = Wire(0.01, 1e5), Wire(0.01, 1e8)
    slow.time()
    fast.time()
    assert slow.num_bytes < 1e5
    assert fast.num_bytes > 1e6


def test_what_is_too_fast_to_be_timed_counts_as_fast_as_could_be_timed() -> None:
    rate = Wire(0.0, math.inf).time().bytes_per_second
    assert 1e8 < rate < 1e10


def test_only_the_piece_that_was_asked_for_is_timed() -> None:
    posted: list[Outgoing] = []
    found: list[LinkTimes] = []
    near = Exchange(Blobs(), posted.append)
    near.time_link(A, lambda: 0.0, found.append)
    (request,) = [sent.message for sent in posted]
    assert request == BlobRequest(name_ballast().blob, 0, 1)
    for sender, piece in ((HUB, BlobPart(request.blob, 0, 1)), (A, BlobPart(request.blob, 0, 2))):
        assert isinstance(near.receive(sender, piece, (bytes(piece.size_bytes),)), Refusal)
    assert len(posted) == 1
    assert not found


def test_everybody_serves_the_ballast_and_no_link_can_shrink_it() -> None:
    import zlib

    posted: list[Outgoing] = []
    Exchange(Blobs(), posted.append).receive(A, BlobRequest(name_ballast().blob, 0, 1 << 20), ())
    assert bytes(posted[0].buffers[0]) == ballast()
    assert name_blob(ballast()) == name_ballast()
    assert len(zlib.compress(ballast())) >= len(ballast())


def test_one_report_is_taken_for_each_probe_and_the_way_back_is_timed_with_it() -> None:
    posted: list[Outgoing] = []
    applied: list[Probed] = []
    exchange = Exchange(Blobs(), posted.append)
    reports = ProbeReports(exchange, applied.append)
    reports.complete(A, ProbeReport(1e9), lambda: 1.0)
    assert not applied  # nobody asked
    reports.await_from(A)
    for _ in range(2):
        reports.complete(A, ProbeReport(1e9), lambda: 1.0)
    assert applied == [Probed(A, 1e9, None, None, None, 1.0)]
    reports.await_from(A)
    reports.complete(A, ProbeReport(None, 1e6, 0.01), lambda: 1.0)
    while posted:
        request = posted.pop().message
        assert isinstance(request, BlobRequest)
        Exchange(Blobs(), lambda sent: exchange.receive(A, sent.message, sent.buffers)).receive(
            HUB, request, ()
        )
    assert applied[1] == Probed(A, None, applied[1].upload_bytes_per_second, 1e6, 0.01, 1.0)
    assert applied[1].upload_bytes_per_second > 0


@pytest.mark.parametrize(
    ("num_cuda", "has_mps", "asked", "found"),
    [
        (0, False, "auto", "cpu"),
        (2, True, "auto", "cuda:0"),
        (0, True, "auto", "mps"),
        (2, False, "cpu", "cpu"),
        (2, False, "cuda", "cuda:0"),
        (2, False, "cuda:1", "cuda:1"),
        (2, False, "cuda:2", None),
        (0, False, "cuda", None),
        (0, False, "mps", None),
        (0, False, "tpu", None),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_fastest(
    monkeypatch: pytest.MonkeyPatch, num_cuda: int, has_mps: bool, asked: str, found: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    if found is None:
        with pytest.raises(ConfigError, match=f"--device {asked} is not here: torch sees .*cpu"):
            capabilities.choose_device(asked)
    else:
        assert capabilities.choose_device(asked) == found


def test_of_a_gpu_most_of_what_is_free_there_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (10e9, 16e9)}[device])
    assert capabilities.lent_memory_bytes("cuda:1") == 8e9
    assert capabilities.lent_memory_bytes("cpu") > 0


@pytest.mark.parametrize("stated", ALL)
def test_join_says_what_it_only_guesses_and_which_device_it_lends(stated: Fact) -> None:
    known = {"auto": "cuda:1"}, {"cuda:1": 8e9}, {"cuda:1": 7e9}
    machine = capabilities.Machine(*(each.__getitem__ for each in known))
    speed = 1e9 if stated is Fact.SPEED else None
    bandwidth = 5e6 if stated is Fact.BANDWIDTH else None
    latency = 0.0 if stated is Fact.LATENCY else None
    said = _Stated("auto", None, speed, None, bandwidth, latency)
    offer = _make_offer("a", said, _Listening("", (), True), 60.0, machine)
    assert set(offer.guessed) == set(ALL) - {stated}
    assert offer.limits.device == "cuda:1"
    assert offer.limits.memory_bytes == offer.node.memory_bytes == 8e9
    assert offer.node.flops_per_second == (1e9 if stated is Fact.SPEED else 7e9)
    assert offer.limits.flops_per_batch == 600 * offer.node.flops_per_second
    if stated is Fact.BANDWIDTH:
        assert offer.node.upload_bytes_per_second == offer.node.download_bytes_per_second == 5e6
    if stated is Fact.LATENCY:
        assert offer.node.latency_seconds == 0.0


@pytest.mark.parametrize("claimed", [None, 3e9])
def test_an_emulated_speed_is_stated(claimed: float | None) -> None:
    said = _Stated("cpu", 1e9, claimed, 2e9, 1e6, 0.01)
    offer = _make_offer("a", said, _Listening("", (), True), 60.0, capabilities.THIS_PC)
    assert offer.guessed == ()
    assert offer.limits.emulated_flops_per_second == 2e9
    assert offer.node.flops_per_second == (claimed or 2e9)
