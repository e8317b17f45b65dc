"""What wrong and changing bandwidth costs while a swarm trains, and what the hub's live repair recovers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from benchmarks.measure import say, spread, table
from ravnest.config import TIMEOUTS, Favour, HubTimeouts, PlanConfig
from ravnest.hub.coordinator.events import JobGiven, MakePlan, PlanMade
from ravnest.hub.coordinator.planner import SEARCH_PLANNER, Planner
from ravnest.ids import NodeId
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile
from ravnest.plan.types import Node, Swarm
from ravnest.sim.churn import AnyChange, LinkChange, made_up_changes, made_up_link_changes
from ravnest.sim.run import PARTS, SimulationSettings, make_job, run_simulation
from ravnest.sim.world import WorldParts
from studies.study import Study, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL, HUB_UPLOAD = "gpt2-xl", 1e9  # the first weights are there in minutes
NO_REPAIR = replace(TIMEOUTS.hub, speed_change_seconds=inf)  # another speed is never believed
ERRORS, NOISES = (0.1, 0.3, 0.5), (0.5, 1.0)
FALLEN_SHARE, FALLEN_TIMES = 0.2, 0.1
CHANGED_AT, SEEN_FROM = 15, 25  # minutes


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated."""

    nodes: str = "home:60"
    num_seeds: int = 2
    hours: float = 1.0
    errors: tuple[float, ...] = ERRORS
    noises: tuple[float, ...] = NOISES
    many_fall: bool = True


QUICK = Scale("home:16", 1, 0.6, (), (), many_fall=False)


def run(quick: bool, folder: Path) -> Study:
    scale = QUICK if quick else Scale()
    found = [_try_all(scale, seed) for seed in range(scale.num_seeds)]
    assert all(row[_TRUTH].rate > 0.0 for row in found), found
    assert all(
        row[f"{name}, {_IDLE}"].num_repairs == 0
        for row in found
        for name in _PAIRS
        if f"{name}, {_IDLE}" in row
    ), found
    shares = {name: spread([row[name].rate / row[_TRUTH].rate for row in found]) for name in found[0]}
    repairs = {name: [row[name].num_repairs for row in found] for name in found[0]}
    rates = [round(row[_TRUTH].rate, 2) for row in found]
    if quick:
        assert found[0][f"{_ONE}, {_LIVE}"].num_repairs > 0, found
        return Study(_QUESTION, "", _describe(scale), "", {"shares": shares}, _LIMITS)
    draw(folder / "formation.svg", partial(_plot, shares))
    figures: dict[str, object] = {
        "share of the rate": shares,
        "repairs": repairs,
        "samples/s of the truth": rates,
    }
    return Study(
        _QUESTION, _answer(shares), _describe(scale), _body(shares, repairs, rates), figures, _LIMITS
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """Samples per second in the end, how often the hub repaired, and who had stages in the end."""

    rate: float
    num_repairs: int
    nodes: tuple[NodeId, ...]


@dataclass(slots=True)
class RememberingPlanner:
    """Gives the answer again that it gave to the same question: planning is pure, and most of the work."""

    planner: Planner = SEARCH_PLANNER
    _answers: dict[tuple[JobGiven, MakePlan], PlanMade] = field(default_factory=dict)

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        """Plan, or remember."""
        if (job, asked) not in self._answers:
            self._answers[job, asked] = self.planner.make_plan(job, asked, now)
        return replace(self._answers[job, asked], now=now)


@dataclass(slots=True)
class WrongAtFirst:
    """Measures each node wrong by a factor the first time, and as it is afterwards."""

    factors: Mapping[NodeId, tuple[float, float]]
    _measured: set[NodeId] = field(default_factory=set)

    def __call__(self, node: Node) -> Node:
        """Return what a probe finds."""
        if node.name in self._measured:
            return node
        self._measured.add(node.name)
        up, down = self.factors[node.name]
        return replace(
            node,
            upload_bytes_per_second=up * node.upload_bytes_per_second,
            download_bytes_per_second=down * node.download_bytes_per_second,
        )


def draw_errors(swarm: Swarm, error: float, seed: int) -> dict[NodeId, tuple[float, float]]:
    """Return by what factor each node's upload and download are measured wrong."""
    noise = Random(f"errors {seed}")
    return {node.name: (exp(error * noise.gauss()), exp(error * noise.gauss())) for node in swarm.nodes}


def draw_fallen(swarm: Swarm, share: float, times: float, seconds: float, seed: int) -> list[LinkChange]:
    """Return the fall of a share of all links to so many times what they carried."""
    chosen = Random(f"fallen {seed}").sample(swarm.nodes, round(share * len(swarm.nodes)))
    return [LinkChange(seconds, node.name, times) for node in chosen]


def apply_changes(swarm: Swarm, changes: Iterable[LinkChange]) -> Swarm:
    """Return a swarm whose links are as these changes leave them."""
    times = {change.node: change.times for change in changes}
    nodes = (
        replace(
            node,
            upload_bytes_per_second=times.get(node.name, 1.0) * node.upload_bytes_per_second,
            download_bytes_per_second=times.get(node.name, 1.0) * node.download_bytes_per_second,
        )
        for node in swarm.nodes
    )
    return replace(swarm, nodes=tuple(nodes))


def _try_all(scale: Scale, seed: int) -> dict[str, Seen]:
    swarm, hours = population(scale.nodes, seed), scale.hours
    config = PlanConfig(hub_bytes_per_second=HUB_UPLOAD, favour=Favour.SPEED)
    job = make_job(builtin_profile(MODEL), config, SimulationSettings(hours, seed))
    parts = replace(PARTS, planner=RememberingPlanner())

    def simulate(
        swarm: Swarm,
        links: Iterable[LinkChange] = (),
        measures: Callable[[Node], Node] = lambda node: node,
        timeouts: HubTimeouts = TIMEOUTS.hub,
    ) -> Seen:
        changes: tuple[AnyChange, ...] = (*made_up_changes(swarm, seed, hours, 0.0), *links)
        own = replace(parts, measures=measures, timeouts=timeouts)
        return _play(job, swarm, changes, SimulationSettings(hours, seed), own)

    found = {_TRUTH: simulate(swarm)}

    def compare(name: str, links: Iterable[LinkChange] = (), error: float = 0.0) -> None:
        factors = draw_errors(swarm, error, seed)
        for what, timeouts in ((_IDLE, NO_REPAIR), (_LIVE, TIMEOUTS.hub)):
            found[f"{name}, {what}"] = simulate(swarm, links, WrongAtFirst(factors), timeouts)

    for error in scale.errors:
        compare(_wrong(error), error=error)
    one = Random(f"one {seed}").choice(found[_TRUTH].nodes)
    falls = {_ONE: [LinkChange(60.0 * CHANGED_AT, one, FALLEN_TIMES)]}
    if scale.many_fall:
        falls[_FALLEN] = draw_fallen(swarm, FALLEN_SHARE, FALLEN_TIMES, 60.0 * CHANGED_AT, seed)
    for name, fallen in falls.items():
        compare(name, fallen)
        found[f"{name}, {_ANEW}"] = simulate(apply_changes(swarm, fallen))
    for noise in scale.noises:
        compare(_changing(noise), made_up_link_changes(swarm, seed, hours, noise))
    say(f"seed {seed}: { {name: (round(each.rate, 2), each.num_repairs) for name, each in found.items()} }")
    return found


def _play(
    job: JobGiven, swarm: Swarm, changes: tuple[AnyChange, ...], wanted: SimulationSettings, parts: WorldParts
) -> Seen:
    world = run_simulation(job, swarm, changes, wanted, parts)
    spans = world.recorder.spans[SEEN_FROM:]
    nodes = tuple(name for cluster in world.hub.clusters for name in cluster.nodes)
    rate = sum(span.samples for span in spans) / (60.0 * len(spans))
    return Seen(rate, world.recorder.notices["Repaired"], nodes)


def _wrong(error: float) -> str:
    return f"measured {error:.0%} wrong"


def _changing(noise: float) -> str:
    return f"changing by exp({noise:g} x noise)"


_TRUTH, _ANEW = "truth", "planned anew"
_ONE, _FALLEN = "one link falls", f"{FALLEN_SHARE:.0%} of links fall"
_IDLE, _LIVE = "hub does nothing", "hub repairs"
_PAIRS = (*map(_wrong, ERRORS), _ONE, _FALLEN, *map(_changing, NOISES))
Shares = dict[str, dict[str, float]]


def _plot(shares: Shares, axes: "Axes") -> None:
    for number, what in enumerate((_IDLE, _LIVE, _ANEW)):
        names = [name for name in _PAIRS if f"{name}, {what}" in shares]
        each = [shares[f"{name}, {what}"] for name in names]
        middle = [found["median"] for found in each]
        below = [found["median"] - found["min"] for found in each]
        above = [found["max"] - found["median"] for found in each]
        places = [_PAIRS.index(name) + 0.25 * (1 - number) for name in names]
        axes.barh(places, middle, 0.24, xerr=(below, above), label=what)
    axes.set_yticks(range(len(_PAIRS)), _PAIRS, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("samples/s, in those of a plan that knew the truth and links that stay")
    axes.legend(fontsize=7)


def _answer(shares: Shares) -> str:
    def median(name: str, what: str) -> str:
        return f"{shares[f'{name}, {what}']['median']:.2f}"

    wrong, noise = _wrong(ERRORS[1]), _changing(NOISES[0])
    return (
        f"Bandwidth measured {ERRORS[1]:.0%} wrong leaves {median(wrong, _IDLE)} of the rate and live repair "
        f"{median(wrong, _LIVE)}, for a cluster is compared with its own past; when one link falls to a "
        f"tenth {median(_ONE, _IDLE)} is left and repair makes that {median(_ONE, _LIVE)} (a new plan "
        f"{median(_ONE, _ANEW)}), "
        f"when {_FALLEN.replace('fall', 'do')} {median(_FALLEN, _IDLE)}, {median(_FALLEN, _LIVE)} and "
        f"{median(_FALLEN, _ANEW)}, and links that always change leave {median(noise, _IDLE)} without and "
        f"{median(noise, _LIVE)} with repair."
    )


def _body(shares: Shares, repairs: Mapping[str, list[int]], rates: list[float]) -> str:
    def cell(name: str) -> str:
        found = shares.get(name)
        return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})" if found else "-"

    rows = [
        [
            name,
            *(cell(f"{name}, {what}") for what in (_IDLE, _LIVE, _ANEW)),
            ", ".join(map(str, repairs[f"{name}, {_LIVE}"])),
        ]
        for name in _PAIRS
    ]
    return (
        "Rates as shares of those of a plan that knew the truth, whose links stay "
        f"({', '.join(map(str, rates))} samples/s): median (smallest-largest) over swarms.\n\n"
        + table(["what", _IDLE, _LIVE, _ANEW, "repairs by swarm"], rows)
        + "\n\n![Shares of the rate](formation.svg)\n\n"
        + "The [lab log](../lab-log.md) has a trace that shows why repair recovers so little."
    )


def _describe(scale: Scale) -> str:
    return _METHOD.format(
        nodes=scale.nodes,
        count=scale.num_seeds,
        minutes=60 * scale.hours,
        model=MODEL,
        changed=CHANGED_AT,
        seen=SEEN_FROM,
    )


_QUESTION = (
    "What do wrong and changing bandwidths cost while a swarm trains, and what does live repair recover?"
)
_METHOD = """\
The simulator ([simulate](../simulate.md)) with the production coordinator, monitors and planner: `{nodes}`,
{model}, `favour=speed`, a hub of 8 Gbit/s, nobody leaves, {minutes:g} virtual minutes, {count} swarms.
*Measured wrong*: the probe of a newcomer finds its upload and its download times exp(error x normal noise),
each with its own; later probes find the truth. *One link falls*: that of one node with a stage carries a
tenth from minute {changed} on. *20% of links fall*: those of as many nodes, with a stage or without.
*Changing*: every link draws a new factor exp(spread x noise) about every ten minutes (`--link-noise`). *Hub
repairs* is what ships: a cluster that has become half as slow again for 20 s has its links measured again,
and a link that is three times as slow as the plan believes is planned around. *Hub does nothing* never
believes that a speed changed (`speed_change_seconds` without end). *Planned anew* begins with the fallen
links known. Rates are those from minute {seen} on."""
_LIMITS = """\
A swarm of another size, model or hub is not tried, two swarms say little of spread, and half an hour after
a fall is soon: a repair that moves gigabytes over home links pays later. Nodes come and go in no run. The
plan alone, without time passing, is in [sensitivity](../sensitivity.md). The simulator moves content in one
queue per direction and has no packets."""
