"""When a plan or a repair is asked for, and whether the answer fits the members that are here by then.

Members that are not measured yet are waited for. They run a piece of the real model and time their link, for
facts that their provider has not stated. A plan waits for that, but not for long; then the peer's own guess
counts. The links of a cluster that has become slow are measured again while it trains.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from ravnest.config import TIMEOUTS, HubTimeouts
from ravnest.hub.coordinator.events import (
    Action,
    ClusterSlowed,
    JobGiven,
    MakeParts,
    MakePlan,
    Notify,
    PartsMade,
    PlanMade,
    Probed,
    Send,
)
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured, Waiting
from ravnest.hub.coordinator.placement import Placement
from ravnest.ids import NodeId
from ravnest.plan.types import ModelProfile, Node
from ravnest.protocol.membership import Fact, ProbeOrder

_TIMES_AS_SLOW = 3.0  # a link must be, to be believed: training takes its part of it
_SO = "so what it says of itself counts"
# No machine is slower or faster; a report that says so has measured something else.
_SPEEDS, _RATES, _LATENCIES = (1e6, 1e16), (1e3, 1e11), (0.0, 10.0)


def probe_due(membership: Membership) -> float | None:
    """Return when the first probe is given up."""
    return min((each.probe_by for each in membership.unmeasured if each.probe_by is not None), default=None)


def order_probes(
    placement: Placement, profile: ModelProfile, now: float, timeouts: HubTimeouts
) -> list[MakeParts | Send | Notify]:
    """Have every unmeasured member measured, once; believe one that does not answer in time."""
    orders: list[MakeParts | Send | Notify] = []
    for member in placement.membership.unmeasured:
        if member.probe_by is None:
            orders += _order_probe(placement, profile, member, now + timeouts.probe_seconds)
        elif now >= member.probe_by:
            placement.membership.end_probe(member.node.name, member.node)
            told = f"was not measured within {timeouts.probe_seconds:.0f} s, {_SO}"
            orders.append(Notify(Measured(member.node, told)))
    return orders


def _order_probe(
    placement: Placement, profile: ModelProfile, member: Member, probe_by: float
) -> list[MakeParts] | list[Send]:
    """Order a probe as soon as the parts of the busiest position are there, if these are needed."""
    blueprint = None
    if Fact.SPEED in member.guessed:
        busiest = max(range(profile.num_positions), key=lambda position: profile.forward_flops[position])
        made = placement.find_parts(busiest, busiest + 1)
        if not isinstance(made, PartsMade):
            return made
        blueprint = made.blueprint
    placement.membership.update(replace(member, probe_by=probe_by))
    times_link = member.guessed != (Fact.SPEED,)
    return [Send(member.node.name, ProbeOrder(blueprint, times_link))]


def end_probe(membership: Membership, probed: Probed) -> list[Action] | str:
    """Believe what was measured, within reason; return why not, if nobody asked or it is nonsense."""
    member = membership.find(probed.node)
    if member is None or member.probe_by is None:
        return f"nobody asked how fast {probed.node} is, or it came too late"
    found = {
        Fact.SPEED: {"flops_per_second": (probed.flops_per_second, _SPEEDS)},
        Fact.BANDWIDTH: {
            "upload_bytes_per_second": (probed.upload_bytes_per_second, _RATES),
            "download_bytes_per_second": (probed.download_bytes_per_second, _RATES),
        },
        Fact.LATENCY: {"latency_seconds": (probed.latency_seconds, _LATENCIES)},
    }
    facts = {name: fact for each in member.guessed for name, fact in found[each].items()}
    values: dict[str, Any] = {name: value for name, (value, _) in facts.items() if value is not None}
    if not all(isfinite(x) and (x > 0 or facts[name][1][0] == 0 == x) for name, x in values.items()):
        return f"no machine is like what was measured of {probed.node}: {values}"
    bounded = {name: min(max(value, facts[name][1][0]), facts[name][1][1]) for name, value in values.items()}
    node = replace(member.node, **bounded)
    membership.end_probe(probed.node, node)
    fault = "" if len(values) == len(facts) else f"could not measure all, {_SO}"
    return [Notify(Measured(node, fault))]


class LinkChecks:
    """Has the links of slow clusters measured; a check is over when all nodes of its cluster have answered.

    `replan` is told when the facts of a node have changed.
    """

    def __init__(self, placement: Placement, replan: Callable[[float], None]) -> None:
        self._placement, self._membership, self._replan = placement, placement.membership, replan
        self._awaited: dict[NodeId, str] = {}  # the cluster_id, by node
        self._found: dict[str, list[Node]] = {}  # by cluster_id: nodes as their links are now

    def order(self, slowed: ClusterSlowed) -> list[Action] | str:
        """Have all links of a cluster measured; a check of it that is under way begins anew."""
        cluster = self._placement.find_cluster(slowed.cluster_id)
        if cluster is None or not cluster.is_running or len(cluster.nodes) < 2:
            return f"no microbatch crosses a link of the slow cluster {slowed.cluster_id}"
        self._awaited |= dict.fromkeys(cluster.nodes, cluster.cluster_id)
        self._found[cluster.cluster_id] = []
        return [Send(name, ProbeOrder(None, times_link=True)) for name in cluster.nodes]

    def end_probe(self, probed: Probed, now: float) -> list[Action] | str:
        """Plan with what was measured of a newcomer, or of the links of a cluster that is slow."""
        if probed.node not in self._awaited:
            return end_probe(self._membership, probed)
        changed = self._record(probed)
        for node in changed:
            self._membership.update(replace(self._membership[node.name], node=node))
            self._replan(now)
        return [Notify(Measured(node, "has a slower link than before")) for node in changed]

    def _record(self, probed: Probed) -> list[Node]:
        """Take an answer; with the last one, return the nodes whose links are slower than the plan knows.

        If all of them are, it is rather the line of the hub, which measures.
        """
        cluster_id = self._awaited.pop(probed.node)
        member, found = self._membership.find(probed.node), self._found[cluster_id]
        if member is not None:
            found.append(_with_links(member.node, probed))
        if cluster_id in self._awaited.values():
            return []
        del self._found[cluster_id]
        here = [node for node in found if node.name in self._membership]
        slow = [node for node in here if node != self._membership[node.name].node]
        return slow if len(slow) < len(found) else []


def _with_links(node: Node, probed: Probed) -> Node:
    """Return a node with the rates of its link that are much slower than they were."""
    changes = {}
    for fact in ("upload_bytes_per_second", "download_bytes_per_second"):
        rate = getattr(probed, fact)
        if rate is not None and _RATES[0] <= rate < getattr(node, fact) / _TIMES_AS_SLOW:
            changes[fact] = rate
    return replace(node, **changes)


NOBODY = "nobody is here; training goes on when enough nodes have joined: `ravnest token` says how"
_Asked = list[MakePlan | MakeParts | Send | Notify]


class PlanTrigger:
    """Asks once for each set of members: when all expected ones are here, or when it is quiet."""

    def __init__(self, job: JobGiven, placement: Placement, timeouts: HubTimeouts = TIMEOUTS.hub) -> None:
        self._job, self._timeouts = job, timeouts
        self._placement, self._membership = placement, placement.membership
        self._changed_at = 0.0  # when a member last came, went or changed
        self._was_asked = False  # for a plan of these members
        self._plan_id = 0  # of the plan that is being made
        self.shortage = ""  # as people were told
        self._had_plan = False

    def reset(self, now: float) -> None:
        """A member came, went or changed: another plan is needed."""
        self._changed_at, self._was_asked = now, False

    @property
    def plan_due(self) -> float | None:
        """When to look again for a plan, if nothing else happens."""
        if self._membership.unmeasured:
            return probe_due(self._membership)
        if not len(self._membership) or self._was_asked or self._membership.missing:
            return None
        longest = self._timeouts.replan_seconds if self._had_plan else math.inf
        return self._changed_at + min(self._job.settings.settle_seconds, longest)

    def ask_for_plan(self, now: float) -> _Asked:
        """Have newcomers measured, and a plan formed if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        due, expected = self.plan_due, self._job.settings.expected_nodes
        is_enough = not self._had_plan and len(self._membership) >= expected > 0
        if self._membership.unmeasured or due is None or not (now >= due or is_enough):
            return actions
        return [*actions, self._ask()]

    def repair_due(self, is_urgent: bool) -> float | None:
        """Return when to ask for a repair, if nothing else happens."""
        if self._membership.unmeasured and not is_urgent:
            return probe_due(self._membership)
        quiet_seconds = 0.0 if is_urgent else self._timeouts.join_seconds
        return None if self._was_asked else self._changed_at + quiet_seconds

    def ask_for_repair(self, now: float, is_urgent: bool) -> _Asked:
        """Have newcomers measured, and the plan repaired if it is time for that."""
        actions: _Asked = [*order_probes(self._placement, self._job.profile, now, self._timeouts)]
        must_wait = bool(self._membership.unmeasured) and not is_urgent
        due = None if must_wait else self.repair_due(is_urgent)
        return actions if due is None or now < due else [*actions, self._ask()]

    def _ask(self) -> MakePlan:
        asked = self._placement.ask_for_plan()
        self._was_asked, self._plan_id = True, asked.plan_id
        return asked

    def accept(self, made: PlanMade) -> bool:
        """Return whether a plan, or a shortage, is of the members that are here."""
        self._had_plan |= self.fits(made) and made.plan is not None
        return self.fits(made)

    def fits(self, made: PlanMade) -> bool:
        """Return whether no member came, went or changed since a plan was asked for."""
        return self._was_asked and made.plan_id == self._plan_id

    def notify_shortage(self, shortage: str = NOBODY) -> list[Notify]:
        """Say once why there is no plan."""
        told, self.shortage = self.shortage, shortage
        return [Notify(Waiting(shortage))] if shortage not in ("", told) else []
