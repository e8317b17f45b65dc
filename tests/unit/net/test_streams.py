"""What waits for one neighbour: priorities, cutting, credit, the window; and how it is put together."""

import heapq
import math
from collections.abc import Sequence

import pytest

from ravnest.config import TIMEOUTS
from ravnest.errors import LinkError, ProtocolError
from ravnest.net.endpoint import Dial
from ravnest.net.link import ACK_BYTES, Link
from ravnest.net.streams import (
    OVERHEAD_BYTES,
    Ack,
    Chunk,
    Greeting,
    Ping,
    ReceiveStream,
    SendStream,
    StreamPosition,
    decode_frame,
    encode_frame,
)
from ravnest.net.transport import MIB, PublicKey, Service, TransportLimits, as_views, check_limits

LIMITS = TransportLimits(chunk_bytes=100, window_bytes=800, credit_bytes=(4000,) * 5)


def put(outbox: SendStream, service: Service, *buffers: bytes, header: bytes = b"h") -> None:
    outbox.put(service, header, as_views(buffers))


def chunk_of(outbox: SendStream) -> Chunk:
    chunk = outbox.next_chunk(0.0)
    assert chunk is not None
    return chunk[0]


@pytest.mark.parametrize("urgent", [Service.CONTROL, Service.GRADIENT, Service.ACTIVATION, Service.AVERAGING])
def test_an_urgent_message_goes_before_the_next_chunk_of_a_blob(urgent):
    outbox = SendStream(LIMITS)
    put(outbox, Service.BLOB, bytes(1000))
    assert [chunk_of(outbox).offset for _ in range(2)] == [0, 100]
    put(outbox, urgent, bytes(150))
    assert [(chunk_of(outbox).service) for _ in range(3)] == [urgent, urgent, Service.BLOB]


def test_what_is_less_urgent_on_the_wire_does_not_hold_back_what_is_more_urgent():
    outbox = SendStream(LIMITS)
    put(outbox, Service.BLOB, bytes(1000))
    while outbox.next_chunk(0.0):
        pass
    put(outbox, Service.GRADIENT, bytes(1000))
    num_gradients = 0
    while outbox.next_chunk(0.0):
        num_gradients += 1
    assert num_gradients == LIMITS.window_bytes // LIMITS.chunk_bytes
    put(outbox, Service.CONTROL)
    assert chunk_of(outbox).service is Service.CONTROL
    assert outbox.next_chunk(0.0) is None


def test_chunks_are_views_of_the_buffers_of_the_caller():
    outbox, data = SendStream(LIMITS), bytearray(250)
    outbox.put(Service.BLOB, b"", as_views([data]))
    _, views = outbox.next_chunk(0.0)
    assert views[0].obj is data
    data[7] = 99
    assert views[0][7] == 99


def test_small_buffers_travel_together_and_a_chunk_never_reaches_over_a_buffers_end():
    outbox = SendStream(LIMITS)
    put(outbox, Service.BLOB, bytes(20), b"", bytes(30), bytes(120), header=b"head")
    chunk, views = outbox.next_chunk(0.0)
    assert chunk.sizes == (4, 20, 0, 30, 120)
    assert [view.nbytes for view in views] == [4, 20, 30, 46]
    assert [view.nbytes for view in outbox.next_chunk(0.0)[1]] == [74]


def test_credit_comes_back_when_the_program_over_there_took_the_message_not_when_it_arrived():
    outbox, inbox = SendStream(LIMITS), ReceiveStream(LIMITS)
    put(outbox, Service.BLOB, bytes(2000))
    assert not outbox.has_room(Service.BLOB, 2000)
    assert outbox.has_room(Service.GRADIENT, 2000)
    while (chunk := outbox.next_chunk(0.0)) is not None:
        inbox.accept(*chunk)
        outbox.acknowledge(inbox.news(), 0.0, 0.0)
    assert not outbox.has_room(Service.BLOB, 2000)
    inbox.consume(Service.BLOB)
    outbox.acknowledge(inbox.news(), 0.0, 0.0)
    assert outbox.has_room(Service.BLOB, 2000)


def test_a_message_over_the_credit_goes_alone():
    outbox = SendStream(LIMITS)
    assert outbox.has_room(Service.BLOB, 10**6)
    put(outbox, Service.BLOB)
    assert not outbox.has_room(Service.BLOB, 10**6)


def test_empty_messages_use_up_credit_too():
    outbox = SendStream(LIMITS)
    num_messages = 0
    while outbox.has_room(Service.BLOB, 0):
        put(outbox, Service.BLOB, header=b"")
        num_messages += 1
    assert num_messages == LIMITS.credit_bytes[Service.BLOB] // OVERHEAD_BYTES


class Wire:
    """Two links over a way of one rate and delay in each direction; each end has a clock of its own."""

    def __init__(self, rate: float, delay: float) -> None:
        self.rate, self.delay, self.now = rate, delay, 0.0
        self.links = [Link(1, TransportLimits()), Link(2, TransportLimits())]
        self.clocks = [1000.0, -5.0]  # how far each is ahead
        self.free_at = [0.0, 0.0]
        self.arrived = [0, 0]
        self.queues: list[float] = []
        self._wake_at = [-math.inf, -math.inf]
        self._events: list[tuple[float, int, int, list[memoryview] | None]] = []
        for me, link in enumerate(self.links):
            link.connect(Greeting(1, 2 - me, 0, (), b""), self.clocks[me])

    def run(self, senders: Sequence[int], seconds: float) -> None:
        blob = memoryview(bytearray(4 * MIB))
        for me in (0, 1):
            self._pump(me)
        while self.now < seconds:
            for me in senders:
                if self.links[me].outbox.has_room(Service.BLOB, blob.nbytes):
                    self.links[me].outbox.put(Service.BLOB, b"", [blob])
                self._pump(me)
            self.queues.append(self.free_at[0] - self.now)
            self.now, _, me, frames = heapq.heappop(self._events)
            if frames is not None:
                self.arrived[me] += sum(map(len, frames[1:]))
                message = self.links[me].receive(decode_frame(frames), frames[1:], self.now + self.clocks[me])
                if message is not None:
                    self.links[me].consume(message[0], self.now + self.clocks[me])
            self._pump(me)

    def _pump(self, me: int) -> None:
        link, clock = self.links[me], self.clocks[me]
        while frames := link.next_frames(self.now + clock):
            size = sum(map(len, frames))
            self.free_at[me] = max(self.free_at[me], self.now) + size / self.rate
            self._plan(self.free_at[me] + self.delay, 1 - me, [memoryview(frame) for frame in frames])
        due = max(self.now, link.due - clock) + 1e-6
        if due < self._wake_at[me] or self._wake_at[me] <= self.now < due < math.inf:
            self._wake_at[me] = due
            self._plan(due, me, None)

    def _plan(self, at: float, me: int, frames: list[memoryview] | None) -> None:
        heapq.heappush(self._events, (at, len(self._events) + 2 * self.arrived[me], me, frames))


@pytest.mark.parametrize("rate", [3e4, 1e5, 1e6, 1e7, 1e8])
@pytest.mark.parametrize("delay", [0.001, 0.05, 0.2])
def test_on_a_slow_link_little_lies_before_an_urgent_message_and_a_fast_one_is_filled(rate, delay):
    wire = Wire(rate, delay)
    wire.run([0], seconds=30.0 if delay > 0.1 else 10.0)
    late = wire.queues[len(wire.queues) // 2 :]
    assert max(late) <= max(0.3, 80 * 1024 / rate)
    assert wire.arrived[1] / wire.now >= 0.8 * min(rate, 4 * MIB / (2 * delay + MIB / rate))


@pytest.mark.parametrize("rate", [1e6, 1e7])
@pytest.mark.parametrize("delay", [0.001, 0.02, 0.05])
def test_both_ways_are_filled_though_confirmations_wait_behind_what_is_sent(rate, delay):
    wire = Wire(rate, delay)
    wire.run([0, 1], seconds=30.0)
    assert min(wire.arrived) / wire.now >= 0.95 * min(rate, 4 * MIB / (2 * delay + MIB / rate))


def test_links_that_share_a_way_share_it_however_late_their_confirmations_are():
    rate, now, free_at, backs, counts = 6e6, 0.0, 0.0, (0.001, 0.06, 0.001), [0, 0, 0]
    pairs = [(Link(1, TransportLimits()), Link(2, TransportLimits())) for _ in backs]
    events: list[tuple[float, int, int, int, list[memoryview] | None]] = []
    for number, pair in enumerate(pairs):
        for link in pair:
            link.connect(Greeting(1, 1, 0, (), b""), 0.0)
        heapq.heappush(events, (0.0, number, number, 0, None))
    while now < 16.0:
        now, _, number, end, frames = heapq.heappop(events)
        link = pairs[number][end]
        if frames is not None:
            message = link.receive(decode_frame(frames), frames[1:], now)
            counts[number] += sum(map(len, frames[1:])) if now > 6.0 else 0
            if message is not None:
                link.consume(message[0], now)
        if end == 0 and link.outbox.has_room(Service.BLOB, 4 * MIB):
            link.outbox.put(Service.BLOB, b"", [memoryview(bytearray(4 * MIB))])
        while sent := link.next_frames(now):
            free_at = free_at if end else max(free_at, now) + sum(map(len, sent)) / rate
            at = now + backs[number] if end else free_at + 0.001
            views = [memoryview(frame) for frame in sent]
            heapq.heappush(events, (at, len(events) + counts[0], number, 1 - end, views))
        if link.due < math.inf:
            heapq.heappush(events, (max(now, link.due) + 1e-4, len(events) + counts[0], number, end, None))
    assert sum(counts) / 10.0 >= 0.98 * rate
    assert min(counts) >= 0.65 * max(counts)


def test_a_buffer_in_one_piece_is_passed_on_and_a_cut_one_is_gathered_and_both_can_be_written():
    inbox = ReceiveStream(LIMITS)
    small, first, second = (memoryview(bytearray(b)) for b in (b"ab", b"c" * 90, b"d" * 60))
    header = memoryview(bytearray(b"head"))
    assert inbox.accept(Chunk(Service.BLOB, 0, 0, (4, 2, 150)), [header, small, first]) is None
    message = inbox.accept(Chunk(Service.BLOB, 0, 96, ()), [second])
    assert message is not None
    service, head, buffers = message
    assert (service, head) == (Service.BLOB, b"head")
    assert buffers[0].obj is small.obj
    assert bytes(buffers[1]) == b"c" * 90 + b"d" * 60
    assert not any(buffer.readonly for buffer in buffers)


def test_a_second_copy_is_dropped_and_a_copy_that_reaches_further_is_used_from_where_it_is_new():
    inbox = ReceiveStream(LIMITS)
    data = memoryview(bytes(range(80)))
    inbox.accept(Chunk(Service.BLOB, 0, 0, (0, 80)), [data[:30]])
    assert inbox.accept(Chunk(Service.BLOB, 0, 0, (0, 80)), [data[:30]]) is None
    message = inbox.accept(Chunk(Service.BLOB, 0, 10, ()), [data[10:]])
    assert message is not None
    assert bytes(message[2][0]) == bytes(data)
    assert inbox.accept(Chunk(Service.BLOB, 0, 10, ()), [data[10:]]) is None


@pytest.mark.parametrize(
    ("chunk", "pieces", "reason"),
    [
        (Chunk(Service.BLOB, 1, 0, (0,)), [], "missing"),
        (Chunk(Service.BLOB, 0, 5, ()), [b"x"], "missing"),
        (Chunk(Service.BLOB, 0, 0, ()), [b"x"], "refused"),
        (Chunk(Service.BLOB, 0, 0, (65 * 1024,)), [], "refused"),
        (Chunk(Service.BLOB, 0, 0, (0,) * 258), [], "refused"),
        (Chunk(Service.BLOB, 0, 0, (0, 2**40)), [], "is over"),
        (Chunk(Service.BLOB, 0, 0, (0, 101)), [bytes(101)], "a chunk over"),
        (Chunk(Service.BLOB, 0, 0, (1, 9)), [b"hb"], "over the end"),
        (Chunk(Service.BLOB, 0, 0, (0, 4)), [b"abcde"], "too many"),
    ],
)
def test_what_no_honest_neighbour_sends_is_refused_with_a_reason(chunk, pieces, reason):
    with pytest.raises(ProtocolError, match=reason):
        ReceiveStream(LIMITS).accept(chunk, [memoryview(piece) for piece in pieces])


def test_who_ignores_credits_is_refused():
    inbox = ReceiveStream(LIMITS)
    inbox.accept(Chunk(Service.BLOB, 0, 0, (0,)), [])
    with pytest.raises(ProtocolError, match="credit"):
        inbox.accept(Chunk(Service.BLOB, 1, 0, (0, 3000)), [])


@pytest.mark.parametrize(
    "position", [(4, 2, 0, 0), (4, 0, 9000, 0), (4, 0, 50, 1), (4, 1, 0, 2), (0, 1, 0, 0), (4, 1, 1, 0)]
)
def test_who_confirms_what_was_not_sent_is_refused(position):
    outbox = SendStream(LIMITS)
    put(outbox, Service.BLOB, bytes(50))
    put(outbox, Service.BLOB, bytes(50))
    outbox.next_chunk(0.0)
    with pytest.raises(ProtocolError, match="was sent"):
        outbox.acknowledge([StreamPosition(Service(position[0]), *position[1:])], 0.0, 0.0)


@pytest.mark.parametrize(
    ("header", "buffers", "reason"),
    [
        (bytes(65 * 1024), [], "header of 66560 bytes"),
        (b"", [b""] * 257, "257 buffers"),
        (b"", [memoryview(bytes(1))] * 200 + [bytes(10**6)], "1000200 bytes is over the limit of 1000000"),
    ],
)
def test_a_message_over_the_limits_is_refused_with_the_limit(header, buffers, reason):
    with pytest.raises(LinkError, match=reason):
        check_limits(header, as_views(buffers), TransportLimits(message_bytes=10**6))


def connected(now: float = 0.0) -> Link:
    link = Link(1, LIMITS)
    link.connect(Greeting(1, 2, 0, (), b""), now)
    while link.next_frames(now):
        pass
    return link


def test_a_quiet_link_pings_and_a_silent_neighbour_is_noticed_within_two_seconds():
    link, now, num_pings = connected(), 0.0, 0
    while True:
        now += TIMEOUTS.net.tick_seconds
        reason = link.tick(now)
        if reason is not None:
            break
        num_pings += link.next_frames(now) == [encode_frame(Ping())]
    assert num_pings == 2  # not at the first tick, the link had just spoken
    assert TIMEOUTS.net.silence_seconds < now < 2.0
    assert "nothing heard" in reason


def test_whoever_was_frozen_itself_does_not_blame_the_others():
    link = connected()
    assert link.tick(TIMEOUTS.net.tick_seconds) is None
    assert link.tick(60.0) is None


def test_a_heard_neighbour_stays():
    link, now = connected(), 0.0
    for _ in range(20):
        now += TIMEOUTS.net.tick_seconds
        assert link.tick(now) is None
        link.receive(Ping(), [], now)


def test_only_a_chunk_carries_more_frames():
    with pytest.raises(ProtocolError, match="Ping came with 1 frames"):
        decode_frame([memoryview(encode_frame(Ping())), memoryview(b"x")])


def heads(link: Link, now: float) -> list[Ack | Chunk]:
    found = []
    while frames := link.next_frames(now):
        found.append(decode_frame([memoryview(frame) for frame in frames]))
    return found


def test_a_confirmation_goes_along_with_what_is_sent():
    link = connected()
    link.receive(Chunk(Service.GRADIENT, 0, 0, (1,)), [memoryview(b"h")], 1.0)
    assert heads(link, 1.0) == []
    put(link.outbox, Service.CONTROL)
    assert heads(link, 1.0) == [
        Chunk(
            Service.CONTROL, 0, 0, (1,), 1_000_000, (StreamPosition(Service.GRADIENT, 1, 0, 0),), 1_000_000
        ),
    ]
    assert heads(link, 9.0) == []


def test_a_confirmation_that_nothing_goes_along_with_is_sent_in_time():
    link = connected()
    link.receive(Chunk(Service.GRADIENT, 0, 0, (1,)), [memoryview(b"h")], 1.0)
    link.receive(Chunk(Service.GRADIENT, 1, 0, (1,)), [memoryview(b"h")], 1.0 + TIMEOUTS.net.ack_seconds / 2)
    assert link.owed_by == 1.0 + TIMEOUTS.net.ack_seconds
    assert heads(link, link.owed_by) == [Ack((StreamPosition(Service.GRADIENT, 2, 0, 0),), 1_005_000)]


def test_what_gives_much_credit_back_is_confirmed_at_once():
    link = Link(1, TransportLimits())
    link.connect(Greeting(1, 2, 0, (), b""), 0.0)
    heads(link, 0.0)
    link.receive(
        Chunk(Service.BLOB, 0, 0, (1, ACK_BYTES)), [memoryview(b"h"), memoryview(bytes(ACK_BYTES))], 1.0
    )
    assert heads(link, 1.0) == [Ack((StreamPosition(Service.BLOB, 1, 0, 0),), 1_000_000)]
    link.consume(Service.BLOB, 2.0)
    assert heads(link, 2.0) == [Ack((StreamPosition(Service.BLOB, 1, 0, 1),), 1_000_000)]


def test_a_lie_that_goes_along_with_a_chunk_is_refused():
    with pytest.raises(ProtocolError, match="was sent"):
        connected().receive(
            Chunk(Service.BLOB, 0, 0, (1,), 0, (StreamPosition(Service.BLOB, 3, 0, 0),)), [], 0.0
        )


def greeting(session: int, known: int) -> Greeting:
    return Greeting(2, session, known, (), b"")


def silent_until(link: Link, since: float, is_behind: bool = False) -> float:
    """Return after how many seconds a link is thought dead of which nothing is heard."""
    ticks = (since + 0.1 * number for number in range(1, 400))
    return next(now - since for now in ticks if link.tick(now, lambda: is_behind) is not None)


def test_a_neighbour_that_was_thought_dead_and_came_back_is_waited_for_longer_for_a_while():
    link, now = Link(1, TransportLimits()), 0.0
    found = []
    for _ in range(6):
        link.connect(greeting(7, 1), now)
        found.append(silent_until(link, now))
        link.disconnect()
        now += 50.0
    assert found == pytest.approx([1.4, 2.8, 5.6, 11.2, 11.2, 11.2], abs=0.11)
    link.connect(greeting(7, 1), now)
    for number in range(1, 1000):  # it holds for 100 s
        link.receive(Ping(), [], now + 0.1 * number)
        assert link.tick(now + 0.1 * number) is None
    assert silent_until(link, now + 99.9) == pytest.approx(5.6, abs=0.11)
    link.disconnect()
    link.connect(greeting(8, 0), now + 200.0)  # another program
    assert silent_until(link, now + 200.0) == pytest.approx(1.4, abs=0.11)


def test_silence_is_not_death_while_what_came_lies_unread_but_not_for_ever():
    link = Link(1, TransportLimits())
    link.connect(greeting(7, 0), 0.0)
    assert silent_until(link, 0.0, is_behind=True) == pytest.approx(11.2, abs=0.11)


def test_a_dial_gets_longer_with_each_pass_over_the_addresses():
    timeouts = TIMEOUTS.net
    dial = Dial(PublicKey(b"key"), ("tcp://a:1", "tcp://b:1"), b"")
    seconds = []
    for _ in range(10):
        seconds.append(dial.patience_seconds(timeouts))
        dial.fail(timeouts, was_up=False)
    assert seconds == [2, 2, 4, 4, 8, 8, 16, 16, 16, 16]
