"""Probes: peers are measured before a plan uses them, on a piece of the real model and on their link.

Only facts that a provider has not stated are measured. A plan waits for them, but not for long; then the
peer's own guess counts.
"""

from dataclasses import replace
from math import isfinite
from typing import Any

from ravnest.config import HubTimeouts
from ravnest.hub.coordinator.events import Action, MakeParts, Notify, PartsMade, Probed, Send
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured
from ravnest.hub.coordinator.placement import Placement
from ravnest.plan.types import ModelProfile
from ravnest.protocol.membership import Fact, ProbeOrder

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
