"""What the site and the packages promise: shown commands, quoted messages, pictures, pins, units."""

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ravnest.cli.main import program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
UNITS = sorted((ROOT / "packaging").glob("*.service"))
RAVNEST = re.compile(r"(?:^|(?<=[\s/]))ravnest(?= )")


def load(name: str):
    """Return a module of the site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `ravnest` of each command in the shell blocks of a page."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            places = [place for place, word in enumerate(words) if Path(word).name == "ravnest"]
            for place in places:
                rest = words[place + 1 :]
                end = next((at for at, word in enumerate(rest) if word in ("&&", "|", ">", "&")), len(rest))
                if rest[:1] and rest[0] in program.commands:
                    yield rest[:end]


def check_command(words: list[str]) -> None:
    """Raise if a command has an option that the program does not know, or too many arguments."""
    command = program.commands[words[0]]
    parser = command.make_parser(click.Context(command, info_name=words[0]))
    _, left, _ = parser.parse_args(list(words[1:]))
    assert not left, f"{words} has {left} too many"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_is_one_of_the_program(page: Path) -> None:
    for words in find_commands(page.read_text(encoding="utf-8")):
        check_command(words)


def test_a_command_that_the_program_does_not_know_is_found() -> None:
    (words,) = find_commands("```sh\n.venv/bin/ravnest join rvn1_... --memroy '4 GB'  # no\n```\n")
    with pytest.raises(click.NoSuchOption):
        check_command(words)
    assert list(find_commands("```sh\n. .venv/bin/activate && ravnest plan --json > x\n```\n")) == [
        ["plan", "--json"]
    ]


def find_sentences() -> list[str]:
    """Return the texts of the program's code; what differs in one is `...`."""
    found = []
    for path in sorted((ROOT / "ravnest").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
                found.append("".join(map(str, parts)))
    return found


def is_said(message: str, sentences: list[str]) -> bool:
    """Return whether some text of the program holds the message, or each of its longer parts."""
    parts = [part.strip(" ;:,()") for part in message.split("...")]
    long = [part for part in parts if len(part) > 8] or [max(parts, key=len)]
    return any(message in each for each in sentences) or all(
        any(part in each for each in sentences) for part in long
    )


def test_every_message_of_the_troubleshooting_page_is_one_that_the_program_has() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^- `(.+?)`: ", page, re.MULTILINE | re.DOTALL)
    assert len(messages) > 40
    assert len(messages) == len(re.findall(r"^- ", page, re.MULTILINE))
    sentences = find_sentences()
    assert [each for each in messages if not is_said(" ".join(each.split()), sentences)] == []


def test_a_message_that_nobody_says_is_found() -> None:
    sentences = ["the hub at ... cannot be reached: ..."]
    assert is_said("the hub at ... cannot be reached: ...", sentences)
    assert not is_said("the hub at ... is not to be found: ...", sentences)


def test_the_pictures_are_as_they_are_drawn() -> None:
    pictures = load("pictures")
    for name, draw in pictures.PICTURES.items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == draw(), (
            "run docs/site/pictures.py"
        )


def test_the_benchmarks_page_has_every_report_with_what_it_missed() -> None:
    made = load("made_pages").show_reports()
    for report in (ROOT / "benchmarks" / "reports").glob("*.md"):
        assert f"/benchmarks/reports/{report.stem}\n" in made
        section = made.partition(f"## {report.stem}\n")[2].partition("\n## ")[0]
        missed = re.search(r"Missed: (.+?)\.$", report.read_text(encoding="utf-8"), re.MULTILINE)
        assert section.count("\n- ") == (len(missed[1].split("; ")) if missed else 0)


def test_the_commands_page_has_every_command() -> None:
    made = load("made_pages").show_commands()
    assert re.findall(r"^## ravnest (\S+)$", made, re.MULTILINE) == list(program.commands)


def test_the_lock_has_every_dependency_with_hashes_and_no_address() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    body = "\n".join(line for line in lock.splitlines() if not line.lstrip().startswith("#"))
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", body, re.MULTILINE))
    for dependency in project["dependencies"]:
        name, _, least = dependency.partition(">=")
        version = locked[name.replace("_", "-")]
        assert tuple(map(int, version.split("."))) >= tuple(map(int, least.split("."))), dependency
    assert "://" not in body
    entries = re.split(r"^(?=[\w.-]+==)", body, flags=re.MULTILINE)[1:]
    assert len(entries) >= len(locked)
    assert [each.split()[0] for each in entries if "--hash=sha256:" not in each] == []
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert locked["torch"] == torch[1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_has_no_objection_to_a_unit(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text().replace("/opt/ravnest/bin/ravnest", sys.executable)
    copy = tmp_path / unit.name
    copy.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_of_the_program(unit: Path) -> None:
    start = re.search(r"^ExecStart=/opt/ravnest/bin/ravnest (.+)$", unit.read_text(), re.MULTILINE)
    assert start is not None
    check_command(shlex.split(start[1]))


def test_the_image_copies_what_is_there_and_its_shell_parses() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "packaging" / "Dockerfile").read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "ENV", "STOPSIGNAL"}
    assert {name for name, _ in steps} <= known | {"ENTRYPOINT", "CMD"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]}
    assert copied == sent, "what is sent to Docker is what the image copies"
    for name, rest in steps:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
