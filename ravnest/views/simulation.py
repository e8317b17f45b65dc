"""A simulation as people see it: a table of what was found, and curves over virtual time as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.units import show_bytes, show_seconds
from ravnest.views.plan_picture import draw_box, draw_label, show_number

Report = Mapping[str, Any]
_ROWS = (
    ("trained", "samples", ""),
    ("rate, in all", "samples_per_second", " samples/s"),
    ("rate, usual minute", "steady_samples_per_second", " samples/s"),
    ("rate that the plan predicts", "foreseen_samples_per_second", " samples/s"),
    ("training began", "first_trained_at", " s"),
    ("lag at the root, mean", "mean_lag", " updates"),
    ("lag at the root, most", "most_lag", " updates"),
    ("rounds that happened", "rounds_committed", ""),
    ("rounds that were lost", "rounds_lost", ""),
    ("a round took", "round_seconds", " s"),
    ("recoveries", "recoveries", ""),
    ("a recovery took", "recovery_seconds", " s"),
    ("the longest took", "longest_recovery_seconds", " s"),
    ("samples trained again", "samples_trained_again", ""),
    ("samples lost", "samples_lost", ""),
    ("events of the hub", "events", ""),
    ("reports to the hub", "reports", ""),
    ("messages in", "messages_in", ""),
    ("messages out", "messages_out", ""),
    ("largest plan order", "largest_plan_order_bytes", " bytes"),
)


def show_simulation(report: Report) -> Iterator[RenderableType]:
    """Return the tables of a simulation."""
    facts, plan, totals = report["settings"], report["plan"], report["totals"]
    hours = f"{facts['hours']:g} h of {facts['nodes']} nodes, {facts['model']}, seed {facts['seed']}"
    shape = f"{plan['clusters']} clusters with {plan['stages']} stages at the end, {plan['averaging']}"
    yield Text(f"{hours}: {shape}")
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, key, unit in _ROWS:
        value = totals[key]
        table.add_row(label, "never" if value is None else f"{value:,.6g}{unit}")
    carried = {name: sum(x[name] for x in report["minutes"]) for name in _CARRIED}
    for name, label in _CARRIED.items():
        table.add_row(label, show_bytes(carried[name]))
    yield table


_CARRIED = {
    "control_bytes": "messages of the hub",
    "sample_bytes": "samples that the hub sent",
    "weight_bytes": "weights that the hub sent",
    "relay_bytes": "passed on by the hub",
}


def show_cost(seconds: float, num_events: int, planning: float, longest: float, event: str) -> str:
    """Return what the hub's decisions took of this PC's CPU, as a sentence."""
    each = 1e6 * seconds / max(1, num_events)
    return (
        f"the hub took {show_seconds(seconds)} of CPU for {num_events:,} events and reports,"
        f" {each:.0f} us each, at most {1e3 * longest:.1f} ms ({event}); plans took {show_seconds(planning)}"
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    label: str
    key: str
    color: str


_PANELS = (
    ("samples per second", (_Curve("trained", "samples_per_second", "#1b6ca8"),)),
    (
        "members and clusters",
        (_Curve("members", "members", "#7a7a7a"), _Curve("clusters that train", "clusters", "#2e8b57")),
    ),
    (
        "lag in updates",
        (_Curve("mean", "mean_lag", "#c0631d"), _Curve("most", "most_lag", "#e2b184")),
    ),
    (
        "messages of the hub per second",
        (_Curve("in", "messages_in", "#6a4c93"), _Curve("out", "messages_out", "#b39bc8")),
    ),
)
_WIDTH, _PANEL, _LEFT, _TOP, _GAP = 860.0, 120.0, 70.0, 54.0, 46.0
_PER_SECOND = {"messages_in", "messages_out"}


def draw_simulation(report: Report) -> str:
    """Return curves over virtual time as an SVG picture."""
    minutes, facts = report["minutes"], report["settings"]
    height = _TOP + len(_PANELS) * (_PANEL + _GAP)
    title = f"{facts['nodes']} nodes train {facts['model']} for {facts['hours']:g} h, seed {facts['seed']}"
    parts = [draw_label(_LEFT, 26, title, "title")]
    for number, (label, curves) in enumerate(_PANELS):
        parts += _draw_panel(label, curves, minutes, _TOP + number * (_PANEL + _GAP))
    size = f'width="{show_number(_WIDTH)}" height="{show_number(height)}"'
    box = f'viewBox="0 0 {show_number(_WIDTH)} {show_number(height)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>{_STYLE}{"".join(parts)}</svg>\n'


def _draw_panel(label: str, curves: Sequence[_Curve], minutes: Sequence[Report], top: float) -> list[str]:
    width = _WIDTH - _LEFT - 30
    series = {curve: [_value(span, curve.key) for span in minutes] for curve in curves}
    most = max((value for values in series.values() for value in values), default=0.0) or 1.0
    parts = [draw_box(_LEFT, top, width, _PANEL, "panel"), draw_label(_LEFT, top - 7, label, "name")]
    parts.append(draw_label(8, top + 10, f"{most:.3g}", "tick"))
    parts.append(draw_label(8, top + _PANEL, "0", "tick"))
    parts.append(draw_label(_LEFT, top + _PANEL + 14, "0 min", "tick"))
    parts.append(draw_label(_LEFT + width - 44, top + _PANEL + 14, f"{len(minutes)} min", "tick"))
    for number, (curve, values) in enumerate(series.items()):
        step = width / max(1, len(values) - 1)
        places = [(_LEFT + step * k, top + _PANEL * (1 - value / most)) for k, value in enumerate(values)]
        points = " ".join(f"{show_number(x)},{show_number(y)}" for x, y in places)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{curve.color}" stroke-width="1.6"/>')
        x = _LEFT + width - 150 * (len(curves) - number)
        parts.append(
            f'<rect x="{show_number(x)}" y="{show_number(top - 14)}" width="10" height="4"'
            f' fill="{curve.color}"/>'
        )
        parts.append(draw_label(x + 14, top - 7, curve.label, "tick"))
    return parts


def _value(span: Report, key: str) -> float:
    value = float(span[key])
    return value / 60.0 if key in _PER_SECOND else value


_STYLE = (
    "<style>text{font-family:sans-serif;font-size:11px;fill:#333}.title{font-size:16px;font-weight:bold}"
    ".name{font-size:12px;font-weight:bold}.tick{fill:#666}.panel{fill:#fafafa;stroke:#ccc}</style>"
)
