"""Lifecycles of nodes, clusters and the job: one enum each, and which phase may follow which.

A phase is the only truth about where a thing is in its life. Deadlines and reasons beside it are data.
The lifecycle of a round is in averaging.round, because members and the coordinator share it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class NodePhase(StrEnum):
    """Where a member of the swarm is in its life."""

    PROBING = "probing"  # it has joined, and is measured before a plan may use it
    SPARE = "spare"  # it has no stage; it may keep state or a backup for others
    BUILDING = "building"  # a plan gave it a stage, which it fetches and builds
    HOSTING = "hosting"  # its stage is built
    LEAVING = "leaving"  # it wants to go and stays until nobody needs what it has
    MISSING = "missing"  # the hub was away and waits for it to come back


class ClusterPhase(StrEnum):
    """Where a cluster is between two builds; a new build is a new cluster."""

    BUILDING = "building"  # some of its stages are not ready
    RUNNING = "running"  # it trains and takes new leases
    DRAINING = "draining"  # it trains what it has and takes nothing new, because it changes soon
    BROKEN = "broken"  # a stage is missing; it stands still until a new plan replaces it


class JobPhase(StrEnum):
    """How far the job is."""

    COLLECTING = "collecting"  # nodes join; there is no plan that holds
    TRAINING = "training"  # clusters train, average and are repaired
    AVERAGING = "averaging"  # all is trained; the last round runs
    EVALUATING = "evaluating"  # the last evaluation runs
    KEEPING = "keeping"  # the result is collected from one cluster
    FINISHED = "finished"  # nothing more happens


NODE_TRANSITIONS: Mapping[NodePhase, frozenset[NodePhase]] = {
    NodePhase.PROBING: frozenset({NodePhase.SPARE, NodePhase.MISSING}),
    NodePhase.SPARE: frozenset({NodePhase.BUILDING, NodePhase.LEAVING, NodePhase.MISSING}),
    NodePhase.BUILDING: frozenset({NodePhase.HOSTING, NodePhase.SPARE, NodePhase.LEAVING, NodePhase.MISSING}),
    NodePhase.HOSTING: frozenset({NodePhase.BUILDING, NodePhase.SPARE, NodePhase.LEAVING, NodePhase.MISSING}),
    NodePhase.LEAVING: frozenset({NodePhase.MISSING}),
    NodePhase.MISSING: frozenset(set(NodePhase) - {NodePhase.MISSING}),  # it is again what it was
}
CLUSTER_TRANSITIONS: Mapping[ClusterPhase, frozenset[ClusterPhase]] = {
    ClusterPhase.BUILDING: frozenset({ClusterPhase.RUNNING, ClusterPhase.DRAINING, ClusterPhase.BROKEN}),
    ClusterPhase.RUNNING: frozenset({ClusterPhase.DRAINING, ClusterPhase.BROKEN}),
    ClusterPhase.DRAINING: frozenset({ClusterPhase.RUNNING, ClusterPhase.BROKEN}),
    ClusterPhase.BROKEN: frozenset(),
}
_BEGIN_AGAIN = frozenset({JobPhase.COLLECTING, JobPhase.TRAINING, JobPhase.FINISHED})
JOB_TRANSITIONS: Mapping[JobPhase, frozenset[JobPhase]] = {
    JobPhase.COLLECTING: frozenset({JobPhase.TRAINING, JobPhase.FINISHED}),
    JobPhase.TRAINING: frozenset({JobPhase.AVERAGING}) | _BEGIN_AGAIN,
    JobPhase.AVERAGING: frozenset({JobPhase.EVALUATING}) | _BEGIN_AGAIN,
    JobPhase.EVALUATING: frozenset({JobPhase.KEEPING}) | _BEGIN_AGAIN,
    JobPhase.KEEPING: _BEGIN_AGAIN,
    JobPhase.FINISHED: frozenset(),
}

_P = TypeVar("_P", NodePhase, ClusterPhase, JobPhase)


def follow(transitions: Mapping[_P, frozenset[_P]], before: _P, after: _P) -> _P:
    """Return the phase that follows; one that may not is a mistake of ours."""
    assert after is before or after in transitions[before], f"{before} is never followed by {after}"
    return after
