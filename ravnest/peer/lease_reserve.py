"""What a root has ahead of the leases that it is at, with their samples.

It begins one of them when the hub says so; without the hub it begins the next one when it has nothing else to
begin.
"""

import logging

from ravnest.config import RESERVE
from ravnest.ids import LeaseId
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import LeaseGrant

_MOST_LEASES = 2 * RESERVE.most_microbatches  # no hub grants more

logger = logging.getLogger(__name__)


class RootReserve:
    """The leases that a root has and does not begin yet, oldest first."""

    def __init__(self) -> None:
        self._grants: dict[LeaseId, LeaseGrant] = {}
        self.has_lost_hub = False  # so nobody else says when they are begun
        self._num_begun = 0  # without it

    def follow_hub(self, *, is_lost: bool) -> None:
        """Learn whether the hub is there."""
        self.has_lost_hub, self._num_begun = is_lost, 0

    def add(self, grant: LeaseGrant) -> Refusal | None:
        """Wait with a lease."""
        if len(self._grants) >= _MOST_LEASES:
            return Refusal(f"lease {grant.lease} comes ahead of {len(self._grants)} others")
        self._grants[grant.lease] = grant
        return None

    def pop(self, lease: LeaseId) -> LeaseGrant | Refusal:
        """Return a lease that is begun now."""
        grant = self._grants.pop(lease, None)
        return Refusal(f"lease {lease} is not ahead here, or no more") if grant is None else grant

    def pop_next(self, *, is_idle: bool) -> LeaseGrant | None:
        """Return the lease that is begun without the hub, if it is lost and there is one."""
        if not self.has_lost_hub:
            return None
        if self._grants:
            if not self._num_begun:
                told = "training goes on without the hub: the samples of %d leases are here"
                logger.warning(told, len(self._grants))
            self._num_begun += 1
            return self._grants.pop(next(iter(self._grants)))
        if self._num_begun and is_idle:
            logger.warning("%d leases are trained without the hub: there are no more here", self._num_begun)
            self._num_begun = 0
        return None

    def clear(self) -> None:
        """Begin none of them."""
        self._grants.clear()
