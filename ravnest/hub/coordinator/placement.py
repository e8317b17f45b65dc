"""Placement: the plan in force, its clusters with their ClusterPhase, and the parts stages are made of.

A first plan is formed from all members at once; later ones are repairs. Clusters that a newer plan leaves as
they are train on, or go on being built. The others are built anew under its number, so what they still send
is late by number. Stages are built of what their nodes hold and of what others have (sources).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.config import Averaging, PlanConfig
from ravnest.hub.coordinator.events import JobGiven, MakeParts, MakePlan, PartsMade, Send
from ravnest.hub.coordinator.membership import HeldState, Membership
from ravnest.hub.coordinator.phases import CLUSTER_TRANSITIONS, ClusterPhase, NodePhase, follow
from ravnest.ids import NodeId, SegmentId
from ravnest.plan.assembly import sample_rooms
from ravnest.plan.forecast import Forecast, Outline, forecast, outline
from ravnest.plan.line import LineCost
from ravnest.plan.sharing import ALONE, LEAST_UPDATES, Sharing, adam_rate_times, efficiency
from ravnest.plan.types import Backup, Cluster, ModelProfile, Node, Plan, Ring, Stage, Swarm, cluster_name
from ravnest.protocol.placement import Contact, PlanOrder, RingOrder, Rings

_MOST_TRIED = 4  # spares that came while clusters were built, in one plan
Extras = Mapping[NodeId, Collection[NodeId]]  # contacts of a node beside its cluster and its rings
_NEAR = 2  # owners before and after it that a node knows in a ring, if no round needs all
SLICE = 1024  # members that are told of a plan in one event, about


@dataclass(slots=True, eq=False)
class ClusterState:
    """A cluster of the current plan, from its build to the next."""

    name: str
    build_id: int
    cluster: Cluster
    unready: set[NodeId]  # nodes whose stages are still to be built
    cluster_id: str  # its name in the ledger, never used again
    version: int = 0
    samples_per_second: float = 0.0  # as foreseen
    sample_rooms: tuple[int, ...] = ()  # by stage: the samples that it has memory to wait with
    stopped_at: float | None = None  # since when it, or the cluster it replaces, stands still
    phase: ClusterPhase = ClusterPhase.BUILDING

    @property
    def is_running(self) -> bool:
        """Whether all its stages are built and there."""
        return self.phase in (ClusterPhase.RUNNING, ClusterPhase.DRAINING)

    @property
    def has_trained(self) -> bool:
        """Whether it trains, or trained before it stood still."""
        return self.is_running or self.stopped_at is not None

    @property
    def is_broken(self) -> bool:
        """Whether it stands still until a new plan replaces it."""
        return self.phase is ClusterPhase.BROKEN

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Its nodes from root to leaf."""
        return tuple(stage.node for stage in self.cluster.stages)

    @property
    def root(self) -> NodeId:
        """Where microbatches enter."""
        return self.cluster.stages[0].node

    @property
    def updates_in_flight(self) -> int:
        """Updates that may be under way, so that nobody has reported them."""
        return -(-self.cluster.stages[0].window // self.cluster.accumulate)

    @property
    def leaf(self) -> NodeId:
        """Where losses come from."""
        return self.cluster.stages[-1].node


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What a new plan does: clusters to build, clusters that end, whether the rings are others."""

    built: tuple[ClusterState, ...]
    ended: tuple[ClusterState, ...]
    has_new_rings: bool


class Contacts:
    """Whom each member is told of: its cluster, its rings, and whom it gives state to or gets it from.

    In a robust round each owner of a segment sends to all others. Else a node needs those next to it in its
    rings, and some more, so that a few may be absent: a list of all would grow with the swarm, and all would
    dial all. A round in which two are neighbours that were not told of each other introduces them.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rings: tuple[Ring, ...] = ()
        self._rings_of: dict[NodeId, Rings] = {}  # by owner
        self._turns_of: dict[NodeId, tuple[int, ...]] = {}  # by owner: its place in each of them
        self._meets_all = True  # in its rings
        self._extras: Extras = {}  # as members were told last
        self._introduced: dict[NodeId, set[NodeId]] = {}  # contacts that rounds have needed since
        self._contact_of: dict[NodeId, Contact] = {}  # of those that others were told of
        # While many are told: how members are reached, and owners by rings. None: members may be others.
        self._told: dict[NodeId, Contact] | None = None
        self._owners_of: dict[tuple[SegmentId, ...], tuple[Contact, ...]] = {}

    def rings(self, name: NodeId) -> Rings:
        """Return the rings that a node is an owner of, with their numbers."""
        return self._rings_of.get(name, ())

    def follow(self, rings: tuple[Ring, ...], meets_all: bool) -> None:
        """Follow the rings of a plan; with `meets_all` a node may send to every owner in its rings."""
        self._rings, self._meets_all, self._introduced = rings, meets_all, {}
        self._rings_of, self._turns_of = {}, {}
        for index, ring in enumerate(rings):
            numbered = (SegmentId(index), ring)
            for turn, owner in enumerate(ring.owners):
                self._rings_of[owner] = (*self._rings_of.get(owner, ()), numbered)
                self._turns_of[owner] = (*self._turns_of.get(owner, ()), turn)
        here = self._membership
        self._contact_of = {each: made for each, made in self._contact_of.items() if each in here}

    def begin(self, extras: Extras) -> None:
        """Begin to tell many, while nobody comes or goes."""
        self._extras, self._introduced, self._owners_of = extras, {}, {}
        self._told = {name: self._contact(name) for name in self._membership}

    def end(self) -> None:
        """All are told."""
        self._told, self._owners_of = None, {}

    def find(
        self, name: NodeId, nodes: tuple[NodeId, ...] = (), *, has_extras: bool = True
    ) -> tuple[Contact, ...]:
        """Return whom a node is told of: those of its cluster, its extras, and of its rings."""
        extras = sorted(self._extras.get(name, ())) if has_extras else ()
        near = dict.fromkeys((*nodes, *extras))
        found = [self._contact(each) for each in near if each != name and each in self._membership]
        near[name] = None
        found += [each for each in self._owners(name) if each.node not in near]
        return tuple(found)

    def introduce(self, absent: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Record who will be neighbours in a round without these; return those that do not know of it."""
        if self._meets_all:
            return ()
        away, new = frozenset(absent), dict[NodeId, None]()
        for ring in self._rings:
            turns = [turn for turn, owner in enumerate(ring.owners) if owner not in away]
            for before, turn in zip([*turns[-1:], *turns], turns, strict=False):
                distance = (turn - before) % len(ring.owners)
                if min(distance, len(ring.owners) - distance) <= _NEAR:
                    continue
                for one, other in ((before, turn), (turn, before)):
                    known = self._introduced.setdefault(ring.owners[one], set())
                    if ring.owners[other] not in known:
                        known.add(ring.owners[other])
                        new[ring.owners[one]] = None
        return tuple(new)

    def _owners(self, name: NodeId) -> Sequence[Contact]:
        """Return how the owners of a node's rings are reached that it may send to."""
        rings = self.rings(name)
        if not self._meets_all:
            near: dict[NodeId, None] = {}
            for (_, ring), turn in zip(rings, self._turns_of.get(name, ()), strict=True):
                near |= dict.fromkeys(_neighbours(ring.owners, turn))
            near |= dict.fromkeys(sorted(self._introduced.get(name, ())))
            return [self._contact(each) for each in near if each in self._membership]
        numbers = tuple(number for number, _ in rings)
        if numbers in self._owners_of:  # many nodes are in the same
            return self._owners_of[numbers]
        owners = dict.fromkeys(owner for _, ring in rings for owner in ring.owners)
        found = tuple(self._contact(each) for each in owners if each in self._membership)
        if self._told is not None:
            self._owners_of[numbers] = found
        return found

    def _contact(self, name: NodeId) -> Contact:
        """Return how a member is reached; many are told the same."""
        if self._told is not None:
            return self._told[name]
        member, found = self._membership[name], self._contact_of.get(name)
        if found is None or found.key != member.key or found.addresses != member.addresses:
            found = self._contact_of[name] = Contact(name, member.key, member.addresses)
        return found


def _neighbours(owners: tuple[NodeId, ...], turn: int) -> tuple[NodeId, ...]:
    """Return the owners next to one in a ring, in the order of the ring; in a small one these are all."""
    if len(owners) <= 2 * _NEAR + 1:
        return owners
    around = ((turn + step) % len(owners) for step in range(-_NEAR, _NEAR + 1))
    return tuple(owners[each] for each in sorted(around))


class Placement:
    """Which node hosts which stage of which cluster, by the plan in force."""

    def __init__(self, job: JobGiven, membership: Membership) -> None:
        self._job = job
        self.membership = membership
        self._clusters: tuple[ClusterState, ...] = ()
        self._running: tuple[ClusterState, ...] | None = ()  # None: to be found anew
        self._cluster_by_node: dict[NodeId, ClusterState] = {}
        self._last_id = 0  # of plans and builds
        self._plan: Plan | None = None
        self._contacts = Contacts(membership)
        self._rings_since = 0  # the plan whose rings hold
        self._planned: dict[NodeId, Node] = {}  # as the plan knew them
        self._planned_costs = job.profile, job.config  # as the plan counted
        self._outline: Outline | None = None
        self._outlook: Forecast | None = None  # once somebody has asked
        self._microbatches = 1
        self.sharing = ALONE  # how clusters share the job
        self.noise: float | None = None  # the job's noise scale, once measured
        self._tries_spares = False  # at the next repair
        self._untried: dict[NodeId, None] = {}  # spares that came while clusters were being built
        self._parts: dict[tuple[int, int], PartsMade] = {}
        self._asked: set[tuple[int, int]] = set()
        self._stale: set[tuple[int, int]] = set()  # parts with weights that are older than a checkpoint

    @property
    def outline(self) -> Outline:
        """How fast the current plan is."""
        assert self._outline is not None, "no plan was formed"
        return self._outline

    @property
    def outlook(self) -> Forecast:
        """What the current plan promises, stage by stage; people ask for it, no decision does."""
        assert self._plan is not None, "no plan was formed"
        if self._outlook is None:
            profile, config = self._planned_costs
            self._outlook = forecast(self._plan, profile, Swarm(tuple(self._planned.values())), config)
        return self._outlook

    @property
    def costs(self) -> tuple[ModelProfile, PlanConfig]:
        """What a microbatch of the current plan costs, and what the plan assumes."""
        facts = self._microbatches, self.sharing
        return self._job.profile_microbatch(*facts), self._job.configure_microbatch(*facts)

    @property
    def is_exact(self) -> bool:
        """Whether clusters sum the gradients of every batch."""
        return self.sharing.averaging is Averaging.EXACT and len(self._clusters) > 1

    @property
    def rate_times(self) -> float:
        """How many times the job's rate clusters use: more for the requester's own Adam on shared batches."""
        settings = self._job.settings
        if not settings.has_own_adam or not self.sharing.is_split or self.is_exact:
            return 1.0
        return adam_rate_times(replace(settings.length, noise=self.noise), max(1, len(self._clusters)))

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings in which clusters average."""
        return self._plan.rings if self._plan is not None and self._clusters else ()

    @property
    def backups(self) -> tuple[Backup, ...]:
        """Which spares keep snapshots of which nodes."""
        return self._plan.backups if self._plan is not None and self._clusters else ()

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """All clusters of the plan, in any phase."""
        return self._clusters

    @property
    def running(self) -> tuple[ClusterState, ...]:
        """The clusters that train."""
        if self._running is None:
            self._running = tuple(each for each in self._clusters if each.is_running)
        return self._running

    @property
    def has_broken(self) -> bool:
        """Whether a cluster stands still."""
        if len(self.running) == len(self._clusters):
            return False
        return any(each.is_broken for each in self._clusters)

    @property
    def has_leaving_host(self) -> bool:
        """Whether a node that wants to go has a stage."""
        return any(member.node.name in self._cluster_by_node for member in self.membership.leaving)

    @property
    def cluster_ids(self) -> set[str]:
        """The ids of clusters that are here, or whose state a node holds."""
        held = (member.held.cluster_id for member in self.membership.members if member.held is not None)
        return {*held, *(cluster.cluster_id for cluster in self._clusters)}

    def cluster_of(self, name: NodeId) -> ClusterState | None:
        """Return the cluster a node has a stage in."""
        return self._cluster_by_node.get(name)

    def find_cluster(self, cluster_id: str) -> ClusterState | None:
        """Return the cluster of this id, if it is of the plan."""
        return next((each for each in self._clusters if each.cluster_id == cluster_id), None)

    def build_id(self, name: NodeId) -> int:
        """Return the number of the build that a member follows."""
        return self.membership[name].build_id

    def absent(self, names: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Return the owners in the plan's rings that are not among these."""
        assert self._plan is not None
        owners = (stage.node for cluster in self._plan.clusters for stage in cluster.stages)
        return tuple(name for name in owners if name not in names)

    def slowest_link(self, names: Collection[NodeId]) -> float:
        """Return the bytes per second that the slowest of these sends or receives."""
        nodes = [self.membership[name].node for name in names]
        return min(min(each.upload_bytes_per_second, each.download_bytes_per_second) for each in nodes)

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

    def mark_broken(self, cluster: ClusterState) -> None:
        """Mark a cluster broken: a stage of it is missing."""
        self._move(cluster, ClusterPhase.BROKEN)

    def mark_ready(self, name: NodeId) -> ClusterState | str:
        """Record that a stage is built; return its cluster, or why that was not awaited."""
        cluster = self.cluster_of(name)
        is_new = self.membership[name].present_phase in (NodePhase.PROBING, NodePhase.SPARE)  # it came back
        if cluster is None or is_new or name not in cluster.unready:
            return f"{name} has no stage to get ready"
        stage = next(stage for stage in cluster.cluster.stages if stage.node == name)
        cluster.unready.remove(name)
        held = HeldState(stage.start, stage.stop, cluster.cluster_id)
        self.membership.update(replace(self.membership[name], held=held))
        if not self.membership[name].is_leaving:
            self.membership.move(name, NodePhase.HOSTING)
        if not cluster.unready and not cluster.is_broken:
            is_draining = self._has_leaving(cluster)
            self._move(cluster, ClusterPhase.DRAINING if is_draining else ClusterPhase.RUNNING)
        return cluster

    def drain(self, clusters: Iterable[ClusterState]) -> None:
        """Drain these clusters: they finish what they have. Others go on, unless a node of them leaves."""
        draining = set(clusters)
        for cluster in self.running:
            is_draining = cluster in draining or self._has_leaving(cluster)
            self._move(cluster, ClusterPhase.DRAINING if is_draining else ClusterPhase.RUNNING)

    def drain_host(self, name: NodeId) -> None:
        """Drain the cluster of a node that leaves: it finishes what it has."""
        cluster = self.cluster_of(name)
        if cluster is not None and cluster.is_running:
            self._move(cluster, ClusterPhase.DRAINING)

    def _has_leaving(self, cluster: ClusterState) -> bool:
        found = (self.membership.find(name) for name in cluster.nodes)
        return any(member is not None and member.is_leaving for member in found)

    def _move(self, cluster: ClusterState, phase: ClusterPhase) -> None:
        cluster.phase = follow(CLUSTER_TRANSITIONS, cluster.phase, phase)
        self._running = None

    def _place(self, clusters: tuple[ClusterState, ...]) -> None:
        self._clusters, self._running = clusters, None
        self._cluster_by_node = {name: cluster for cluster in clusters for name in cluster.nodes}

    def add_spare(self, name: NodeId) -> list[Send]:
        """Tell a newcomer that it is a spare, while there is a plan."""
        return self._order_spare(name, has_extras=False) if self._clusters else []

    def dissolve(self, clusters: Iterable[ClusterState]) -> list[Send]:
        """Make spares of the nodes of these clusters."""
        sends: list[Send] = []
        for cluster in tuple(clusters):
            self._place(tuple(each for each in self._clusters if each is not cluster))
            self._last_id += 1
            for name in cluster.nodes:
                if name in self.membership:
                    sends += self._order_spare(name, has_extras=False)
        return sends

    def ask_for_plan(self) -> MakePlan:
        """Return the action to plan with all members, or to repair the plan there is."""
        self._last_id += 1
        return self._ask(self._last_id, ())

    def imagine(self, guest: Node) -> MakePlan:
        """Return what would be asked if one more node were here; nothing changes."""
        return self._ask(self._last_id + 1, (guest,))

    def _ask(self, plan_id: int, guests: tuple[Node, ...]) -> MakePlan:
        usable = {NodePhase.SPARE, NodePhase.BUILDING, NodePhase.HOSTING}
        nodes = tuple(member.node for member in self.membership.members if member.phase in usable) + guests
        if not self._clusters:
            return MakePlan(plan_id, nodes, noise=self.noise)
        by_name = {node.name: node for node in nodes}
        gone = tuple(node for name, node in self._planned.items() if name not in by_name)
        changed = tuple(x for name, x in self._planned.items() if name in by_name and x != by_name[name])
        facts = (nodes, self._plan, gone, changed, self._microbatches, self.sharing, self.noise)
        building = tuple(x.root for x in self._clusters if x.phase is ClusterPhase.BUILDING)
        untried = () if building else tuple(x for x in self._untried if x in by_name)[:_MOST_TRIED]
        return MakePlan(plan_id, *facts, self._tries_spares, building, untried)

    @property
    def has_untried(self) -> bool:
        """Whether all clusters are built, and spares came meanwhile that may help one of them."""
        return bool(self._untried) and all(each.is_running for each in self._clusters)

    def record_noise(self, noise: float) -> bool:
        """Plan with this noise scale from now on; return whether spares may form clusters that pay now."""
        job = self._job
        self.noise = noise
        if self._plan is None or not self._plan.spares or job.config.clusters:
            return False
        count = len(self._clusters) + 1

        # Slow links need more noise than this, so every larger one is a reason to try.
        length = replace(job.settings.length, noise=noise)
        found = efficiency(length, count, Averaging.BLOCKING, not length.is_whole_batch, LEAST_UPDATES)
        self._tries_spares = found >= job.config.favour.least_efficiency
        return self._tries_spares

    def adopt(self, plan: Plan, microbatches: int, sharing: Sharing = ALONE) -> PlanChange:
        """Adopt a plan that was made of the members as they are; no peer is told yet."""
        names = {*plan.spares, *(stage.node for each in plan.clusters for stage in each.stages)}
        self._record_untried(plan)
        planned = {name: self.membership[name].node for name in self.membership if name in names}
        self._planned, self._microbatches, self.sharing = planned, microbatches, sharing
        self._tries_spares = False
        self._planned_costs = profile, config = self.costs
        self._outline, self._outlook = outline(plan, profile, Swarm(tuple(planned.values())), config), None
        rooms = sample_rooms(plan.clusters, LineCost(profile, config, len(plan.clusters) > 1), planned)
        before, kept = self._clusters, {x.root: x for x in self._clusters if not x.is_broken}
        clusters: list[ClusterState] = []
        built: list[ClusterState] = []
        for index, cluster in enumerate(plan.clusters):
            name = cluster_name(index)
            state = kept.get(cluster.stages[0].node)
            if state is None or state.cluster != cluster:
                unready = {stage.node for stage in cluster.stages}
                state = ClusterState(name, plan.plan_id, cluster, unready, f"{name}{plan.plan_id}")
                built.append(state)
            state.name = name
            state.samples_per_second = self._outline.cluster_rates[index]
            state.sample_rooms = rooms[index]
            clusters.append(state)
        self._place(tuple(clusters))
        here = set(clusters)
        ended = tuple(each for each in before if each not in here)
        for name in (name for each in ended for name in each.nodes if name in self.membership):
            self._move_to_spare(name)
        for each in built:
            for name in each.nodes:
                self.membership.begin_build(name, each.build_id)
        has_new_rings = self._plan is None or self._plan.rings != plan.rings or not before
        self._rings_since = plan.plan_id if has_new_rings else self._rings_since
        self._plan, count = plan, len(clusters)
        self._contacts.follow(
            plan.rings, not self.is_exact and self._job.settings.mean.is_robust(count, count)
        )
        return PlanChange(tuple(built), ended, has_new_rings)

    def _record_untried(self, plan: Plan) -> None:
        """Remember newcomers that are spares while clusters are built; others had their chance."""
        if any(each.phase is ClusterPhase.BUILDING for each in self._clusters):
            known = [*self._untried, *(x for x in plan.spares if x not in self._planned)]
        else:
            known = [*self._untried][_MOST_TRIED:]
        spares = set(plan.spares)
        self._untried = dict.fromkeys(x for x in known if x in spares)

    def announce(
        self, change: PlanChange, extras: Extras, is_giver: Callable[[NodeId], bool] = lambda _: False
    ) -> Iterator[list[Send]]:
        """Tell every member its part of a new plan, unless it is the same as before; some at a time.

        A node that has no stage any more, but gives its state to others, is told only its contacts.
        """
        sends: list[Send] = []
        self._contacts.begin(extras)
        built = {cluster.cluster_id for cluster in change.built}
        for cluster in self._clusters:
            for stage in cluster.cluster.stages:
                if cluster.cluster_id in built:
                    sends.append(self._order_stage(cluster, stage))
                elif change.has_new_rings or stage.node in extras:
                    sends.append(self._order_rings(cluster, stage.node))
            if len(sends) >= SLICE:
                yield sends
                sends = []
        was_busy = {name for cluster in change.ended for name in cluster.nodes}
        for member in self.membership.members:
            name = member.node.name
            if self.cluster_of(name) is not None:
                continue
            if member.held is not None and (is_giver(name) or member.is_leaving):
                sends.append(Send(name, RingOrder(member.build_id, 0, (), self._contacts.find(name))))
            elif not member.build_id or name in was_busy or name in extras:
                sends += self._order_spare(name)
        self._contacts.end()
        yield sends

    def introduce(self, absent: Collection[NodeId]) -> list[Send]:
        """Tell neighbours in a round of each other, if they were too far apart in their ring to be told."""
        names = self._contacts.introduce(absent) if absent else ()
        return [self._order_rings(self._cluster_by_node[name], name) for name in names]

    def retire(self, is_needed: Callable[[NodeId], bool]) -> list[Send]:
        """Make spares of nodes without a stage whose state others have by now."""
        members = self.membership.in_phase(NodePhase.SPARE, NodePhase.MISSING)
        left = [m.node.name for m in members if m.held is not None and not m.is_leaving]
        done = [name for name in left if self.cluster_of(name) is None and not is_needed(name)]
        return [send for name in done for send in self._order_spare(name, has_extras=False)]

    def find_parts(
        self, start: int, stop: int, is_newest: bool = False, *, has_weights: bool = False
    ) -> PartsMade | list[MakeParts]:
        """Return the parts of an interval, or the action to make them unless that was asked already."""
        interval = (start, stop)
        made = self._parts.get(interval)
        is_old = is_newest and interval in self._stale
        if made is not None and not is_old and (made.weights is not None or not has_weights):
            return made
        is_new = interval not in self._asked
        self._asked.add(interval)
        return [MakeParts(start, stop, has_weights)] if is_new else []

    def retain_parts(self, others: Collection[tuple[int, int]]) -> None:
        """Forget the parts of all intervals but those of stages in the plan, and these others."""
        stages = {(stage.start, stage.stop) for each in self._clusters for stage in each.cluster.stages}
        self._parts = {x: made for x, made in self._parts.items() if x in stages or x in others}

    def needs_parts(self, interval: tuple[int, int]) -> bool:
        """Return whether the parts of an interval are those of a stage, as far as is known."""
        return interval in self._parts or interval in self._asked

    def add_parts(self, made: PartsMade) -> str | None:
        """Store the parts of an interval; return why not, if nobody asked."""
        interval = (made.start, made.stop)
        if interval not in self._asked:
            return f"nobody asked for the parts of positions {made.start} to {made.stop}"
        self._asked.remove(interval)
        self._stale -= {interval} & self._parts.keys()  # else it was asked for before the checkpoint
        self._parts[interval] = made
        return None

    def forget_parts(self) -> None:
        """Forget the parts: what was made of stages is lost with the hub's memory."""
        self._parts, self._asked, self._stale = {}, set(), set()

    def mark_parts_stale(self) -> None:
        """Record that the hub has newer weights than the parts that were made."""
        self._stale = {*self._parts, *self._asked}

    def _order_spare(self, name: NodeId, *, has_extras: bool = True) -> list[Send]:
        assert self._plan is not None
        self.membership.update(replace(self.membership[name], build_id=self._last_id, held=None))
        self._move_to_spare(name)
        contacts = self._contacts.find(name, has_extras=has_extras)
        order = PlanOrder(self._last_id, self._rings_since, self._plan.seed, None, (), (), contacts)
        return [Send(name, order)]

    def _move_to_spare(self, name: NodeId) -> None:
        """Move a node that lost its stage to the spares; one that leaves or is measured stays what it is."""
        has_stage = self.membership[name].present_phase in (NodePhase.BUILDING, NodePhase.HOSTING)
        if has_stage and self.cluster_of(name) is None:
            self.membership.move(name, NodePhase.SPARE)

    def _order_stage(self, cluster: ClusterState, stage: Stage) -> Send:
        assert self._plan is not None
        nodes = cluster.nodes
        rings, contacts = self._contacts.rings(stage.node), self._contacts.find(stage.node, nodes)
        facts = (cluster.build_id, self._rings_since, self._plan.seed, stage, nodes, rings, contacts)
        return Send(stage.node, PlanOrder(*facts, cluster.cluster.accumulate, self.is_exact))

    def _order_rings(self, cluster: ClusterState, name: NodeId) -> Send:
        rings, contacts = self._contacts.rings(name), self._contacts.find(name, cluster.nodes)
        return Send(name, RingOrder(cluster.build_id, self._rings_since, rings, contacts, self.is_exact))
