"""Text to train on, as people have it: JSON lines, CSV, Parquet, a datasets.Dataset or a list of dicts.

A record is a text, a prompt with its completion, or a chat. Each knows its place, so that an error names the
file and the line. Nothing is kept: records are read one after the other. No torch in here.
"""

import codecs
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ravnest.disk import read_bounded
from ravnest.errors import ConfigError
from ravnest.foreign import quote
from ravnest.units import show_bytes

_LONGEST_LINE = 64 << 20  # bytes
_MOST_JSON_BYTES = 1 << 30  # of a file that has to be read whole
_MOST_ROLE = 64
_FORMS = "text; prompt and completion; or messages"
_FIX = f"give {_FORMS}; or say how yours are called (columns: prompt=question, completion=answer)"
COLUMNS = ("text", "prompt", "completion", "messages")
_COLUMNS_OF = (("messages",), ("prompt", "completion"), ("text",))  # of each form, the first counts


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text; all of it is learned."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt and what is to follow it; only that is learned."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What somebody says in a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A chat; what the assistant says is learned."""

    place: str
    messages: tuple[ChatMessage, ...]


Record = TextRecord | PromptRecord | ChatRecord
_Rows = Iterator[tuple[str, Any]]  # each with its place


def read_records(data: Any, columns: Mapping[str, str] | None = None) -> Iterator[Record]:
    """Yield the records of a file, by the end of its name, or of a dataset; or raise ConfigError.

    `columns` says what the data calls text, prompt, completion or messages, where it has other names.
    """
    names = {**{name: name for name in COLUMNS}, **_check_columns(columns or {})}
    for place, row in _open(data):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{place} is {quote(row)}, no object of columns; {_FIX}")
        yield _read_row(place, row, names)


def _check_columns(columns: Mapping[str, str]) -> Mapping[str, str]:
    for name, own in columns.items():
        if name not in COLUMNS or not isinstance(own, str):
            given = f"columns says {quote(name)}: {quote(own)}"
            raise ConfigError(f"{given}; give names of yours for {', '.join(COLUMNS)}")
    return columns


def _read_row(place: str, row: Mapping[str, Any], names: Mapping[str, str]) -> Record:
    has_all = [form for form in _COLUMNS_OF if all(names[each] in row for each in form)]
    filled = [form for form in has_all if all(row[names[each]] is not None for each in form)]
    for form in (*filled, *has_all):  # where records of several forms are one table, others are empty
        if form == ("messages",):
            return ChatRecord(place, _read_messages(place, row[names["messages"]]))
        texts = [_read_text(place, row, names[each]) for each in form]
        return TextRecord(place, *texts) if form == ("text",) else PromptRecord(place, *texts)
    found = ", ".join(quote(name) for name in list(row)[:8]) or "none"
    raise ConfigError(f"{place} has no text to train on (its columns: {found}); {_FIX}")


def _read_text(place: str, row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        hint = f"; a chat goes into a column {COLUMNS[-1]!r}" if isinstance(value, list) else ""
        raise ConfigError(f"{place}: {quote(name)} is {quote(value)}, not text{hint or '; give text'}")
    return value


def _read_messages(place: str, given: Any) -> tuple[ChatMessage, ...]:
    form = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"{place}: the messages are {quote(given)}; {form}")
    found = []
    for number, message in enumerate(given, 1):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        )
        is_role = isinstance(role, str) and 0 < len(role) <= _MOST_ROLE
        if not is_role or not isinstance(content, str):
            shown = quote(message if not is_role else content)
            raise ConfigError(f"{place}: message {number} has no role with text ({shown}); {form}")
        found.append(ChatMessage(str(role), content))
    if not any(message.role == "assistant" for message in found):
        told = "has no message of the assistant, so nothing can be learned from it"
        raise ConfigError(f"{place} {told}; give its answer the role 'assistant'")
    return tuple(found)


def _open(data: Any) -> _Rows:
    if isinstance(data, str | os.PathLike):
        file = Path(data)
        readers: dict[str, Callable[[Path], _Rows]] = {
            ".jsonl": _read_lines,
            ".ndjson": _read_lines,
            ".json": _read_json,
            ".csv": lambda file: _read_csv(file, ","),
            ".tsv": lambda file: _read_csv(file, "\t"),
            ".parquet": _read_parquet,
        }
        reader = readers.get(file.suffix.lower())
        if reader is None and not file.is_dir():
            known = ", ".join(readers)
            raise ConfigError(f"{file} is of no known form by its name; give a file that ends in {known}")
        return _checked_file(file, reader or _read_lines)
    is_foreign = isinstance(data, bytes | Mapping) or not isinstance(data, Iterable)
    if is_foreign or hasattr(data, "keys"):
        kind = type(data).__name__
        split = "; of a DatasetDict give one split: data['train']" if hasattr(data, "keys") else ""
        fix = f"give a file (.jsonl, .csv, .parquet), a datasets.Dataset or a list of dicts{split}"
        raise ConfigError(f"the data is of type {kind}; {fix}")
    return ((f"record {number} of the data", row) for number, row in enumerate(data, 1))


def _checked_file(file: Path, reader: Callable[[Path], _Rows]) -> _Rows:
    """Yield what a reader finds; what goes wrong on the disk is told as a sentence."""
    read_bounded(file, 0) if not file.exists() or file.is_dir() else None  # says why it cannot be read
    try:
        yield from reader(file)
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text (it is no UTF-8 in some line); write UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}; give another file") from None


def _read_lines(file: Path) -> _Rows:
    with file.open("rb") as opened:
        _skip_mark(opened, file)
        number = 0
        while line := opened.readline(_LONGEST_LINE + 1):
            number += 1
            place = f"{file}, line {number}"
            if len(line) > _LONGEST_LINE:
                raise ConfigError(f"{place} is longer than {show_bytes(_LONGEST_LINE)}; cut the text")
            if line.strip():
                yield place, _decode(line, place)


def _read_json(file: Path) -> _Rows:
    with file.open("rb") as opened:
        _skip_mark(opened, file)
        is_list = opened.read(64).lstrip()[:1] == b"["
    if not is_list:
        yield from _read_lines(file)
        return
    rows = _decode(read_bounded(file, _MOST_JSON_BYTES).removeprefix(codecs.BOM_UTF8), str(file))
    for number, row in enumerate(rows, 1):
        yield f"{file}, record {number}", row


def _skip_mark(opened: BinaryIO, file: Path) -> None:
    """Pass the mark that Windows programs begin a text with; refuse text that is no UTF-8 by its mark."""
    found = opened.read(len(codecs.BOM_UTF8))
    if found.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"{file} is UTF-16, as PowerShell's > writes it; write UTF-8: | Out-File -Encoding utf8"
        )
    opened.seek(len(found) if found == codecs.BOM_UTF8 else 0)


def _decode(content: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        form = 'write one object per line, like {"prompt": "...", "completion": "..."}'
        raise ConfigError(f"{place} is no JSON: {error}; {form}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not text (byte {error.start} is no UTF-8); write UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{place} is nested too deeply; write one object per line") from None


def _read_csv(file: Path, delimiter: str) -> _Rows:
    before = csv.field_size_limit(_LONGEST_LINE)
    try:
        with file.open("rb") as opened:
            _skip_mark(opened, file)
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, delimiter=delimiter, strict=True)
            try:
                for row in reader:
                    place = f"{file}, line {reader.line_num}"
                    if None in row or None in row.values():
                        num_columns = len(reader.fieldnames or ())
                        fix = f"give every line {num_columns} columns; text with commas or lines needs quotes"
                        raise ConfigError(f"{place} has other columns than the first line; {fix}")
                    yield place, row
            except csv.Error as error:
                fix = 'text with commas, lines or quotes needs quotes around it, and "" for each quote in it'
                raise ConfigError(f"{file}, line {reader.line_num} is no CSV: {error}; {fix}") from None
    finally:
        csv.field_size_limit(before)


def _read_parquet(file: Path) -> _Rows:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        fix = "pip install pyarrow, or write the data as .jsonl"
        raise ConfigError(f"{file} is Parquet, which needs pyarrow; {fix}") from None
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except ArrowException as error:
        told = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{file} is no sound Parquet file: {told}; write it again") from None
