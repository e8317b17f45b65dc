"""Recorded histories give the same orders, byte for byte; a refactor changes none.

How the recordings are made is in record.py, what a rename needs in names.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypedDict

import pytest
from replay.names import Names
from replay.neutral import Codec, canonical
from replay.replaying import FOLDER, DiffersError, Replay, make_codec, read_histories

FILES = sorted(FOLDER.glob("*.jsonl.xz"))
pytestmark = pytest.mark.timeout(300)  # seconds of one core; a busy PC has not a whole one


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_recorded_histories_give_the_same_orders(path):
    codec = make_codec()
    histories = dict(read_histories(path))
    assert len(histories) >= 40
    for name, lines in histories.items():
        Replay(codec, name).run(lines)


def test_there_are_enough_files():
    assert len(FILES) >= 8


def test_another_order_is_shown_with_its_history_and_its_event():
    name, lines = next(read_histories(FILES[0]))
    number = next(index for index, line in enumerate(lines) if "MakePlan" in line)
    changed = [*lines[:number], lines[number].replace('"MakePlan"', '"MakePlans"'), *lines[number + 1 :]]
    with pytest.raises(DiffersError) as told:
        Replay(make_codec(), name).run(changed)
    assert f"history {name!r}, event {number // 2 + 1}\n" in str(told.value)
    assert '-   "type": "MakePlans",\n+   "type": "MakePlan",' in str(told.value)


Number = NewType("Number", int)


class Colour(StrEnum):
    CRIMSON = "crimson"


class Shelf(TypedDict):
    rows: list[tuple[int, str]]


@dataclass(frozen=True)
class Part:
    ident: Number
    colour: Colour
    weight: float
    is_new: bool = False


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    shelf: Shelf | None
    seal: bytes
    told: str
    pairs: dict[int, Part | None]


def test_renames_are_one_line_each_and_hold_in_both_directions():
    names = Names(
        classes={"Piece": "Part", "Bench": "Shelf", "Hue": "Colour"},
        fields={("Piece", "number"): "ident", ("Bench", "lines"): "rows"},
        values={("Hue", "red"): "crimson"},
        sentences={"a piece is": "a part is"},
        added={("Piece", "is_new"): False},
    )
    codec = Codec(names, Whole)
    part = Part(Number(3), Colour.CRIMSON, 0.1)
    whole = Whole((part,), {"rows": [(1, "x")]}, b"\x00\xff", "a part is here", {4: None, 5: part})
    data = codec.write(whole)
    piece = {"type": "Piece", "number": 3, "colour": "red", "weight": 0.1}
    assert data == {
        "type": "Whole",
        "parts": [piece],
        "shelf": {"type": "Bench", "lines": [[1, "x"]]},
        "seal": {"bytes": "00ff"},
        "told": "a piece is here",
        "pairs": [[4, None], [5, piece]],
    }
    again = codec.read({**data, "told": "a part is here"})
    assert again == whole
    assert canonical(codec.write(again)) == canonical(data)
    assert codec.write(Part(Number(3), Colour.CRIMSON, 0.1, is_new=True)) == {**piece, "is_new": True}


def test_a_recorded_name_that_nobody_has_is_named():
    codec = Codec(Names(), Whole)
    with pytest.raises(AssertionError, match="no record is called Piece"):
        codec.read({"type": "Piece"})
    with pytest.raises(AssertionError, match="Part has no field number"):
        codec.read({"type": "Part", "number": 3})
