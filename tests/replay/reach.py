"""Counts how many lines of the hub's decisions the recorded histories run; run it by hand.

    PYTHONPATH=.:tests python -m replay.reach

Only lines inside functions count: those of modules and classes run when they are imported.
"""

import importlib
import sys
from collections import defaultdict
from types import CodeType, FrameType
from typing import Any

from replay.replaying import FOLDER, Replay, make_codec, read_histories

MODULES = """
    coordinator.coordinator coordinator.leases coordinator.ledger coordinator.lifecycle coordinator.membership
    coordinator.placement coordinator.planner coordinator.progress coordinator.recovery
    coordinator.rounds coordinator.snapshots coordinator.sources coordinator.checkpoints
    coordinator.robust_rounds coordinator.spot_checks coordinator.evaluations
    monitors.liveness monitors.loss_guard monitors.monitors
""".split()  # noqa: SIM905


def main() -> None:
    loaded = [importlib.import_module(f"ravnest.hub.{name}") for name in MODULES]
    seen: dict[str, set[int]] = {str(each.__file__): set() for each in loaded}
    codec = make_codec()
    sys.settrace(lambda frame, kind, _: _trace(seen, frame, kind))
    for path in sorted(FOLDER.glob("*.jsonl.xz")):
        for name, lines in read_histories(path):
            Replay(codec, name).run(lines)
    sys.settrace(None)
    num_run = num_all = 0
    for path, found in seen.items():
        with open(path) as file:
            text = file.read()
        lines = _find_lines(compile(text, path, "exec"))
        missed = sorted(set(lines) - found)
        num_run, num_all = num_run + len(lines) - len(missed), num_all + len(lines)
        print(f"{path.rpartition('/')[2]:15} {1 - len(missed) / len(lines):6.1%} of {len(lines):3}")
        by_function = defaultdict(list)
        for line in missed:
            by_function[lines[line]].append(line)
        for function, some in by_function.items():
            shown = [f"    {line}: {text.splitlines()[line - 1].strip()}" for line in some]
            print("\n".join([f"  {function}", *shown]))
    print(f"{num_run} of {num_all} lines run: {num_run / num_all:.1%}")


def _trace(seen: dict[str, set[int]], frame: FrameType, kind: str) -> Any:
    found = seen.get(frame.f_code.co_filename)
    if found is None:
        return None

    def note(frame: FrameType, kind: str, _: Any) -> Any:
        found.add(frame.f_lineno)
        return note

    return note


def _find_lines(code: CodeType, function: str = "") -> dict[int, str]:
    """Return the lines inside functions, and whose they are."""
    lines: dict[int, str] = {}
    for inner in (each for each in code.co_consts if isinstance(each, CodeType)):
        lines |= _find_lines(inner, inner.co_qualname)
    if function and not _is_class(code):
        own = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
        lines |= {line: function for line in own if line not in lines}
    return lines


def _is_class(code: CodeType) -> bool:
    return "__module__" in code.co_names and "__qualname__" in code.co_names


if __name__ == "__main__":
    main()
