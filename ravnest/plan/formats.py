"""How each link carries activations and gradients.

The search assumes the narrowest formats that may be used. Only links that set the pace need them: every other
link gets the widest format that leaves at least half of it free, for rounds and for what was measured wrong.
"""

from dataclasses import replace

import numpy as np

from ravnest.config import WireFormat
from ravnest.plan.cost import Floats, Ints, LineCost, NodeTable, Rows, timing

_MOST_USE = 0.5  # of the time, for a link that carries a wider format than it must


def choose_formats(line: LineCost, nodes: NodeTable, rows: Rows) -> Rows:
    """Return the clusters with the widest format of each link and direction that does not slow them down."""
    shape = rows.nodes.shape
    narrow = replace(
        rows, forward=np.full(shape, line.forward_ratio), backward=np.full(shape, line.backward_ratio)
    )
    formats = _ratios(line.config.activation_formats), _ratios(line.config.gradient_formats)
    if all(len(each) == 1 for each in formats):
        return narrow
    before = timing(line, nodes, narrow)
    pace = before.stage.max(axis=1, initial=1e-9)[:, None]
    wide = narrow
    for forward in formats[0]:
        wide = _widen(line, nodes, wide, pace, "forward", forward)
    for backward in formats[1]:
        wide = _widen(line, nodes, wide, pace, "backward", backward)
    after = timing(line, nodes, wide)
    fits = (after.memory <= nodes.memory[rows.nodes]).all(axis=1)
    is_free = (fits & (after.seconds <= before.seconds * (1 + 1e-9)))[:, None]
    assert wide.forward is not None
    assert wide.backward is not None
    return replace(
        rows,
        forward=np.where(is_free, wide.forward, line.forward_ratio),
        backward=np.where(is_free, wide.backward, line.backward_ratio),
    )


def _ratios(formats: tuple[WireFormat, ...]) -> list[float]:
    """Return bytes on the wire per byte of fp32, the narrowest first."""
    return sorted({each.ratio for each in formats})


def _widen(line: LineCost, nodes: NodeTable, rows: Rows, pace: Floats, way: str, ratio: float) -> Rows:
    """Give links this format where the sender, the receiver and the hub between them stay half idle."""
    column = getattr(rows, way)
    wider = replace(rows, **{way: np.maximum(column, ratio)})
    times = timing(line, nodes, replace(wider, window=np.ones(rows.nodes.shape, np.int64)))
    sends, receives, relays = (each <= _MOST_USE * pace for each in (times.send, times.receive, times.relay))
    if line.config.hub_bytes_per_second:  # all relays share one line
        relays &= times.relay == 0.0
    is_free = np.zeros(column.shape, bool)
    if way == "forward":  # from each stage to the one after it, which has one depth less
        is_free[:, 1:] = sends[:, 1:] & receives[:, :-1] & relays[:, 1:]
    else:
        is_free[:, :-1] = sends[:, :-1] & receives[:, 1:] & relays[:, 1:]
    # Nobody gets what the last stage would send forward, or the first one back.
    is_free[np.arange(len(is_free)), 0 if way == "forward" else rows.lengths - 1] = True
    return replace(rows, **{way: np.where(is_free, np.maximum(column, ratio), column)})


def format_names(line: LineCost, rows: Rows) -> tuple[list[list[WireFormat]], list[list[WireFormat]]]:
    """Return the formats of each stage, [cluster][depth], for sending forward and back."""
    assert rows.forward is not None
    assert rows.backward is not None
    return (
        _names(rows.forward, line.config.activation_formats),
        _names(rows.backward, line.config.gradient_formats),
    )


def _names(ratios: Floats, formats: tuple[WireFormat, ...]) -> list[list[WireFormat]]:
    known = np.array([each.ratio for each in formats])
    nearest: Ints = np.abs(ratios[:, :, None] - known).argmin(axis=2)
    return [[formats[k] for k in row] for row in nearest.tolist()]
