"""Pages made from what they speak of: where one says `<!-- made: commands -->`, the site has the commands.

Commands come from the program's own help, the API from docstrings, benchmarks from their reports.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ravnest
from ravnest.cli.main import program
from ravnest.requester.result import Result

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
# A checkout lists a folder; a site needs a page.
FOLDERS = {
    "docs/decisions/": "docs/decisions/README.md",
    "docs/studies/": "docs/studies/README.md",
    "benchmarks/reports/": "docs/benchmarks.md",
}
MARK = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
LISTS = {"docs/decisions/README": "[0-9]*", "docs/studies/README": "[a-z]*"}  # and what each lists
HELP_COLUMNS = 100


def show_commands() -> str:
    """Return what every command says of itself."""
    parts = []
    for name, command in program.commands.items():
        words = f"ravnest {name}"
        context = click.Context(command, info_name=words, terminal_width=HELP_COLUMNS)
        parts.append(f"## {words}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def show_api() -> str:
    """Return what Sphinx makes of the public names: classes and functions with their docstrings."""
    return "```{eval-rst}\n" + "\n".join(_document_names()) + "\n```\n"


def _document_names() -> Iterator[str]:
    public = {f"ravnest.{name}": getattr(ravnest, name) for name in ravnest.__all__}
    for place, found in {**public, "ravnest.requester.result.Result": Result}.items():
        if isinstance(found, type):
            yield f".. autoclass:: {place}\n   :members:\n   :exclude-members: __init__, __new__\n"
        elif callable(found):
            yield f".. autofunction:: {place}\n"
        else:
            yield f".. automodule:: {found.__name__}\n   :members:\n   :undoc-members:\n   :no-index:\n"


def show_reports(folder: Path = ROOT / "benchmarks") -> str:
    """Return what each benchmark asks and whether it met its targets, with the reports for the menu."""
    reports = sorted((folder / "reports").glob("*.md"))
    parts = [_introduce(report, folder / "scenarios" / f"{report.stem}.py") for report in reports]
    menu = "\n".join(f"/benchmarks/reports/{report.stem}" for report in reports)
    return "\n".join(parts) + f"\n```{{toctree}}\n:hidden:\n\n{menu}\n```\n"


def _introduce(report: Path, scenario: Path) -> str:
    question = ast.get_docstring(ast.parse(scenario.read_text(encoding="utf-8"))) if scenario.exists() else ""
    text = report.read_text(encoding="utf-8")
    missed = re.search(r"Missed: (.+?)\.$", text, re.MULTILINE)
    outcome = "Missed:\n\n" + "\n".join(f"- {each}" for each in missed[1].split("; ")) if missed else ""
    outcome = outcome or ("All targets met." if "All targets met." in text else "")
    first = (question or "").partition("\n\n")[0].replace("\n", " ")
    return f"## {report.stem}\n\n{first}\n\n{outcome}\n\n[The report](../benchmarks/reports/{report.name}).\n"


MADE: dict[str, Callable[[], str]] = {"commands": show_commands, "api": show_api, "benchmarks": show_reports}


def complete(_: Any, page: str, source: list[str]) -> None:
    """Put in what a page asks for, and lead links to folders to their pages."""
    if page in LISTS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{LISTS[page]}\n```\n"
    text = MARK.sub(lambda mark: MADE[mark[1]](), source[0])
    for folder, listed in FOLDERS.items():
        text = text.replace(f"]({folder})", f"]({listed})")
    source[0] = text


def setup(app: "Sphinx") -> dict[str, bool]:
    """Tell Sphinx of it."""
    app.connect("source-read", complete)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    sys.stdout.write(MADE[sys.argv[1]]())
