"""What stands in the box of one stage: as much as its size lets a person read, the rest in a tooltip."""

from ravnest.plan.forecast import StageForecast
from ravnest.showing import svg
from ravnest.units import show_bytes, show_seconds

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
        *_name(stage, x + 8, y + 19, inside),
        *_fact(x + 8, y + 34, inside, "s g", positions, positions.split()[1]),
        _bar(x + 8, y + 42, inside, 6, _used(stage), f"f-{stage.limited_by}"),
        *_fact(x + 8, y + 59, inside, "s", _memory(stage), show_bytes(stage.memory_bytes)),
        _bar(x + 8, y + 66, inside, 6, stage.busy_share, "busy"),
        *_fact(x + 8, y + 83, inside, "s", _busy(stage), _busy(stage).removesuffix(" busy")),
    ]


def _fill_low(stage: StageForecast, x: float, y: float, width: float) -> list[str]:
    inside = width - 16
    return [
        *_name(stage, x + 8, y + 18, inside),
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
    text = svg.shorten(stage.stage.node, height - 26, _BOLD * size)
    return [*parts, svg.label(x + width / 2 + 4, y + (height - 16) / 2, text, style, angle=-90)]


def _name(stage: StageForecast, x: float, y: float, width: float) -> list[str]:
    """Return the node's name, in smaller letters or cut in its middle if there is no room."""
    name = stage.stage.node
    if svg.text_width(name, _BOLD * 12) <= width:
        return [svg.label(x, y, name, "b")]
    return [svg.label(x, y, svg.shorten(name, width, _BOLD * _SMALL), "s b")]


def _fact(x: float, y: float, width: float, style: str, *texts: str) -> list[str]:
    """Return the first of the texts that fits, if any does."""
    fitting = next((text for text in texts if svg.text_width(text, _SMALL) <= width), None)
    return [svg.label(x, y, fitting, style)] if fitting else []


def _bar(x: float, y: float, width: float, height: float, share: float, style: str) -> str:
    track = svg.box(x, y, width, height, "track", height / 2)
    return track + svg.box(x, y, width * min(share, 1.0), height, style, height / 2)


def _used(stage: StageForecast) -> float:
    return stage.memory_bytes / stage.available_bytes


def _memory(stage: StageForecast) -> str:
    return f"{show_bytes(stage.memory_bytes)} of {show_bytes(stage.available_bytes)}"


def _busy(stage: StageForecast) -> str:
    return f"{100 * stage.busy_share:.0f} % busy"
