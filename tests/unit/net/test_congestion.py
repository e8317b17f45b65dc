"""How much may be on the wire: what noise, idleness, urgency and a reconnect do to it."""

from ravnest.net.congestion import FIRST_WINDOW_BYTES, Departure, Window
from ravnest.net.streams import SendStream, StreamPosition
from ravnest.net.transport import MIB, Service, TransportLimits


def fill(delays: tuple[float, ...], num_chunks: int = 2000) -> int:
    """Return the window of a link of 20 ms each way whose chunks are this late in turn."""
    window, now = Window(4 * MIB), 0.0
    for number in range(num_chunks):
        now, behind = now + 0.002, 0.02 + delays[number % len(delays)]
        departure = Departure(now - 0.02 - behind, window.size_bytes)
        window.adjust(departure, behind, window.size_bytes // 8, MIB, now)
    return window.size_bytes


def test_an_event_loop_that_is_late_now_and_then_is_no_queue_but_one_that_always_is_looks_like_one():
    assert fill((0.0, 0.0, 0.08)) >= 0.5 * fill((0.0,))
    assert fill((0.0,), 50) > 4 * fill((0.0,) * 40 + (0.15,) * 2000)


def test_a_window_that_is_not_used_does_not_grow():
    window = Window(4 * MIB)
    for number in range(100):
        window.adjust(Departure(0.1 * number, 1000), 0.0, 1000, 0, 0.1 * number + 0.02)
    assert window.size_bytes == FIRST_WINDOW_BYTES


def outbox_after_a_journey(seconds: float) -> SendStream:
    """Return one with a blob to send, of which the first chunk was confirmed."""
    outbox = SendStream(TransportLimits())
    outbox.put(Service.BLOB, b"", [memoryview(bytearray(MIB))])
    chunk = outbox.next_chunk(0.0)
    assert chunk is not None
    outbox.acknowledge([StreamPosition(Service.BLOB, 0, len(chunk[1][0]), 0)], 0.0, seconds)
    return outbox


def test_chunks_follow_each_other_over_a_journey_and_an_urgent_message_need_not_wait():
    outbox, num_chunks = outbox_after_a_journey(1.0), 0
    while outbox.next_chunk(1.0) is not None:
        num_chunks += 1
    assert num_chunks <= 2
    assert 1.0 < outbox.ready_at < 1.5
    assert outbox.next_chunk(outbox.ready_at) is not None
    outbox.put(Service.GRADIENT, b"now", [])
    urgent = outbox.next_chunk(1.0)
    assert urgent is not None
    assert urgent[0].service is Service.GRADIENT


def test_what_was_on_the_wire_before_a_reconnect_says_nothing_about_journeys_after_it():
    outbox = SendStream(TransportLimits())
    outbox.put(Service.BLOB, b"", [memoryview(bytearray(MIB))])
    outbox.next_chunk(0.0)
    outbox.resume([])
    chunk = outbox.next_chunk(100.0)
    assert chunk is not None
    outbox.acknowledge([StreamPosition(Service.BLOB, 0, len(chunk[1][0]), 0)], 0.0, 100.01)
    while outbox.next_chunk(100.01) is not None:
        pass
    assert outbox.ready_at < 100.1
