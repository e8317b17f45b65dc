"""Prints lines per package; a file or a class that is too long to be one idea fails (STYLE section 9)."""

import ast
import sys
from collections import Counter
from pathlib import Path

FILE_LINES = 600
CLASS_LINES = 400


def main() -> int:
    root = Path(__file__).resolve().parents[1] / "ravnest"
    packages: Counter[str] = Counter()
    faults = []
    for path in sorted(root.rglob("*.py")):
        text, shown = path.read_text(), path.relative_to(root.parent)
        lines = len(text.splitlines())
        packages[".".join(path.parent.relative_to(root).parts) or "ravnest"] += lines
        if lines > FILE_LINES:
            faults.append(f"{shown} has {lines} lines, over {FILE_LINES}: is there a second idea in it?")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and (long := node.end_lineno - node.lineno + 1) > CLASS_LINES:  # type: ignore[operator]
                faults.append(f"{shown}: class {node.name} has {long} lines, over {CLASS_LINES}")
    shown = ", ".join(f"{package} {lines}" for package, lines in sorted(packages.items()))
    num_files = len(list(root.rglob("*.py")))
    print("\n".join(faults) or f"size: {packages.total()} lines in {num_files} files ({shown})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
