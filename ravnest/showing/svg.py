"""The few SVG shapes a picture of a plan needs, as strings; text is escaped here and nowhere else.

Node names come from strangers: `clean` drops what XML cannot hold or what would hide or reorder text.
"""

import html
import unicodedata

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


def shorten(text: str, width: float, size: float) -> str:
    """Return a name that `width` holds, cut in its middle: names differ at their ends."""
    keep = len(text)
    while keep > 1 and text_width(text, size) > width:
        keep -= 1
        head = (keep + 1) // 2
        short = text[:head] + "…" + text[len(text) - (keep - head) :]
        if text_width(short, size) <= width:
            return short
    return text if text_width(text, size) <= width else ""


def label(x: float, y: float, text: str, style: str = "", angle: float = 0.0, unit: str = "") -> str:
    """Return a line of text at its baseline; `style` names classes of the picture's style sheet."""
    turn = f' transform="rotate({number(angle)} {number(x)} {number(y)})"' if angle else ""
    tail = f' <tspan class="unit">{clean(unit)}</tspan>' if unit else ""
    return f'<text x="{number(x)}" y="{number(y)}" class="{style}"{turn}>{clean(text)}{tail}</text>'


def box(x: float, y: float, width: float, height: float, style: str, radius: float = 0.0) -> str:
    """Return a rectangle."""
    size = f'width="{number(max(width, 0.0))}" height="{number(height)}" rx="{number(radius)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size} class="{style}"/>'


def group(parts: list[str], title: str = "", style: str = "") -> str:
    """Return shapes that belong together; the title is what a pointer held over them shows."""
    about = f"<title>{'&#10;'.join(clean(line) for line in title.splitlines())}</title>" if title else ""
    return f'<g class="{style}">{about}{"".join(parts)}</g>'


def path(data: str, style: str) -> str:
    """Return a line or shape given as path data, which holds numbers and commands only."""
    return f'<path d="{data}" class="{style}"/>'


def number(value: float) -> str:
    """Return a coordinate: one decimal is finer than a screen shows, and keeps files small."""
    return f"{value:.1f}".removesuffix(".0")


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in _WIDE:
        return 1.05
    if letter in "il.,:;|!'()[] jtf":
        return 0.33
    return 0.82 if letter in "mwMW%@" else 0.64 if letter.isupper() else 0.58
