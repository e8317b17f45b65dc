"""A stranger follows the docs word for word: the commands of two pages, run as they stand there.

Only what downloads is left out: the clone, the environment and what pip installs are those of this checkout.
"""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.as_root import home_network
from support.shown_commands import Shown, Terminal, follow, read_page

ROOT = Path(__file__).parents[2]
DOWNLOADS = "git clone <this repository>"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": os.pathsep.join((str(ROOT / ".venv" / "bin"), os.environ["PATH"])),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def read_doc(name: str) -> list[Shown]:
    """Return what a page tells people to do, but for what downloads."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    shell = re.findall(r"^```sh\n(.*)$", text, re.MULTILINE)
    found = list(read_page(text))
    assert len(found) == len(shell), "a shell block does not say where it is typed"
    return [block for block in found if DOWNLOADS not in block.script]


def find_accuracy(said: str) -> float:
    """Return the accuracy of the last training that a terminal has seen."""
    return float(re.findall(r"^val_accuracy (\S+)$", said, re.MULTILINE)[-1])


@pytest.fixture
def opened() -> ExitStack:
    """Close terminals and networks in the end, whatever happens."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.needs_root
def test_the_five_minutes(opened: ExitStack, tmp_path: Path) -> None:
    """It takes the hub's port, so it has a network of its own."""
    page = read_doc("start.md")
    names = list(dict.fromkeys(block.terminal for block in page))
    assert names == ["your PC", "a second terminal", "a third terminal"]
    for name in (".venv", "examples"):
        (tmp_path / name).symlink_to((ROOT / name).resolve())
    (space,) = opened.enter_context(home_network(["pc"])).values()
    prefix = ("ip", "netns", "exec", space)
    desk: list[Terminal] = []
    terminals = {name: Terminal(tmp_path, prefix, ENVIRONMENT, desk) for name in names}
    for terminal in terminals.values():
        opened.callback(terminal.close)
    follow(page, terminals)
    said = terminals["your PC"].said
    assert find_accuracy(said) > 0.6
    assert "tensors" in said
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "Net" / "model.safetensors").exists()
    for name in names[1:]:
        assert "ended: the job is done" in terminals[name].said


@pytest.mark.needs_root
def test_the_tutorial_with_three_pcs(opened: ExitStack, tmp_path: Path) -> None:
    page = read_doc("tutorial.md")
    names = list(dict.fromkeys(block.terminal for block in page))
    assert names == ["Anna", "Ben", "Cleo"]
    spaces = opened.enter_context(home_network(names))
    terminals, desk = {}, []
    for name, space in spaces.items():
        (tmp_path / name).mkdir()
        terminals[name] = Terminal(tmp_path / name, ("ip", "netns", "exec", space), ENVIRONMENT, desk)
        opened.callback(terminals[name].close)
    follow(page, terminals)
    said = terminals["Anna"].said
    assert "ben joined" in said
    assert "cleo joined" in said
    assert find_accuracy(said) > 0.7
    for name in ("Ben", "Cleo"):
        assert "ended: the job is done" in terminals[name].said
    assert "lends 1 GB of memory" in terminals["Cleo"].said
    assert "50 Mbit/s of upload" in terminals["Cleo"].said
    assert sorted(path.name for path in tmp_path.glob("*/*.py")) == ["sums.py"], (
        "others have no code of Anna's"
    )


def test_a_page_is_read_as_people_do() -> None:
    text = """
```python
# a.py
x = 1
```
```sh
# Anna
ravnest hub a.py:job
```
```
ravnest is printed here
```
```sh
# Ben
ravnest join rvn1_... --quiet
```
"""
    first, second = read_page(text)
    assert (first.terminal, first.script, first.files) == (
        "Anna",
        "ravnest hub a.py:job\n",
        {"a.py": "x = 1\n"},
    )
    assert (second.terminal, second.goes_on, second.files) == ("Ben", True, {})


def test_a_command_that_fails_is_told_at_once_though_another_waits(opened: ExitStack, tmp_path: Path) -> None:
    desk: list[Terminal] = []
    terminals = {name: Terminal(tmp_path, (), ENVIRONMENT, desk) for name in ("Anna", "Ben")}
    for terminal in terminals.values():
        opened.callback(terminal.close)
    hub = "echo ravnest join rvn1_abc\nread line < <(tail -f /dev/null)  # ravnest hub \n"
    page = [Shown("Anna", hub), Shown("Ben", "ls rvn1_...\necho on\n"), Shown("Anna", "echo done\n")]
    with pytest.raises(AssertionError, match=r"a command has failed:[^$]*rvn1_abc"):
        follow(page, terminals)
    assert "on" not in terminals["Ben"].said.split()
