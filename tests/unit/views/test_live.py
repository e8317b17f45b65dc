"""The panel: what it says, how often it is drawn, and that it is plain data too."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from support.hub_world import HubWorld, job

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.notices import CaptureStep
from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.service.status import NO_JOB, ClusterStatus, MemberStatus, Said, Status, StatusTracker
from ravnest.views.live import LiveView, show_status, status_to_dict

STATUS = Status(
    now=100.0,
    phase=JobPhase.TRAINING,
    job="digits [bold]",
    members=(
        MemberStatus("spare-pc", NodePhase.SPARE),
        MemberStatus("leaf [red]", NodePhase.HOSTING, "A", 1, busy=0.62),
        MemberStatus("root", NodePhase.HOSTING, "A", 0),
    ),
    clusters=(ClusterStatus("A", ("root", "leaf [red]"), ClusterPhase.RUNNING),),
    num_samples=300,
    num_total=1200,
    epoch=2,
    num_updates=9,
    samples_per_second=1234.0,
    loss=0.125,
    validation_epoch=1,
    validation={"loss": 0.5, "acc": 0.75, "odd": None},
    rounds_committed=3,
    rounds_aborted=1,
    round_seconds=1.25,
    left_out=("C",),
    recent=(Said(90.0, "root joined"), Said(99.9, "round 3 committed")),
    predicted_samples_per_second=1300.0,
    eta_seconds=90.0,
)


def text_of(status: Status, width: int = 100, has_hub: bool = True) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(show_status(status, has_hub))
    return console.file.getvalue()


def test_the_panel_says_how_far_how_fast_and_who() -> None:
    text = text_of(STATUS, width=160)
    for words in (
        *("digits [bold]", "1 cluster, 3 nodes", "training  epoch 2  25%", "loss 0.125", "val acc 0.75"),
        *(
            "1,234 samples/s (1,300 predicted)",
            "left",
            "62%",
            "rounds 3 committed, 1 aborted, the last in 1.25 s",
            "without C",
            "10 s ago  root joined",
            "now  round 3 committed",
        ),
    ):
        assert words in text, text
    assert "odd" not in text
    interrupted = text_of(STATUS, width=160, has_hub=False)
    assert "interrupted  epoch 2" in interrupted
    assert "at the end  round 3" in interrupted
    assert not any(word in interrupted for word in ("samples/s", " left", " ago"))
    order = [text.index(name) for name in ("root  ", "leaf [red]", "spare-pc")]
    assert order == sorted(order)


def test_a_cluster_that_does_not_train_is_shown_with_its_phase() -> None:
    shown = {
        phase: text_of(replace(STATUS, clusters=(ClusterStatus("A", ("root", "leaf [red]"), phase),)))
        for phase in ClusterPhase
    }
    for phase, text in shown.items():
        assert (f"A {phase}" in text) is (phase is not ClusterPhase.RUNNING)


def test_it_fits_a_narrow_terminal_and_many_nodes() -> None:
    many = replace(STATUS, members=tuple(MemberStatus(f"pc-{k}", "waiting") for k in range(100)))
    text = text_of(many, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "and 76 more" in text
    assert len(text.splitlines()) < 40


def test_before_a_job_there_is_something_to_show_too() -> None:
    assert "no job yet" in text_of(NO_JOB)


def test_as_data_it_is_versioned_json() -> None:
    data = json.loads(json.dumps(status_to_dict(STATUS)))
    assert data["eta_seconds"] is not None
    assert data | {"eta_seconds": None} == json.loads(json.dumps(status_to_dict(STATUS, has_hub=False)))
    assert data["schema"] == "ravnest.status/2"
    assert (data["phase"], data["members"][1]["stage"], data["validation"]["odd"]) == ("training", 1, None)


class Asked(StatusTracker):
    """Counts how often somebody wants to know."""

    num_times = 0

    def status(self, now: float | None = None) -> Status:
        self.num_times += 1
        return super().status(now)


def test_it_is_drawn_at_most_a_few_times_a_second_and_once_at_the_end() -> None:
    now = [0.0]
    console = Console(file=StringIO(), force_terminal=True, width=80)
    watch = Asked(Coordinator(job()))
    with LiveView(console, clock=lambda: now[0]) as view:
        for now[0] in (0.0, 0.1, 0.2, 0.26, 0.3, 5.0):
            view.look(watch)
        assert watch.num_times == 3
    assert watch.num_times == 4


def test_getting_ready_is_shown_until_there_is_a_job() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with LiveView(console) as view:
        view.tell(CaptureStep("digits", "exporting the [bold] graph"))
        assert "exporting the [bold] graph" in console.file.getvalue()
        view.look(StatusTracker(Coordinator(job())))
        before = console.file.getvalue()
        view.tell(CaptureStep("digits", "never shown"))
        assert console.file.getvalue() == before


def test_a_stage_is_as_busy_as_its_last_reports_say() -> None:
    world = HubWorld(job(epochs=6))
    tracker = StatusTracker(world.hub)
    world.join(*"abc")
    world.run_until(lambda: world.hub.ledger.num_counted > 0)
    for event, orders in world.happened:
        tracker.observe(event, orders)
    status = tracker.status()
    assert {each.busy is not None for each in status.members if each.cluster} == {True}
    assert all(0.0 <= each.busy <= 1.0 for each in status.members if each.cluster)
    assert status.predicted_samples_per_second == world.hub.placement.outlook.samples_per_second


def test_nothing_is_drawn_before_something_happens() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with LiveView(console):
        pass
    assert console.file.getvalue() == ""


def test_without_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert LiveView()._console.no_color
