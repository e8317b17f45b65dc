"""What commands share: files in, files and tables out, with a sentence where that fails."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.disk import read_bounded
from ravnest.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


def read_text(name: str, max_bytes: int) -> str:
    """Return what a file or a pipe holds, or raise the sentence that says why it cannot be read."""
    try:
        return read_bounded(name, max_bytes, is_plain=False).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not text (byte {error.start} is no UTF-8); give a TOML or JSON file"
        ) from None


def write_text(option: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{option} {name} cannot be written: {error.strerror}"
        raise ConfigError(f"{reason}; give a file in a folder that exists and is yours") from None


def to_json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False)


def print_parts(show: Callable[[int], Iterable["RenderableType"]]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for part in show(console.width):
        console.print(part)
