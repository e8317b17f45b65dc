"""The records hub.members keeps: a peer that has joined, a cluster of the plan, what a new plan changes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ravnest.hub.coordinator.events import JobGiven, MakeParts, MakePlan, PartsMade, PeerJoined, Send
from ravnest.hub.coordinator.planner import configure_microbatch, profile_microbatch
from ravnest.ids import NodeId, SegmentId
from ravnest.plan.forecast import Forecast, forecast
from ravnest.plan.types import Backup, Cluster, Node, Plan, Ring, Stage, Swarm, cluster_name
from ravnest.protocol.membership import Fact
from ravnest.protocol.placement import Contact, PlanOrder, RingOrder, Rings

# Wider than any machine is; the planner divides and multiplies these, and what overflows ends the hub.
_FACTS = {
    "memory_bytes": (0.0, 1e18),
    "flops_per_second": (1.0, 1e21),
    "upload_bytes_per_second": (1.0, 1e15),
    "download_bytes_per_second": (1.0, 1e15),
    "latency_seconds": (0.0, 1e3),
    "uptime_seconds": (1.0, 1e12),
}


@dataclass(frozen=True, slots=True)
class HeldState:
    """State that a node has: of these positions, as a cluster had them."""

    start: int
    stop: int
    cluster_id: str


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that has joined, and the plan it was told to follow."""

    node: Node
    key: str
    addresses: tuple[str, ...]
    build_id: int = 0
    guessed: tuple[Fact, ...] = ()  # what of the node is still to be measured
    probe_by: float | None = None  # until when that is waited for, once it is ordered
    held: HeldState | None = None
    leaves_by: float | None = None  # once it wants to
    leaves_for: str = ""
    back_by: float | None = None  # while the hub, which was away, waits for it


@dataclass(slots=True, eq=False)
class ClusterState:
    """A cluster of the current plan: it gets ready, then it trains, until somebody of it is missing."""

    name: str
    build_id: int
    cluster: Cluster
    unready: set[NodeId]
    cluster_id: str  # its name in the lease book, never used again
    version: int = 0
    broken_at: float | None = None  # since when it stands still; until it trains, for one that is mended
    is_broken: bool = False

    @property
    def is_running(self) -> bool:
        """Whether all its stages are built and there."""
        return not self.unready and not self.is_broken

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


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What a new plan does: clusters to be built, those they take the place of, whether rings are others."""

    built: tuple[ClusterState, ...]
    ended: tuple[ClusterState, ...]
    has_new_rings: bool


def is_sensible(node: Node) -> bool:
    """Return whether a plan can be made with what a peer says of its machine."""
    return all(least <= getattr(node, fact) <= most for fact, (least, most) in _FACTS.items())


Extras = Mapping[NodeId, Collection[NodeId]]  # whom a node meets beside its cluster and its rings


class Membership:
    """The peers by name in the order they came, the plan, and the parts its stages are made of."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._clusters: tuple[ClusterState, ...] = ()
        self._draining: tuple[ClusterState, ...] = ()
        self._last_id = 0
        self._plan: Plan | None = None
        self._rings_since = 0  # the plan whose rings hold
        self._planned: dict[NodeId, Node] = {}  # as the plan knew them
        self._outlook: Forecast | None = None
        self._microbatches = 1
        self._parts: dict[tuple[int, int], PartsMade] = {}
        self._asked: set[tuple[int, int]] = set()
        self._stale: set[tuple[int, int]] = set()  # parts with weights that are older than a checkpoint

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
    def rings(self) -> tuple[Ring, ...]:
        """In which clusters average."""
        return self._plan.rings if self._plan is not None and self._clusters else ()

    @property
    def microbatches(self) -> int:
        """Into how many microbatches the current plan cuts a batch."""
        return self._microbatches

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """The clusters that get ready, train, or wait to be mended."""
        return self._clusters

    @property
    def running(self) -> tuple[ClusterState, ...]:
        """The clusters that train."""
        return tuple(each for each in self._clusters if each.is_running)

    @property
    def leaving(self) -> tuple[Member, ...]:
        """Those who go as soon as nobody needs them."""
        return tuple(member for member in self._members.values() if member.leaves_by is not None)

    @property
    def missing(self) -> tuple[Member, ...]:
        """Those who are to come back to a hub that was away."""
        return tuple(member for member in self._members.values() if member.back_by is not None)

    def miss_all(self, back_by: float) -> None:
        """Wait for everybody, after the hub was away; what was made for stages is lost with its memory."""
        for name, member in self._members.items():
            self._members[name] = replace(member, back_by=back_by, probe_by=None)
        self._parts, self._asked, self._stale = {}, set(), set()

    def is_draining(self, cluster: ClusterState) -> bool:
        """Return whether a cluster takes nothing new: somebody of it wants to go, or it is cut anew soon."""
        return cluster in self._draining or any(member.node.name in cluster.nodes for member in self.leaving)

    def drain(self, clusters: Iterable[ClusterState]) -> None:
        """Let these clusters, and no others, finish what they are at."""
        self._draining = tuple(clusters)

    @property
    def backups(self) -> tuple[Backup, ...]:
        """Which spares keep snapshots of which nodes."""
        return self._plan.backups if self._plan is not None and self._clusters else ()

    @property
    def cluster_ids(self) -> set[str]:
        """The names of clusters that are here, or whose state somebody holds."""
        held = (member.held.cluster_id for member in self._members.values() if member.held is not None)
        return {*held, *(cluster.cluster_id for cluster in self._clusters)}

    def absent(self, names: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Return the owners in the plan's rings who are not among these."""
        assert self._plan is not None
        owners = (stage.node for cluster in self._plan.clusters for stage in cluster.stages)
        return tuple(name for name in owners if name not in names)

    def slowest_link(self, names: Collection[NodeId]) -> float:
        """Return the bytes per second that the slowest of these sends or receives."""
        nodes = [self._members[name].node for name in names]
        return min(min(each.upload_bytes_per_second, each.download_bytes_per_second) for each in nodes)

    def build_id(self, name: NodeId) -> int:
        """Return the number of the plan that a member follows."""
        return self._members[name].build_id

    def cluster_of(self, name: NodeId) -> ClusterState | None:
        """Return the cluster a node has a stage in."""
        return next((each for each in self._clusters if name in each.nodes), None)

    def find_cluster(self, cluster_id: str) -> ClusterState | None:
        """Return the cluster of this id, if it gets ready or trains."""
        return next((each for each in self.clusters if each.cluster_id == cluster_id), None)

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
        """Take a peer in; while a plan holds it is a spare of it, until the next one."""
        name = event.node.name
        self._members[name] = Member(event.node, event.key, event.addresses, guessed=event.guessed)
        return self._order_spare(name, {}) if self._clusters else []

    def leave(self, name: NodeId) -> ClusterState | None:
        """Forget a peer; return the cluster that it is missing in."""
        del self._members[name]
        return self.cluster_of(name)

    def dissolve(self, clusters: Iterable[ClusterState]) -> list[Send]:
        """Make spares of the nodes of these clusters."""
        sends: list[Send] = []
        for cluster in tuple(clusters):
            self._clusters = tuple(each for each in self._clusters if each is not cluster)
            self._last_id += 1
            for name in cluster.nodes:
                if name in self._members:
                    sends += self._order_spare(name, {})
        return sends

    def ask_for_plan(self) -> MakePlan:
        """Return the order to plan with all members, or to repair the plan there is."""
        self._last_id += 1
        here = (m for m in self._members.values() if not m.guessed and m.leaves_by is None)
        nodes = tuple(member.node for member in here if member.back_by is None)
        if not self._clusters:
            return MakePlan(self._last_id, nodes)
        names = {node.name for node in nodes}
        gone = tuple(node for name, node in self._planned.items() if name not in names)
        changed = tuple(node for name, node in self._planned.items() if name in names and node not in nodes)
        return MakePlan(self._last_id, nodes, self._plan, gone, changed, self._microbatches)

    def adopt(self, plan: Plan, microbatches: int, job: JobGiven) -> PlanChange:
        """Take a plan that was made of the members as they are; nobody is told yet."""
        names = {*plan.spares, *(stage.node for each in plan.clusters for stage in each.stages)}
        intervals = {(stage.start, stage.stop) for each in plan.clusters for stage in each.stages}
        self._parts = {each: made for each, made in self._parts.items() if each in intervals}
        planned = {name: self._members[name].node for name in self._members if name in names}
        self._planned, self._microbatches = planned, microbatches
        profile, config = profile_microbatch(job, microbatches), configure_microbatch(job, microbatches)
        self._outlook = forecast(plan, profile, Swarm(tuple(planned.values())), config)
        before, self._clusters = self._clusters, ()
        built: list[ClusterState] = []
        for index, cluster in enumerate(plan.clusters):
            name = cluster_name(index)
            state = next((x for x in before if x.is_running and x.cluster == cluster), None)
            if state is None:
                unready = {stage.node for stage in cluster.stages}
                state = ClusterState(name, plan.plan_id, cluster, unready, f"{name}{plan.plan_id}")
                built.append(state)
            state.name = name
            self._clusters += (state,)
        ended = tuple(each for each in before if each not in self._clusters)
        has_new_rings = self._plan is None or self._plan.rings != plan.rings or not before
        self._rings_since = plan.plan_id if has_new_rings else self._rings_since
        self._plan = plan
        return PlanChange(tuple(built), ended, has_new_rings)

    def announce(
        self, change: PlanChange, extras: Extras, is_giver: Callable[[NodeId], bool] = lambda _: False
    ) -> list[Send]:
        """Tell every member its part of a new plan, but for those who have no other than before.

        Who has no stage any more, but gives what it holds to others, is told only whom it meets.
        """
        sends = []
        for cluster in self._clusters:
            for stage in cluster.cluster.stages:
                if cluster in change.built:
                    sends.append(self._order_stage(cluster, stage, extras))
                elif change.has_new_rings or stage.node in extras:
                    sends.append(self._order_rings(cluster, stage.node, extras))
        was_busy = {name for cluster in change.ended for name in cluster.nodes}
        for member in tuple(self._members.values()):
            name = member.node.name
            if self.cluster_of(name) is not None:
                continue
            if member.held is not None and (is_giver(name) or member.leaves_by is not None):
                sends.append(Send(name, RingOrder(member.build_id, 0, (), self._contacts(name, (), extras))))
            elif not member.build_id or name in was_busy or name in extras:
                sends += self._order_spare(name, extras)
        return sends

    def retire(self, is_needed: Callable[[NodeId], bool]) -> list[Send]:
        """Make spares of those who have no stage any more, and what they held, others have."""
        left = [m.node.name for m in self._members.values() if m.held is not None and m.leaves_by is None]
        done = [name for name in left if self.cluster_of(name) is None and not is_needed(name)]
        return [send for name in done for send in self._order_spare(name, {})]

    def find_parts(self, start: int, stop: int, is_newest: bool = False) -> PartsMade | list[MakeParts]:
        """Return the parts of an interval, or the order to make them unless that is given already."""
        interval = (start, stop)
        if interval in self._parts and not (is_newest and interval in self._stale):
            return self._parts[interval]
        is_new = interval not in self._asked
        self._asked.add(interval)
        return [MakeParts(start, stop)] if is_new else []

    def needs_parts(self, interval: tuple[int, int]) -> bool:
        """Return whether the parts of an interval are those of a stage, as far as is known."""
        return interval in self._parts or interval in self._asked

    def take_parts(self, made: PartsMade) -> str | None:
        """Know the parts of an interval; return why not, if nobody asked."""
        interval = (made.start, made.stop)
        if interval not in self._asked:
            return f"nobody asked for the parts of positions {made.start} to {made.stop}"
        self._asked.remove(interval)
        self._stale -= {interval} & self._parts.keys()  # else it was asked for before the checkpoint
        self._parts[interval] = made
        return None

    def note_checkpoint(self) -> None:
        """From now on the hub has newer weights than those in the parts that were made."""
        self._stale = {*self._parts, *self._asked}

    def take_ready(self, sender: NodeId) -> ClusterState | str:
        """Note that a stage is built; return its cluster, or why that was not awaited."""
        cluster = self.cluster_of(sender)
        if cluster is None or sender not in cluster.unready:
            return f"{sender} has no stage to get ready"
        stage = next(stage for stage in cluster.cluster.stages if stage.node == sender)
        cluster.unready.remove(sender)
        held = HeldState(stage.start, stage.stop, cluster.cluster_id)
        self._members[sender] = replace(self._members[sender], held=held)
        return cluster

    def _order_spare(self, name: NodeId, extras: Extras) -> list[Send]:
        assert self._plan is not None
        self._members[name] = replace(self._members[name], build_id=self._last_id, held=None)
        contacts = self._contacts(name, (), extras)
        order = PlanOrder(self._last_id, self._rings_since, self._plan.seed, None, (), (), contacts)
        return [Send(name, order)]

    def _order_stage(self, cluster: ClusterState, stage: Stage, extras: Extras) -> Send:
        assert self._plan is not None
        self._members[stage.node] = replace(self._members[stage.node], build_id=cluster.build_id)
        rings, contacts = self._rings(stage.node), self._contacts(stage.node, cluster.nodes, extras)
        since, seed, accumulate = self._rings_since, self._plan.seed, cluster.cluster.accumulate
        order = PlanOrder(cluster.build_id, since, seed, stage, cluster.nodes, rings, contacts, accumulate)
        return Send(stage.node, order)

    def _order_rings(self, cluster: ClusterState, name: NodeId, extras: Extras) -> Send:
        contacts = self._contacts(name, cluster.nodes, extras)
        return Send(name, RingOrder(cluster.build_id, self._rings_since, self._rings(name), contacts))

    def _rings(self, name: NodeId) -> Rings:
        assert self._plan is not None
        numbered = enumerate(self._plan.rings)
        return tuple((SegmentId(index), ring) for index, ring in numbered if name in ring.owners)

    def _contacts(self, name: NodeId, nodes: tuple[NodeId, ...], extras: Extras) -> tuple[Contact, ...]:
        owners = (owner for _, ring in self._rings(name) for owner in ring.owners)
        known = dict.fromkeys((*nodes, *owners, *extras.get(name, ())))
        members = (self._members[each] for each in known if each != name and each in self._members)
        return tuple(Contact(each.node.name, each.key, each.addresses) for each in members)
