"""When nodes come and go and links change: made up, or read from a trace.

A trace is text: a line for each change, `seconds,node,change`, in any order, `#` begins a remark. A node that
is not there cannot leave, and one that is there cannot join; such lines are skipped. `seconds,node,link,0.25`
lets a link carry a quarter of what its node stands for, both ways, until the next such line.
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
_MEAN_STEADY = 600.0  # seconds, until a link that changes by itself changes again
_LEAST_TIMES, _MOST_TIMES = 1e-3, 1e3  # of what a link carries at first
_LINK = "link"


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


@dataclass(frozen=True, slots=True)
class LinkChange:
    """From now on a link carries so many times what it does at first, both ways."""

    seconds: float
    node: NodeId
    times: float


AnyChange = Change | LinkChange


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


def made_up_link_changes(swarm: Swarm, seed: int, hours: float, spread: float) -> tuple[LinkChange, ...]:
    """Return changes of all links, each about every ten minutes, by exp(spread x normal noise)."""
    changes: list[LinkChange] = []
    for number, node in enumerate(swarm.nodes if spread > 0 else ()):
        draw = Random(f"links {seed} {number}")  # noqa: S311 - it hides nothing
        now = draw.expovariate(1 / _MEAN_STEADY)
        while now <= 3600.0 * hours:
            times = min(max(math.exp(spread * draw.gauss(0.0, 1.0)), _LEAST_TIMES), _MOST_TIMES)
            changes.append(LinkChange(now, node.name, times))
            now += draw.expovariate(1 / _MEAN_STEADY)
    return tuple(sorted(changes, key=lambda change: (change.seconds, change.node)))


def read_trace(text: str, where: str, swarm: Swarm) -> tuple[AnyChange, ...]:
    """Return the changes of a trace; ConfigError names the line that is none."""
    known = {str(node.name): node.name for node in swarm.nodes}
    changes: list[AnyChange] = []
    for number, line in enumerate(text.splitlines(), start=1):
        plain = line.partition("#")[0].strip()
        if plain:
            changes.append(_read_line(plain, f"{where}, line {number}", known))
        if len(changes) > _MOST_CHANGES:
            raise ConfigError(f"{where} has more than {_MOST_CHANGES} changes; simulate a shorter time")
    return tuple(sorted(changes, key=lambda change: (change.seconds, change.node)))


def _read_line(line: str, where: str, known: dict[str, NodeId]) -> AnyChange:
    words = [word.strip() for word in line.split(",")]
    is_link = len(words) == 4 and words[2] == _LINK
    if len(words) != 3 and not is_link:
        raise ConfigError(
            f"{where}: {show_value(line)} is no change; write SECONDS,NODE,join|leave|kill"
            " or SECONDS,NODE,link,TIMES"
        )
    seconds = _read_number(words[0])
    if not 0.0 <= seconds <= 1e9:
        raise ConfigError(f"{where}: {show_value(words[0])} is no time; write seconds from 0 on")
    if words[1] not in known:
        raise ConfigError(f"{where}: no node is called {show_value(words[1])}; use the names of the nodes")
    if is_link:
        times = _read_number(words[3])
        if not _LEAST_TIMES <= times <= _MOST_TIMES:
            bounds = f"from {_LEAST_TIMES:g} to {_MOST_TIMES:g} times what it carries at first"
            raise ConfigError(f"{where}: {show_value(words[3])} is no change of a link; write {bounds}")
        return LinkChange(seconds, known[words[1]], times)
    if words[2] not in tuple(ChangeKind):
        raise ConfigError(f"{where}: {show_value(words[2])} is no change; write join, leave or kill")
    return Change(seconds, known[words[1]], ChangeKind(words[2]))


def _read_number(word: str) -> float:
    """Return the number that a word says; one that says none fails every bound."""
    try:
        return float(word)
    except ValueError:
        return math.nan
