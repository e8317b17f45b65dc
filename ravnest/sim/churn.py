"""When nodes come and go: made up from their uptimes, or read from a trace.

A trace is text: a line for each change, `seconds,node,change`, in any order, `#` begins a remark. A node that
is not there cannot leave, and one that is there cannot join; such lines are skipped.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.plan.types import Swarm
from ravnest.units import show_value

_MEAN_AWAY = 1800.0  # seconds, until a node that went comes back
_POLITE_SHARE = 0.5  # of those that go: they say goodbye and hand over
_MOST_CHANGES = 1_000_000


class ChangeKind(StrEnum):
    """What a node does."""

    JOIN = "join"
    LEAVE = "leave"  # it says so, and hands over what it has
    KILL = "kill"  # power is cut


@dataclass(frozen=True, slots=True)
class Change:
    """A node comes or goes."""

    seconds: float
    node: NodeId
    kind: ChangeKind


def made_up_changes(
    swarm: Swarm, seed: int, hours: float, times: float, join_seconds: float = 30.0
) -> tuple[Change, ...]:
    """Return joins in the first seconds, departures so many times as often as uptimes say, and returns."""
    changes: list[Change] = []
    for number, node in enumerate(swarm.nodes):
        draw = Random(f"{seed} {number}")  # noqa: S311 - it hides nothing
        now = draw.uniform(0.0, join_seconds)
        changes.append(Change(now, node.name, ChangeKind.JOIN))
        while times > 0:
            now += draw.expovariate(times / node.uptime_seconds)
            if now > 3600.0 * hours:
                break
            kind = ChangeKind.LEAVE if draw.random() < _POLITE_SHARE else ChangeKind.KILL
            changes.append(Change(now, node.name, kind))
            now += 30.0 + draw.expovariate(1 / _MEAN_AWAY)
            changes.append(Change(now, node.name, ChangeKind.JOIN))
    return tuple(sorted(changes, key=lambda change: (change.seconds, change.node)))


def read_trace(text: str, where: str, swarm: Swarm) -> tuple[Change, ...]:
    """Return the changes of a trace; ConfigError names the line that is none."""
    known = {str(node.name): node.name for node in swarm.nodes}
    changes: list[Change] = []
    for number, line in enumerate(text.splitlines(), start=1):
        plain = line.partition("#")[0].strip()
        if plain:
            changes.append(_read_line(plain, f"{where}, line {number}", known))
        if len(changes) > _MOST_CHANGES:
            raise ConfigError(f"{where} has more than {_MOST_CHANGES} changes; simulate a shorter time")
    return tuple(sorted(changes, key=lambda change: (change.seconds, change.node)))


def _read_line(line: str, where: str, known: dict[str, NodeId]) -> Change:
    words = [word.strip() for word in line.split(",")]
    if len(words) != 3:
        raise ConfigError(f"{where}: {show_value(line)} is no change; write SECONDS,NODE,join|leave|kill")
    try:
        seconds = float(words[0])
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= 1e9:
        raise ConfigError(f"{where}: {show_value(words[0])} is no time; write seconds from 0 on")
    if words[1] not in known:
        raise ConfigError(f"{where}: no node is called {show_value(words[1])}; use the names of the nodes")
    if words[2] not in tuple(ChangeKind):
        raise ConfigError(f"{where}: {show_value(words[2])} is no change; write join, leave or kill")
    return Change(seconds, known[words[1]], ChangeKind(words[2]))
