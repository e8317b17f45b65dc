"""Which clusters the next round is of: one that held up the others stays away from a few.

A period is what lies between two regular rounds; a round that was held up is tried again within it, without
who was to blame. Driven by hub.rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ravnest.hub.members import ClusterState

_MOST_ROUNDS = 8  # a cluster stays away from, however often it held up the others


@dataclass(frozen=True, slots=True)
class _Lateness:
    """How often in a row a cluster was late, and the period in which it is asked again."""

    num_times: int
    back_in: int


_NEVER = _Lateness(0, 0)


class Attendance:
    """Knows clusters by their holders, who never come again under the same name."""

    def __init__(self) -> None:
        self._period = 0
        self._late: dict[str, _Lateness] = {}

    def begin_period(self) -> None:
        """Let the next regular round come."""
        self._period += 1

    def present(self, running: Sequence[ClusterState]) -> tuple[ClusterState, ...]:
        """Return the clusters that a round of this period is of."""
        return tuple(x for x in running if self._late.get(x.holder, _NEVER).back_in <= self._period)

    def note_late(self, cluster: ClusterState) -> int:
        """Leave a cluster out; return of how many rounds: twice as many each time in a row."""
        num_times = self._late.get(cluster.holder, _NEVER).num_times + 1
        num_rounds = min(1 << (num_times - 1), _MOST_ROUNDS)
        self._late[cluster.holder] = _Lateness(num_times, self._period + num_rounds)
        return num_rounds

    def note_committed(self, clusters: Iterable[ClusterState]) -> None:
        """Forget what those who made a round together were blamed for before."""
        for cluster in clusters:
            self._late.pop(cluster.holder, None)


def judge(suspects: Mapping[str, str | None]) -> frozenset[str]:
    """Return who is to blame, from whom each holder waited for; one that knows of nobody names None.

    Who is cut off blames others as they blame it, so whoever is blamed is believed only when nobody else is
    heard. When nobody blames anybody, all who gave up share it.
    """
    blamed = {suspect for suspect in suspects.values() if suspect is not None}
    believed = {
        who for who in blamed if any(suspects[x] == who and x not in blamed - {who} for x in suspects)
    }
    return frozenset(believed or blamed or suspects)
