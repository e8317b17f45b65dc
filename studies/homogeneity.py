"""What it costs and gains to form clusters of like nodes: bounds on speed, memory and upload."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import say, spread, table
from ravnest.config import PlanConfig
from ravnest.errors import PlanError
from ravnest.plan.formation import form_plan
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile
from ravnest.plan.sharing import TrainingLength, share_job
from ravnest.plan.types import Node, Swarm
from studies.study import Study, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "gpt2-xl"
LENGTH = TrainingLength(batch_size=512, num_updates=20_000)
GB, MBIT = 1e9, 1e6 / 8
RATIOS = (1.0, 1.5, 2.0, 4.0, 8.0, 1000.0)
MEMORY = (0.0, 5.0, 8.0, 12.0)  # GB that a node lends
UPLOAD = (0.0, 10.0, 40.0, 150.0)  # Mbit/s


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which clusters may train beside each other, and which nodes may be in them."""

    speed_ratio: float = 4.0  # as a plan is made by default
    memory: float = 0.0  # GB, at least
    upload: float = 0.0  # Mbit/s, at least

    def admits(self, node: Node) -> bool:
        """Return whether a node may be in a cluster."""
        is_large = node.memory_bytes >= self.memory * GB
        return is_large and node.upload_bytes_per_second >= self.upload * MBIT


@dataclass(frozen=True, slots=True)
class Found:
    """What a swarm does within some bounds."""

    samples_per_second: float = 0.0
    efficiency: float = 0.0  # of a sample, in its effect in one process
    num_clusters: int = 0
    num_nodes: int = 0  # with a stage

    @property
    def goodput(self) -> float:
        """Samples per second, in samples of one process."""
        return self.samples_per_second * self.efficiency


def run(quick: bool, folder: Path) -> Study:
    kinds, seeds = (("home:20",), 1) if quick else (("home:60", "fibre:60"), 3)
    sweeps = _choose_sweeps(quick)
    found = {
        kind: {
            name: [[_try(kind, seed, each) for seed in range(seeds)] for each in sweep]
            for name, sweep in sweeps.items()
        }
        for kind in kinds
    }
    for kind, each in found.items():
        say(f"{kind}: {each}")
    assert all(row[0].num_nodes > 0 for sweep in found[kinds[0]].values() for row in sweep[:1]), found
    if quick:
        return Study(_QUESTION, "", _METHOD, "", {"found": str(found)}, _LIMITS)
    for kind in kinds:
        draw(folder / f"homogeneity-{kind.partition(':')[0]}.svg", partial(_plot, found[kind], sweeps))
    shares = {
        kind: {
            name: _shares(rows, found[kind]["speed_ratio"][RATIOS.index(4.0)]) for name, rows in each.items()
        }
        for kind, each in found.items()
    }
    figures: dict[str, object] = {
        kind: {
            name: {_name(name, each): spread(row) for each, row in zip(sweeps[name], rows, strict=True)}
            for name, rows in each.items()
        }
        for kind, each in shares.items()
    }
    return Study(_QUESTION, _answer(shares), _METHOD, _body(found, shares, sweeps), figures, _LIMITS)


Sweeps = dict[str, tuple[Bounds, ...]]
Rows = list[list[Found]]  # for each bound, of each swarm


def _choose_sweeps(quick: bool) -> Sweeps:
    step = 3 if quick else 1
    return {
        "speed_ratio": tuple(Bounds(speed_ratio=ratio) for ratio in RATIOS[::step]),
        "memory": tuple(Bounds(memory=least) for least in MEMORY[::step]),
        "upload": tuple(Bounds(upload=least) for least in UPLOAD[::step]),
    }


def _try(kind: str, seed: int, bounds: Bounds) -> Found:
    """Plan with the nodes that are admitted; nothing can be trained if they do not suffice."""
    swarm, profile = population(kind, seed), builtin_profile(MODEL)
    admitted = Swarm(tuple(filter(bounds.admits, swarm.nodes)), swarm.region_latency)
    config = PlanConfig(speed_ratio=bounds.speed_ratio, accumulates=True)
    try:
        plan = form_plan(profile, admitted, config)
    except PlanError:
        return Found()
    shared = share_job(plan, profile, admitted, config, LENGTH)
    count = sum(len(cluster.stages) for cluster in plan.clusters)
    return Found(shared.samples_per_second, shared.efficiency, len(plan.clusters), count)


def _shares(rows: Rows, usual: Sequence[Found]) -> list[list[float]]:
    """Return goodputs as shares of those within the usual bounds, swarm by swarm."""
    return [[each.goodput / base.goodput for each, base in zip(row, usual, strict=True)] for row in rows]


def _name(sweep: str, bounds: Bounds) -> str:
    value: float = getattr(bounds, sweep)
    if sweep == "speed_ratio":
        return "any" if value >= 1000.0 else f"{value:g}"
    return f"{value:g} {'GB' if sweep == 'memory' else 'Mbit/s'}" if value else "none"


def _answer(shares: dict[str, dict[str, list[list[float]]]]) -> str:
    def both(sweep: str, place: int) -> str:
        return " and ".join(f"{spread(each[sweep][place])['median']:.2f}" for each in shares.values())

    return (
        "Of samples per second times what a sample teaches with the default bounds, among home PCs and on "
        f"fibre, clusters that must be equally fast reach {both('speed_ratio', 0)}, and clusters that may "
        f"differ in any way {both('speed_ratio', -1)}; to admit only nodes that lend {MEMORY[-1]:g} GB "
        f"leaves {both('memory', -1)}, only uploads from {UPLOAD[-1]:g} Mbit/s on {both('upload', -1)}."
    )


def _body(
    found: dict[str, dict[str, Rows]], shares: dict[str, dict[str, list[list[float]]]], sweeps: Sweeps
) -> str:
    head = ["bound", "clusters", "nodes used", "samples/s", "e", "goodput", "of that with the default bounds"]
    parts = []
    for kind, each in found.items():
        picture = f"homogeneity-{kind.partition(':')[0]}.svg"
        parts.append(f"### {kind}\n\n![Rate, e and goodput over the speed ratio]({picture})")
        for name, rows in each.items():
            lines = [
                _line(_name(name, bounds), row, share)
                for bounds, row, share in zip(sweeps[name], rows, shares[kind][name], strict=True)
            ]
            parts.append(f"{_TITLES[name]}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _line(name: str, row: Sequence[Found], share: Sequence[float]) -> list[object]:
    def range_of(values: Sequence[float]) -> str:
        each = spread(values)
        return f"{each['median']:.3g} ({each['min']:.3g}-{each['max']:.3g})"

    return [
        name,
        ", ".join(str(each.num_clusters) for each in row),
        ", ".join(str(each.num_nodes) for each in row),
        range_of([each.samples_per_second for each in row]),
        range_of([each.efficiency for each in row]),
        range_of([each.goodput for each in row]),
        range_of(share),
    ]


def _plot(each: dict[str, Rows], sweeps: Sweeps, axes: "Axes") -> None:
    rows = each["speed_ratio"]
    usual = rows[RATIOS.index(4.0)]
    names = [_name("speed_ratio", bounds) for bounds in sweeps["speed_ratio"]]
    for what in ("samples_per_second", "efficiency", "goodput"):
        found = [
            spread([getattr(one, what) / getattr(base, what) for one, base in zip(row, usual, strict=True)])
            for row in rows
        ]
        middle = [one["median"] for one in found]
        below = [one["median"] - one["min"] for one in found]
        above = [one["max"] - one["median"] for one in found]
        axes.errorbar(names, middle, (below, above), marker="o", capsize=3, label=what.replace("_", " "))
    axes.set(xlabel="fastest over slowest cluster, at most", ylabel="share of that at 4")
    axes.legend(fontsize=7)


_QUESTION = "How alike must clusters and nodes be?"
_TITLES = {
    "speed_ratio": "Fastest over slowest cluster, at most (4 is the default)",
    "memory": "Only nodes that lend at least so much memory",
    "upload": "Only nodes that send at least so much",
}
_METHOD = """\
`form_plan` with its default budget over made-up swarms of 60 nodes ([files](../files.md)), gpt2-xl, a job
of 20,000 updates of 512 samples, no limit on the number of clusters. *Speed ratio* bounds how much faster
one cluster may be than another (`speed_ratio`; the faster ones are held back to it). *Memory* and *upload*
are thresholds: nodes below are not in the swarm. Samples per second are those of the forecast with rounds;
*e* is what a sample teaches in that of one process ([quality](../quality.md)), which falls with the number
of clusters and the updates between rounds; goodput is their product. Three swarms: median
(smallest-largest); counts swarm by swarm."""
_LIMITS = """\
Nothing was trained: e is a formula that was off by 0.04 to 0.08 in the median where it was measured
([convergence](../../benchmarks/reports/convergence.md)), with its first guess of the noise scale. It knows
nothing of how unequal clusters are: whether unequal shares of samples cost more than equal ones was not
measured. The plan is the fastest one; the hub would take fewer clusters where they cost too much quality
(`favour`). Nodes neither leave nor change."""
