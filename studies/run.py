"""One runner for all studies: `python -m studies.run NAME [--quick] [--json]`.

Prints one JSON object (name, figures, machine, seconds) on stdout and progress on stderr. A full run also
writes `docs/studies/NAME.md` with its plots, and the list of studies anew. `--quick` is for CI: it checks
invariants within seconds and writes nothing. `all` runs every study; `index` only writes the list.
"""

import argparse
import ast
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import say
from benchmarks.run import describe_machine
from studies.study import Study, make_page, write_index

PAGES = Path(__file__).parents[1] / "docs" / "studies"


def find_names(folder: Path = Path(__file__).parent) -> list[str]:
    """Return the names of the studies: modules that have a function `run`."""
    names = []
    for path in sorted(folder.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
            names.append(path.stem.replace("_", "-"))
    return names


def main(words: list[str], pages: Path = PAGES) -> int:
    names = find_names()
    parser = argparse.ArgumentParser(prog="studies.run", description="Run one study.")
    parser.add_argument("name", choices=[*names, "all", "index"])
    parser.add_argument("--quick", action="store_true", help="small inputs, invariants only, no page")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    arguments = parser.parse_args(words)
    if arguments.name == "index":
        write_index(pages)
        return 0
    if arguments.name == "all":
        results = [run_study(name, arguments.quick, pages) for name in names]
        result: dict[str, object] = {"name": "all", "studies": results}
    else:
        result = run_study(arguments.name, arguments.quick, pages)
    print(json.dumps(result, indent=None if arguments.json else 2))
    return 0


def run_study(name: str, is_quick: bool, pages: Path) -> dict[str, object]:
    """Run one study; write its page and plots unless it is a quick one."""
    say(f"study {name}")
    module = importlib.import_module(f"studies.{name.replace('-', '_')}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        study: Study = module.run(is_quick, Path(folder))
        seconds = round(time.monotonic() - started, 1)
        if not is_quick:
            publish(name, study, seconds, Path(folder), pages)
    return {"name": name, "figures": study.figures, "machine": describe_machine(), "seconds": seconds}


def publish(name: str, study: Study, seconds: float, plots: Path, pages: Path) -> None:
    """Write the page of a study, its plots and the list of studies."""
    pages.mkdir(exist_ok=True)
    for plot in plots.iterdir():
        (pages / plot.name).write_bytes(plot.read_bytes())
    page = make_page(name, study, describe_machine(), seconds)
    (pages / f"{name}.md").write_text(page, encoding="utf-8")
    write_index(pages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
