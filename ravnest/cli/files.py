"""What commands share: files in, files and tables out, with a sentence where that fails."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


def read_text(name: str, max_bytes: int) -> str:
    """Return what a file holds, or raise the sentence that says why it cannot be read."""
    try:
        with Path(name).open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ConfigError(f"{name} is larger than {max_bytes >> 20} MiB; give a smaller file")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; check its name and folder") from None
    except IsADirectoryError:
        raise ConfigError(f"{name} is a folder; give a file inside it") from None
    except PermissionError:
        raise ConfigError(f"{name} may not be read by this user; change its permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not text (byte {error.start} is no UTF-8); give a TOML or JSON file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give another file") from None


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
