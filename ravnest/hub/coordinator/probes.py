"""Probes: peers are measured before a plan uses them, on a piece of the real model and on their link.

Only facts that a provider has not stated are measured. A plan waits for them, but not for long; then the
peer's own guess counts. The links of a cluster that has become slow are measured again while it trains.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from ravnest.config import HubTimeouts
from ravnest.hub.coordinator.events import Action, ClusterSlowed, MakeParts, Notify, PartsMade, Probed, Send
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured
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
