"""What one more PC would bring: the hub's own planner is asked what it would do if that PC joined. Pure."""

from dataclasses import dataclass

from ravnest.hub.coordinator.events import JobGiven, MakePlan
from ravnest.hub.coordinator.membership import is_sensible
from ravnest.hub.coordinator.planner import Planner
from ravnest.hub.service.web.recorder import RunRecorder
from ravnest.ids import NodeId
from ravnest.plan.forecast import forecast
from ravnest.plan.types import Node, Plan, Swarm, cluster_name

GUEST = NodeId("one more PC")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A question for the planner, with all facts it needs; nothing in it changes any more."""

    job: JobGiven
    asked: MakePlan
    now_samples_per_second: float  # that are foreseen without the PC


@dataclass(frozen=True, slots=True)
class WhatIfDocument:
    """What would be planned if a PC joined; None: nobody would train."""

    now_samples_per_second: float
    then_samples_per_second: float | None
    num_clusters: int
    place: str  # of the PC
    reason: str  # what the planner says of it


def pose_what_if(recorder: RunRecorder, guest: Node) -> WhatIf | None:
    """Return the question, from the facts of this moment; None before there is a job."""
    if recorder.tracker is None or recorder.job is None:
        return None
    placement = recorder.tracker.hub.placement
    now = placement.outline.samples_per_second if placement.clusters else 0.0
    return WhatIf(recorder.job, placement.imagine(guest), now)


def answer_what_if(question: WhatIf, planner: Planner) -> WhatIfDocument:
    """Return what the planner would do; a search takes a moment."""
    job, asked, now = question.job, question.asked, question.now_samples_per_second
    made = planner.make_plan(job, asked, 0.0)
    if made.plan is None:
        return WhatIfDocument(now, None, 0, "nobody trains", made.shortage)
    profile = job.profile_microbatch(made.microbatches, made.sharing)
    config = job.configure_microbatch(made.microbatches, made.sharing)
    then = forecast(made.plan, profile, Swarm(asked.nodes), config)
    facts = (len(made.plan.clusters), _find_place(made.plan), made.reason)
    return WhatIfDocument(now, then.samples_per_second, *facts)


def _find_place(plan: Plan) -> str:
    for index, cluster in enumerate(plan.clusters):
        for number, stage in enumerate(cluster.stages):
            if stage.node == GUEST:
                return f"stage {number + 1} of {len(cluster.stages)} in cluster {cluster_name(index)}"
    helped = [backup.node for backup in plan.backups if backup.spare == GUEST]
    return f"a spare that keeps a backup of {', '.join(helped)}" if helped else "a spare"


def make_guest(memory_bytes: float, flops_per_second: float, bytes_per_second: float) -> Node | None:
    """Return a PC of these facts, if there are such PCs."""
    guest = Node(GUEST, memory_bytes, flops_per_second, bytes_per_second, bytes_per_second)
    return guest if is_sensible(guest) else None
