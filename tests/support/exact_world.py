"""Clusters that make exact updates: each trains its share of a batch, gradient rounds sum the shares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ravnest.engine.optimizers import OptimizerSettings
from ravnest.ids import HUB, NodeId, RoundId
from ravnest.model.capture.capture import Captured
from ravnest.protocol.averaging import RoundAbort, RoundOpen
from ravnest.protocol.placement import PlanOrder, RingOrder
from ravnest.transfer.outbox import Outgoing
from tests.support.tied_world import TiedWorld


class ExactWorld(TiedWorld):
    """A world of hosts whose updates wait for gradient rounds, unless it is told otherwise."""

    def __init__(
        self,
        captured: Captured,
        settings: OptimizerSettings,
        cuts: Sequence[Sequence[int]],
        accumulate: int = 1,
        is_exact: bool = True,
        **options,
    ) -> None:
        self.is_exact = is_exact
        self.next_microbatch = self.last_round = 0
        super().__init__(captured, settings, cuts, window=4, accumulate=accumulate, **options)

    def order(self, name: NodeId) -> PlanOrder:
        return replace(super().order(name), is_exact=self.is_exact)

    def grant(self, cluster: int, batch: Mapping[str, Tensor], num_microbatches: int | None = None) -> None:
        """Grant a cluster its share of a batch, cut in near-equal microbatches."""
        count = self.accumulate if num_microbatches is None else num_microbatches
        parts = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
        microbatches = [{name: part[k] for name, part in parts.items()} for k in range(count)]
        self.lease(microbatches, self.next_microbatch, cluster)
        self.next_microbatch += count

    def grant_all(self, batch: Mapping[str, Tensor], shares: Sequence[int]) -> None:
        """Grant every cluster its share: so many samples of the batch, in order."""
        start = 0
        for cluster, size in enumerate(shares):
            self.grant(cluster, {name: tensor[start : start + size] for name, tensor in batch.items()})
            start += size

    def open_gradients(
        self,
        rate: float,
        left_out: Sequence[int] = (),
        num_microbatches: Mapping[int, int] | None = None,
        deadline_seconds: float = 1e9,
    ) -> RoundId:
        """Open a gradient round without some clusters; say how many microbatches the shares of some have."""
        absent = tuple(name for cluster in left_out for name in self.clusters[cluster])
        self.members = [name for name in self.stages if name not in absent]
        self.last_round += 1
        order = RoundOpen(self.build_id, RoundId(self.last_round), deadline_seconds, False, False, absent)
        order = replace(order, sums_gradients=True, rate=rate)
        for number, cluster in enumerate(self.clusters):
            own = replace(order, num_microbatches=(num_microbatches or {}).get(number))
            for name in cluster:
                if name in self.members:
                    self.post(HUB, Outgoing(name, own))
        return order.round_id

    def abort(self, round_id: RoundId) -> None:
        for name in self.members:
            self.post(HUB, Outgoing(name, RoundAbort(round_id, "somebody died")))

    def order_rings(self, name: NodeId, is_exact: bool, rings=None) -> None:
        """Tell a node of a newer plan that leaves its cluster as it is."""
        rings = self.rings_of(name) if rings is None else rings
        for outgoing in self.hosts[name].handle(RingOrder(self.build_id, self.plan, rings, (), is_exact)):
            self.post(name, outgoing)

    def versions(self) -> set[int]:
        """The updates that stages have made."""
        return {host.stage.worker.stage.version for host in self.hosts.values()}

    def everything(self, cluster: int) -> dict[str, Tensor]:
        """Return weights and optimizer state of a cluster."""
        found: dict[str, Tensor] = {}
        for name in self.clusters[cluster]:
            snapshot = self.hosts[name].stage.worker.stage.snapshot()
            found |= snapshot.state | snapshot.optimizer
        return found
