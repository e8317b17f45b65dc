"""A plan as an SVG picture: clusters, stages, links and rings, drawn with a few plain shapes.

Text is escaped here and nowhere else. Node names come from strangers: `clean` drops what XML cannot hold and
what would hide or reorder text.
"""

import html
import unicodedata
from dataclasses import dataclass
from itertools import pairwise

from ravnest.ids import NodeId
from ravnest.plan.forecast import ClusterForecast, Forecast, StageForecast
from ravnest.plan.types import ModelProfile, Plan, Ring, Swarm, cluster_name
from ravnest.units import show_bytes, show_count, show_seconds
from ravnest.views.plan_text import describe_bottleneck, relayed_pairs, show_samples

_WIDE = ("W", "F")  # East Asian letters take a whole em


def clean(text: str) -> str:
    """Return text that is safe between tags and in attributes."""
    return html.escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))


def fit(text: str, width: float, size: float) -> str:
    """Return as much of the text as `width` holds at this font size, ended by an ellipsis if cut."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…" if text else ""


def wrap(text: str, width: float, size: float) -> list[str]:
    """Return the text as lines that `width` holds."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [fit(line, width, size) for line in lines]


def text_width(text: str, size: float) -> float:
    """Return roughly how wide a text is in a usual sans-serif font."""
    return size * sum(_letter_width(letter) for letter in text)


def shorten_text(text: str, width: float, size: float) -> str:
    """Return a name that `width` holds, cut in its middle: names differ at their ends."""
    keep = len(text)
    while keep > 1 and text_width(text, size) > width:
        keep -= 1
        head = (keep + 1) // 2
        short = text[:head] + "…" + text[len(text) - (keep - head) :]
        if text_width(short, size) <= width:
            return short
    return text if text_width(text, size) <= width else ""


def draw_label(x: float, y: float, text: str, style: str = "", angle: float = 0.0, unit: str = "") -> str:
    """Return a line of text at its baseline; `style` names classes of the picture's style sheet."""
    turn = f' transform="rotate({show_number(angle)} {show_number(x)} {show_number(y)})"' if angle else ""
    tail = f' <tspan class="unit">{clean(unit)}</tspan>' if unit else ""
    return f'<text x="{show_number(x)}" y="{show_number(y)}" class="{style}"{turn}>{clean(text)}{tail}</text>'


def draw_box(x: float, y: float, width: float, height: float, style: str, radius: float = 0.0) -> str:
    """Return a rectangle."""
    size = f'width="{show_number(max(width, 0.0))}" height="{show_number(height)}" rx="{show_number(radius)}"'
    return f'<rect x="{show_number(x)}" y="{show_number(y)}" {size} class="{style}"/>'


def draw_group(parts: list[str], title: str = "", style: str = "") -> str:
    """Return shapes that belong together; the title is what a pointer held over them shows."""
    about = f"<title>{'&#10;'.join(clean(line) for line in title.splitlines())}</title>" if title else ""
    return f'<g class="{style}">{about}{"".join(parts)}</g>'


def draw_path(data: str, style: str) -> str:
    """Return a line or shape given as path data, which holds numbers and commands only."""
    return f'<path d="{data}" class="{style}"/>'


def show_number(value: float) -> str:
    """Return a coordinate: one decimal is finer than a screen shows, and keeps files small."""
    return f"{value:.1f}".removesuffix(".0")


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in _WIDE:
        return 1.05
    if letter in "il.,:;|!'()[] jtf":
        return 0.33
    return 0.82 if letter in "mwMW%@" else 0.64 if letter.isupper() else 0.58


LIMIT_NAMES = {
    "compute": "compute speed",
    "send": "sending (upload)",
    "receive": "receiving (download)",
    "relay": "relay through the hub",
    "latency": "waiting for answers",
    "memory": "memory",
}
_BOLD = 1.1  # a bold letter is that much wider
_SMALL = 10.5
_LEAST_LEVEL_WIDTH = 58.0  # of a box in which text can be level
_LEAST_TURNED_WIDTH = 13.0
_LEAST_HIGH = 90.0  # of a box with a line for every fact


def fill_box(stage: StageForecast, x: float, y: float, width: float, height: float) -> list[str]:
    """Return the shapes inside a stage's box."""
    if width < _LEAST_LEVEL_WIDTH:
        return _fill_narrow(stage, x, y, width, height)
    return _fill_high(stage, x, y, width) if height >= _LEAST_HIGH else _fill_low(stage, x, y, width)


def describe_stage(stage: StageForecast, where: str) -> str:
    """Return a tooltip: everything known about a stage, one fact per line."""
    hosted = stage.stage
    window = "1 batch" if hosted.window == 1 else f"{hosted.window} batches"
    times = (
        ("compute", stage.compute_seconds),
        ("send", stage.send_seconds),
        ("receive", stage.receive_seconds),
    )
    lines = (
        f"{hosted.node}: {where}",
        f"{show_positions(hosted.start, hosted.stop)}, at most {window} in flight",
        f"memory {_memory(stage)}" + (", activations are recomputed" if hosted.recompute else ""),
        "per batch: " + ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in times),
        f"{_busy(stage)}, limited by {LIMIT_NAMES[stage.limited_by]}",
    )
    return "\n".join(lines)


def show_positions(start: int, stop: int) -> str:
    """Return an interval as people count: both ends belong to it."""
    return f"position {start}" if stop == start + 1 else f"positions {start}–{stop - 1}"


def _fill_high(stage: StageForecast, x: float, y: float, width: float) -> list[str]:
    inside = width - 16
    positions = show_positions(stage.stage.start, stage.stage.stop)
    return [
        *_box_name(stage, x + 8, y + 19, inside),
        *_fact(x + 8, y + 34, inside, "s g", positions, positions.split()[1]),
        _bar(x + 8, y + 42, inside, 6, _used(stage), f"f-{stage.limited_by}"),
        *_fact(x + 8, y + 59, inside, "s", _memory(stage), show_bytes(stage.memory_bytes)),
        _bar(x + 8, y + 66, inside, 6, stage.busy_share, "busy"),
        *_fact(x + 8, y + 83, inside, "s", _busy(stage), _busy(stage).removesuffix(" busy")),
    ]


def _fill_low(stage: StageForecast, x: float, y: float, width: float) -> list[str]:
    inside = width - 16
    return [
        *_box_name(stage, x + 8, y + 18, inside),
        *_fact(x + 8, y + 34, inside, "s", f"{_memory(stage)}, {_busy(stage)}", _busy(stage)),
        _bar(x + 8, y + 44, inside, 5, _used(stage), f"f-{stage.limited_by}"),
        _bar(x + 8, y + 55, inside, 5, stage.busy_share, "busy"),
    ]


def _fill_narrow(stage: StageForecast, x: float, y: float, width: float, height: float) -> list[str]:
    inset = min(5.0, width / 5)
    bottom = y + height
    parts = [
        _bar(x + inset, bottom - 16, width - 2 * inset, 3.5, _used(stage), f"f-{stage.limited_by}"),
        _bar(x + inset, bottom - 9, width - 2 * inset, 3.5, stage.busy_share, "busy"),
    ]
    if width < _LEAST_TURNED_WIDTH:
        return parts
    size, style = (11.0, "s b m") if width >= 22 and height >= _LEAST_HIGH else (9.0, "xs m")
    text = shorten_text(stage.stage.node, height - 26, _BOLD * size)
    return [*parts, draw_label(x + width / 2 + 4, y + (height - 16) / 2, text, style, angle=-90)]


def _box_name(stage: StageForecast, x: float, y: float, width: float) -> list[str]:
    """Return the node's name, in smaller letters or cut in its middle if there is no room."""
    name = stage.stage.node
    if text_width(name, _BOLD * 12) <= width:
        return [draw_label(x, y, name, "b")]
    return [draw_label(x, y, shorten_text(name, width, _BOLD * _SMALL), "s b")]


def _fact(x: float, y: float, width: float, style: str, *texts: str) -> list[str]:
    """Return the first of the texts that fits, if any does."""
    fitting = next((text for text in texts if text_width(text, _SMALL) <= width), None)
    return [draw_label(x, y, fitting, style)] if fitting else []


def _bar(x: float, y: float, width: float, height: float, share: float, style: str) -> str:
    track = draw_box(x, y, width, height, "track", height / 2)
    return track + draw_box(x, y, width * min(share, 1.0), height, style, height / 2)


def _used(stage: StageForecast) -> float:
    return stage.memory_bytes / stage.available_bytes


def _memory(stage: StageForecast) -> str:
    return f"{show_bytes(stage.memory_bytes)} of {show_bytes(stage.available_bytes)}"


def _busy(stage: StageForecast) -> str:
    return f"{100 * stage.busy_share:.0f} % busy"


_MOST_CLUSTERS = 24
_MOST_SPARES = 36
_MOST_NAMED = 12  # owners in a tooltip
_MARGIN, _LEFT, _RIGHT = 28.0, 104.0, 168.0
_EVEN = 0.35  # of the width is shared equally by the segments, so that none is too narrow to see
_NUMBERED = 18.0  # least distance of two numbers on one line

_COLOURS = {  # a set that colour-blind people can tell apart
    "compute": ("#0072b2", "#e3f0f8"),
    "send": ("#d98200", "#fdf1dc"),
    "receive": ("#3a9fd8", "#e6f5fc"),
    "relay": ("#c8450a", "#fbe6dc"),
    "latency": ("#b0568c", "#f7e8f1"),
    "memory": ("#00866a", "#e0f3ee"),
}
_SIGNS = (
    ("f-memory", "memory used, in the colour of its limit"),
    ("busy", "how busy the device is"),
    ("dot", "a column of dots is a ring: the owners of one segment, who average it with each other"),
)
_STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1f2933}
.h{font-size:24px;font-weight:700}.n{font-size:20px;font-weight:700}.b{font-weight:700}.s{font-size:10.5px}
.xs{font-size:9px;font-weight:700}.unit{font-size:12px;font-weight:400;fill:#616e7c}.g{fill:#616e7c}.m{text-anchor:middle}.e{text-anchor:end}
.page{fill:#fff}.tile{fill:#f4f6f8}.warn{fill:#fff6e5;stroke:#f0c36d}.lane{fill:#f8fafb}
.bar{fill:#d5dce3}.bar2{fill:#c3ccd5}.track{fill:#fff;stroke:#c3ccd5;stroke-width:.6}
.cut{stroke:#9aa5b1;stroke-width:1;stroke-dasharray:1.5 3.5;fill:none}
.ring{stroke:#7b8794;stroke-width:1.2;fill:none;opacity:.55}.dot,.busy{fill:#52606d}.hop{fill:#52606d}
.chip{fill:#f4f6f8;stroke:#c3ccd5}.helps{fill:#e0f3ee;stroke:#00866a}.first{stroke-width:3.2!important}
"""


def draw_plan(plan: Plan, predicted: Forecast, profile: ModelProfile, swarm: Swarm) -> str:
    """Return the picture as SVG text."""
    return _Picture(plan, predicted, profile, swarm).draw()


@dataclass(frozen=True, slots=True)
class _Line:
    """Where each cut of the model's line lies on the page."""

    left: float
    width: float
    places: tuple[float, ...]  # of every cut, 0 to 1
    cuts: tuple[int, ...]  # that some cluster makes, both ends included

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, left: float, width: float) -> "_Line":
        stages = [stage for cluster in plan.clusters for stage in cluster.stages]
        cuts = {0, profile.num_positions} | {s.start for s in stages} | {s.stop for s in stages}
        ordered = tuple(sorted(cuts))
        places = [0.0]
        for start, stop in pairwise(ordered):
            weights = _weights(profile, start, stop)
            share = (1 - _EVEN) * sum(weights) + _EVEN / (len(ordered) - 1)
            for weight in weights:
                places.append(places[-1] + share * weight / sum(weights))
        return cls(left, width, tuple(places), ordered)

    def x(self, cut: int) -> float:
        return self.left + self.width * self.places[cut] / self.places[-1]

    def middle(self, start: int, stop: int) -> float:
        return (self.x(start) + self.x(stop)) / 2


def _weights(profile: ModelProfile, start: int, stop: int) -> list[float]:
    """Return the share of the line's width that each position deserves: by parameters, work and count."""
    parameters = sum(profile.parameter_bytes) or 1.0
    work = sum(profile.forward_flops) or 1.0
    return [
        0.4 * profile.parameter_bytes[k] / parameters
        + 0.4 * profile.forward_flops[k] / work
        + 0.2 / profile.num_positions
        for k in range(start, stop)
    ]


class _Picture:
    """Draws from top to bottom; `self._y` is how far the page is filled."""

    def __init__(self, plan: Plan, predicted: Forecast, profile: ModelProfile, swarm: Swarm) -> None:
        self._plan, self._predicted, self._profile, self._swarm = plan, predicted, profile, swarm
        self._shown = predicted.clusters[:_MOST_CLUSTERS]
        longest = max((len(cluster.stages) for cluster in self._shown), default=1)
        line_width = min(max(820.0, 78.0 * longest), 1640.0)
        self._line = _Line.of(plan, profile, _MARGIN + _LEFT, line_width)
        self._width = 2 * _MARGIN + _LEFT + line_width + _RIGHT
        self._box_height = 94.0 if len(self._shown) <= 8 else 70.0
        self._lane = 26.0 if plan.rings else 16.0
        self._relayed = set(relayed_pairs(plan, swarm))
        self._parts: list[str] = []
        self._y = 0.0

    def draw(self) -> str:
        self._draw_header()
        self._draw_legend()
        self._draw_clusters()
        self._draw_spares()
        about = f"Ravnest plan: {self._profile.name}, {show_samples(self._predicted.samples_per_second)}"
        size = f"{show_number(self._width)} {show_number(self._y + _MARGIN)}"
        width, height = size.split()
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" height="{height}"'
        )
        page = draw_box(0, 0, self._width, self._y + _MARGIN, "page")
        body = "\n".join(self._parts)
        limits = "".join(
            f".k-{limit}{{stroke:{dark};stroke-width:1.3;fill:{pale}}}.f-{limit}{{fill:{dark}}}"
            for limit, (dark, pale) in _COLOURS.items()
        )
        style = f"<style>{_STYLE}{limits}</style>"
        return f'{head} role="img">\n<title>{clean(about)}</title>\n{style}\n{page}\n{body}\n</svg>\n'

    def _draw_header(self) -> None:
        plan, predicted, profile = self._plan, self._predicted, self._profile
        inner = self._width - 2 * _MARGIN
        title = f"{profile.name} on {show_count(len(self._swarm.nodes), 'PC')}"
        self._parts.append(draw_label(_MARGIN, 48, fit(title, inner, 24), "h"))
        facts = (
            f"{show_count(profile.num_positions, 'position')}, {show_bytes(sum(profile.parameter_bytes))} of"
            f" parameters, {show_count(profile.samples_per_batch, 'sample')} per batch; plan {plan.plan_id},"
            f" seed {plan.seed}"
        )
        self._parts.append(draw_label(_MARGIN, 68, facts, "g"))
        training = sum(len(cluster.stages) for cluster in plan.clusters)
        rounds = show_seconds(predicted.round_seconds) if plan.rings else "none"
        at_most = " at most" if predicted.bottleneck and predicted.bottleneck.is_least else ""
        tiles = (
            (show_samples(predicted.samples_per_second), f"predicted{at_most} for the whole swarm"),
            (show_count(predicted.staleness, "update"), "staleness: how late a gradient may be"),
            (rounds, "a round of averaging" if plan.rings else "no rounds: one cluster only"),
            (
                show_count(len(plan.clusters), "cluster"),
                f"{show_count(training, 'node')} training, {len(plan.spares):,} spare",
            ),
        )
        width = (inner - 3 * 12) / 4
        for k, (big, small) in enumerate(tiles):
            x = _MARGIN + k * (width + 12)
            self._parts.append(draw_box(x, 84, width, 58, "tile", 8))
            self._parts.append(draw_label(x + 14, 110, big, "n"))
            self._parts.append(draw_label(x + 14, 130, fit(small, width - 20, 12), "g"))
        lines = wrap(f"Bottleneck: {describe_bottleneck(predicted)}.", inner - 28, 12)
        self._parts.append(draw_box(_MARGIN, 154, inner, 14 + 17 * len(lines), "warn", 8))
        for k, line in enumerate(lines):
            self._parts.append(draw_label(_MARGIN + 14, 173 + 17 * k, line))
        self._y = 168.0 + 17 * len(lines)

    def _draw_legend(self) -> None:
        y, x = self._y + 24, _MARGIN
        self._parts.append(draw_label(x, y, "A stage is limited by", "g"))
        x += 132
        for limit, name in LIMIT_NAMES.items():
            self._parts.append(draw_box(x, y - 10, 14, 12, f"k-{limit}", 3))
            self._parts.append(draw_label(x + 20, y, name))
            x += 38 + text_width(name, 12)
        y, x = y + 21, _MARGIN
        for style, meaning in _SIGNS if self._plan.rings else _SIGNS[:2]:
            width = 7 if style == "dot" else 22
            self._parts.append(draw_box(x, y - 7, width, 6, style, 3.5))
            self._parts.append(draw_label(x + width + 7, y, meaning, "g"))
            x += width + 34 + text_width(meaning, 12)
        self._y = y + 8

    def _draw_clusters(self) -> None:
        top = self._y + 40
        pitch = self._box_height + self._lane
        bottom = top + pitch * len(self._shown)
        self._draw_ruler(top - 14, bottom)
        for number, ring in enumerate(self._plan.rings, 1):
            self._draw_ring(number, ring, top, bottom)
        for k, cluster in enumerate(self._shown):
            self._draw_cluster(k, cluster, top + k * pitch)
        self._y = bottom
        if self._plan.rings:
            self._draw_ring_numbers(bottom + 8)
            self._y += 18
        missing = len(self._plan.clusters) - len(self._shown)
        if missing:
            more = f"and {show_count(missing, 'more cluster')} that the picture leaves out"
            self._parts.append(draw_label(self._line.left, self._y + 18, more, "b"))
            self._y += 26

    def _draw_ruler(self, y: float, bottom: float) -> None:
        """Draw the model's line with its positions, and every cut down through all rows."""
        line = self._line
        self._parts.append(draw_label(line.left - 12, y, "position", "s g e"))
        if self._profile.num_positions <= 512:
            for k in range(self._profile.num_positions):
                width = line.x(k + 1) - line.x(k)
                self._parts.append(draw_box(line.x(k), y - 5, width, 6, "bar" if k % 2 else "bar2"))
        else:
            self._parts.append(draw_box(line.x(0), y - 5, line.width, 6, "bar"))
        last = -_NUMBERED
        for cut in line.cuts:
            x = line.x(cut)
            self._parts.append(
                draw_path(f"M{show_number(x)} {show_number(y - 6)}V{show_number(bottom)}", "cut")
            )
            if x - last >= _NUMBERED + 4:
                self._parts.append(draw_label(x, y - 10, str(cut), "s g m"))
                last = x

    def _draw_ring(self, number: int, ring: Ring, top: float, bottom: float) -> None:
        x = show_number(self._line.middle(ring.start, ring.stop))
        dots = [
            top + (k + 1) * (self._box_height + self._lane) - self._lane / 2 for k in range(len(self._shown))
        ]
        parts = [draw_path(f"M{x} {show_number(dots[0])}V{show_number(bottom)}", "ring")]
        parts += [f'<circle cx="{x}" cy="{show_number(y)}" r="3.4" class="dot"/>' for y in dots]
        size = show_bytes(sum(self._profile.parameter_bytes[ring.start : ring.stop]))
        title = f"Ring {number}: {show_positions(ring.start, ring.stop)}, {size} of parameters"
        self._parts.append(draw_group(parts, f"{title}\n{_names(ring.owners)}"))

    def _draw_ring_numbers(self, y: float) -> None:
        self._parts.append(draw_label(self._line.left - 12, y, "ring", "s g e"))
        last = -_NUMBERED
        for number, ring in enumerate(self._plan.rings, 1):
            x = self._line.middle(ring.start, ring.stop)
            if x - last >= _NUMBERED:
                self._parts.append(draw_label(x, y, str(number), "s m"))
                last = x

    def _draw_cluster(self, k: int, cluster: ClusterForecast, y: float) -> None:
        height, stages = self._box_height, cluster.stages
        middle = y + height / 2
        parts = [
            draw_label(_MARGIN, middle - 2, f"Cluster {cluster_name(k)}", "b"),
            draw_label(_MARGIN, middle + 14, show_count(len(stages), "stage"), "s g"),
        ]
        x = self._line.left + self._line.width + 16
        rate, unit = show_samples(cluster.samples_per_second).split()
        batches = show_count(self._plan.clusters[k].accumulate, "batch").replace("batchs", "batches")
        parts += [
            draw_label(x, middle - 8, rate, "n", unit=unit),
            draw_label(x, middle + 8, f"a batch each {show_seconds(cluster.period_seconds)}", "s g"),
            draw_label(x, middle + 22, f"lag {cluster.lag}, {batches} per update", "s g"),
        ]
        self._parts.append(draw_group(parts))
        for index, stage in enumerate(stages):
            self._draw_stage(k, index, stage, y)
        for one, other in pairwise(stages):
            self._draw_hop(one.stage.node, other.stage.node, self._line.x(other.stage.start), middle)

    def _draw_hop(self, one: NodeId, other: NodeId, x: float, y: float) -> None:
        is_relayed = (one, other) in self._relayed
        shape = f"M{show_number(x - 4)} {show_number(y - 5)}l8 5l-8 5z"
        title = f"{one} to {other}" + (
            ", through the hub: nobody can dial either of them" if is_relayed else ""
        )
        arrow = draw_path(shape, "f-relay" if is_relayed else "hop")
        self._parts.append(draw_group([arrow], title))

    def _draw_stage(self, k: int, index: int, stage: StageForecast, y: float) -> None:
        left, right = self._line.x(stage.stage.start), self._line.x(stage.stage.stop)
        gap = min(5.0, 0.16 * (right - left))
        x, width = left + gap, right - left - 2 * gap
        found = self._predicted.bottleneck
        is_bottleneck = found is not None and (found.cluster, found.node) == (k, stage.stage.node)
        style = f"k-{stage.limited_by}" + (" first" if is_bottleneck else "")
        parts = [draw_box(x, y, width, self._box_height, style, min(8.0, width / 4))]
        parts += fill_box(stage, x, y, width, self._box_height)
        where = f"Stage {index + 1} of cluster {cluster_name(k)}" + (
            ", the bottleneck" if is_bottleneck else ""
        )
        self._parts.append(draw_group(parts, describe_stage(stage, where)))

    def _draw_spares(self) -> None:
        spares = self._plan.spares
        if not spares:
            return
        helps = {backup.spare: backup.node for backup in self._plan.backups}
        ordered = sorted(spares, key=lambda name: name not in helps)  # the ones with a task first
        x, y = _MARGIN, self._y + 34
        self._parts.append(draw_label(x, y, show_count(len(spares), "spare"), "b"))
        y += 12
        for name in ordered[:_MOST_SPARES]:
            task = f" backs up {helps[name]}" if name in helps else ""
            shown = shorten_text(name, 190, 11) + (task and f" backs up {shorten_text(helps[name], 190, 11)}")
            width = text_width(shown, 11) + 22
            if x + width > self._width - _MARGIN and x > _MARGIN:
                x, y = _MARGIN, y + 30
            chip = [draw_box(x, y, width, 23, "helps" if task else "chip", 11.5)]
            chip.append(draw_label(x + 11, y + 15.5, shown, "s"))
            self._parts.append(draw_group(chip, name + task))
            x += width + 8
        missing = len(spares) - _MOST_SPARES
        if missing > 0:
            self._parts.append(draw_label(_MARGIN, y + 44, f"and {show_count(missing, 'more spare')}", "g"))
            y += 24
        self._y = y + 24


def _names(names: tuple[NodeId, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return " → ".join(names[:_MOST_NAMED]) + more
