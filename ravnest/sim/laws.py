"""What must hold in every history of a swarm: books balance, nothing counts twice, no node has two stages.

The world shows it every event before and after it is applied; a broken law is an AssertionError with the
facts. The cheap ones are checked with each event, those that look at everything with each plan.
"""

from bisect import bisect_right
from itertools import pairwise

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, Notify, PlanMade, Received, Send
from ravnest.hub.coordinator.leases import Lease
from ravnest.hub.coordinator.notices import WorkLost
from ravnest.ids import LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.plan.types import Plan
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import PlanOrder
from ravnest.protocol.training import LeaseDone, LeaseGrant


class CountedSamples:
    """Disjoint intervals of places that were counted, by epoch."""

    def __init__(self) -> None:
        self._stops: dict[int, list[tuple[int, int]]] = {}
        self.total = 0

    def add(self, epoch: int, start: int, stop: int) -> None:
        """Add an interval, of which nothing may be there."""
        known = self._stops.setdefault(epoch, [])
        place = bisect_right(known, (start, stop))
        before, after = known[place - 1 : place], known[place : place + 1]
        assert not before or before[0][1] <= start, f"places {start} to {stop} count twice: {before}"
        assert not after or stop <= after[0][0], f"places {start} to {stop} count twice: {after}"
        self.total += stop - start
        first = before[0][0] if before and before[0][1] == start else start
        last = after[0][1] if after and after[0][0] == stop else stop
        known[place - (first < start) : place + (last > stop)] = [(first, last)]

    def clear(self) -> None:
        """Count from nothing."""
        self._stops, self.total = {}, 0


class Laws:
    """Checks one hub; a broken law raises AssertionError."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._counted = CountedSamples()
        self._follows = True  # samples are known one by one, until training begins again from a checkpoint
        self._next_microbatch = MicrobatchId(0)
        self._build_of: dict[NodeId, int] = {}
        self._last_round = RoundId(0)
        self._leases: dict[LeaseId, Lease] = {}  # that roots say are done; each may have to wait
        self.num_checks = 0

    def before(self, hub: Coordinator, event: Event) -> None:
        """Note what an event is about."""
        if isinstance(event, Received) and isinstance(event.message, LeaseDone):
            found = hub.ledger.find_open(event.message.lease)
            if found is not None and found.lease is not None:
                self._leases[found.number] = found.lease

    def count(self, hub: Coordinator, event: Event, actions: tuple[Action, ...]) -> None:
        """Count a lease that the coordinator was told of, at once or when it could be true."""
        is_refused = bool(actions) and isinstance(actions[0], Refusal)
        if not isinstance(event, Received) or not isinstance(event.message, LeaseDone) or is_refused:
            return
        lease = self._leases.pop(event.message.lease, None)
        if lease is not None and self._follows and not hub.placement.is_exact:
            self._counted.add(lease.epoch, lease.start, lease.stop)
            assert self._counted.total == hub.ledger.num_counted, "the books do not balance"

    def after(self, hub: Coordinator, event: Event, actions: tuple[Action, ...]) -> None:
        """Check what an event did."""
        self.num_checks += 1
        is_refused = bool(actions) and isinstance(actions[0], Refusal)
        lost = [x for x in actions if isinstance(x, Notify) and isinstance(x.notice, WorkLost)]
        if lost:
            self._follows = False
        for action in actions:
            if isinstance(action, Send):
                self._check_sent(hub, action)
        if isinstance(event, PlanMade) and event.plan is not None and not is_refused:
            self.check_all(hub)
            check_plan(event.plan, self._num_positions)

    def _check_sent(self, hub: Coordinator, sent: Send) -> None:
        match sent.message:
            case PlanOrder():
                assert sent.message.build_id > self._build_of.get(sent.to, 0), f"{sent.to} has a newer order"
                self._build_of[sent.to] = sent.message.build_id
            case LeaseGrant():
                assert sent.message.first_microbatch >= self._next_microbatch, "a microbatch is granted twice"
                self._next_microbatch = MicrobatchId(
                    sent.message.first_microbatch + len(sent.message.num_samples)
                )
                cluster = hub.placement.cluster_of(sent.to)
                assert cluster is not None, f"{sent.to} gets a lease and has no stage"
                assert sent.message.build_id == self._build_of[sent.to], "a lease of another build"
            case RoundOpen():
                assert sent.message.round_id >= self._last_round, "an older round is opened"
                self._last_round = sent.message.round_id
                assert sent.to not in sent.message.left_out, f"{sent.to} is left out of its own round"

    def forget(self, name: NodeId) -> None:
        """A node that joins anew has no order."""
        self._build_of.pop(name, None)

    def check_all(self, hub: Coordinator) -> None:
        """Check what takes a look at everything."""
        placed: dict[NodeId, str] = {}
        for cluster in hub.clusters:
            for name in cluster.nodes:
                assert name not in placed, f"{name} has a stage in {placed[name]} and in {cluster.name}"
                placed[name] = cluster.name
        running = {cluster.cluster_id for cluster in hub.clusters if cluster.is_running}
        for lease in hub.ledger.open_leases:
            assert lease.cluster_id in running, f"lease {lease.number} is of a cluster that does not train"


def check_plan(plan: Plan, num_positions: int) -> None:
    """Check that stages tile the line, that no node has two, and that rings have an owner per cluster."""
    used: set[NodeId] = set(plan.spares)
    assert len(used) == len(plan.spares), "a spare is named twice"
    for cluster in plan.clusters:
        assert cluster.stages[0].start == 0
        assert cluster.stages[-1].stop == num_positions
        assert all(one.stop == other.start for one, other in pairwise(cluster.stages)), "stages do not tile"
        for stage in cluster.stages:
            assert stage.node not in used, f"{stage.node} has two places in a plan"
            used.add(stage.node)
    for ring in plan.rings:
        assert len(set(ring.owners)) == len(ring.owners) == len(plan.clusters)
