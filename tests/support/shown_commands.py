"""Carries out what a page of the docs tells people to do: the text is the program.

A block of shell names its terminal in its first line (`# Anna`), a block of another language its file
(`# sums.py`), which is written where the next shell block runs. `rvn1_...` is the invitation that a hub has
printed by then. A block that opens a hub or joins one goes on while people read on; its terminal takes the
next block when it has ended.
"""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^```(sh|python|toml)\n# (.+?)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INVITATION = re.compile(r"ravnest join (rvn1_\w+)")
_PLACEHOLDER = "rvn1_..."
_ENDED = "-- block ended --"
MOST_SECONDS = 500  # for a block to end: only one that hangs needs so long


@dataclass(frozen=True, slots=True)
class Shown:
    """A block of shell, where it is typed, and the files that the page has shown for it."""

    terminal: str
    script: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether people do something else while it runs."""
        return re.search(r"^ravnest (hub|join) ", self.script, re.MULTILINE) is not None


def read_page(text: str) -> Iterator[Shown]:
    """Yield what a page tells people to do, in order."""
    files: dict[str, str] = {}
    for language, name, body in _BLOCK.findall(text):
        if language == "sh":
            yield Shown(name, body, files)
            files = {}
        else:
            files[name] = body


class Terminal:
    """A shell that takes one block after the other; an error ends it, and nobody waits any longer."""

    def __init__(
        self, folder: Path, prefix: Sequence[str], environment: Mapping[str, str], desk: "list[Terminal]"
    ) -> None:
        self.folder = folder
        self.said = ""
        self._num_sent = 0
        self._desk = desk  # all that are open
        self.news = desk[0].news if desk else threading.Condition()
        desk.append(self)
        self._shell = subprocess.Popen(
            [*prefix, "bash", "-e"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            with self.news:
                self.said += line
                self.news.notify_all()
        with self.news:
            self._has_ended = True
            self.news.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether the shell ended before what was typed did."""
        return self._has_ended and self.said.count(_ENDED) < self._num_sent

    def type(self, script: str) -> None:
        """Send a block when the one before has ended."""
        self.wait()
        assert self._shell.stdin is not None
        self._num_sent += 1
        self._shell.stdin.write(f"{script}\necho '{_ENDED}'\n")
        self._shell.stdin.flush()

    def wait(self) -> None:
        """Wait until all that was typed has ended well."""
        self._wait_for(lambda: self.said.count(_ENDED) == self._num_sent)

    def read_invitation(self) -> str:
        """Wait for the line that a hub prints, and return the token in it."""
        self._wait_for(lambda: _INVITATION.search(self.said) is not None)
        return _INVITATION.findall(self.said)[-1]

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        with self.news:
            self.news.wait_for(
                lambda: is_there() or any(each.has_failed for each in self._desk), MOST_SECONDS
            )
        failed = next((each for each in self._desk if each.has_failed), None)
        assert failed is None, f"a command has failed:\n{failed.said}"
        assert is_there(), f"a command hangs:\n{self.said}"

    def close(self) -> None:
        """End the shell and all that it started."""
        if self._shell.poll() is None:
            os.killpg(self._shell.pid, 9)
        self._shell.communicate()


def follow(page: Sequence[Shown], terminals: Mapping[str, Terminal]) -> None:
    """Do what a page says, word for word; every command must end well."""
    invitation = ""
    for block in page:
        terminal = terminals[block.terminal]
        for name, body in block.files.items():
            (terminal.folder / name).write_text(body)
        assert invitation or _PLACEHOLDER not in block.script, "nobody has invited yet"
        terminal.type(block.script.replace(_PLACEHOLDER, invitation))
        if "ravnest hub " in block.script:
            invitation = terminal.read_invitation()
        elif not block.goes_on:
            terminal.wait()
    for terminal in terminals.values():
        terminal.wait()
