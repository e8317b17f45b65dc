"""Records come from files and datasets; what is wrong with one is said with its file and line."""

import importlib.util
import json

import pytest

from ravnest.errors import ConfigError
from ravnest.requester.finetuning.records import (
    ChatMessage,
    ChatRecord,
    PromptRecord,
    TextRecord,
    read_records,
)


def write(folder, name, content):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_each_form_of_record_is_read_from_json_lines(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"text": "a"}, {"prompt": "p", "completion": "c", "id": 3}, {"messages": chat}]
    file = write(tmp_path, "data.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert list(read_records(file)) == [
        TextRecord(f"{file}, line 1", "a"),
        PromptRecord(f"{file}, line 2", "p", "c"),
        ChatRecord(f"{file}, line 3", (ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello"))),
    ]


def test_csv_knows_the_line_even_after_text_over_several_lines(tmp_path):
    file = write(tmp_path, "data.csv", 'prompt,completion\n"a\nb",c\nd,e\n')
    assert [record.place for record in read_records(file)] == [f"{file}, line 3", f"{file}, line 4"]


def test_a_list_in_a_json_file_and_a_list_of_dicts_are_read(tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    file = write(tmp_path, "data.json", json.dumps(rows, indent=1))
    assert [record.text for record in read_records(file)] == ["one", "two"]
    assert [record.place for record in read_records(rows)] == [
        "record 1 of the data",
        "record 2 of the data",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [("d.jsonl", '{"text": "a"}\r\n'), ("d.json", '[{"text": "a"}]'), ("d.csv", "text\r\na\r\n")],
)
def test_the_mark_that_windows_puts_first_is_no_part_of_the_text(tmp_path, name, content):
    file = write(tmp_path, name, content.encode("utf-8-sig"))
    assert [record.text for record in read_records(file)] == ["a"]


def test_in_a_table_of_several_forms_the_columns_that_are_filled_count():
    chat = [{"role": "assistant", "content": "Hello"}]
    forms = ({"text": "a"}, {"prompt": "p", "completion": "c"}, {"messages": chat})
    rows = [dict.fromkeys(("text", "prompt", "completion", "messages")) | form for form in forms]
    assert [type(record) for record in read_records(rows)] == [TextRecord, PromptRecord, ChatRecord]


def test_columns_may_have_other_names(tmp_path):
    rows = [{"question": "q", "answer": "a"}]
    columns = {"prompt": "question", "completion": "answer"}
    assert list(read_records(rows, columns)) == [PromptRecord("record 1 of the data", "q", "a")]
    with pytest.raises(ConfigError, match=r"columns says 'promt'"):
        list(read_records(rows, {"promt": "question"}))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("data.jsonl", '{"text": "a"}\n{"text": }', r"data.jsonl, line 2 is no JSON"),
        ("data.jsonl", "[1, 2]", r"line 1 is \[1, 2\], no object"),
        ("data.jsonl", '{"body": "a"}', r"line 1 has no text to train on \(its columns: 'body'\)"),
        ("data.jsonl", '{"text": 7}', r"line 1: 'text' is 7, not text"),
        ("data.jsonl", '{"prompt": "a", "completion": null}', r"line 1: 'completion' is None"),
        ("data.jsonl", '{"messages": "hi"}', r"line 1: the messages are 'hi'; write \["),
        ("data.jsonl", '{"messages": [{"role": "user"}]}', r"message 1 has no role with text"),
        ("data.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', r"no message of the assistant"),
        ("data.jsonl", b'{"text": "\xff"}', r"line 1 is not text"),
        ("data.jsonl", "[" * 5000, r"line 1 is (no JSON|nested too deeply)"),
        ("data.csv", "text\na,b\n", r"data.csv, line 2 has other columns"),
        ("data.csv", "prompt,completion\na\n", r"data.csv, line 2 has other columns"),
        ("data.csv", b"text\n\xff\xfe\n", r"data.csv is not text"),
        ("data.csv", 'text\n"a\n', r"line 1 is no CSV: .*; text with commas, lines or quotes needs quotes"),
        ("data.jsonl", '{"text": "a"}'.encode("utf-16"), r"data.jsonl is UTF-16, .*; write UTF-8"),
        ("data.csv", "text\na\n".encode("utf-16"), r"data.csv is UTF-16, .*; write UTF-8"),
        ("data.doc", "", r"data.doc is of no known form by its name; give a file that ends in .jsonl"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, name, content, told):
    with pytest.raises(ConfigError, match=told):
        list(read_records(write(tmp_path, name, content)))


def test_files_that_are_not_there_are_said(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl does not exist"):
        list(read_records(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"is a folder; give a file inside it"):
        list(read_records(tmp_path))


@pytest.mark.parametrize("data", [7, None, {"train": []}, b"abc"])
def test_data_of_another_kind_is_refused(data):
    with pytest.raises(ConfigError, match=r"the data is of type"):
        list(read_records(data))


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install pyarrow"):
        list(read_records(write(tmp_path, "data.parquet", b"PAR1")))
