"""A study becomes a page with its answer at the top, and the list says what every page says."""

import importlib
import inspect
from pathlib import Path
from statistics import mean, stdev

import pytest

from benchmarks.shapes import make_shape
from ravnest.config import WireFormat
from studies.bandwidth import CUTS, LATENCY, MEAN_RATE, average, draw_nodes
from studies.kappa import best_pace, find_worth, pace, rule, updates_worth, worst_share
from studies.late_stages import windows_of
from studies.late_training import cost_at, tolerated
from studies.memory import saving
from studies.run import PAGES, find_names, main, publish
from studies.staleness import find_broken
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


def test_a_tolerated_lag_lies_between_those_measured() -> None:
    points = [(0, 0.0), (2, 0.01), (4, 0.05), (8, 0.03)]
    assert tolerated(points, 0.03) == pytest.approx(3.0)
    assert tolerated(points, 0.005) == pytest.approx(1.0)
    assert tolerated(points, 0.06) == 8
    assert cost_at(points, 3) == pytest.approx(0.03)
    assert cost_at(points, 8) == pytest.approx(0.03)


def test_training_is_broken_where_a_quarter_of_it_does_as_well() -> None:
    assert find_broken([(16, 2.6), (0, 2.0), (4, 2.3), (8, 2.5)], quarter=2.5) == 8
    assert find_broken([(0, 2.0), (4, 2.3)], quarter=2.5) is None


def test_windows_make_the_first_stage_late_and_the_last_one_never() -> None:
    assert windows_of(4, 3) == (4, 3, 2, 1)
    assert windows_of(3, 8) == (9, 5, 1)
    assert windows_of(1, 0) == (1,)
    assert windows_of(2, 0) == (1, 1)


def test_updates_are_worth_what_one_process_needs_for_the_loss() -> None:
    curve = {0.25: 4.0, 0.5: 2.0, 1.0: 1.0}
    for share, loss in curve.items():
        assert updates_worth(curve, loss) == pytest.approx(share)
    assert updates_worth(curve, 1.5) == pytest.approx(0.5**0.5)
    assert updates_worth(curve, 3.0) == pytest.approx(0.25 * 2**0.5)
    assert updates_worth(curve, 8.0) == pytest.approx(0.0625)
    assert updates_worth(curve, 0.5) == 1.0


def test_the_best_pace_weighs_pauses_against_what_updates_are_worth() -> None:
    worth = {1: 1.0, 10: 0.8, 100: 0.5}
    assert find_worth(worth, 10) == pytest.approx(0.8)
    assert find_worth(worth, 1000) == 0.5
    assert pace(worth, 10, pause=10.0) == pytest.approx(0.4)
    for pause in (0.1, 3.0, 30.0):
        assert best_pace(worth, pause) == max(pace(worth, kappa, pause) for kappa in range(1, 101))
    assert worst_share([worth], rule(1e-9)) < worst_share([worth], rule(2)) <= 1.0


def test_a_round_over_unequal_links_ends_with_the_plain_mean() -> None:
    shape = make_shape(CUTS[:2], 40_000)
    seen = average(shape, draw_nodes(shape, 1.0, 3), WireFormat.FP32)
    assert 0 < seen.error < 1e-6
    assert seen.seconds > 2 * LATENCY


def test_links_are_drawn_with_the_mean_and_the_variation_that_were_asked() -> None:
    shape = make_shape([[50]] * 400, 400)
    rates = [each.upload_bytes_per_second for each in draw_nodes(shape, 0.5, 1).values()]
    assert mean(rates) == pytest.approx(MEAN_RATE, rel=0.05)
    assert stdev(rates) / mean(rates) == pytest.approx(0.5, rel=0.1)


def test_a_node_with_a_third_of_the_bytes_has_two_thirds_less() -> None:
    assert saving(1e8, 3e8) == pytest.approx(2 / 3)
