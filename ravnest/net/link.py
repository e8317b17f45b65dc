"""One neighbour over any number of connections, as a state machine that does no I/O.

Each connection starts with a hello each way that says what arrived before; sending goes on from there. If
either side has forgotten the other (a new session), both start at zero.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import assert_never

import msgspec

from ravnest.errors import ProtocolError
from ravnest.net.congestion import SMALLEST_WINDOW_BYTES
from ravnest.net.streams import (
    FRAME_VERSION,
    Ack,
    Bye,
    Chunk,
    Frames,
    Greeting,
    Head,
    InboundMessage,
    Ping,
    ReceiveStream,
    SendStream,
    encode_frame,
)
from ravnest.net.transport import Service, TransportLimits

ACK_BYTES = SMALLEST_WINDOW_BYTES // 2  # confirmed at once: the other side has as many again to send


class Link:
    """Sends and receives for one neighbour. `session` is a random number, drawn when the link is made."""

    def __init__(self, session: int, limits: TransportLimits) -> None:
        assert session > 0
        self.outbox = SendStream(limits)
        self.inbox = ReceiveStream(limits)
        self.is_up = False
        self._session = session
        self._limits, self._timeouts = limits, limits.timeouts
        self._their_session = 0
        self._received_at = 0.0
        self._ticked_at = 0.0
        self._has_sent = False  # since the last tick
        self._is_ping_due = False
        self._owed_bytes = 0  # arrived or taken, and not confirmed
        self.owed_by = inf  # when they must be
        self._patience = 1  # times the usual silence
        self._patient_since = 0.0
        self._was_silent = False  # when it was last thought dead
        self._behind = 0  # microseconds the newest chunk took, by two clocks that are not the same

    @property
    def due(self) -> float:
        """When to ask for frames again, if nothing happens before."""
        return min(self.owed_by, self.outbox.ready_at) if self.is_up else inf

    def hello(self, greeting: bytes = b"") -> Frames:
        """Return the first frame of a connection."""
        return [
            encode_frame(
                Greeting(FRAME_VERSION, self._session, self._their_session, self.inbox.positions(), greeting)
            )
        ]

    def connect(self, hello: Greeting, now: float) -> bool:
        """Go on over a new connection; return whether the neighbour is a new one."""
        is_new = hello.session != self._their_session
        if self._was_silent and not is_new:  # it was only busy, or this side was
            self._patience = min(self._timeouts.most_patience, 2 * self._patience)
        self._was_silent, self._patient_since = False, now
        if is_new:
            self._patience = 1
            if self._their_session:
                self.outbox.reset()
            self.inbox = ReceiveStream(self._limits)
        self.outbox.resume(hello.positions if hello.known == self._session and not is_new else ())
        self.inbox.repeat()
        self.owed_by = now
        self._their_session = hello.session
        self._received_at = self._ticked_at = now
        self.is_up = True
        return is_new

    def disconnect(self) -> None:
        """Stop until the next hello."""
        self.is_up = False

    def receive(self, head: Head, pieces: Sequence[memoryview], now: float) -> InboundMessage | None:
        """Accept what came over the connection; return a message that is whole."""
        self._received_at = now
        match head:
            case Chunk():
                self._owe(sum(piece.nbytes for piece in pieces), now)
                self._behind = round(1e6 * now) - head.sent_at
                self.outbox.acknowledge(head.positions, 1e-6 * head.behind, now)
                return self.inbox.accept(head, pieces)
            case Ack():
                self.outbox.acknowledge(head.positions, 1e-6 * head.behind, now)
            case Ping():
                pass
            case Greeting() | Bye():
                raise ProtocolError(f"a {type(head).__name__} in the middle of a connection")
            case _:
                assert_never(head)
        return None

    def consume(self, service: Service, now: float) -> None:
        """Record that the program has the oldest message of a service."""
        self._owe(self.inbox.consume(service), now)

    def next_frames(self, now: float, *, is_held: bool = False) -> Frames | None:
        """Return what to send next, if anything: the most urgent chunk, or what must be confirmed."""
        if not self.is_up:
            return None
        frames = self._next_news(now, is_held)
        if frames is not None:
            self._has_sent = True
        elif self._is_ping_due:
            frames = [encode_frame(Ping())]
        self._is_ping_due = False
        return frames

    def tick(self, now: float, is_behind: Callable[[], bool] = lambda: False) -> str | None:
        """Call every `tick_seconds`: keeps the neighbour informed; returns why the link is dead, if it is.

        `is_behind` tells whether what came lies unread: then silence may be this side's own.
        """
        if now - self._ticked_at > 2 * self._timeouts.tick_seconds:
            self._received_at = now  # this side did not listen
        self._ticked_at = now
        if now - self._patient_since > self._timeouts.forgive_seconds:
            self._patience, self._patient_since = max(1, self._patience // 2), now
        silent, limit = now - self._received_at, self._timeouts.silence_seconds
        if silent > limit * self._patience:
            is_sure = silent > limit * self._timeouts.most_patience
            if is_sure or not is_behind():
                self._was_silent = True
                return f"nothing heard for {silent:.1f} s"
        self._is_ping_due = not self._has_sent
        self._has_sent = False
        return None

    def _owe(self, num_bytes: int, now: float) -> None:
        self._owed_bytes += num_bytes
        due = now if self._owed_bytes >= ACK_BYTES else now + self._timeouts.ack_seconds
        self.owed_by = min(self.owed_by, due)

    def _next_news(self, now: float, is_held: bool) -> Frames | None:
        chunk = self.outbox.next_chunk(now, is_held=is_held)
        if chunk is None and now < self.owed_by:
            return None
        news = self.inbox.news()
        self._owed_bytes, self.owed_by = 0, inf
        if chunk is None:
            return [encode_frame(Ack(news, self._behind))] if news else None
        head = msgspec.structs.replace(
            chunk[0], sent_at=round(1e6 * now), positions=news, behind=self._behind
        )
        return [encode_frame(head), *chunk[1]]
