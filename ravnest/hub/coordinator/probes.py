"""Probes: new peers are measured before they are planned with, on a piece of the model and on their link.

Only facts that a provider has not stated are measured. A plan waits some seconds for them; then the guesses
of the peer count.
"""

from dataclasses import replace
from math import isfinite
from typing import Any

from ravnest.hub.coordinator.events import Action, MakeParts, Notify, PartsMade, Probed, Send
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured
from ravnest.plan.types import ModelProfile
from ravnest.protocol.membership import Fact, ProbeOrder

PROBE_SECONDS = 15.0
_SO = "so what it says of itself counts"
# No machine that joins is slower or faster; a number outside is a mistake of measuring.
_SPEEDS, _RATES, _LATENCIES = (1e6, 1e16), (1e3, 1e11), (0.0, 10.0)


def probe_due(members: Membership) -> float | None:
    """Return when the first probe is given up."""
    return min((each.probe_by for each in members.guessing if each.probe_by is not None), default=None)


def order_probes(members: Membership, profile: ModelProfile, now: float) -> list[MakeParts | Send | Notify]:
    """Measure every node with a guessed fact, once; the guess counts if no answer comes in time."""
    orders: list[MakeParts | Send | Notify] = []
    for member in members.guessing:
        if member.probe_by is None:
            orders += _order_probe(members, profile, member, now)
        elif now >= member.probe_by:
            members.replace(replace(member, guessed=(), probe_by=None))
            orders.append(
                Notify(Measured(member.node, f"was not measured within {PROBE_SECONDS:.0f} s, {_SO}"))
            )
    return orders


def _order_probe(
    members: Membership, profile: ModelProfile, member: Member, now: float
) -> list[MakeParts] | list[Send]:
    """Order a probe when the parts of the busiest position are made, if it needs them."""
    blueprint = None
    if Fact.SPEED in member.guessed:
        busiest = max(range(profile.num_positions), key=lambda position: profile.forward_flops[position])
        made = members.find_parts(busiest, busiest + 1)
        if not isinstance(made, PartsMade):
            return made
        blueprint = made.blueprint
    members.replace(replace(member, probe_by=now + PROBE_SECONDS))
    times_link = member.guessed != (Fact.SPEED,)
    return [Send(member.node.name, ProbeOrder(blueprint, times_link))]


def take_probe(members: Membership, probed: Probed) -> list[Action] | str:
    """Plan with measured facts, within bounds; return why not, if nobody asked or they make no sense."""
    member = members.find(probed.node)
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
    members.replace(replace(member, node=node, guessed=(), probe_by=None))
    fault = "" if len(values) == len(facts) else f"could not measure all, {_SO}"
    return [Notify(Measured(node, fault))]
