"""Floods: how many messages a peer may send, and how many of them in vain.

One token bucket per peer and kind: it holds a burst and fills at a steady rate. The rates are far above what
any honest peer was seen to send. A message in vain fits no lease, round or order: a few come late after a
plan has changed, thousands come from a peer that means harm. Pure: time is an argument.
"""

from dataclasses import dataclass
from enum import StrEnum


class Spending(StrEnum):
    """What a message costs."""

    ARRIVED = "sends more messages than any peer has to"
    IN_VAIN = "keeps sending what nobody awaits"


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many messages at once, and so many per second after that."""

    burst: float
    per_second: float


ALLOWANCES = {Spending.ARRIVED: Allowance(50_000, 5_000), Spending.IN_VAIN: Allowance(2_000, 20)}


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float

    def spend(self, allowance: Allowance, now: float) -> bool:
        """Take one; return whether there was one left."""
        gained = max(0.0, now - self.filled_at) * allowance.per_second
        self.level = min(allowance.burst, self.level + gained) - 1
        self.filled_at = now
        return self.level >= 0


class FloodGuard:
    """Feed it every message; it returns why a peer must go."""

    def __init__(self, allowances: dict[Spending, Allowance] | None = None) -> None:
        self._allowances = ALLOWANCES if allowances is None else allowances
        self._buckets: dict[str, dict[Spending, _Bucket]] = {}

    def record(self, peer: str, spending: Spending, now: float) -> str | None:
        """Count a message; return the reason to ban its sender, if it is one too many."""
        allowance = self._allowances[spending]
        buckets = self._buckets.setdefault(peer, {})
        bucket = buckets.setdefault(spending, _Bucket(allowance.burst, now))
        return None if bucket.spend(allowance, now) else f"it {spending.value}"

    def forget(self, peer: str) -> None:
        """Forget a peer that has gone."""
        self._buckets.pop(peer, None)
