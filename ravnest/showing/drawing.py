"""A plan as one self-contained SVG picture: who holds which part of the model, and who averages with whom.

From left to right runs the model's line, one row per cluster, one box per stage. Dotted lines are the
segments' borders; below each row every segment has a dot, and the dots of one column are a ring.
"""

from dataclasses import dataclass
from itertools import pairwise

from ravnest.plan.forecast import ClusterForecast, Forecast, StageForecast
from ravnest.plan.types import ModelProfile, NodeId, Plan, Ring, Swarm, cluster_name
from ravnest.showing import svg
from ravnest.showing.boxes import LIMIT_NAMES, describe_stage, fill_box, show_positions
from ravnest.showing.report import describe_bottleneck, relayed_pairs, show_count, show_samples
from ravnest.units import show_bytes, show_seconds

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
        size = f"{svg.number(self._width)} {svg.number(self._y + _MARGIN)}"
        width, height = size.split()
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" height="{height}"'
        )
        page = svg.box(0, 0, self._width, self._y + _MARGIN, "page")
        body = "\n".join(self._parts)
        limits = "".join(
            f".k-{limit}{{stroke:{dark};stroke-width:1.3;fill:{pale}}}.f-{limit}{{fill:{dark}}}"
            for limit, (dark, pale) in _COLOURS.items()
        )
        style = f"<style>{_STYLE}{limits}</style>"
        return f'{head} role="img">\n<title>{svg.clean(about)}</title>\n{style}\n{page}\n{body}\n</svg>\n'

    def _draw_header(self) -> None:
        plan, predicted, profile = self._plan, self._predicted, self._profile
        inner = self._width - 2 * _MARGIN
        title = f"{profile.name} on {show_count(len(self._swarm.nodes), 'PC')}"
        self._parts.append(svg.label(_MARGIN, 48, svg.fit(title, inner, 24), "h"))
        facts = (
            f"{show_count(profile.num_positions, 'position')}, {show_bytes(sum(profile.parameter_bytes))} of"
            f" parameters, {show_count(profile.samples_per_batch, 'sample')} per batch; plan {plan.epoch},"
            f" seed {plan.seed}"
        )
        self._parts.append(svg.label(_MARGIN, 68, facts, "g"))
        training = sum(len(cluster.stages) for cluster in plan.clusters)
        rounds = show_seconds(predicted.round_seconds) if plan.rings else "none"
        tiles = (
            (show_samples(predicted.samples_per_second), "predicted for the whole swarm"),
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
            self._parts.append(svg.box(x, 84, width, 58, "tile", 8))
            self._parts.append(svg.label(x + 14, 110, big, "n"))
            self._parts.append(svg.label(x + 14, 130, svg.fit(small, width - 20, 12), "g"))
        lines = svg.wrap(f"Bottleneck: {describe_bottleneck(predicted)}.", inner - 28, 12)
        self._parts.append(svg.box(_MARGIN, 154, inner, 14 + 17 * len(lines), "warn", 8))
        for k, line in enumerate(lines):
            self._parts.append(svg.label(_MARGIN + 14, 173 + 17 * k, line))
        self._y = 168.0 + 17 * len(lines)

    def _draw_legend(self) -> None:
        y, x = self._y + 24, _MARGIN
        self._parts.append(svg.label(x, y, "A stage is limited by", "g"))
        x += 132
        for limit, name in LIMIT_NAMES.items():
            self._parts.append(svg.box(x, y - 10, 14, 12, f"k-{limit}", 3))
            self._parts.append(svg.label(x + 20, y, name))
            x += 38 + svg.text_width(name, 12)
        y, x = y + 21, _MARGIN
        for style, meaning in _SIGNS if self._plan.rings else _SIGNS[:2]:
            width = 7 if style == "dot" else 22
            self._parts.append(svg.box(x, y - 7, width, 6, style, 3.5))
            self._parts.append(svg.label(x + width + 7, y, meaning, "g"))
            x += width + 34 + svg.text_width(meaning, 12)
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
            self._parts.append(svg.label(self._line.left, self._y + 18, more, "b"))
            self._y += 26

    def _draw_ruler(self, y: float, bottom: float) -> None:
        """Draw the model's line with its positions, and every cut down through all rows."""
        line = self._line
        self._parts.append(svg.label(line.left - 12, y, "position", "s g e"))
        if self._profile.num_positions <= 512:
            for k in range(self._profile.num_positions):
                width = line.x(k + 1) - line.x(k)
                self._parts.append(svg.box(line.x(k), y - 5, width, 6, "bar" if k % 2 else "bar2"))
        else:
            self._parts.append(svg.box(line.x(0), y - 5, line.width, 6, "bar"))
        last = -_NUMBERED
        for cut in line.cuts:
            x = line.x(cut)
            self._parts.append(svg.path(f"M{svg.number(x)} {svg.number(y - 6)}V{svg.number(bottom)}", "cut"))
            if x - last >= _NUMBERED + 4:
                self._parts.append(svg.label(x, y - 10, str(cut), "s g m"))
                last = x

    def _draw_ring(self, number: int, ring: Ring, top: float, bottom: float) -> None:
        x = svg.number(self._line.middle(ring.start, ring.stop))
        dots = [
            top + (k + 1) * (self._box_height + self._lane) - self._lane / 2 for k in range(len(self._shown))
        ]
        parts = [svg.path(f"M{x} {svg.number(dots[0])}V{svg.number(bottom)}", "ring")]
        parts += [f'<circle cx="{x}" cy="{svg.number(y)}" r="3.4" class="dot"/>' for y in dots]
        size = show_bytes(sum(self._profile.parameter_bytes[ring.start : ring.stop]))
        title = f"Ring {number}: {show_positions(ring.start, ring.stop)}, {size} of parameters"
        self._parts.append(svg.group(parts, f"{title}\n{_names(ring.owners)}"))

    def _draw_ring_numbers(self, y: float) -> None:
        self._parts.append(svg.label(self._line.left - 12, y, "ring", "s g e"))
        last = -_NUMBERED
        for number, ring in enumerate(self._plan.rings, 1):
            x = self._line.middle(ring.start, ring.stop)
            if x - last >= _NUMBERED:
                self._parts.append(svg.label(x, y, str(number), "s m"))
                last = x

    def _draw_cluster(self, k: int, cluster: ClusterForecast, y: float) -> None:
        height, stages = self._box_height, cluster.stages
        middle = y + height / 2
        parts = [
            svg.label(_MARGIN, middle - 2, f"Cluster {cluster_name(k)}", "b"),
            svg.label(_MARGIN, middle + 14, show_count(len(stages), "stage"), "s g"),
        ]
        x = self._line.left + self._line.width + 16
        rate, unit = show_samples(cluster.samples_per_second).split()
        batches = show_count(self._plan.clusters[k].accumulate, "batch").replace("batchs", "batches")
        parts += [
            svg.label(x, middle - 8, rate, "n", unit=unit),
            svg.label(x, middle + 8, f"a batch each {show_seconds(cluster.period_seconds)}", "s g"),
            svg.label(x, middle + 22, f"lag {cluster.lag}, {batches} per update", "s g"),
        ]
        self._parts.append(svg.group(parts))
        for index, stage in enumerate(stages):
            self._draw_stage(k, index, stage, y)
        for one, other in pairwise(stages):
            self._draw_hop(one.stage.node, other.stage.node, self._line.x(other.stage.start), middle)

    def _draw_hop(self, one: NodeId, other: NodeId, x: float, y: float) -> None:
        is_relayed = (one, other) in self._relayed
        shape = f"M{svg.number(x - 4)} {svg.number(y - 5)}l8 5l-8 5z"
        title = f"{one} to {other}" + (
            ", through the hub: nobody can dial either of them" if is_relayed else ""
        )
        arrow = svg.path(shape, "f-relay" if is_relayed else "hop")
        self._parts.append(svg.group([arrow], title))

    def _draw_stage(self, k: int, index: int, stage: StageForecast, y: float) -> None:
        left, right = self._line.x(stage.stage.start), self._line.x(stage.stage.stop)
        gap = min(5.0, 0.16 * (right - left))
        x, width = left + gap, right - left - 2 * gap
        found = self._predicted.bottleneck
        is_bottleneck = found is not None and (found.cluster, found.node) == (k, stage.stage.node)
        style = f"k-{stage.limited_by}" + (" first" if is_bottleneck else "")
        parts = [svg.box(x, y, width, self._box_height, style, min(8.0, width / 4))]
        parts += fill_box(stage, x, y, width, self._box_height)
        where = f"Stage {index + 1} of cluster {cluster_name(k)}" + (
            ", the bottleneck" if is_bottleneck else ""
        )
        self._parts.append(svg.group(parts, describe_stage(stage, where)))

    def _draw_spares(self) -> None:
        spares = self._plan.spares
        if not spares:
            return
        helps = {backup.spare: backup.node for backup in self._plan.backups}
        ordered = sorted(spares, key=lambda name: name not in helps)  # the ones with a task first
        x, y = _MARGIN, self._y + 34
        self._parts.append(svg.label(x, y, show_count(len(spares), "spare"), "b"))
        y += 12
        for name in ordered[:_MOST_SPARES]:
            task = f" backs up {helps[name]}" if name in helps else ""
            shown = svg.shorten(name, 190, 11) + (task and f" backs up {svg.shorten(helps[name], 190, 11)}")
            width = svg.text_width(shown, 11) + 22
            if x + width > self._width - _MARGIN and x > _MARGIN:
                x, y = _MARGIN, y + 30
            chip = [svg.box(x, y, width, 23, "helps" if task else "chip", 11.5)]
            chip.append(svg.label(x + 11, y + 15.5, shown, "s"))
            self._parts.append(svg.group(chip, name + task))
            x += width + 8
        missing = len(spares) - _MOST_SPARES
        if missing > 0:
            self._parts.append(svg.label(_MARGIN, y + 44, f"and {show_count(missing, 'more spare')}", "g"))
            y += 24
        self._y = y + 24


def _names(names: tuple[NodeId, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return " → ".join(names[:_MOST_NAMED]) + more
