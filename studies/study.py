"""What a study finds, its page, its plots, and the list of all studies."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ANSWER = "> **Answer.** "
_INDEX = "README.md"


@dataclass(frozen=True, slots=True)
class Study:
    """One question with its answer; `body` is Markdown with what was found, and may show plots."""

    question: str
    answer: str  # one sentence that follows from the printed figures
    method: str
    body: str
    figures: dict[str, object]
    limits: str  # what it does not show


def make_page(name: str, study: Study, machine: dict[str, object], seconds: float) -> str:
    """Return the page of a study, with its answer at the top."""
    parts = ", ".join(f"{key} {value}" for key, value in machine.items())
    return (
        f"# {study.question}\n\n{_ANSWER}{study.answer}\n\n"
        f"`python -m studies.run {name}` wrote this page. Machine: {parts}. Took {seconds} s.\n\n"
        f"## Method\n\n{study.method.strip()}\n\n"
        f"## What was found\n\n{study.body.strip()}\n\n"
        f"## What it does not show\n\n{study.limits.strip()}\n"
    )


def make_index(folder: Path) -> str:
    """Return the list of the studies that have a page in a folder."""
    items = "\n".join(f"- [{question}]({path.name}) {answer}" for path, question, answer in _read(folder))
    return (
        "# Studies\n\n"
        "Questions about the whole system, each with method, numbers, a plot and what it does not show.\n"
        "`python -m studies.run NAME` measures one and writes its page; `python -m studies.run index` "
        "writes this list.\n\n"
        f"{items}\n"
    )


def write_index(folder: Path) -> None:
    """Write the list of studies beside their pages."""
    (folder / _INDEX).write_text(make_index(folder), encoding="utf-8")


def _read(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each page with its question and its answer."""
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        question = re.match(r"# (.+)", text)
        answer = re.search(rf"^{re.escape(_ANSWER)}(.+)", text, re.MULTILINE)
        if path.name != _INDEX and question and answer:
            yield path, question[1], answer[1]


def show_spread(values: Sequence[float], form: str = ".2f") -> list[str]:
    """Return the cells of a table for median, smallest and largest."""
    return [format(each, form) for each in (median(values), min(values), max(values))]


def draw(path: Path, plot: Callable[["Axes"], None], width: float = 6.4, height: float = 3.6) -> None:
    """Write what `plot` draws as a picture; the same drawing gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    chosen = {"svg.fonttype": "none", "svg.hashsalt": path.name, "axes.grid": True, "grid.alpha": 0.3}
    with mpl.rc_context(chosen):
        figure = Figure(figsize=(width, height), layout="constrained")
        plot(figure.subplots())
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
