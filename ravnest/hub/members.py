"""Who is here, and which clusters the current plan makes of them.

A plan is formed from all members at once. A cluster that loses a node is dissolved: those of it who are left
become spares under a newer plan number, so what they still send is late by number. Driven by hub.state.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ravnest.blobs import Fact
from ravnest.hub.events import JobGiven, MakeParts, Order, PartsMade, PeerJoined, PlanFormed, Send
from ravnest.hub.microbatches import configure_microbatch, profile_microbatch
from ravnest.hub.planning import MakePlan
from ravnest.plan.forecast import Forecast, forecast
from ravnest.plan.types import Cluster, Node, NodeId, Plan, Stage, Swarm, cluster_name
from ravnest.protocol import Contact, PlanOrder, SegmentId, StageParts


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that has joined, and the plan it was told to follow."""

    node: Node
    key: str
    addresses: tuple[str, ...]
    epoch: int = 0
    guessed: tuple[Fact, ...] = ()  # what of the node is still to be measured
    probe_by: float | None = None  # until when that is waited for, once it is ordered


@dataclass(slots=True)
class ClusterState:
    """A cluster of the current plan: it gets ready, then it trains."""

    name: str
    epoch: int
    cluster: Cluster
    unready: set[NodeId]
    version: int = 0

    @property
    def is_running(self) -> bool:
        """Whether all its stages are built."""
        return not self.unready

    @property
    def holder(self) -> str:
        """Its name in the lease book, never used again."""
        return f"{self.name}{self.epoch}"

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its nodes in pipeline order."""
        return tuple(stage.node for stage in self.cluster.stages)

    @property
    def root(self) -> NodeId:
        """Where batches enter."""
        return self.cluster.stages[0].node

    @property
    def leaf(self) -> NodeId:
        """Where the loss is."""
        return self.cluster.stages[-1].node


def is_sensible(node: Node) -> bool:
    """Return whether a plan can be made with what a peer says of its machine."""
    rates = (node.flops_per_second, node.upload_bytes_per_second, node.download_bytes_per_second)
    return min(*rates, node.uptime_seconds) > 0 and min(node.memory_bytes, node.latency_seconds) >= 0


class Members:
    """The peers by name in the order they came, the plan, and the parts its stages are made of."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._clusters: dict[str, ClusterState] = {}
        self._last_epoch = 0
        self._plan: Plan | None = None
        self._outlook: Forecast | None = None
        self._microbatches = 1
        self._parts: dict[tuple[int, int], PartsMade] = {}
        self._asked: set[tuple[int, int]] = set()

    def __contains__(self, name: NodeId) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._members)

    @property
    def outlook(self) -> Forecast:
        """What the current plan promises."""
        assert self._outlook is not None, "no plan was formed"
        return self._outlook

    @property
    def microbatches(self) -> int:
        """Into how many microbatches the current plan cuts a batch."""
        return self._microbatches

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters that get ready or train."""
        return tuple(self._clusters.values())

    @property
    def running(self) -> tuple[ClusterState, ...]:
        """The clusters that train."""
        return tuple(each for each in self._clusters.values() if each.is_running)

    def absent(self, names: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Return the owners in the plan's rings who are not among these."""
        assert self._plan is not None
        owners = (stage.node for cluster in self._plan.clusters for stage in cluster.stages)
        return tuple(name for name in owners if name not in names)

    def epoch(self, name: NodeId) -> int:
        """Return the number of the plan that a member follows."""
        return self._members[name].epoch

    def cluster_of(self, name: NodeId) -> ClusterState | None:
        """Return the cluster a node has a stage in."""
        return next((each for each in self._clusters.values() if name in each.nodes), None)

    def fields(
        self, cluster: ClusterState, is_evaluation: bool
    ) -> tuple[tuple[NodeId, tuple[str, ...]], ...]:
        """Return which nodes of a cluster consume which fields of a batch."""
        found = []
        for stage in cluster.cluster.stages:
            parts = self._parts[stage.start, stage.stop]
            names = parts.evaluation_fields if is_evaluation else parts.train_fields
            if names:
                found.append((stage.node, names))
        return tuple(found)

    @property
    def guessing(self) -> tuple[Member, ...]:
        """Those of whom something is still to be measured."""
        return tuple(member for member in self._members.values() if member.guessed)

    def find(self, name: NodeId) -> Member | None:
        """Return who goes by a name."""
        return self._members.get(name)

    def replace(self, member: Member) -> None:
        """Know something else of a member."""
        self._members[member.node.name] = member

    def join(self, event: PeerJoined) -> list[Send]:
        """Take a peer in; while a plan holds it is a spare of it."""
        name = event.node.name
        self._members[name] = Member(event.node, event.key, event.addresses, guessed=event.guessed)
        return self._order_spare(name) if self._clusters else []

    def leave(self, name: NodeId) -> tuple[ClusterState | None, list[Send]]:
        """Forget a peer; return the cluster that is dissolved by that, and what its other nodes are told."""
        cluster = self.cluster_of(name)
        del self._members[name]
        return cluster, self.dissolve([cluster]) if cluster else []

    def dissolve(self, clusters: Iterable[ClusterState]) -> list[Send]:
        """Make spares of the nodes of these clusters."""
        sends: list[Send] = []
        for cluster in clusters:
            del self._clusters[cluster.name]
            self._last_epoch += 1
            for name in cluster.nodes:
                if name in self._members:
                    sends += self._order_spare(name)
        return sends

    def ask_for_plan(self) -> MakePlan:
        """Return the order to plan with all members."""
        assert not self._clusters, "a plan is formed when no cluster is left"
        self._last_epoch += 1
        return MakePlan(self._last_epoch, tuple(member.node for member in self._members.values()))

    def adopt(self, plan: Plan, microbatches: int, job: JobGiven) -> PlanFormed:
        """Take a plan that was made of the members as they are; nobody is told yet."""
        swarm = Swarm(tuple(member.node for member in self._members.values()))
        self._plan, self._microbatches = plan, microbatches
        profile = profile_microbatch(job, microbatches)
        config = configure_microbatch(job, microbatches)
        self._outlook = outlook = forecast(plan, profile, swarm, config)
        for index, cluster in enumerate(plan.clusters):
            name = cluster_name(index)
            unready = {stage.node for stage in cluster.stages}
            self._clusters[name] = ClusterState(name, plan.epoch, cluster, unready)
        size = job.settings.batch_size
        return PlanFormed(plan, outlook.samples_per_second, outlook.round_seconds, size, microbatches)

    def announce(self) -> list[Send | MakeParts]:
        """Tell every member its part of a new plan, and have made what its stages need."""
        orders: list[Send | MakeParts] = []
        for cluster in self._clusters.values():
            orders += [self._order_stage(cluster, stage) for stage in cluster.cluster.stages]
        for name in self._members:
            if self.cluster_of(name) is None:
                orders += self._order_spare(name)
        for stage in (stage for each in self._clusters.values() for stage in each.cluster.stages):
            made = self.find_parts(stage.start, stage.stop)
            orders += [self._deliver(stage.node, made)] if isinstance(made, PartsMade) else made
        return orders

    def find_parts(self, start: int, stop: int) -> PartsMade | list[MakeParts]:
        """Return the parts of an interval, or the order to make them unless that is given already."""
        interval = (start, stop)
        if interval in self._parts:
            return self._parts[interval]
        is_new = interval not in self._asked
        self._asked.add(interval)
        return [MakeParts(start, stop)] if is_new else []

    def take_parts(self, made: PartsMade) -> list[Order] | str:
        """Deliver parts to all stages that wait for them; return why not, if nobody asked."""
        interval = (made.start, made.stop)
        if interval not in self._asked:
            return f"nobody asked for the parts of positions {made.start} to {made.stop}"
        self._asked.remove(interval)
        self._parts[interval] = made
        stages = (stage for each in self._clusters.values() for stage in each.cluster.stages)
        return [self._deliver(each.node, made) for each in stages if (each.start, each.stop) == interval]

    def take_ready(self, sender: NodeId, parts: StageParts) -> ClusterState | str:
        """Note that a stage is built; return its cluster, or why that was not awaited."""
        cluster = self.cluster_of(sender)
        if cluster is None or sender not in cluster.unready:
            return f"{sender} has no stage to get ready"
        stage = next(stage for stage in cluster.cluster.stages if stage.node == sender)
        made = self._parts.get((stage.start, stage.stop))
        if made is None or parts.blueprint != made.blueprint:
            return f"{sender} built another stage than it was given"
        cluster.unready.remove(sender)
        cluster.version = max(cluster.version, parts.version)
        return cluster

    def _deliver(self, name: NodeId, made: PartsMade) -> Send:
        return Send(name, StageParts(self._members[name].epoch, 0, made.blueprint, made.weights))

    def _order_spare(self, name: NodeId) -> list[Send]:
        assert self._plan is not None
        self._follow(name)
        return [Send(name, PlanOrder(self._last_epoch, self._plan.seed, None, (), (), ()))]

    def _order_stage(self, cluster: ClusterState, stage: Stage) -> Send:
        assert self._plan is not None
        self._follow(stage.node)
        rings = tuple(
            (SegmentId(index), ring)
            for index, ring in enumerate(self._plan.rings)
            if stage.node in ring.owners
        )
        known = dict.fromkeys((*cluster.nodes, *(name for _, ring in rings for name in ring.owners)))
        contacts = tuple(self._contact(name) for name in known if name != stage.node)
        accumulate = cluster.cluster.accumulate
        order = PlanOrder(cluster.epoch, self._plan.seed, stage, cluster.nodes, rings, contacts, accumulate)
        return Send(stage.node, order)

    def _contact(self, name: NodeId) -> Contact:
        member = self._members[name]
        return Contact(name, member.key, member.addresses)

    def _follow(self, name: NodeId) -> None:
        self._members[name] = replace(self._members[name], epoch=self._last_epoch)
