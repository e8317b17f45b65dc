"""A study becomes a page with its answer at the top, and the list says what every page says."""

import importlib
import inspect
from pathlib import Path

import pytest

from studies.run import PAGES, find_names, main, publish
from studies.study import Study, draw, make_index, make_page

MADE = Study(
    "Does it hold?", "It does, for 2 of 2.", "Both are tried.", "![x](it.svg)", {"num": 2}, "A third."
)


def test_a_page_has_the_answer_at_the_top_and_the_limits_at_the_end() -> None:
    page = make_page("it-holds", MADE, {"cores": 2}, 1.5)
    assert page.startswith("# Does it hold?\n\n> **Answer.** It does, for 2 of 2.\n\n")
    assert "`python -m studies.run it-holds`" in page
    assert "cores 2. Took 1.5 s." in page
    places = [page.index(part) for part in ("Both are tried.", "![x](it.svg)", "A third.")]
    assert places == sorted(places)
    assert page.endswith("A third.\n")


def test_the_list_has_every_page_with_its_question_and_answer(tmp_path: Path) -> None:
    pages, plots = tmp_path / "pages", tmp_path / "plots"
    plots.mkdir()
    (plots / "it.svg").write_text("<svg/>")
    publish("it", MADE, 1.0, plots, pages)
    publish("another", MADE, 1.0, plots, pages)
    assert sorted(each.name for each in pages.iterdir()) == ["README.md", "another.md", "it.md", "it.svg"]
    found = (pages / "README.md").read_text()
    assert "- [Does it hold?](another.md) It does, for 2 of 2.\n- [Does it hold?](it.md) It does" in found


def test_the_list_of_the_repository_is_what_its_pages_say() -> None:
    assert (PAGES / "README.md").read_text() == make_index(PAGES)


def test_a_name_that_is_no_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "--quick"], tmp_path)
    assert "invalid choice: 'study'" in capsys.readouterr().err


@pytest.mark.parametrize("name", find_names())
def test_a_study_is_loaded_and_has_its_page(name: str) -> None:
    module = importlib.import_module(f"studies.{name.replace('-', '_')}")
    inspect.signature(module.run).bind(True, Path())
    assert (PAGES / f"{name}.md").exists()


def test_the_same_drawing_gives_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        draw(tmp_path / folder / "it.svg", lambda axes: axes.plot([1, 2], [3, 4]))
        found.append((tmp_path / folder / "it.svg").read_bytes())
    assert found[0] == found[1]
    assert len(found[0]) < 50_000


def test_index_writes_the_list_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index"], tmp_path) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]
    assert not capsys.readouterr().out
