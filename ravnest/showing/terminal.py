"""How a plan looks in a terminal: tables and paragraphs that `ravnest plan` prints. Prints nothing itself.

Node names come from strangers, so the console that prints this must not interpret markup.
"""

import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.plan.forecast import ClusterForecast, Forecast, StageForecast
from ravnest.plan.types import ModelProfile, Plan, cluster_name
from ravnest.showing.report import describe_bottleneck, describe_round, show_count, show_samples
from ravnest.units import show_bytes, show_seconds

_MOST_CLUSTERS = 12  # shown stage by stage; of more, as many lines
_MOST_NAMES = 8  # of spares and backups
_LABEL_WIDTH = 12
_ROOMY_WIDTH = 100
_LEAST_NAME = 6
_NAMES = ("node", "slowest node")
_WORDS = (*_NAMES, "cluster", "limit")


def show_plan(
    plan: Plan, predicted: Forecast, profile: ModelProfile, advice: tuple[str, ...], width: int
) -> Iterator[RenderableType]:
    """Yield what to print, from the model down to the advice, for a terminal of `width` columns."""
    nodes = sum(len(cluster.stages) for cluster in plan.clusters) + len(plan.spares)
    size = show_bytes(sum(profile.parameter_bytes))
    batch = show_count(profile.samples_per_batch, "sample")
    yield Text(f"{profile.name} on {show_count(nodes, 'node')}", style="bold")
    yield Text(f"{show_count(profile.num_positions, 'position')}, {size} of parameters, {batch} per batch\n")
    if len(plan.clusters) > _MOST_CLUSTERS:
        yield from _show_summary(predicted, width)
    else:
        for k, cluster in enumerate(predicted.clusters):
            yield from _show_cluster(k, cluster, plan.clusters[k].accumulate, width)
    for label, text in _findings(plan, predicted, advice):
        margin = " " * (_LABEL_WIDTH + (2 if text.startswith("- ") else 0))
        lines = textwrap.wrap(text, max(width - len(margin), 20), break_on_hyphens=False)
        yield Text.assemble((label.ljust(_LABEL_WIDTH), "bold"), f"\n{margin}".join(lines))


def _show_cluster(
    index: int, cluster: ClusterForecast, accumulate: int, width: int
) -> Iterator[RenderableType]:
    updates = "every batch" if accumulate == 1 else f"every {accumulate} batches"
    pace = f"a batch each {show_seconds(cluster.period_seconds)}, an update {updates}, lag {cluster.lag}"
    title = (f"Cluster {cluster_name(index)}", "bold")
    yield Text.assemble(title, f"  {show_samples(cluster.samples_per_second)}, {pace}")
    headers = ("#", "node", "positions", "memory", "compute", "send", "receive", "busy", "limit")
    rows = [(str(number), *_stage_row(stage)) for number, stage in enumerate(cluster.stages, 1)]
    yield _table(width, headers, rows)
    yield ""


def _stage_row(stage: StageForecast) -> tuple[str, ...]:
    start, last = stage.stage.start, stage.stage.stop - 1
    return (
        stage.stage.node,
        f"{start}-{last}" if last > start else str(start),
        f"{stage.memory_bytes / 1e9:.1f}/{stage.available_bytes / 1e9:.1f} GB",
        show_seconds(stage.compute_seconds),
        show_seconds(stage.send_seconds),
        show_seconds(stage.receive_seconds),
        f"{100 * stage.busy_share:.0f} %",
        stage.limited_by,
    )


def _show_summary(predicted: Forecast, width: int) -> Iterator[RenderableType]:
    """Yield one line per cluster, for swarms whose stages would fill pages."""
    headers = ("cluster", "stages", "samples/s", "batch each", "lag", "slowest node", "limit")
    rows = []
    for k, cluster in enumerate(predicted.clusters[:_MOST_CLUSTERS]):
        slowest = max(cluster.stages, key=lambda s: max(s.compute_seconds, s.send_seconds, s.receive_seconds))
        pace = f"{cluster.samples_per_second:.3g}", show_seconds(cluster.period_seconds), str(cluster.lag)
        count = str(len(cluster.stages))
        rows.append((cluster_name(k), count, *pace, slowest.stage.node, slowest.limited_by))
    yield _table(width, headers, rows)
    rest = [cluster.samples_per_second for cluster in predicted.clusters[_MOST_CLUSTERS:]]
    speed = (
        f"{min(rest):.3g} to {max(rest):.3g} samples/s" if min(rest) < max(rest) else show_samples(rest[0])
    )
    yield Text(f"and {show_count(len(rest), 'more cluster')} of {speed}; --json lists every stage\n")


def _table(width: int, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table in which names, and nothing else, are cut short when the terminal is narrow."""
    gap = 2 if width >= _ROOMY_WIDTH else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    needed = [max(map(cell_len, column)) for column in zip(headers, *rows, strict=True)]
    for header, size in zip(headers, needed, strict=True):
        is_name = header in _NAMES
        room = width - sum(needed) + size - gap * (len(headers) - 1) if is_name else size
        table.add_column(
            Text(header, style="dim"),
            justify="left" if header in _WORDS else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=max(min(size, _LEAST_NAME), min(size, room)),
        )
    for row in rows:
        table.add_row(*row)
    return table


def _findings(plan: Plan, predicted: Forecast, advice: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield "predicted", show_samples(predicted.samples_per_second)
    yield "staleness", f"{show_count(predicted.staleness, 'update')} at most"
    yield "round", describe_round(predicted)
    yield "deaths", f"cost about {100 * predicted.lost_share:.2g} % of the work"
    yield "bottleneck", describe_bottleneck(predicted)
    yield "spares", _some(plan.spares)
    yield "backups", _some([f"{backup.spare} for {backup.node}" for backup in plan.backups])
    for number, sentence in enumerate(advice):
        yield ("" if number else "advice"), f"- {sentence}"


def _some(names: Sequence[str]) -> str:
    """Return a list as people read one: the first few, and how many more."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more or "none"
