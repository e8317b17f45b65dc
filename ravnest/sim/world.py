"""A swarm on virtual time: the production coordinator and its monitors, and simulated peers around it.

Events enter the hub as in the program: messages after the latency of their sender, ticks when the coordinator
is due, plans after the time that planning takes. Its actions go out in the same way. A node that dies is
missed by the production monitor of outages. A hub that restarts has its log and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.engine.staleness import StalenessPolicy
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    Abandon,
    Action,
    Collect,
    Collected,
    Event,
    Evict,
    Finish,
    InspectSamples,
    JobGiven,
    MakeParts,
    MakePlan,
    PartsMade,
    PeerJoined,
    PeerLeft,
    PeerReturned,
    PlanMade,
    Probed,
    Received,
    Restarted,
    SamplesInspected,
    Send,
    SendFields,
    Tick,
)
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.planner import Planner
from ravnest.hub.monitors.liveness import OutageMonitor
from ravnest.hub.monitors.monitors import MonitoredCoordinator
from ravnest.ids import HUB, NodeId, RoundId
from ravnest.peer.pacing import make_policy
from ravnest.plan.line import LineCost
from ravnest.plan.types import Cluster, Node, Swarm
from ravnest.protocol.averaging import RoundOpen
from ravnest.protocol.membership import Fact, ProbeOrder
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import BlobRef, PlanOrder
from ravnest.protocol.training import LeaseGrant, StepReport
from ravnest.sim.churn import AnyChange, ChangeKind, LinkChange
from ravnest.sim.laws import Laws
from ravnest.sim.lines import Lines
from ravnest.sim.pipeline import ClusterBuild, ClusterPipeline
from ravnest.sim.recorder import MINUTE, Recorder
from ravnest.sim.sim_peer import PEER_SPEEDS, PeerSpeeds, SimPeer, made_up_hash
from ravnest.sim.sim_rounds import PlanFacts, SimRounds
from ravnest.sim.timeline import Timeline
from ravnest.sim.transfers import Transfers

_ALL_FACTS = (Fact.SPEED, Fact.BANDWIDTH, Fact.LATENCY)


@dataclass(frozen=True, slots=True)
class HubSpeeds:
    """What the hub's own work takes, in seconds."""

    plan_seconds_per_node: float = 2e-3  # a first plan
    repair_seconds: float = 0.2
    parts_seconds: float = 0.1
    link_lost_seconds: float = 1.6  # a node without power is silent; a program that is killed closes its link
    away_seconds: float = 5.0  # when it restarts


HUB_SPEEDS = HubSpeeds()


class HubCost:
    """What the hub's decisions took of a CPU; the clock is an argument, and nothing is decided by it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, 0.0
        self.seconds = self.planning_seconds = self.longest = 0.0
        self.longest_event = ""
        self.num_events = 0
        self.by_event: dict[str, tuple[int, float]] = {}

    def begin(self) -> None:
        """Begin to measure."""
        self._began = self._clock()

    def end(self, event: Event) -> None:
        """Add what an event took."""
        seconds = self._clock() - self._began
        of = event.message if isinstance(event, Received) else event
        name = type(of).__name__
        count, total = self.by_event.get(name, (0, 0.0))
        self.by_event[name] = (count + 1, total + seconds)
        self.seconds, self.num_events = self.seconds + seconds, self.num_events + 1
        if seconds > self.longest:
            self.longest, self.longest_event = seconds, name

    def pause(self) -> float:
        """Return when what is no work of a hub began, for `resume`."""
        return self._clock()

    def resume(self, since: float) -> None:
        """Leave out what was no work of a hub, such as the look of this simulation at it."""
        self._began += self._clock() - since

    def end_planning(self) -> None:
        """Add what a plan took, which a real hub makes beside its event loop."""
        self.planning_seconds += self._clock() - self._began


@dataclass(frozen=True, slots=True)
class WorldParts:
    """What a world is built of."""

    planner: Planner
    clock: Callable[[], float] = lambda: 0.0  # of the CPU
    timeouts: HubTimeouts = TIMEOUTS.hub
    peer_speeds: PeerSpeeds = PEER_SPEEDS
    hub_speeds: HubSpeeds = HUB_SPEEDS
    has_laws: bool = True
    is_measured: bool = True  # newcomers, before a plan uses them
    claims: Callable[[Node], Node] = lambda node: node  # what a node says of itself
    measures: Callable[[Node], Node] = lambda node: node  # what a probe finds
    keeps_log: bool = False  # so that the hub can restart


class World:
    """One hub and its swarm; `run` lets time pass."""

    def __init__(self, job: JobGiven, swarm: Swarm, parts: WorldParts, seed: int = 0) -> None:
        self.job, self._parts, self._random = job, parts, Random(seed)  # noqa: S311 - it hides nothing
        self.timeline, self.speeds = Timeline(), parts.peer_speeds
        self.lines = Lines(self.timeline, swarm, job.config)
        self.transfers = Transfers(self.timeline, self.lines, self._is_alive)
        self.peers: dict[NodeId, SimPeer] = {}
        self.rounds = SimRounds(self.timeline, self.lines, job.config, self.say)
        self.cost = HubCost(parts.clock)
        self.laws = Laws(job.profile.num_positions)
        self._line_of_state = LineCost(job.profile, job.config, is_averaged=True)
        self._pipelines: dict[NodeId, ClusterPipeline] = {}
        self._waiting: dict[NodeId, RoundOpen] = {}  # members of a gradient round, at work on their share
        self._facts: PlanFacts | None = None
        self._outages = OutageMonitor(parts.timeouts)
        self._due: float | None = None
        self._tick_at: float | None = None
        self._session, self._log = 0, list[Event]()
        self._books: LedgerState | None = None
        self.finish: Finish | Abandon | None = None
        self._begin()
        self.recorder = Recorder(self.hub)
        self.feed(job)
        self.timeline.at(MINUTE, self._end_span)

    def _begin(self) -> None:
        self.hub = Coordinator(self.job, self._parts.timeouts)
        log = self._log.append if self._parts.keeps_log else None
        self._monitored = MonitoredCoordinator(self.hub, log, self._watch)

    # What happens around the hub.

    def plan_change(self, change: AnyChange) -> None:
        """Let a node come or go, or its link change, at its time."""
        if isinstance(change, LinkChange):
            self.timeline.at(change.seconds, self.lines.change, change.node, change.times)
            return
        actions = {
            ChangeKind.JOIN: self.join,
            ChangeKind.LEAVE: self.leave,
            ChangeKind.KILL: self.kill,
        }
        self.timeline.at(change.seconds, actions[change.kind], change.node)

    def run(self, until: float) -> None:
        """Let time pass."""
        while self.timeline.advance(until):
            pass

    def join(self, name: NodeId) -> None:
        """Let a node join, unless it is here."""
        before = self.peers.get(name)
        if before is not None and before.is_alive:
            return
        peer = self.peers[name] = SimPeer(name, self)
        self.lines.restart(name)
        self.timeline.after(self.lines.latency(name, HUB), self._in_session(), self._welcome, peer)

    def _welcome(self, peer: SimPeer) -> None:
        if not peer.is_alive or self.peers[peer.name] is not peer:
            return
        node, guessed = self._parts.claims(self.lines.node(peer.name)), _ALL_FACTS
        self._outages.forget(peer.name)
        self.laws.forget(peer.name)
        facts = (f"key of {peer.name}", (f"tcp://{peer.name}.example:7700",), self.timeline.now)
        self.feed(PeerJoined(node, *facts, guessed if self._parts.is_measured else ()))

    def leave(self, name: NodeId) -> None:
        """Let a provider take its PC back politely."""
        peer = self.peers.get(name)
        if peer is not None and peer.is_alive and not peer.is_leaving:
            peer.leave()
            self.timeline.after(self._parts.timeouts.handover.total_seconds + 5.0, self._kill, peer)

    def kill(self, name: NodeId) -> None:
        """Cut the power of a node."""
        if name in self.peers:
            self._kill(self.peers[name])

    def _kill(self, peer: SimPeer) -> None:
        if peer.is_alive:
            self._end(peer)
            self.timeline.after(self._parts.hub_speeds.link_lost_seconds, self._lose_link, peer)

    def _end(self, peer: SimPeer) -> None:
        peer.end()
        self.transfers.forget(peer.name)
        self._waiting.pop(peer.name, None)

    def _lose_link(self, peer: SimPeer) -> None:
        if self.peers[peer.name] is peer and peer.name in self.hub.membership:
            self._outages.record_loss(peer.name, "nothing heard", self.timeline.now)
            self._look_at_outages()

    def _look_at_outages(self) -> None:
        if self._outages.due is not None:
            self.timeline.at(self._outages.due, self._find_gone)

    def _find_gone(self) -> None:
        here = {name for name in self.hub.membership if self._is_alive(name)}
        gone = self._outages.find_gone(here, self.hub.can_wait_for_all, self.timeline.now)
        for name, absence in gone:
            self.feed(PeerLeft(name, absence.reason, self.timeline.now, absence.since))
        if gone:
            self._look_at_outages()

    def restart_hub(self) -> None:
        """Kill the hub; after a while one comes back that has its log, and all who live find it."""
        assert self._parts.keeps_log, "a hub without a log cannot restart"
        self._session, self._due = self._session + 1, None
        for peer in self.peers.values():
            peer.lose_hub()
        self.timeline.after(self._parts.hub_speeds.away_seconds, self._come_back)

    def _come_back(self) -> None:
        self._begin()
        for event in self._log:
            self.hub.apply(event)
        self.recorder.hub = self.hub
        self.feed(Restarted(self._books, self.timeline.now))
        for peer in [peer for peer in self.peers.values() if peer.is_alive]:
            self.timeline.after(self._random.uniform(0.1, 10.0), self._in_session(), self._return, peer)

    def _return(self, peer: SimPeer) -> None:
        if not peer.is_alive or self.peers[peer.name] is not peer:
            return
        if self.hub.find_missing(f"key of {peer.name}", peer.build_id if peer.held else 0) == peer.name:
            for message in peer.find_hub():
                self._hear(peer, message)
            self.feed(PeerReturned(peer.name, (f"tcp://{peer.name}.example:7700",), self.timeline.now))
        else:
            self._end(peer)
            self.join(peer.name)

    def _in_session(self) -> Callable[..., None]:
        """Return what does something unless the hub has died meanwhile: its links died with it."""
        session = self._session

        def act(action: Callable[..., object], *facts: object) -> None:
            if session == self._session:
                action(*facts)

        return act

    # The hub's side.

    def feed(self, event: Event) -> None:
        """Let the hub decide, and carry out what it wants."""
        if self._parts.has_laws:
            self.laws.before(self.hub, event)
        self.cost.begin()
        actions = self._monitored.apply(event)
        is_quiet = not actions and isinstance(event, Received) and isinstance(event.message, StepReport)
        due = self._due if is_quiet else self._monitored.due
        self.cost.end(event)
        if self._parts.has_laws:
            self.laws.after(self.hub, event, actions)
        self._expect_round(actions)
        for action in actions:
            self._carry_out(action)
        self._set_timer(due)

    def _watch(self, event: Event, actions: tuple[Action, ...]) -> None:
        since = self.cost.pause()
        self.recorder.observe(event, actions, self.timeline.now)
        self.laws.count(self.hub, event, actions)
        self.cost.resume(since)
        if isinstance(event, PlanMade) and not (actions and isinstance(actions[0], Refusal)):
            self._learn_plan()

    def _learn_plan(self) -> None:
        """Know the costs of the plan in force."""
        placement = self.hub.placement
        if placement.clusters:
            profile, config = placement.costs
            line = LineCost(profile, config, is_averaged=len(placement.clusters) > 1)
            self.lines.link_share = line.link_share
            self._facts = PlanFacts.of(line, placement.outlook, placement.sharing.averaging)

    def _set_timer(self, due: float | None) -> None:
        self._due = due
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = max(due, self.timeline.now)
            self.timeline.at(self._tick_at, self._in_session(), self._tick, self._tick_at)

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return
        self._tick_at = None
        if self._due is not None and self._due <= self.timeline.now:
            self.feed(Tick(self.timeline.now))
        elif self._due is not None:
            self._set_timer(self._due)

    def _expect_round(self, actions: tuple[Action, ...]) -> None:
        asked = [x for x in actions if isinstance(x, Send) and isinstance(x.message, RoundOpen)]
        if asked and isinstance(asked[0].message, RoundOpen):
            self.rounds.expect(asked[0].message, {each.to for each in asked})

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                peer = self.peers[to]
                self.timeline.after(self.lines.latency(HUB, to), self._in_session(), peer.receive, message)
            case Evict(to):
                self.timeline.after(self.lines.latency(HUB, to), self._dismiss, self.peers[to])
            case MakePlan():
                self._make_plan(action)
            case MakeParts():
                seconds = self._parts.hub_speeds.parts_seconds
                self.timeline.after(seconds, self._in_session(), self._make_parts, action)
            case SendFields():
                self._send_samples(action)
            case InspectSamples(is_evaluation, samples):
                found = SamplesInspected(is_evaluation, samples, (), self.timeline.now)
                self.timeline.after(0.5, self._in_session(), self.feed, found)
            case Collect():
                self._collect(action)
            case Finish() | Abandon():
                self.finish = action

    def _dismiss(self, peer: SimPeer) -> None:
        if peer.is_alive:
            self._end(peer)

    def _make_plan(self, order: MakePlan) -> None:
        self.cost.begin()
        made = self._parts.planner.make_plan(self.job, order, 0.0)
        self.cost.end_planning()
        speeds = self._parts.hub_speeds
        seconds = speeds.plan_seconds_per_node * len(order.nodes)
        seconds = seconds if order.repairs is None else speeds.repair_seconds
        self.timeline.after(seconds, self._in_session(), self._give_plan, made)

    def _give_plan(self, made: PlanMade) -> None:
        self.feed(replace(made, now=self.timeline.now))

    def _make_parts(self, order: MakeParts) -> None:
        start, stop, num_positions = order.start, order.stop, self.job.profile.num_positions
        parameters = self._line_of_state.parameters
        weights = BlobRef(
            made_up_hash("first", start, stop, self.hub.ledger.num_starts, self._books is None),
            max(1, int(parameters[stop] - parameters[start])),
        )
        fields = ("inputs",) * (start == 0) + ("labels",) * (stop == num_positions)
        blueprint = BlobRef(made_up_hash("blueprint", start, stop), 1)
        now = self.timeline.now
        self.feed(PartsMade(start, stop, blueprint, weights, fields, fields, now))

    def _send_samples(self, order: SendFields) -> None:
        """Send the samples of a lease; the cluster begins when its root has them."""
        crossing, size = self.job.profile.crossing_bytes, self.job.profile.samples_per_batch
        num_samples = sum(map(len, order.samples))
        for name, fields in order.consumers:
            peer = self.peers[name]
            is_root = "inputs" in fields
            num_bytes = crossing[0] * is_root + crossing[-1] * ("labels" in fields)
            num_bytes *= num_samples / size
            then = peer.take_samples if is_root else _ignore
            self.lines.send(HUB, name, num_bytes, self._in_session(), then, order.lease)

    def _collect(self, order: Collect) -> None:
        """Fetch the snapshots of a checkpoint, or of the result."""
        left = {part.node for part in order.parts}

        def take(node: NodeId) -> None:
            left.discard(node)
            if not left:
                self._books = order.books
                self.feed(Collected(order.number, self.timeline.now))

        for part in order.parts:
            facts = (self._in_session(), take, part.node)
            self.lines.send(part.node, HUB, part.weights.size_bytes, *facts, is_bulk=True)

    def _end_span(self) -> None:
        lines = self.lines
        carried = (lines.hub_data.num_bytes, lines.hub_bulk.num_bytes, lines.hub_relay.num_bytes)
        self.recorder.end_span(carried)
        self.timeline.after(MINUTE, self._end_span)

    # The peers' side.

    def _is_alive(self, name: NodeId) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.is_alive

    def say(self, peer: SimPeer, message: Message) -> None:
        """Send a message of a peer to the hub; what it says of its work waits for one that is away."""
        if peer.has_link:
            self.timeline.after(
                self.lines.latency(peer.name, HUB), self._in_session(), self._hear, peer, message
            )
        else:
            peer.keep_unheard(message)

    def _hear(self, peer: SimPeer, message: Message) -> None:
        if self.peers[peer.name] is peer:  # another with its name has another key
            self.feed(Received(peer.name, message, self.timeline.now))

    def report_probe(self, peer: SimPeer, order: ProbeOrder) -> None:
        """Measure a peer as it is, or as the world has it measured."""
        self.timeline.after(self.speeds.probe_seconds, self._in_session(), self._probe, peer, order)

    def _probe(self, peer: SimPeer, order: ProbeOrder) -> None:
        if not peer.is_alive or self.peers[peer.name] is not peer:
            return
        node = self._parts.measures(self.lines.node(peer.name))
        speed = node.flops_per_second if order.blueprint is not None else None
        facts = (node.upload_bytes_per_second, node.download_bytes_per_second, node.latency_seconds)
        self.feed(Probed(peer.name, speed, *facts, self.timeline.now))

    def snapshot_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of a stage's weights and the state of its optimizer."""
        line, config = self._line_of_state, self.job.config
        trained = float(line.trained[stop] - line.trained[start])
        whole = float(line.parameters[stop] - line.parameters[start])
        first, square = config.states.ratios
        moments = first * config.optimizer.has_moment + square * config.optimizer.has_squares
        return max(1, int(whole + moments * trained))

    def end_pipeline(self, name: NodeId) -> None:
        """Stop the cluster that a node has a stage in."""
        pipeline = self._pipelines.pop(name, None)
        if pipeline is not None:
            pipeline.end()

    def train(self, peer: SimPeer, grant: LeaseGrant) -> None:
        """Let the cluster of a root train or evaluate a lease; a new build is a new pipeline."""
        pipeline = self._pipelines.get(peer.name)
        if pipeline is None or pipeline.build.build_id != grant.build_id:
            pipeline = self._start_pipeline(peer)
        if pipeline is None or pipeline.is_over:
            return
        if grant.is_evaluation:
            pipeline.evaluate(grant)
        else:
            pipeline.grant(grant)

    def _start_pipeline(self, root: SimPeer) -> ClusterPipeline | None:
        assert root.order is not None
        assert self._facts is not None
        nodes = root.order.pipeline
        orders = [self.peers[name].order for name in nodes]
        if not all(each is not None and each.build_id == root.build_id for each in orders):
            return None
        if not all(self._is_alive(name) for name in nodes):
            return None
        config, settings = self.job.config, self.job.settings
        placed = [each for each in orders if each is not None]
        policies = tuple(_make_policy(each, settings.num_batches, config.max_lag) for each in placed)
        stages = tuple(each.position.stage for each in placed)
        build = ClusterBuild(
            Cluster(stages, root.order.accumulate),
            root.build_id,
            root.version,
            root.order.seed,
            policies,
            root.order.is_exact,
        )
        pipeline = ClusterPipeline(self.timeline, self.lines, build, self._facts.line, self._tell)
        pipeline.watch_complete, pipeline.watch_dry = self._complete_share, root.begin_next
        for name in nodes:
            self.end_pipeline(name)
            self._pipelines[name] = pipeline
        return pipeline

    def _tell(self, name: NodeId, message: Message) -> None:
        self.say(self.peers[name], message)

    def enter_round(self, peer: SimPeer, opened: RoundOpen) -> None:
        """Let a peer take part in a round; a gradient round waits for its share of the batch."""
        assert self._facts is not None
        pipeline = self._pipelines.get(peer.name)
        if opened.sums_gradients and pipeline is not None:
            pipeline.expect(opened.num_microbatches)
            if not pipeline.is_complete(peer.name):
                self._waiting[peer.name] = opened
                return
        elif opened.is_blocking and pipeline is not None:
            pipeline.pause()
        self.rounds.enter(peer, opened, self._facts)

    def _complete_share(self, name: NodeId) -> None:
        opened = self._waiting.pop(name, None)
        if opened is not None and self._facts is not None:
            self.rounds.enter(self.peers[name], opened, self._facts)

    def end_round(self, peer: SimPeer, round_id: RoundId, is_committed: bool) -> None:
        """Let a peer go on: with an exact update, if the round made one."""
        self.rounds.end(round_id)
        self._waiting.pop(peer.name, None)
        pipeline = self._pipelines.get(peer.name)
        if pipeline is None:
            return
        pipeline.resume()
        if is_committed and pipeline.is_complete(peer.name):
            pipeline.make_update(peer.name)


def _make_policy(order: PlanOrder, num_updates: int, max_lag: int) -> StalenessPolicy:
    stage = order.position.stage
    return make_policy(num_updates // order.num_clusters, max_lag, stage, order.accumulate)


def _ignore(_: object) -> None:
    """Labels are at the leaf long before a microbatch is."""
