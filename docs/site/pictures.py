"""Draws the pictures of docs/how-it-works.md into docs/pictures: a pipeline, rings, a death.

Run it after a change; a test compares what it draws with what is there.
"""

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "pictures"
INK, PALE, PAPER = "#1f2933", "#7b8794", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY = "#2f6fdb", "#c2570c", "#1c8a4b", "#d64545", "#e4e7eb"
COLOURS = (BLUE, ORANGE, GREEN)


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "start") -> str:
    """Return words at a place."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{fill}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "", ink: str = PAPER) -> str:
    """Return a box with words in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'
    return shape + text(x + width / 2, y + height / 2 + 4.5, words, 12, ink, "middle") if words else shape


def line(x1: float, y1: float, x2: float, y2: float, colour: str = PALE, dashes: str = "") -> str:
    """Return a line, dashed if that is said."""
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5"{dash}/>'
    )


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a whole picture on paper of its own, so that it can be read on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif">'
    )
    paper = f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
    return "\n".join((head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>")) + "\n"


def draw_pipeline() -> str:
    """Three stages over time: with a flush after every batch, and without waiting."""
    parts = [
        text(20, 28, "Three stages, one batch after the other. Each waits for the gradients of the batch:")
    ]
    flushed = {
        0: (("f1", 0), ("f2", 1), ("b1", 5), ("b2", 7), ("f3", 9), ("f4", 10)),
        1: (("f1", 1), ("f2", 2), ("b1", 4), ("b2", 6), ("f3", 10), ("f4", 11)),
        2: (("f1", 2), ("b1", 3), ("f2", 4), ("b2", 5), ("f3", 11), ("b3", 12)),
    }
    parts += _draw_stages(44, flushed)
    parts.append(
        text(20, 194, "Ravnest: no stage waits. A gradient may be of weights a few updates old (staleness):")
    )
    running = {
        0: (
            ("f1", 0),
            ("f2", 1),
            ("f3", 2),
            *((f"{'bf'[i % 2]}{1 + i // 2 + 3 * (i % 2)}", 5 + i) for i in range(8)),
        ),
        1: (("f1", 1), ("f2", 2), *((f"{'bf'[i % 2]}{1 + i // 2 + 2 * (i % 2)}", 4 + i) for i in range(9))),
        2: tuple((f"{'fb'[i % 2]}{1 + i // 2}", 2 + i) for i in range(11)),
    }
    parts += _draw_stages(210, running)
    parts += [box(100, 338, 14, 14, BLUE), text(120, 350, "forward"), box(200, 338, 14, 14, ORANGE)]
    parts += [text(220, 350, "backward, and an update"), box(400, 338, 14, 14, GREY), text(420, 350, "idle")]
    return picture(760, 368, "A pipeline of three stages with and without waiting", parts)


def _draw_stages(top: float, work: dict[int, tuple[tuple[str, int], ...]]) -> Iterable[str]:
    step, height = 48, 34
    for stage, pieces in work.items():
        y = top + stage * (height + 6)
        yield text(20, y + 22, f"stage {stage + 1}")
        yield box(100, y, 13 * step, height, GREY)
        for name, at in pieces:
            yield box(100 + at * step + 1, y, step - 2, height, BLUE if name[0] == "f" else ORANGE, name[1:])


def draw_rings() -> str:
    """Two clusters that are cut differently, and the four rings of their segments."""
    left, unit = 110, 50
    cut_a = ((0, 4, "ana"), (4, 8, "bob"), (8, 12, "cem"))
    cut_b = ((0, 6, "dan"), (6, 12, "eva"))
    parts = [text(20, 34, "the model"), line(left, 50, left + 12 * unit, 50)]
    parts += [text(left + (n + 0.5) * unit, 34, str(n), 12, PALE, "middle") for n in range(12)]
    for top, name, cuts in ((64, "cluster A", cut_a), (200, "cluster B", cut_b)):
        parts.append(text(20, top + 29, name))
        parts += [
            box(left + a * unit + 2, top, (b - a) * unit - 4, 46, COLOURS[n], who)
            for n, (a, b, who) in enumerate(cuts)
        ]
    for number, (a, b) in enumerate(((0, 4), (4, 6), (6, 8), (8, 12))):
        middle = left + (a + b) / 2 * unit
        parts += [
            line(middle, 110, middle, 200, INK, "4 4"),
            box(middle - 32, 142, 64, 26, INK, f"ring {number + 1}"),
        ]
    parts += [line(left + n * unit, 58, left + n * unit, 252, RED, "2 5") for n in (4, 6, 8)]
    parts += [box(left + 2, 276, 3 * unit, 40, PALE, "fay: a spare")]
    told = "keeps a backup, and takes over when a node dies"
    parts += [text(20, 301, "and"), text(left + 3 * unit + 14, 301, told, fill=PALE)]
    return picture(760, 336, "Two clusters, their stages, four rings and a spare", parts)


def draw_death() -> str:
    """What happens in the seconds after a node loses its power."""
    left, second = 110, 118
    rows = (
        (
            "ana",
            (
                (0, 1, BLUE, "trains"),
                (1, 4.6, GREY, "holds its state, finishes what it has"),
                (4.6, 5.4, BLUE, ""),
            ),
        ),
        ("bob", ((0, 1, BLUE, "trains"), (1, 5.4, PAPER, ""))),
        (
            "fay, a spare",
            (
                (0, 3.9, GREY, "has a backup of bob's stage"),
                (3.9, 4.6, ORANGE, "fetches"),
                (4.6, 5.4, BLUE, ""),
            ),
        ),
        ("cluster B", ((0, 5.4, GREEN, "trains on all the time"),)),
    )
    parts = []
    for row, (name, spans) in enumerate(rows):
        y = 56 + row * 44
        parts.append(text(20, y + 22, name))
        parts += [
            box(left + a * second, y, (b - a) * second - 2, 34, fill, words, INK if fill == GREY else PAPER)
            for a, b, fill, words in spans
        ]
    for at, words, y in ((1, "power lost", 26), (1.6, "the hub names it missing", 46)):
        parts += [line(left + at * second, y - 8, left + at * second, 236, RED, "3 4")]
        parts.append(text(left + at * second + 5, y, words, 12, RED))
    parts += [line(left + 3.9 * second, 30, left + 3.9 * second, 236, INK, "3 4")]
    parts += [text(left + 3.9 * second + 5, 38, "a new plan", 12)]
    parts += [text(left + 1.65 * second, 254, "it has three seconds to come back", 12, PALE)]
    parts += [text(left + 3.95 * second, 254, "then the cluster trains again", 12, PALE)]
    return picture(760, 270, "A node dies; a spare takes its place", parts)


PICTURES = {"pipeline.svg": draw_pipeline, "rings.svg": draw_rings, "death.svg": draw_death}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
