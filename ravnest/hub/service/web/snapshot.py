"""A RunRecorder and the tracker beside it become one RunDocument. Pure, and the only place that does it.

The recorder stays with the hub, which cuts off what is new; a replica of the run is in the web's thread.
"""

from dataclasses import dataclass, replace

from ravnest.hub.coordinator.phases import JobPhase, NodePhase
from ravnest.hub.coordinator.placement import ClusterState
from ravnest.hub.service.status import NO_JOB, MemberStatus, Status, StatusTracker
from ravnest.hub.service.web.documents import (
    API_SCHEMA,
    ClusterDocument,
    LinkDocument,
    NodeDocument,
    PlanDocument,
    RingDocument,
    RoundsDocument,
    RunDocument,
    StageDocument,
    TrainingDocument,
    UpdateDocument,
)
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.ids import NodeId
from ravnest.plan.forecast import Forecast, StageForecast
from ravnest.plan.types import ModelProfile, Node, Stage
from ravnest.web.updates import GrowthCutter, PageReplica

_LEAST_GAIN = 0.005  # less is nobody's bottleneck


@dataclass(frozen=True, slots=True)
class HubFacts:
    """What a recorder cannot know of the hub beside it."""

    is_live: bool = False
    can_stop: bool = False
    can_invite: bool = False
    wall_offset: float | None = None


def make_document(recorder: RunRecorder, facts: HubFacts) -> RunDocument:
    """Return where the run stands."""
    tracker = recorder.tracker
    status = NO_JOB if tracker is None else tracker.status(recorder.now)
    is_under_way = facts.is_live and status.phase is not JobPhase.FINISHED
    shortage = "" if tracker is None else tracker.hub.shortage
    collects = status.phase is JobPhase.COLLECTING
    return RunDocument(
        schema=API_SCHEMA,
        number=recorder.number,
        job=status.job,
        phase=status.phase,
        waits_for=(shortage or recorder.preparing) if collects else "",
        is_live=facts.is_live,
        can_stop=facts.can_stop and is_under_way and not recorder.is_stopping,
        can_invite=facts.can_invite and is_under_way,
        is_stopping=recorder.is_stopping and status.phase is not JobPhase.FINISHED,
        now=recorder.now,
        started_at=recorder.started_at,
        wall_offset=facts.wall_offset,
        clusters=() if tracker is None else _clusters(recorder, tracker, status),
        nodes=() if tracker is None else _nodes(recorder, tracker, status),
        departures=tuple(recorder.departures),
        plan=None if tracker is None else _plan(tracker),
        training=_training(recorder, status),
        rounds=RoundsDocument(recorder.num_rounds[True], recorder.num_rounds[False], tuple(recorder.rounds)),
        texts=tuple(recorder.texts),
        is_paused=status.is_paused,
    )


class UpdateCutter:
    """Cuts off what a recorder has that was not cut off before."""

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self._growth = GrowthCutter()

    def cut(self, facts: HubFacts) -> UpdateDocument:
        """Return where the run stands, and what is new."""
        run = make_document(self.recorder, facts)
        return self._growth.cut(run, self.recorder.news, self.recorder.curves)


class RunReplica(PageReplica[RunDocument]):
    """Put all updates of a run into it, in order."""

    def end(self) -> None:
        """Record that the hub is no longer at work."""
        if self.run is not None:
            self.run = replace(self.run, is_live=False, can_stop=False, can_invite=False)


def _training(recorder: RunRecorder, status: Status) -> TrainingDocument:
    settings = None if recorder.job is None else recorder.job.settings
    left, rate = status.num_total - status.num_samples, status.samples_per_second
    is_going_on = (
        status.phase is JobPhase.TRAINING and rate > 0.0 and not (recorder.is_stopping or status.is_paused)
    )
    return TrainingDocument(
        num_samples=status.num_samples,
        num_total=status.num_total,
        epoch=status.epoch,
        num_epochs=0 if settings is None else settings.epochs,
        num_updates=status.num_updates,
        batch_size=0 if settings is None else settings.batch_size,
        samples_per_second=rate if status.phase is JobPhase.TRAINING else 0.0,
        eta_seconds=left / rate if is_going_on else None,
        loss=status.loss,
        learning_rate=recorder.learning_rate,
        validation_epoch=status.validation_epoch,
        validation=status.validation,
        efficiency=status.efficiency,
        noise_scale=status.noise_scale,
        samples_redone=recorder.samples_redone,
        microbatches_dropped=recorder.microbatches_dropped,
    )


def _plan(tracker: StatusTracker) -> PlanDocument | None:
    placement = tracker.hub.placement
    if not placement.clusters:
        return None
    outlook = placement.outlook
    rings = tuple(RingDocument(ring.start, ring.stop, ring.owners) for ring in placement.rings)
    speed = (outlook.samples_per_second, outlook.round_seconds, outlook.staleness)
    return PlanDocument(*speed, _show_bottleneck(outlook), rings)


def _show_bottleneck(outlook: Forecast) -> str:
    found = outlook.bottleneck
    if found is None:
        return ""
    if found.is_least:
        return "the programs themselves set the pace of a model this small; no faster node would help"
    gain = found.gain_samples_per_second / outlook.samples_per_second if outlook.samples_per_second else 0.0
    if gain < _LEAST_GAIN:
        return f"{found.node} is limited by {found.limited_by}; other nodes are almost as limited"
    return f"{found.node} is limited by {found.limited_by}; twice as much of it would bring {gain:+.0%}"


def _clusters(recorder: RunRecorder, tracker: StatusTracker, status: Status) -> tuple[ClusterDocument, ...]:
    outlook = {
        stage.stage: stage
        for cluster in (tracker.hub.placement.outlook.clusters if tracker.hub.clusters else ())
        for stage in cluster.stages
    }
    members = {member.name: member for member in status.members}
    found = []
    for cluster in tracker.hub.clusters:
        rate = recorder.cluster_rates.get(cluster.cluster_id, 0.0) if cluster.is_running else 0.0
        stages = _stages(recorder, cluster, outlook, members, rate)
        found.append(ClusterDocument(cluster.name, cluster.phase, rate, cluster.samples_per_second, stages))
    return tuple(found)


def _stages(
    recorder: RunRecorder,
    cluster: ClusterState,
    outlook: dict[Stage, StageForecast],
    members: dict[NodeId, MemberStatus],
    rate: float,
) -> tuple[StageDocument, ...]:
    assert recorder.job is not None, "clusters follow from a job"
    profile, membership = recorder.job.profile, members
    total, work = sum(profile.parameter_bytes), sum(profile.forward_flops)
    stages = cluster.cluster.stages
    found = []
    for stage, after in zip(stages, (*stages[1:], None), strict=True):
        member, expected, pulse = (
            membership.get(stage.node),
            outlook.get(stage),
            recorder.pulses.get(stage.node),
        )
        span = slice(stage.start, stage.stop)
        is_of_build = pulse is not None and pulse.build_id == cluster.build_id
        found.append(
            StageDocument(
                node=stage.node,
                phase=None if member is None else member.phase,
                start=stage.start,
                stop=stage.stop,
                share=sum(profile.parameter_bytes[span]) / total if total else 0.0,
                work_share=sum(profile.forward_flops[span]) / work if work else 0.0,
                is_missing=stage.node in recorder.missing,
                fetching="" if member is None else member.fetching,
                busy=pulse.busy if pulse is not None and is_of_build else None,
                lag=pulse.lag if pulse is not None and is_of_build else None,
                lag_bound=recorder.job.config.max_lag,
                window=stage.window,
                planned_bytes=0.0 if expected is None else expected.memory_bytes,
                available_bytes=0.0 if expected is None else expected.available_bytes,
                limited_by="" if expected is None else expected.limited_by,
                link=None if after is None else _link(recorder, profile, (stage, after), rate),
                foreseen_busy=None if expected is None else expected.busy_share,
            )
        )
    return tuple(found)


def _link(
    recorder: RunRecorder, profile: ModelProfile, pair: tuple[Stage, Stage], rate: float
) -> LinkDocument:
    one, other = pair
    crossing = profile.crossing_bytes[one.stop] / max(1, profile.samples_per_batch)
    there, back = crossing * one.activations.ratio, crossing * other.gradients.ratio
    possible = 0.0
    if recorder.tracker is not None:
        ends = [recorder.tracker.hub.membership.find(stage.node) for stage in pair]
        if ends[0] is not None and ends[1] is not None:
            possible = min(_narrowest(ends[0].node, ends[1].node), _narrowest(ends[1].node, ends[0].node))
    formats = (str(one.activations), str(other.gradients))
    return LinkDocument(other.node, *formats, there + back, max(there, back) * rate, possible)


def _narrowest(sender: Node, receiver: Node) -> float:
    return min(sender.upload_bytes_per_second, receiver.download_bytes_per_second)


def _nodes(recorder: RunRecorder, tracker: StatusTracker, status: Status) -> tuple[NodeDocument, ...]:
    hub = tracker.hub
    planned = {
        stage.stage.node: stage.memory_bytes
        for cluster in (hub.placement.outlook.clusters if hub.clusters else ())
        for stage in cluster.stages
    }
    backups: dict[NodeId, list[NodeId]] = {}
    for backup in hub.placement.backups:
        backups.setdefault(backup.spare, []).append(backup.node)
    found = []
    for each in status.members:
        member, pulse = hub.membership.find(each.name), recorder.pulses.get(each.name)
        if member is None:
            continue
        node, is_hosting = member.node, each.cluster is not None
        found.append(
            NodeDocument(
                name=each.name,
                phase=each.phase,
                is_missing=each.name in recorder.missing or each.phase is NodePhase.MISSING,
                cluster=each.cluster,
                stage=each.stage,
                backs_up=tuple(backups.get(each.name, ())),
                memory_bytes=node.memory_bytes,
                planned_bytes=planned.get(each.name) if is_hosting else None,
                flops_per_second=node.flops_per_second,
                upload_bytes_per_second=node.upload_bytes_per_second,
                download_bytes_per_second=node.download_bytes_per_second,
                latency_seconds=node.latency_seconds,
                region=node.region,
                is_reachable=node.is_reachable,
                busy=pulse.busy if pulse is not None and is_hosting else None,
                lag=pulse.lag if pulse is not None and is_hosting else None,
                forward_seconds=None if pulse is None else pulse.forward_seconds,
                backward_seconds=None if pulse is None else pulse.backward_seconds,
                link_seconds=None if pulse is None else pulse.link_seconds,
                joined_at=recorder.joined_at.get(each.name),
            )
        )
    return tuple(found)
