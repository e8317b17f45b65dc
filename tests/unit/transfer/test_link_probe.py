"""Links are timed as they are, with little; one report is taken for each probe."""

import math

import pytest

from ravnest.config import TIMEOUTS
from ravnest.hub.coordinator.events import Probed
from ravnest.hub.service.admission import ProbeReports
from ravnest.ids import HUB, NodeId
from ravnest.protocol.membership import ProbeReport
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import BlobPart, BlobRequest
from ravnest.transfer.blobs import Blobs, name_blob
from ravnest.transfer.exchange import Exchange
from ravnest.transfer.link_probe import LinkProbe, LinkTimes, ballast, name_ballast
from ravnest.transfer.outbox import Outgoing

A = NodeId("a")


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
