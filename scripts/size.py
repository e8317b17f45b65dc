"""The size budget: each part of the package and each file stays small enough to read (decision 8)."""

import sys
from collections import Counter
from pathlib import Path

PART_LINES = {
    "ravnest": 1_730,
    "commands": 1_850,
    "plan": 3_200,
    "model": 4_900,
    "engine": 1_710,
    "averaging": 770,
    "net": 2_300,
    "hub": 5_000,
    "peer": 3_400,
    "job": 2_480,
    "showing": 1_700,
}
FILE_LINES = 350


def main() -> int:
    root = Path(__file__).resolve().parents[1] / "ravnest"
    sizes = {path: len(path.read_text().splitlines()) for path in sorted(root.rglob("*.py"))}
    faults = [
        f"{path.relative_to(root.parent)} has {lines} lines, over {FILE_LINES}: is there a second idea in it?"
        for path, lines in sizes.items()
        if lines > FILE_LINES
    ]
    parts: Counter[str] = Counter()
    for path, lines in sizes.items():
        parts[path.parent.name] += lines
    for part, lines in parts.items():
        if lines > PART_LINES.get(part, 0):
            faults.append(f"{part} has {lines} lines, more than {PART_LINES.get(part, 0)}: delete something")
    shown = ", ".join(f"{part} {lines}" for part, lines in parts.items())
    print("\n".join(faults) or f"size: {sum(sizes.values())} lines in {len(sizes)} files ({shown})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
