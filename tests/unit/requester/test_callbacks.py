"""What is done with the news: numbers in files, lines now and then; nobody spoils it for the others."""

import csv
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ravnest.errors import ConfigError
from ravnest.hub.coordinator.notices import (
    EpochDone,
    Evaluated,
    Joined,
    Left,
    Notice,
    PlanFormed,
    Resumed,
    RoundEnded,
    Trained,
    Waiting,
)
from ravnest.requester.callbacks import (
    Callbacks,
    CsvLog,
    EarlyStopping,
    LagNote,
    Narrator,
    StopTraining,
    TensorBoard,
)

STORY: list[Notice] = [
    Joined("a"),
    Trained(64, 256, 1, 2.5),
    Trained(128, 256, 1, None),
    EpochDone(1, 128, 0, 2.25),
    Evaluated(1, "A", 10, 1.5, (("acc", 0.5), ("bad", None))),
    RoundEnded(1, True, False, ""),
]


def test_every_number_is_a_line_of_the_csv_by_the_samples_before_it(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv")
    for news in STORY:
        log(news)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [(row["num_samples"], row["name"], row["value"]) for row in rows] == [
        ("64", "loss", "2.5"),
        ("128", "epoch_loss", "2.25"),
        ("128", "val_loss", "1.5"),
        ("128", "val_acc", "0.5"),
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)


def test_a_csv_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("precious")
    with pytest.raises(ConfigError, match=r"log.csv cannot be written"):
        CsvLog(tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text() == "precious"


def test_without_tensorboard_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def test_tensorboard_gets_the_same_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = TensorBoard(tmp_path)
    for news in STORY:
        board(news)
    assert written == [
        ("loss", 2.5, 64),
        ("epoch_loss", 2.25, 128),
        ("val_loss", 1.5, 128),
        ("val_acc", 0.5, 128),
    ]


def test_a_callback_that_fails_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Notice] = []

    def broken(news: Notice) -> None:
        raise OSError("disk full")

    tell = Callbacks([broken, heard.append], 0)
    with caplog.at_level(logging.WARNING):
        tell(STORY[0])
        tell(STORY[1])
    assert heard == STORY[:2]
    assert caplog.text.count("the callback broken failed and is left out") == 1


def test_a_callback_may_ask_for_some_kinds_of_notices_alone() -> None:
    heard: list[Notice] = []
    tell = Callbacks([], 0)
    tell.add(heard.append, Left | Resumed)
    for news in (Joined("a"), Left("a", "gone"), Resumed(10, 2)):
        tell(news)
    assert heard == [Left("a", "gone"), Resumed(10, 2)]


def test_people_are_told_how_many_are_missing_until_there_is_a_plan() -> None:
    heard: list[Notice] = []
    tell = Callbacks([heard.append], 2)
    for news in (
        Joined("a"),
        Left("a", "gone"),
        Joined("a"),
        Joined("b"),
        PlanFormed(None, 1, 1, 1, 1),
        Left("b", ""),
    ):
        tell(news)
    missing = [news.reason.split()[0] for news in heard if isinstance(news, Waiting)]
    assert missing == ["1", "2", "1"]


@pytest.mark.parametrize(("optimizer", "num_told"), [(object(), 1), ("muon", 0)])
def test_what_a_pipeline_may_cost_an_optimizer_of_ones_own_is_told_once(
    optimizer: object, num_told: int, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(num_stages: int) -> Any:
        return SimpleNamespace(clusters=(SimpleNamespace(stages=(None,) * num_stages),))

    note = LagNote(optimizer)
    for num_stages in (1, 2, 3):
        note(PlanFormed(plan(num_stages), 1, 1, 1, 1))
        assert bool(caplog.records) == (num_stages > 1 and num_told == 1)
    assert len(caplog.records) == num_told


def test_nobody_is_missing_when_a_run_goes_on() -> None:
    heard: list[Notice] = []
    tell = Callbacks([heard.append], 2)
    for news in (Resumed(10, 2), Left("a", "it came back as new"), Joined("a")):
        tell(news)
    assert not any(isinstance(news, Waiting) for news in heard)


def test_nobody_is_missing_where_nobody_is_awaited() -> None:
    heard: list[Notice] = []
    tell = Callbacks([heard.append], 0)
    tell(Left("a", "gone"))
    assert not any(isinstance(news, Waiting) for news in heard)


def test_progress_is_said_now_and_then_and_the_rest_always(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    narrate = Narrator(clock=lambda: now[0])
    for step, news in enumerate(
        (Trained(64, 256, 1, 2.5), Joined("a"), Trained(128, 256, 1, 2.0), Joined("b"))
    ):
        now[0] = 100.0 + step
        narrate(news)
    now[0] = 200.0
    narrate(Trained(192, 256, 2, 1.0))
    assert capsys.readouterr().err.splitlines() == [
        "25% of the training, epoch 1, loss 2.5000",
        "a joined",
        "b joined",
        "75% of the training, epoch 2, loss 1.0000",
    ]


def test_a_callback_may_wish_for_the_end_and_goes_on_being_called() -> None:
    wishes: list[str] = []
    heard: list[Notice] = []

    def has_enough(news: Notice) -> None:
        heard.append(news)
        raise StopTraining("" if isinstance(news, Joined) else "it is good enough")

    callbacks = Callbacks([has_enough, heard.append], 0, wishes.append)
    callbacks(Joined("a"))
    callbacks(EpochDone(1, 128, 0, 2.25))
    assert wishes == ["the callback has_enough wants it", "it is good enough"]
    assert len(heard) == 4


def test_nodes_are_waited_for_after_a_checkpoint_was_gone_on_from_but_not_after_a_restart() -> None:
    for resumed, num_waits in ((Resumed(100, 0), 1), (Resumed(100, 2), 0)):
        told: list[Notice] = []
        callbacks = Callbacks([told.append], 2)
        callbacks(resumed)
        callbacks(Joined("a"))
        assert len([news for news in told if isinstance(news, Waiting)]) == num_waits


def stops_after(
    stopping: EarlyStopping, losses: list[float | None], accuracy: list[float] | None = None
) -> int:
    """Return the number of the evaluation, from 1, that ends the training; 0 for none."""
    for number, loss in enumerate(losses, 1):
        metrics = () if accuracy is None else (("acc", accuracy[number - 1]),)
        try:
            stopping(Trained(64, 256, 1, 2.5))
            stopping(Evaluated(number, "A", 10, loss, metrics))
        except StopTraining:
            return number
    return 0


def test_training_stops_when_evaluations_get_no_better() -> None:
    assert stops_after(EarlyStopping(2), [3.0, 2.0, 1.0, 0.5]) == 0
    assert stops_after(EarlyStopping(2), [3.0, 2.0, 2.5, 1.9, 2.0, 1.9]) == 6
    assert stops_after(EarlyStopping(1, min_delta=0.2), [3.0, 2.9]) == 2
    assert stops_after(EarlyStopping(2), [None, None]) == 2
    falling = EarlyStopping(1, metric="val_acc", higher_is_better=True)
    assert stops_after(falling, [3.0, 2.0, 1.0], [0.5, 0.6, 0.5]) == 3
    with pytest.raises(ConfigError, match="no metric 'f1' in the validation; it has loss, acc"):
        stops_after(EarlyStopping(metric="f1"), [1.0], [0.5])
    with pytest.raises(ConfigError, match="patience is 0; give"):
        EarlyStopping(0)
