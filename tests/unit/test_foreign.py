"""The one reader of foreign data: bounds, places, values and ways out, whatever the file tries."""

import json
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from ravnest.errors import ConfigError, UnsafeBlueprint
from ravnest.foreign import Name, Quantity, decode_json, parse_json, parse_table
from ravnest.units import Dimension


class Memory(Quantity, low="1 MB", high="1 PB", dimension=Dimension.BYTES): ...


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: Literal["a", "b"]
    sizes: list[Annotated[int, Meta(ge=0, le=9)]]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    memory: Memory
    is_on: bool = False


class Top(msgspec.Struct, forbid_unknown_fields=True):
    part: Annotated[list[Part], Meta(max_length=3)] = []
    row: list[Row] = []


PART = {"name": "ana", "memory": "8 GB"}


def refusal(document, is_table=True):
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ConfigError) as caught:
        (parse_table(text, "f.json") if is_table else parse_json(text.encode(), "it", 10_000)).read_as(Top)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


@pytest.mark.parametrize(
    ("document", "in_a_table", "elsewhere"),
    [
        ({"part": [PART, {**PART, "is_on": 1}]}, "part 2 \"ana\": key 'is_on' is 1;", "part[1].is_on is 1;"),
        ({"part": [PART] * 4}, "key 'part' has 4 entries; at most 3", "part has 4 entries; at most 3"),
        (
            {"part": [{"name": "b"}]},
            'part 1 "b": key \'memory\' is missing; write memory = "8 GB"',
            "is missing",
        ),
        ({"row": [["c", []]]}, "row 1: key 'kind' is 'c'; choose one of a, b", "row[0].kind is 'c'"),
        (
            {"row": [["a", [1, 10]]]},
            "key 'sizes' has 10 as entry 2; expected int <= 9",
            "row[0].sizes[1] is 10; expected int <= 9",
        ),
        ({"parts": []}, "key 'parts' = [] is unknown; did you mean 'part'", "parts = [] is unknown"),
    ],
)
def test_a_refusal_names_place_value_and_way_out(document, in_a_table, elsewhere):
    assert in_a_table in refusal(document)
    assert elsewhere in refusal(document, is_table=False)


@pytest.mark.parametrize(
    "key",
    [
        "x` - at `$.part[0]",
        "x` - at `$.part[9]",
        "x` - at `$.part[0].memory",
        "` - at `$",
        " - at `$.row[0]`",
        "$",
    ],
)
def test_a_key_that_imitates_a_place_changes_nothing_but_words(key):
    for is_table in (True, False):
        assert refusal({"part": [PART], key: 1}, is_table).startswith(("f.json", "it"))
        assert refusal({"part": [{**PART, key: "\x1b[2J"}]}, is_table).startswith(("f.json", "it"))


@pytest.mark.parametrize(
    "text", ['{"\\ud800": 1}', '{"part": [{"\\udfff": 1}]}', '{"row": [["\\ud800", []]]}']
)
def test_half_a_character_is_refused(text):
    assert "half a character" in refusal(text)
    assert "half a character" in refusal(text, is_table=False)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"part": [{"name": "a", "name": "b"}]}'])
def test_a_key_that_is_set_twice_is_refused(text):
    assert "is set twice" in refusal(text)
    assert "is set twice" in refusal(text, is_table=False)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"row": [1e400]}'])
def test_a_program_writes_finite_numbers(text):
    assert "is not finite" in refusal(text, is_table=False)


def test_brackets_in_text_are_no_nesting():
    assert parse_json(b'["[[[[[[[[[[[[[[", "}}}}\\"]"]', "it", 100).values == ["[" * 14, '}}}}"]']


def test_depth_that_text_hides_is_refused():
    data = b'["]",' * 5_000 + b"1" + b',"["]' * 5_000
    with pytest.raises(UnsafeBlueprint, match=r"nested more than 12 deep|RecursionError"):
        parse_json(data, "it", len(data), UnsafeBlueprint)


def test_data_too_large_for_plain_values_is_decoded_at_once():
    assert decode_json(b'[["a",[1]]]', list[Row], "it", 20)[0].sizes == [1]
    for data, says in [
        (b"[" * 30, "more than 20 B"),
        (b"[" * 15, "cannot be used"),
        (b'["\xff"]', "cannot be used"),
        (b'[["a",[10]]]', "cannot be used: 'Expected `int` <= 9"),
    ]:
        with pytest.raises(ValueError, match=says):
            decode_json(data, list[Row], "it", 20, ValueError)
