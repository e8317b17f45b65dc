"""A line as a QR code, for a phone that carries it to another PC. Pure: a path for an SVG, and no picture."""

from dataclasses import dataclass

import segno


@dataclass(frozen=True, slots=True)
class CodeDocument:
    """A square of `size` modules without its quiet border; `path` draws the dark ones, each of side 1."""

    size: int
    path: str


def draw_code(text: str) -> CodeDocument:
    """Return the code of a text; of an invitation it has about sixty modules."""
    matrix = segno.make_qr(text, error="m").matrix
    runs = [
        f"M{start} {row}h{stop - start}v1h-{stop - start}z"
        for row, modules in enumerate(matrix)
        for start, stop in _find_runs(modules)
    ]
    return CodeDocument(len(matrix), "".join(runs))


def _find_runs(modules: bytearray) -> list[tuple[int, int]]:
    """Return where dark modules begin and end."""
    padded = (0, *modules, 0)
    edges = [place for place in range(len(modules) + 1) if bool(padded[place]) != bool(padded[place + 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
