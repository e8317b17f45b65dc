"""The report of the quality benchmark: medians against plain loops; a table and a picture for each job."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import table
from benchmarks.quality_jobs import TASKS
from benchmarks.quality_runs import Record

Outcome = tuple[dict[str, Any], str, list[str]]
PICTURES = Path(__file__).parent / "reports" / "quality"
CLOSE = 0.01  # of a loss, or of an accuracy: 1 % or 1 point
OFF = 0.1  # of e, foreseen and measured
SLOWER = 1.1  # times the best number of clusters: the planner's choice takes no longer
_UNTRIED = "no swarm had more than one cluster: predicted e and the choice of clusters were not tried"
_LOOPS = ("plain", "tuned", "own")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A kind of swarm: how many nodes, and what was asked for; nothing is the default."""

    emulated: float
    nodes: int
    clusters: int
    averaging: str
    microbatches: int = 0

    @classmethod
    def of(cls, record: Record) -> "Cell":
        """Return the cell that a record belongs to."""
        run = record["run"]
        names = ("emulated", "nodes", "clusters", "averaging", "microbatches")
        return cls(*(run[name] for name in names))

    @property
    def is_default(self) -> bool:
        """Whether the planner chose."""
        return not self.clusters and not self.averaging and not self.microbatches

    def __str__(self) -> str:
        asked = f", {self.clusters} clusters asked" if self.clusters else ""
        asked += f", {self.averaging}" if self.averaging else ""
        asked += f", {self.microbatches} microbatches" if self.microbatches else ""
        asked += f", {self.emulated:.3g} FLOP/s each" if self.emulated else ""
        return f"{self.nodes} node{'s' * (self.nodes > 1)}{asked}"


@dataclass(slots=True)
class Findings:
    """All records of one task."""

    name: str
    loops: defaultdict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    curve: defaultdict[float, list[float]] = field(default_factory=lambda: defaultdict(list))
    swarms: defaultdict[Cell, list[Record]] = field(default_factory=lambda: defaultdict(list))
    failed: list[Record] = field(default_factory=list)

    @property
    def score(self) -> str:
        """What the task is judged by."""
        return TASKS[self.name].score

    def scores(self, records: Sequence[Record]) -> list[float]:
        """Return it for each record."""
        return [record["scores"][self.score] for record in records]

    def gap(self, value: float, reference: float) -> float:
        """Return by how much a score is better (above 0): of an accuracy as it is, of a loss as a share."""
        return value - reference if self.score == "accuracy" else 1 - value / reference

    def measure_efficiency(self, loss: float) -> float | None:
        """Return with which share of the updates the plain loop has this validation loss; 1 is the most."""
        points = [(share, median(losses)) for share, losses in sorted(self.curve.items())]
        if len(points) < 2:
            return None
        best = math.inf  # a loop that got worse could have ended before
        falling = [(share, best := min(best, value)) for share, value in points]
        if loss <= falling[-1][1]:
            return 1.0
        if loss >= falling[0][1]:
            return falling[0][0]
        for (x0, y0), (x1, y1) in pairwise(falling):
            if y1 <= loss <= y0:
                return math.exp(math.log(x0) + (loss - y0) / (y1 - y0) * math.log(x1 / x0))
        return 1.0


def make_report(records: Sequence[Record]) -> Outcome:
    """Return figures, the text, and what was missed."""
    found = _sort(records)
    figures: dict[str, Any] = {name: _figures(each) for name, each in found.items()}
    missed = [sentence for each in found.values() for sentence in _judge(each, figures[each.name])]
    averaged = _averaged(figures)
    counts = [cell["clusters"] for each in figures.values() for cell in each["swarms"].values()]
    missed += [_UNTRIED] if counts and max(counts) == 1 else []
    first, later = (_difference(averaged, name) for name in ("efficiency", "as_it_went"))
    if first is not None and first > OFF:
        missed.append(f"predicted e is {first:.2f} off measured e (median), not {OFF:g} at most")
    if later is not None and later > OFF:
        missed.append(f"e of the rounds and the noise as they were is {later:.2f} off, not {OFF:g} at most")
    machines = sorted({record["machine"] for record in records})
    text = _METHOD.format(machines=", ".join(machines), summary=_summary(found, figures))
    text += "\n".join(_section(each, figures[each.name]) for each in found.values())
    if first is not None and later is not None:
        text += (
            f"\n{len(averaged)} kinds of swarms with clusters: e as planned is {first:.2f} off (median), "
            f"e of the rounds and the noise as they were {later:.2f}.\n"
        )
    return figures, text, missed


def _difference(cells: Sequence[dict[str, Any]], name: str) -> float | None:
    return median(abs(cell[name] - cell["measured"]) for cell in cells) if cells else None


def write_pictures(records: Sequence[Record]) -> None:
    """Write a picture for each job."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for each in _sort(records).values():
        (PICTURES / f"{each.name}.svg").write_text(_draw(each, _figures(each)))


def show_tuning(records: Sequence[Record]) -> Outcome:
    """Return the mean score of each loop of the grid, the best one first; nothing is judged."""
    scores: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "error" not in record and record["run"]["loop"].isdigit():
            task = TASKS[record["run"]["task"]]
            scores[task.name][record["loop"]].append(record["scores"][task.score])
    figures = {}
    for name, loops in scores.items():
        sign = -1 if TASKS[name].score == "accuracy" else 1
        means = {loop: sum(values) / len(values) for loop, values in loops.items()}
        figures[name] = {k: round(v, 4) for k, v in sorted(means.items(), key=lambda pair: sign * pair[1])}
    return figures, "", []


def _sort(records: Sequence[Record]) -> dict[str, Findings]:
    found = {name: Findings(name) for name in TASKS}
    for record in records:
        run = record["run"]
        each = found[run["task"]]
        if "error" in record:
            each.failed.append(record)
        elif run["nodes"]:
            each.swarms[Cell.of(record)].append(record)
        elif run["loop"] in _LOOPS:
            if run["loop"] == "own":
                each.curve[run["share"]].append(record["scores"]["loss"])
            if run["share"] == 1:
                each.loops[run["loop"]].append(record)
    return {name: each for name, each in found.items() if each.loops or each.swarms or each.failed}


def _figures(found: Findings) -> dict[str, Any]:
    loops = {name: _numbers(found, found.loops[name]) for name in _LOOPS if found.loops[name]}
    tuned = loops.get("tuned")
    swarms = {}
    for cell, records in sorted(found.swarms.items()):
        numbers = _numbers(found, records)
        loss = median(record["scores"]["loss"] for record in records)
        numbers |= {
            "clusters": median(record["clusters"] for record in records),
            "stages": records[0]["stages"],
            "mode": records[0]["mode"],
            "efficiency": records[0]["efficiency"],
            "measured": found.measure_efficiency(loss),
            "as_it_went": median(_foresee(found, record) for record in records),
            "noise": _middle_noise(records),
            "rounds": median(record["rounds"] for record in records),
            "lost_rounds": sum(record["lost_rounds"] for record in records),
            "is_default": cell.is_default,
            "over_tuned": found.gap(numbers["median"], tuned["median"]) if tuned else None,
            "speed": _speed(found, cell, numbers["seconds"]),
            "choice": asdict(replace(cell, clusters=0)),
        }
        efficiency = numbers["measured"]
        numbers["to_quality"] = numbers["seconds"] / efficiency if efficiency else None
        swarms[str(cell)] = numbers
    return {"loops": loops, "swarms": swarms, "failed": len(found.failed)}


def _foresee(found: Findings, record: Record) -> float:
    """Return the planner's e for the rounds that there were and the noise that was measured, if it was."""
    from ravnest.config import Averaging
    from ravnest.plan.sharing import TrainingLength, efficiency

    count, mode = int(record["clusters"]), record["mode"]
    if count < 2 or mode is None:
        return 1.0
    averaging = Averaging(mode.partition(",")[0])
    is_split = "shares" in mode
    num_updates, rounds = record["updates"] / count, max(record["rounds"], 1)
    lateness = min(1.0, record.get("round_seconds", 0.0) * rounds / record["seconds"])
    apart = num_updates / rounds * (1 + 2 * lateness if averaging is Averaging.OVERLAPPED else 1)
    length = TrainingLength(TASKS[found.name].batch_size, round(num_updates * (1 if is_split else count)))
    lengths = [replace(length, noise=noise) for noise in record.get("noise") or [None]]
    return sum(efficiency(each, count, averaging, is_split, apart) for each in lengths) / len(lengths)


def _middle_noise(records: Sequence[Record]) -> float | None:
    scales = [median(record["noise"]) for record in records if record.get("noise")]
    return median(scales) if scales else None


def _numbers(found: Findings, records: Sequence[Record]) -> dict[str, Any]:
    scores = found.scores(records)
    return {
        "median": median(scores),
        "min": min(scores),
        "max": max(scores),
        "runs": len(scores),
        "updates": median(record["updates"] for record in records),
        "seconds": median(record["seconds"] for record in records),
    }


def _speed(found: Findings, cell: Cell, seconds: float) -> float | None:
    """Return how many times as fast as one process this was: as one node where nodes are emulated."""
    alone = found.swarms.get(Cell(cell.emulated, 1, 0, "")) if cell.emulated else found.loops["own"]
    return median(record["seconds"] for record in alone) / seconds if alone else None


def _averaged(figures: dict[str, Any]) -> list[dict[str, Any]]:
    cells = [cell for each in figures.values() for cell in each["swarms"].values()]
    return [x for x in cells if x["clusters"] > 1 and None not in (x["efficiency"], x["measured"])]


def _judge(found: Findings, figures: dict[str, Any]) -> list[str]:
    """Return what a swarm at default settings misses."""
    missed = [
        f"{found.name}: a run failed ({record['error']})"
        for record in found.failed
        if not record["run"]["clusters"]
    ]
    plain = figures["loops"].get("plain")
    for name, cell in figures["swarms"].items():
        if not cell["is_default"]:
            continue
        if cell["over_tuned"] is None:
            missed.append(f"{found.name}, {name}: there is no tuned loop to compare with")
        elif cell["over_tuned"] < -CLOSE:
            missed.append(
                f"{found.name}, {name}: {_show_gap(found, cell['over_tuned'])} against the tuned loop"
            )
        if plain and found.gap(cell["median"], plain["median"]) < -_spread(found, plain):
            missed.append(f"{found.name}, {name}: worse than plain AdamW 1e-3 by more than the spread")
        missed += _judge_choice(found, name, cell, figures["swarms"].values())
    return missed


def _judge_choice(
    found: Findings, name: str, cell: dict[str, Any], others: Iterable[dict[str, Any]]
) -> list[str]:
    """Compare the time to quality of the planner's choice with that of other numbers of clusters."""
    rivals = [x for x in others if x["choice"] == cell["choice"] and x is not cell and x["to_quality"]]
    if not rivals or not cell["to_quality"]:
        return []
    best = min(rivals, key=lambda each: float(each["to_quality"]))
    times = cell["to_quality"] / best["to_quality"]
    if times <= SLOWER:
        return []
    told = f"{times:.2f} times as long to the same quality as {best['clusters']:g} clusters"
    return [f"{found.name}, {name}: the plan takes {told}"]


def _spread(found: Findings, numbers: dict[str, Any]) -> float:
    return abs(found.gap(numbers["min"], numbers["max"]))


def _show_gap(found: Findings, gap: float) -> str:
    if found.score == "accuracy":
        return f"{100 * gap:+.1f} points"
    return f"{-100 * gap:+.1f} % loss"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _show_scores(numbers: dict[str, Any]) -> str:
    return f"{numbers['median']:.4f} ({numbers['min']:.4f}-{numbers['max']:.4f})"


def _summary(found: dict[str, Findings], figures: dict[str, Any]) -> str:
    rows = []
    for name, each in found.items():
        loops, swarms = figures[name]["loops"], figures[name]["swarms"]
        default = {key: cell for key, cell in swarms.items() if cell["is_default"]}
        row: list[object] = [name, each.score]
        row += [f"{loops[loop]['median']:.4f}" if loop in loops else "-" for loop in _LOOPS]
        worst = min((x["over_tuned"] for x in default.values() if x["over_tuned"] is not None), default=None)
        row.append("; ".join(f"{cell['median']:.4f}" for cell in default.values()) or "-")
        rows.append([*row, "-" if worst is None else _show_gap(each, worst)])
    head = ["job", "judged by", "AdamW 1e-3", "tuned", "own in one process"]
    return table([*head, "swarms by nodes", "worst against tuned"], rows)


def _section(found: Findings, figures: dict[str, Any]) -> str:
    task, rows = TASKS[found.name], []
    names = {"plain": "plain AdamW 1e-3", "tuned": f"tuned: {task.tuned}", "own": "own, in one process"}
    for name, numbers in figures["loops"].items():
        rest = ["-"] * 9
        rows.append([names[name], _show_scores(numbers), "", numbers["updates"], *rest, *_times(numbers)])
    for name, cell in figures["swarms"].items():
        plan = f"{cell['clusters']:g} x {max(cell['stages'])}"
        gap = "-" if cell["over_tuned"] is None else _show_gap(found, cell["over_tuned"])
        rounds = f"{cell['rounds']:g}" + (f" ({cell['lost_rounds']} lost)" if cell["lost_rounds"] else "")
        known = ("noise", "efficiency", "as_it_went", "measured", "speed", "to_quality")
        told = [plan, cell["mode"] or "-", rounds, *(_show(cell[each]) for each in known)]
        rows.append([name, _show_scores(cell), gap, cell["updates"], *told, *_times(cell)])
    head = ["", found.score, "against tuned", "updates", "clusters x stages", "mode", "rounds"]
    head += ["noise scale", "e as planned", "e as it went", "e measured", "times as fast", "s to quality"]
    text = table([*head, "seconds", "runs"], rows)
    return f"\n## {found.name}\n\n{text}\n\n![{found.name}](quality/{found.name}.svg)\n"


def _times(numbers: dict[str, Any]) -> list[object]:
    return [f"{numbers['seconds']:.1f}", numbers["runs"]]


def _draw(found: Findings, figures: dict[str, Any]) -> str:
    """Return a picture: the score of every run by the number of nodes, and lines for the plain loops."""
    from ravnest.views.plan_picture import draw_box, draw_label, draw_path

    cells = {cell: records for cell, records in sorted(found.swarms.items()) if cell.is_default}
    loops = {name: numbers["median"] for name, numbers in figures["loops"].items()}
    values = [*loops.values(), *(x for records in cells.values() for x in found.scores(records))]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.1 or 0.01
    low, high, width = low - room, high + room, 90.0 * max(len(cells), 1)

    def place(value: float) -> float:
        return 40 + 200 * (high - value) / (high - low)

    parts = [draw_label(10, 20, f"{found.name}: validation {found.score}", "head")]
    for name, value in loops.items():
        y = place(value)
        parts.append(draw_path(f"M60 {y:.1f}H{60 + width}", name))
        parts.append(draw_label(66 + width, y + 4, f"{name} {value:.4f}"))
    parts += [draw_label(8, place(value) + 4, f"{value:.3f}") for value in (low + room, high - room)]
    for number, (cell, records) in enumerate(cells.items()):
        x, scores = 60 + 90 * (number + 0.5), found.scores(records)
        parts += [draw_box(x - 3, place(value) - 3, 6, 6, "run", radius=3) for value in scores]
        parts.append(draw_path(f"M{x - 20:.1f} {place(median(scores)):.1f}h40", "median"))
        parts.append(draw_label(x - 22, 262, f"{cell.nodes} node{'s' * (cell.nodes > 1)}"))
    style = (
        "text{font:12px sans-serif;fill:#333}.head{font-weight:bold}.plain{stroke:#bbb}.tuned{stroke:#c33}"
        ".own{stroke:#393}.median{stroke:#08519c;stroke-width:2}.run{fill:#4292c6}"
    )
    size = f'width="{width + 190:.0f}" height="275"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


_METHOD = """\
Fourteen small jobs, each as its user would write it, at default settings (digits-adam-mse brings Adam
1e-3, mlp-adamw AdamW 1e-3, gpt-adamw AdamW 3e-3).
Real programs on one machine ({machines}), one thread each. *Plain* is AdamW 1e-3, *tuned* the best of AdamW
with rates from 3e-4 to 3e-2, constant or along a cosine, chosen once per job (`--tune`); *own* is what the
swarm is asked to train with, in one process. The returned weights are evaluated by the same code as those of
a plain loop. Figures are medians over seeds (smallest-largest). Seconds are from the start of the first
cluster to the end of the last epoch. *e* is the share of the updates with which the own loop, its schedule
contracted, reaches the same validation loss; 1 is the most that is measured. *As planned* it follows from the
first guess of the noise scale, *as it went* from the rounds that there were and the noise (in samples) that
stages measured. *Times as fast* is the time of the own loop over that of the swarm; of emulated nodes, that
of one such node. *s to quality* are the seconds over e; the planner's choice is to take no more than 1.1
times that of other numbers of clusters, where those were run.

{summary}
"""
