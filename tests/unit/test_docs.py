"""The documents name what exists: links, files, messages, phases, and no word that the tree has given up."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import get_args, get_origin

import pytest

from ravnest.averaging.round import ROUND_TRANSITIONS, RoundPhase
from ravnest.hub.coordinator.phases import (
    CLUSTER_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    ClusterPhase,
    JobPhase,
    NodePhase,
)
from ravnest.protocol.messages import Message

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# History: they keep the names of their day.
PRESENT = [page for page in PAGES if "decisions" not in page.parts and page.name not in ("lab-log.md",)]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAMED_FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md|toml|json))(?:::?\w+)?`")
# Beside the package: where a file that a page names may lie.
ROOTS = ("", "ravnest", "docs", "tests")
NOT_OURS = {
    "adapter_config.json",
    "config.json",
    "guests.json",
    "hub.json",
    "manifest.json",
    "mine.py",
    "my_model.json",
    "my_model.py",
    "plan.json",
}  # of users and of runs


def show(page: Path) -> str:
    return str(page.relative_to(ROOT))


def find_anchor(heading: str) -> str:
    """Return a heading as it is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def find_broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            broken += [] if anchor in map(find_anchor, headings) else [link]
    return broken


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert find_broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One Thing\n[a](other.md) [b](#one-thing) [c](#two) [d](https://example.org) [e](page.md)"
    )
    assert find_broken_links(page) == ["other.md", "#two"]


@pytest.mark.parametrize("page", PRESENT, ids=show)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(NAMED_FILE.findall(page.read_text(encoding="utf-8"))) - NOT_OURS
    missing = [name for name in named if not any((ROOT / root / name).exists() for root in ROOTS)]
    assert missing == []


def read_section(title: str) -> str:
    """Return a section of the protocol page, with its sections."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    level = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)
    assert level is not None, f"the page has no section {title!r}"
    rest = page[level.end() :]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def find_rows(section: str) -> list[str]:
    """Return the code names that the rows of its tables begin with."""
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_the_protocol_page_has_every_message_once_and_no_other() -> None:
    messages = [(get_origin(kind) or kind) for kind in get_args(Message)]
    assert sorted(find_rows(read_section("The messages"))) == sorted(kind.__name__ for kind in messages)


def test_a_message_is_in_the_section_of_its_module() -> None:
    modules = {
        (get_origin(kind) or kind).__name__: (get_origin(kind) or kind).__module__
        for kind in get_args(Message)
    }
    titles = re.findall(r"^### (.+)$", read_section("The messages"), re.MULTILINE)
    for title in titles:
        module = re.search(r"`protocol/(\w+)\.py`", title)
        assert module is not None
        assert {modules[name] for name in find_rows(read_section(title))} == {f"ravnest.protocol.{module[1]}"}


@pytest.mark.parametrize(
    ("title", "phases"),
    [
        ("A node: `NodePhase`", NodePhase),
        ("A cluster: `ClusterPhase`", ClusterPhase),
        ("A job: `JobPhase`", JobPhase),
        ("A round: `RoundPhase`", RoundPhase),
    ],
)
def test_the_protocol_page_has_and_draws_every_phase(title: str, phases: type[StrEnum]) -> None:
    section = read_section(title)
    assert find_rows(section) == [phase.name for phase in phases]
    drawn = section.split("```")[1]
    assert all(phase.name in drawn for phase in phases)


@pytest.mark.parametrize(
    ("title", "transitions"),
    [
        ("A node: `NodePhase`", NODE_TRANSITIONS),
        ("A cluster: `ClusterPhase`", CLUSTER_TRANSITIONS),
        ("A job: `JobPhase`", JOB_TRANSITIONS),
        ("A round: `RoundPhase`", ROUND_TRANSITIONS),
    ],
)
def test_the_protocol_page_has_the_transitions_of_the_code(
    title: str, transitions: Mapping[StrEnum, frozenset[StrEnum]]
) -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", read_section(title), re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", following)) for name, following in rows}
    # A phase that is entered again is no change.
    allowed = {phase.name: {x.name for x in following - {phase}} for phase, following in transitions.items()}
    assert told == allowed


def test_the_glossary_is_in_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    assert len(words) > 60
    assert words == sorted(words, key=lambda word: word.lower().replace("`", ""))
    assert len(words) == len(set(words))


def test_the_tree_of_the_architecture_names_every_module_and_no_other() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = page.split("## The tree")[1].split("```")[1]
    modules = {file.stem for file in (ROOT / "ravnest").rglob("*.py") if not file.stem.startswith("__")}
    assert modules - set(re.findall(r"\w+", tree)) == set()
    columns = re.findall(r"^ +([a-z_]+(?:, [a-z_]+)*)(?=  +)", tree, re.MULTILINE)
    assert len(columns) > 50
    assert {name for column in columns for name in column.split(", ")} - modules == set()
