"""Laws of a link: whatever breaks, each message once, in order per service, the urgent first, bounded."""

from collections import deque
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.config import TIMEOUTS
from ravnest.errors import ConfigError, ProtocolError
from ravnest.net.identity import Token, new_keys, read_token, write_token
from ravnest.net.link import Link
from ravnest.net.streams import Chunk, Greeting, StreamPosition, decode_frame
from ravnest.net.transport import Service, TransportLimits

CREDIT = 6000
KEYS = new_keys()
LIMITS = TransportLimits(
    header_bytes=32,
    num_buffers=4,
    message_bytes=9000,
    chunk_bytes=64,
    window_bytes=256,
    credit_bytes=(CREDIT,) * 5,
)

LARGEST = max(CREDIT, LIMITS.message_bytes)

services = st.sampled_from(Service)
sizes = st.lists(st.integers(0, 300), max_size=4)
messages = st.tuples(services, st.binary(max_size=32), sizes)
seeds = st.integers(0, 2**32)


def views(frames):
    return [memoryview(bytes(frame)) for frame in frames]


class Side:
    """A link with the program behind it."""

    def __init__(self, session: int) -> None:
        self.link = Link(session, LIMITS)
        self.sent = {service: [] for service in Service}
        self.arrived = {service: [] for service in Service}
        self.num_taken = dict.fromkeys(Service, 0)
        self.wire = deque()  # towards this side

    def send(self, random: Random, service: Service, header: bytes, lengths: list[int]) -> None:
        buffers = [random.randbytes(length) for length in lengths]
        if self.link.outbox.has_room(service, len(header) + sum(lengths)):
            self.link.outbox.put(service, header, [memoryview(buffer) for buffer in buffers])
            self.sent[service].append((header, buffers))

    def emit(self, other: "Side") -> bool:
        frames = self.link.next_frames(0.0) or self.link.next_frames(TIMEOUTS.net.ack_seconds)
        if frames is not None:
            other.wire.append(views(frames))
        return frames is not None

    def deliver(self, is_doubled: bool = False) -> bool:
        if not self.wire:
            return False
        frames = self.wire.popleft()
        for _ in range(2 if is_doubled else 1):
            message = self.link.receive(decode_frame(frames), frames[1:], 0.0)
            if message is not None:
                service, header, buffers = message
                self.arrived[service].append((header, [bytes(buffer) for buffer in buffers]))
        return True

    def consume(self, service: Service) -> None:
        if self.num_taken[service] < len(self.arrived[service]):
            self.num_taken[service] += 1
            self.link.consume(service, 0.0)

    def untaken_bytes(self, service: Service) -> int:
        waiting = self.arrived[service][self.num_taken[service] :]
        return sum(len(header) + sum(map(len, buffers)) for header, buffers in waiting)


def hello_of(link: Link) -> Greeting:
    hello = decode_frame(views(link.hello()))
    assert isinstance(hello, Greeting)
    return hello


def reconnect(one: Side, other: Side, is_answer_lost: bool = False) -> None:
    for side in (one, other):
        side.wire.clear()
        side.link.disconnect()
    other.link.connect(hello_of(one.link), 0.0)
    if is_answer_lost:
        reconnect(one, other)
    else:
        one.link.connect(hello_of(other.link), 0.0)


def replace_connection(one: Side, other: Side) -> None:
    """Use a second connection whose hello was written before more arrived on the first."""
    hello = hello_of(one.link)
    while one.deliver() | one.emit(other):  # what is confirmed now is lost
        for service in Service:
            one.consume(service)
    other.link.connect(hello, 0.0)
    one.wire.clear()
    other.wire.clear()
    one.link.connect(hello_of(other.link), 0.0)


def act(sides: list[Side], random: Random, action: tuple) -> None:
    kind, which, message = action
    one, other = sides[which], sides[1 - which]
    match kind:
        case "send":
            one.send(random, *message)
        case "emit":
            for _ in range(random.randrange(12)):
                one.emit(other)
        case "deliver":
            for _ in range(random.randrange(12)):
                one.deliver(is_doubled=random.random() < 0.1)
        case "take":
            one.consume(message[0])
        case "cut":
            reconnect(one, other, is_answer_lost=random.random() < 0.3)
        case "twin":
            replace_connection(one, other)
    assert all(side.untaken_bytes(service) <= LARGEST for side in sides for service in Service)


def drain(sides: list[Side]) -> None:
    one, other = sides
    is_busy = True
    while is_busy:
        for side in sides:
            for service in Service:
                side.consume(service)
        is_busy = one.emit(other) | other.emit(one) | one.deliver() | other.deliver()
    assert all(side.link.outbox.has_room(service, CREDIT - 1024) for side in sides for service in Service)


actions = st.tuples(
    st.sampled_from(("send", "send", "emit", "deliver", "take", "cut", "twin")), st.integers(0, 1), messages
)


@given(st.lists(actions, max_size=60), seeds)
def test_each_message_arrives_once_and_in_order_whatever_is_cut(history, seed):
    random = Random(seed)
    sides = [Side(1), Side(2)]
    reconnect(*sides)
    for action in history:
        act(sides, random, action)
    drain(sides)
    for one, other in (sides, sides[::-1]):
        assert other.arrived == one.sent


@given(st.lists(actions, max_size=40), st.lists(actions, max_size=40), seeds)
def test_a_new_incarnation_starts_at_zero_and_gets_nothing_meant_for_the_old_one(before, after, seed):
    random = Random(seed)
    sides = [Side(1), Side(2)]
    reconnect(*sides)
    for action in before:
        act(sides, random, action)
    survivor = sides[0]
    sides[1] = Side(3)
    survivor.sent = {service: [] for service in Service}
    survivor.arrived = {service: [] for service in Service}
    survivor.num_taken = dict.fromkeys(Service, 0)
    survivor.link.disconnect()
    assert survivor.link.connect(hello_of(sides[1].link), 0.0)
    sides[1].link.connect(hello_of(survivor.link), 0.0)
    survivor.wire.clear()
    for action in after:
        act(sides, random, action)
    drain(sides)
    for one, other in (sides, sides[::-1]):
        assert other.arrived == one.sent


@given(st.lists(st.one_of(messages, st.integers(1, 8)), max_size=60), seeds)
def test_a_chunk_always_belongs_to_the_most_urgent_service_that_waits(history, seed):
    random = Random(seed)
    side, other = Side(1), Side(2)
    reconnect(side, other)
    unsent = dict.fromkeys(Service, 0)  # messages
    for step in history:
        if not isinstance(step, int):
            before = len(side.sent[step[0]])
            side.send(random, *step)
            unsent[step[0]] += len(side.sent[step[0]]) - before
            continue
        for _ in range(step):
            if not side.emit(other):
                break
            chunk = decode_frame(other.wire[-1])
            size = sum(piece.nbytes for piece in other.wire[-1][1:])
            if not isinstance(chunk, Chunk):
                continue
            assert chunk.service == min(service for service in Service if unsent[service])
            assert size <= LIMITS.chunk_bytes
            header, buffers = side.sent[chunk.service][chunk.sequence]
            unsent[chunk.service] -= chunk.offset + size == len(header) + sum(map(len, buffers))
        in_flight = sum(piece.nbytes for frames in other.wire for piece in frames[1:])
        assert in_flight <= 5 * (LIMITS.window_bytes + LIMITS.chunk_bytes)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=80), max_size=6))
def test_junk_is_refused_with_a_reason_and_nothing_else(first, rest):
    link = Link(1, LIMITS)
    frames = [memoryview(first), *map(memoryview, rest)]
    with suppress(ProtocolError):
        link.receive(decode_frame(frames), frames[1:], 0.0)


positions = st.lists(
    st.tuples(services, st.integers(0, 3), st.integers(0, 400), st.integers(0, 3)), max_size=5
).map(tuple)


@given(st.lists(messages, max_size=4), st.integers(0, 20), positions, st.booleans())
def test_a_lie_about_what_arrived_is_refused_or_harmless(queued, num_chunks, lies, is_hello):
    random, side = Random(0), Side(1)
    side.link.connect(Greeting(1, 2, 0, (), b""), 0.0)
    for message in queued:
        side.send(random, *message)
    for _ in range(num_chunks):
        side.link.next_frames(0.0)
    lies = tuple(StreamPosition(*lie) for lie in lies)
    try:
        if is_hello:
            side.link.connect(Greeting(1, 2, 1, lies, b""), 0.0)
        else:
            side.link.outbox.acknowledge(lies, 0.0, 0.0)
    except ProtocolError:
        return
    for _ in range(500):  # it never sends for ever
        if side.link.next_frames(0.0) is None:
            break
    else:
        pytest.fail("an endless message")


@given(
    st.lists(st.text(min_size=1, max_size=30).filter(str.isprintable), min_size=1, max_size=4),
    st.binary(min_size=16, max_size=16),
    seeds,
)
def test_a_token_is_read_as_it_was_written_and_never_with_a_typing_error(addresses, secret, seed):
    random = Random(seed)
    token = Token(tuple(addresses), KEYS.public, secret)
    text = write_token(token)
    assert read_token(f" {text[:9].upper()}\n{text[9:]} ") == token
    place = random.randrange(len(text))
    wrong = text[:place] + random.choice("abcdefghijklmnopqrstuvwxyz234567!0-") + text[place + 1 :]
    broken = random.choice((wrong, text[:place], text[:place] + text[place + 1 :], text + "a", text[::-1]))
    with suppress(ConfigError):
        assert read_token(broken) == token  # the last character may hold bits that count for nothing
