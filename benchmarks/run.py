"""One runner for all benchmarks: `python -m benchmarks.run NAME [--quick] [--json]`.

Prints one JSON object (name, figures, machine, seconds) on stdout and progress on stderr; a full run also
writes `benchmarks/reports/NAME.md` with the method, the figures and how far they spread. `--quick` is for CI:
it ends within a minute, checks the invariants on smaller inputs and writes no report.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import scenarios

REPORTS = Path(__file__).parent / "reports"


class Outcome(NamedTuple):
    """What a scenario returns: figures by name, the report's body, and the targets it missed."""

    figures: dict[str, object]
    report: str
    missed: list[str]


def main() -> int:
    names = sorted(module.name for module in pkgutil.iter_modules(scenarios.__path__))
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Run one benchmark.")
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="small inputs, invariants only, no report")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    # Some scenarios have options of their own.
    scenario = importlib.import_module(f"benchmarks.scenarios.{parser.parse_known_args()[0].name}")
    has_options = hasattr(scenario, "add_options")
    if has_options:
        scenario.add_options(parser)
    arguments = parser.parse_args()
    started = time.monotonic()
    outcome = Outcome(*scenario.run(arguments.quick, *([arguments] if has_options else [])))
    result = {
        "name": arguments.name,
        "figures": outcome.figures,
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - started, 1),
    }
    if outcome.report and not arguments.quick:
        write_report(result, outcome)
    print(json.dumps(result, indent=None if arguments.json else 2))
    for sentence in outcome.missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if outcome.missed else 0


def describe_machine() -> dict[str, object]:
    import numpy

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "system": platform.system(),
    }


def write_report(result: dict[str, object], outcome: Outcome) -> None:
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    verdict = "All targets met." if not outcome.missed else "Missed: " + "; ".join(outcome.missed) + "."
    head = f"# Benchmark `{result['name']}`\n\nMachine: {machine}. Took {result['seconds']} s. {verdict}\n"
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / f"{result['name']}.md").write_text(f"{head}\n{outcome.report}\n")


if __name__ == "__main__":
    sys.exit(main())
