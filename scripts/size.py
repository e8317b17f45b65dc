"""The size budget: the package and each of its files stay small enough to read."""

import sys
from pathlib import Path

PACKAGE_LINES = 8_000
FILE_LINES = 350


def main() -> int:
    root = Path(__file__).resolve().parents[1] / "ravnest"
    sizes = {path: len(path.read_text().splitlines()) for path in sorted(root.rglob("*.py"))}
    faults = [
        f"{path.relative_to(root.parent)} has {lines} lines, over {FILE_LINES}: is there a second idea in it?"
        for path, lines in sizes.items()
        if lines > FILE_LINES
    ]
    total = sum(sizes.values())
    if total > PACKAGE_LINES:
        faults.append(f"the package has {total} lines, more than {PACKAGE_LINES}: delete something")
    print("\n".join(faults) or f"size: {total} of {PACKAGE_LINES} lines in {len(sizes)} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
