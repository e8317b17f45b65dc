"""Records histories of the hub as it is: run it by hand, from the root of the repository.

    PYTHONPATH=.:tests python -m replay.record [FOLDER]

Recordings are made once. A rename goes to names.py; to record anew is to say that the hub decides otherwise.
"""

import argparse
import lzma
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from replay.drawing import record
from replay.neutral import Codec, canonical
from replay.replaying import FOLDER, Replay, make_codec

NUM_FILES, NUM_EACH = 8, 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = _record_all(make_codec())
    for number in range(NUM_FILES):
        histories = list(islice(found, NUM_EACH))
        text = "".join(f"{line}\n" for lines in histories for line in lines)
        packed = lzma.compress(text.encode("ascii"), preset=9 | lzma.PRESET_EXTREME)
        path = asked.folder / f"{number}.jsonl.xz"
        path.write_bytes(packed)
        num_steps = sum(len(lines) // 2 for lines in histories)
        print(f"{path}: {num_steps} steps, {len(text):,} letters, {len(packed):,} bytes")


def _record_all(codec: Codec) -> Iterator[list[str]]:
    """Return one history after the other, each replayed once."""
    for seed in count():
        name, lines = record(codec, seed)
        if "fails" in name:
            print(name)
        Replay(codec, name).run(lines)
        yield [canonical({"history": name}), *lines]


if __name__ == "__main__":
    main()
