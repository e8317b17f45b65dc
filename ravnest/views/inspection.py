"""A captured model before any peer joins: what a cut costs, and what providers are asked to run.

For each stage it shows what its provider would notice: work, memory, traffic, operators. A cut into equal
stages stands in for a plan. It gets records and returns what to print; docs/inspect.md explains every number.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.blueprint.operators import ALLOWED_SCHEMAS
from ravnest.model.blueprint.program import PARAMETER, Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.plan.files import profile_to_dict
from ravnest.plan.split import best_cuts
from ravnest.plan.types import ModelProfile
from ravnest.units import show_bytes, show_count, show_flops

INSPECTION_SCHEMA = "ravnest.inspect/1"

_TRAINED_COPIES = 4  # weights, gradient and the two moments of AdamW
_MOST_ROWS = 32  # of the line; of a longer one, kinds of positions, the heaviest
_MOST_SIZES = 6  # of blueprints; of more, the smallest and the largest
_LONGEST_NAME = 64  # in a profile file
_LABEL_WIDTH = 12
_LEAST_WIDTH = 20
_ROOMY_WIDTH = 100
_LEAST_NAME = 8
_NUMBER = re.compile(r"\b\d+\b")
_WORDS = ("fields", "name")  # columns of words, which may be cut short


@dataclass(frozen=True, slots=True)
class StageFacts:
    """One stage of the cut: its blueprint and, per batch, what it asks of a node."""

    blueprint: Blueprint
    parameter_bytes: int
    work_share: float
    state_bytes: int
    saved_bytes: float
    receive_bytes: float
    send_bytes: float
    fields: tuple[str, ...]
    blueprint_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect` found out."""

    blueprint: Blueprint
    profile: ModelProfile
    stages: tuple[StageFacts, ...]
    operators: Mapping[str, int]
    notes: tuple[str, ...]


def inspect_model(
    blueprint: Blueprint, profile: ModelProfile, notes: tuple[str, ...], num_stages: int
) -> Inspection:
    """Cut a whole model for equal nodes and find out what each stage is."""
    cuts = best_cuts(profile, num_stages)
    stages = tuple(_look_at(slice_blueprint(blueprint, *pair), profile) for pair in pairwise(cuts))
    return Inspection(blueprint, profile, stages, count_operators(blueprint), notes)


def count_operators(blueprint: Blueprint) -> dict[str, int]:
    """Return how often each operator runs, in training or in evaluation, whichever is more."""
    train, evaluate = (
        Counter(op.name for op in program.ops) for program in (blueprint.train, blueprint.evaluate)
    )
    return dict(sorted((train | evaluate).items()))


def group_operators(names: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names under the headings of the allow-list, in its order."""
    groups: dict[str, list[str]] = {}
    for line in ALLOWED_SCHEMAS.splitlines():
        if line.startswith("# "):
            heading = line[2:]
            continue
        base, dot, overload = line.partition("(")[0].removeprefix("aten::").partition(".")
        name = f"aten.{base}.{overload if dot else 'default'}"
        if name in names:
            groups.setdefault(heading, []).append(name)
    return groups


def inspection_to_dict(inspection: Inspection) -> dict[str, object]:
    """Return everything as plain values for JSON."""
    return {
        "schema": INSPECTION_SCHEMA,
        "model": inspection.blueprint.name,
        "parameters": _num_parameters(inspection.blueprint),
        "parameter_bytes": _parameter_bytes(inspection.blueprint),
        "batch_size": inspection.profile.samples_per_batch,
        "positions": inspection.profile.num_positions,
        "operators": dict(inspection.operators),
        "profile": named_profile(inspection),
        "stages": [_stage_to_dict(stage) for stage in inspection.stages],
        "notes": list(inspection.notes),
    }


def named_profile(inspection: Inspection) -> dict[str, object]:
    """Return the profile as `ravnest plan --model` reads it, with the name of each position for people."""
    document = profile_to_dict(inspection.profile)
    positions = document["position"]
    assert isinstance(positions, list)
    names = _position_names(inspection.blueprint)
    named = [{"name": name[-_LONGEST_NAME:], **entry} for name, entry in zip(names, positions, strict=True)]
    return {**document, "position": named}


def show_inspection(inspection: Inspection, width: int) -> Iterator[RenderableType]:
    """Yield what to print, from the model down to its line, for a terminal of `width` columns."""
    blueprint, profile = inspection.blueprint, inspection.profile
    facts = (
        f"{show_count(_num_parameters(blueprint), 'parameter')} ({show_bytes(_parameter_bytes(blueprint))})",
        show_count(profile.num_positions, "position"),
        show_count(len(blueprint.train.ops), "operation"),
        f"{show_count(profile.samples_per_batch, 'sample')} per batch",
    )
    yield Text(blueprint.name, style="bold")
    yield Text("\n".join(_wrap(", ".join(facts), width)))
    for note in inspection.notes:
        yield _paragraph("note", note, width)
    yield Text.assemble("\n", (f"Cut into {show_count(len(inspection.stages), 'equal stage')}", "bold"))
    headers = ("#", "positions", "parameters", "work", "state", "saved", "receive", "send", "fields")
    rows = [(str(number), *_stage_row(stage)) for number, stage in enumerate(inspection.stages, 1)]
    yield _table(width, headers, rows, dropped=("saved", "state", "parameters"))
    yield ""
    for label, text in _explain(inspection):
        yield _paragraph(label, text, width)
    yield from _show_line(inspection, width)


def _look_at(stage: Blueprint, profile: ModelProfile) -> StageFacts:
    batch = profile.samples_per_batch
    flops = [sum(pair) for pair in zip(profile.forward_flops, profile.backward_flops, strict=True)]
    values = stage.train.values
    fields = {name: values[value].bytes_at(batch) for value, name in stage.train.fields}
    before = 0.0 if stage.is_first else profile.crossing_bytes[stage.start]
    others = {name: 0 for _, name in stage.evaluate.fields}
    return StageFacts(
        blueprint=stage,
        parameter_bytes=_parameter_bytes(stage),
        work_share=sum(flops[stage.start : stage.stop]) / (sum(flops) or 1.0),
        state_bytes=sum(
            entry.size_bytes * (_TRAINED_COPIES if entry.is_trainable else 1) for entry in stage.state
        ),
        saved_bytes=sum(profile.saved_bytes[stage.start : stage.stop]),
        receive_bytes=before + sum(fields.values()),
        send_bytes=0.0 if stage.is_last else profile.crossing_bytes[stage.stop],
        fields=tuple(others | fields),
        blueprint_bytes=len(write_blueprint(stage)),
    )


def _num_parameters(blueprint: Blueprint) -> int:
    return sum(prod(entry.shape) for entry in blueprint.state if entry.kind == PARAMETER)


def _parameter_bytes(blueprint: Blueprint) -> int:
    return sum(entry.size_bytes for entry in blueprint.state if entry.kind == PARAMETER)


def _stage_to_dict(stage: StageFacts) -> dict[str, object]:
    return {
        "start": stage.blueprint.start,
        "stop": stage.blueprint.stop,
        "parameter_bytes": stage.parameter_bytes,
        "work_share": stage.work_share,
        "state_bytes": stage.state_bytes,
        "saved_bytes": stage.saved_bytes,
        "receive_bytes": stage.receive_bytes,
        "send_bytes": stage.send_bytes,
        "fields": list(stage.fields),
        "shared": list(stage.blueprint.shared),
        "operators": count_operators(stage.blueprint),
        "blueprint_bytes": stage.blueprint_bytes,
    }


def _stage_row(stage: StageFacts) -> tuple[str, ...]:
    start, last = stage.blueprint.start, stage.blueprint.stop - 1
    return (
        f"{start}-{last}" if last > start else str(start),
        show_bytes(stage.parameter_bytes),
        f"{100 * stage.work_share:.0f} %",
        show_bytes(stage.state_bytes),
        show_bytes(stage.saved_bytes),
        show_bytes(stage.receive_bytes),
        show_bytes(stage.send_bytes) if stage.send_bytes else "-",
        ", ".join(stage.fields) or "-",
    )


def _explain(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "state", "weights, gradients and AdamW's two moments"
    yield "saved", "what each batch in flight keeps for its backward"
    if len(inspection.stages) > 1:
        yield "send", "values go to the next stage; gradients of the same size come back"
    for name, holders in _holders(inspection).items():
        yield "shared", f"{name} is held by stages {' and '.join(holders)}, which keep it equal"
    kinds = show_count(len(inspection.operators), "operator")
    yield "providers", f"run these {kinds} and nothing else; no Python code, no file or network access:"
    for heading, names in group_operators(inspection.operators).items():
        counted = ", ".join(f"{_short(name)} {inspection.operators[name]}" for name in names)
        yield "", f"- {heading}: {counted}"
    sizes = [stage.blueprint_bytes for stage in inspection.stages]
    if len(sizes) > _MOST_SIZES:
        yield "blueprints", f"{show_bytes(min(sizes))} to {show_bytes(max(sizes))} of JSON for each stage"
    else:
        yield "blueprints", f"{', '.join(map(show_bytes, sizes))} of JSON, stage by stage"


def _holders(inspection: Inspection) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, stage in enumerate(inspection.stages, 1):
        for name in stage.blueprint.shared:
            found.setdefault(name, []).append(str(number))
    return found


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _show_line(inspection: Inspection, width: int) -> Iterator[RenderableType]:
    profile = inspection.profile
    rows = _line_rows(inspection)
    yield Text.assemble("\n", ("The line, per batch", "bold"))
    figures = ("parameters", "forward", "backward", "saved", "crosses")
    if len(rows) <= _MOST_ROWS:
        stages = [
            str(number)
            for number, stage in enumerate(inspection.stages, 1)
            for _ in range(stage.blueprint.start, stage.blueprint.stop)
        ]
        whole = [(str(k), stages[k], *row) for k, row in enumerate(rows)]
        yield _table(width, ("#", "stage", "name", *figures), whole, dropped=("saved", "backward", "stage"))
        return
    groups = _group_rows(rows)
    weight = _weigh(profile)
    ranking = sorted(groups, key=lambda key: -sum(weight[place] for place in groups[key]))
    shown = sorted(ranking[:_MOST_ROWS], key=lambda key: groups[key])
    alike = [(f"{len(groups[key])} x", *key) for key in shown]
    yield _table(width, ("times", "name", *figures), alike, dropped=("saved", "backward"))
    rest = profile.num_positions - sum(len(groups[key]) for key in shown)
    if rest:
        lighter = f"and {show_count(rest, 'lighter position')}; --json lists every one"
        yield Text("\n".join(_wrap(lighter, width)))


def _line_rows(inspection: Inspection) -> list[tuple[str, ...]]:
    profile = inspection.profile
    crossing = [*(show_bytes(size) for size in profile.crossing_bytes[1:-1]), "-"]
    return [
        (
            name or "-",
            show_bytes(profile.parameter_bytes[k]),
            show_flops(profile.forward_flops[k]).removesuffix("/s"),
            show_flops(profile.backward_flops[k]).removesuffix("/s"),
            show_bytes(profile.saved_bytes[k]),
            crossing[k],
        )
        for k, name in enumerate(_position_names(inspection.blueprint))
    ]


def _group_rows(rows: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Return the positions of each kind: those alike in every figure and, up to numbers, in their name."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, (name, *figures) in enumerate(rows):
        groups.setdefault((_NUMBER.sub("*", name), *figures), []).append(position)
    return groups


def _weigh(profile: ModelProfile) -> list[float]:
    """Return each position's share of the work, the parameters or the saved bytes, whichever is largest."""
    columns = (profile.forward_flops, profile.parameter_bytes, profile.saved_bytes)
    shares = [[value / (sum(column) or 1.0) for value in column] for column in columns]
    return [max(share) for share in zip(*shares, strict=True)]


def _position_names(blueprint: Blueprint) -> list[str]:
    """Return the modules whose parameters each position uses."""
    found: list[dict[str, None]] = [{} for _ in range(blueprint.num_positions)]
    for entry in blueprint.state:
        if entry.kind == PARAMETER or entry.is_written:
            module = entry.name.rpartition(".")[0] or entry.name
            for position in entry.positions:
                found[position][module] = None
    return [", ".join(modules) for modules in found]


def _table(
    width: int, headers: Sequence[str], rows: Sequence[Sequence[str]], dropped: Sequence[str]
) -> Table:
    """Return a table; in a narrow terminal words are cut short, then columns dropped, in this order."""
    gap = 2 if width >= _ROOMY_WIDTH else 1
    columns = {header: column for header, *column in zip(headers, *rows, strict=True)}
    sizes = {header: max(map(cell_len, (header, *column))) for header, column in columns.items()}
    for header in dropped:
        least = sum(min(size, _LEAST_NAME) if name in _WORDS else size for name, size in sizes.items())
        if least + gap * (len(sizes) - 1) > width:
            del sizes[header]
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    room = width - gap * (len(sizes) - 1) - sum(size for name, size in sizes.items() if name not in _WORDS)
    for header, size in sizes.items():
        is_word = header in _WORDS
        if is_word:
            sizes[header] = max(min(size, room), min(size, _LEAST_NAME))
        table.add_column(
            Text(header, style="dim"),
            justify="left" if is_word else "right",
            no_wrap=True,
            width=sizes[header],
        )
    for row in zip(*(columns[header] for header in sizes), strict=True):
        table.add_row(*(_shorten(cell, size) for cell, size in zip(row, sizes.values(), strict=True)))
    return table


def _shorten(text: str, size: int) -> str:
    """Return the end of a text that is too long: names of modules begin alike."""
    return text if cell_len(text) <= size else "…" + text[len(text) - size + 1 :]


def _paragraph(label: str, text: str, width: int) -> Text:
    margin = " " * (_LABEL_WIDTH + (2 if text.startswith("- ") else 0))
    lines = _wrap(text, width - len(margin))
    return Text.assemble((label.ljust(_LABEL_WIDTH), "bold"), f"\n{margin}".join(lines))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _LEAST_WIDTH), break_on_hyphens=False)
