"""Measures peers before they are planned with: on a piece of the real model, and on their link to the hub.

Only what a provider has not stated is measured. A plan waits for it, but not for long: then what the peer
guesses counts. Driven by hub.forming, and by hub.server, which times the links.
"""

from dataclasses import replace
from math import isfinite
from typing import Any

from ravnest.config import HubTimeouts
from ravnest.hub.coordinator.events import Action, MakeParts, Notify, PartsMade, Probed, Send
from ravnest.hub.coordinator.membership import Member, Membership
from ravnest.hub.coordinator.notices import Measured
from ravnest.plan.types import ModelProfile
from ravnest.protocol.membership import Fact, ProbeOrder

_SO = "so what it says of itself counts"
# Nothing that joins is slower or faster; who says so has measured something else.
_SPEEDS, _RATES, _LATENCIES = (1e6, 1e16), (1e3, 1e11), (0.0, 10.0)


def probe_due(members: Membership) -> float | None:
    """Return when the first probe is given up."""
    return min((each.probe_by for each in members.guessing if each.probe_by is not None), default=None)


def order_probes(
    members: Membership, profile: ModelProfile, now: float, timeouts: HubTimeouts
) -> list[MakeParts | Send | Notify]:
    """Have everyone measured of whom something is guessed, once; believe who does not answer in time."""
    orders: list[MakeParts | Send | Notify] = []
    for member in members.guessing:
        if member.probe_by is None:
            orders += _order_probe(members, profile, member, now + timeouts.probe_seconds)
        elif now >= member.probe_by:
            members.replace(replace(member, guessed=(), probe_by=None))
            orders.append(
                Notify(
                    Measured(member.node, f"was not measured within {timeouts.probe_seconds:.0f} s, {_SO}")
                )
            )
    return orders


def _order_probe(
    members: Membership, profile: ModelProfile, member: Member, probe_by: float
) -> list[MakeParts] | list[Send]:
    """Order a probe as soon as the parts of the busiest position are there, if these are needed."""
    blueprint = None
    if Fact.SPEED in member.guessed:
        busiest = max(range(profile.num_positions), key=lambda position: profile.forward_flops[position])
        made = members.find_parts(busiest, busiest + 1)
        if not isinstance(made, PartsMade):
            return made
        blueprint = made.blueprint
    members.replace(replace(member, probe_by=probe_by))
    times_link = member.guessed != (Fact.SPEED,)
    return [Send(member.node.name, ProbeOrder(blueprint, times_link))]


def take_probe(members: Membership, probed: Probed) -> list[Action] | str:
    """Believe what was measured, within reason; return why not, if nobody asked or it is nonsense."""
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
