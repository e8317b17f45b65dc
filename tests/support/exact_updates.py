"""Exact mode as the hub's orders show it: plans of unlike clusters, and which samples are in each update."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ravnest.config import WireFormat
from ravnest.hub.coordinator.events import Action, Event, Send, SendFields
from ravnest.ids import LeaseId, NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from ravnest.protocol.averaging import RoundCommit, RoundOpen
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.protocol.training import LeaseGrant


def form_unlike(profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int = 0) -> Plan:
    """Return clusters of one, two and three stages, as long as there are nodes; the rest are spares."""
    length, names = profile.num_positions, [node.name for node in swarm.nodes]
    clusters = []
    for cuts in ((), (length // 2,), (length // 3, 2 * length // 3)):
        bounds = (0, *cuts, length)
        if len(names) > len(cuts):
            nodes = [names.pop(0) for _ in range(len(bounds) - 1)]
            clusters.append(
                Cluster(
                    tuple(
                        Stage(*each, activations=WireFormat.FP32, gradients=WireFormat.FP32)
                        for each in zip(nodes, bounds, bounds[1:], strict=False)
                    )
                )
            )
    nodes = {node.name: node for node in swarm.nodes}
    return Plan(plan_id, seed, tuple(clusters), form_rings(tuple(clusters), nodes), tuple(names))


@dataclass(frozen=True)
class Update:
    """An update that was committed: the samples in it, in no order, and its rate."""

    samples: tuple[int, ...]
    rate: float


class Updates:
    """Sees from the hub's orders which samples are in each update."""

    def __init__(self) -> None:
        self.made: list[Update] = []
        self.is_exact = True  # all the time
        self._granted: dict[LeaseId, tuple[NodeId, int]] = {}  # to which root of which build
        self._shares: dict[tuple[NodeId, int], deque[Sequence[int]]] = {}  # that it is to train
        self._opened: dict[int, dict[tuple[NodeId, int], RoundOpen]] = {}  # by round

    def note(self, event: Event, orders: Iterable[Action]) -> None:
        """Look at what the hub ordered after an event."""
        committed = set()
        self.is_exact &= all(each.message.is_exact for each in orders if _trains(each))
        for order in orders:
            match order:
                case Send(root, LeaseGrant(is_evaluation=False) as grant):
                    self._granted[grant.lease] = (root, grant.build_id)
                case SendFields(is_evaluation=False, lease=lease, samples=samples):
                    share = [sample for microbatch in samples for sample in microbatch]
                    self._shares.setdefault(self._granted[lease], deque()).append(share)
                case Send(name, RoundOpen(sums_gradients=True) as opened):
                    self._opened.setdefault(opened.round_id, {})[name, opened.build_id] = opened
                case Send(_, RoundCommit(round_id)) if round_id in self._opened:
                    committed.add(round_id)
        for round_id in committed:
            opened = self._opened.pop(round_id)
            shares = [
                self._shares[key]
                for key, each in opened.items()
                if each.num_microbatches and key in self._shares
            ]
            taken = [share.popleft() for share in shares]
            (rate,) = {each.rate for each in opened.values()}
            self.made.append(Update(tuple(sample for share in taken for sample in share), rate))

    @property
    def counts(self) -> Counter[int]:
        """How often each sample is in an update."""
        return Counter(sample for update in self.made for sample in update.samples)


def _trains(order: Action) -> bool:
    """Return whether a node is told to train, in a ring with others or alone."""
    if not isinstance(order, Send) or not isinstance(order.message, PlanOrder | RingOrder):
        return False
    if isinstance(order.message, RingOrder):
        return order.message.plan_id > 0  # else it is only about contacts
    return order.message.stage is not None
