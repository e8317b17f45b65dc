"""What the page shows of a run: curves of bounded length, news, and one document, live or from a log."""

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from support.hub_world import job
from support.saved_run import write_beside
from support.watched_world import AT_WORK, WatchedWorld

from ravnest.config import TIMEOUTS
from ravnest.errors import ConfigError, StoreAway
from ravnest.hub.coordinator.events import Received
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    DashboardOpened,
    Evaluated,
    Joined,
    Left,
    Missing,
    Returned,
    RoundEnded,
    Stopping,
    Trained,
    WorkUndone,
)
from ravnest.hub.coordinator.phases import ClusterPhase, JobPhase, NodePhase
from ravnest.hub.service.event_log import EventLog, LogFolder
from ravnest.hub.service.web.dashboard import LogFollower
from ravnest.hub.service.web.recorder import NewsList, RunRecorder
from ravnest.hub.service.web.run_metrics import write_metrics
from ravnest.hub.service.web.snapshot import HubFacts, RunReplica, UpdateCutter, make_document
from ravnest.protocol.training import StepReport
from ravnest.web.updates import RunCurve

HOSTILE = "<img src=x onerror=alert(1)>"


def curves_of(recorder):
    parts = {name: curve.after(0, 0) for name, curve in recorder.curves.items()}
    return {name: part for name, part in parts.items() if part.points}


def trained(**changes):
    world = WatchedWorld(job(epochs=6, **changes))
    world.join(*"abcde", memory_mb=250.0)
    return world


def is_training(world):
    return lambda: any(each.is_running for each in world.hub.clusters) and world.hub.ledger.num_counted > 0


# Curves.


def test_a_curve_that_is_full_halves_itself_and_keeps_its_mean_and_its_ends():
    curve = RunCurve(most_points=8)
    for number in range(1000):
        curve.add(float(number), 10 * number, float(number % 2))
    part = curve.after(0, 0)
    assert len(part.points) < 8
    assert part.generation > 0
    assert [point[0] for point in part.points] == sorted(point[0] for point in part.points)
    assert all(point[1] == 10 * point[0] for point in part.points)
    assert {point[2] for point in part.points} == {0.5}, "a point is the mean of all it stands for"
    assert part.points[-1][0] > 800


def test_a_reader_gets_the_rest_of_a_curve_and_after_a_halving_all_of_it():
    curve = RunCurve(most_points=4)
    for number in range(3):
        curve.add(number, number, 1.0)
    assert curve.after(0, 2).first == 2
    assert len(curve.after(0, 2).points) == 1
    curve.add(3, 3, 1.0)
    again = curve.after(0, 3)
    assert (again.generation, again.first, len(again.points)) == (1, 0, 2)


# News.


def test_news_have_numbers_topics_tones_and_names():
    news = NewsList()
    news.add(Joined("a"), 1.0)
    news.add(Trained(1, 2, 1, 0.5), 2.0)  # a curve shows it
    news.add(RoundEnded(1, False, False, "b is late"), 3.0)
    news.add(ClusterBroken("A", "a left", 8), None)
    found = [(each.number, each.topic, each.tone, each.names) for each in news]
    assert found == [
        (1, "members", "good", ("a",)),
        (2, "rounds", "warning", ()),
        (3, "plan", "bad", ()),
    ]
    assert [each.number for each in news.after(2)] == [3]
    assert news.after(3) == ()


def test_news_are_bounded_in_number_and_in_length():
    news = NewsList()
    for number in range(5000):
        news.add(Left("a", f"{number} " + "x" * 10_000), 0.0)
    kept = list(news)
    assert len(kept) == 2000
    assert kept[-1].number == 5000
    assert max(len(each.text) for each in kept) <= 2001
    assert [each.number for each in news.after(4998)] == [4999, 5000]
    assert len(news.after(0)) == 2000


def test_the_link_with_its_token_is_no_news():
    recorder = RunRecorder()
    recorder.observe_notice(DashboardOpened("http://127.0.0.1:7780/?token=secret"))
    assert list(recorder.news) == []


# The document.


def test_a_document_before_the_job_says_what_is_waited_for():
    found = make_document(RunRecorder(), HubFacts(is_live=True))
    assert (found.phase, found.clusters, found.nodes, found.plan) == (JobPhase.COLLECTING, (), (), None)
    assert not found.can_stop


def test_a_document_of_a_run_at_work_has_clusters_that_tile_the_model():
    world = trained()
    world.run_until(is_training(world))
    found = world.document()
    assert (found.phase, found.is_live, found.can_stop) == (JobPhase.TRAINING, True, True)
    assert found.clusters
    for cluster in found.clusters:
        assert sum(stage.share for stage in cluster.stages) == pytest.approx(1.0)
        assert [stage.start for stage in cluster.stages[1:]] == [stage.stop for stage in cluster.stages[:-1]]
        assert [stage.link.to for stage in cluster.stages[:-1]] == [each.node for each in cluster.stages[1:]]
        assert cluster.stages[-1].link is None
        assert all(0 < stage.planned_bytes <= stage.available_bytes for stage in cluster.stages)
    assert {node.name for node in found.nodes} == set("abcde")
    assert found.plan is not None
    assert found.plan.samples_per_second > 0
    assert {owner for ring in found.plan.rings for owner in ring.owners} <= set("abcde")
    assert msgspec.json.decode(msgspec.json.encode(found))["schema"] == "ravnest.dashboard/1"


def test_reports_of_stages_become_curves_and_a_pulse():
    world = trained()
    world.run()
    curves = curves_of(world.recorder)
    assert len(curves["loss"].points) > 1
    samples = [point[1] for point in curves["loss"].points]
    assert samples == sorted(samples)
    assert 0 < samples[-1] <= world.given.settings.num_total
    assert {point[2] for point in curves["learning_rate"].points} == {0.1}
    assert curves["predicted_samples_per_second"].points[0][2] > 0
    assert "validation loss" in curves
    assert world.recorder.pulses
    assert all(0 <= pulse.busy <= 1 for pulse in world.recorder.pulses.values())


def test_a_death_is_seen_as_missing_then_gone_then_as_another_cluster():
    world = trained()
    world.run_until(is_training(world))
    victim = world.document().clusters[0].stages[0].node
    world.recorder.observe_notice(Missing(victim, "silence", 3.0))
    stage = world.document().clusters[0].stages[0]
    assert (stage.is_missing, stage.phase) == (True, NodePhase.HOSTING)
    world.recorder.observe_notice(Returned(victim))
    assert not world.document().clusters[0].stages[0].is_missing
    world.kill(victim)
    world.run_until(lambda: world.told(Left))
    found = world.document()
    assert [each.name for each in found.departures] == [victim]
    assert victim not in {node.name for node in found.nodes}
    gone = [stage for each in found.clusters for stage in each.stages if stage.node == victim]
    broken = [each.phase for each in found.clusters if each.phase is ClusterPhase.BROKEN]
    assert {stage.phase for stage in gone} <= {None}
    assert bool(gone) == bool(broken)
    redone = sum(each.num_given_back for each in world.told(ClusterBroken))
    assert found.training.samples_redone >= redone
    world.run()
    assert world.document().phase is JobPhase.FINISHED
    assert not world.document().can_stop


def test_a_run_that_is_stopped_cannot_be_stopped_again():
    world = trained()
    world.run_until(is_training(world))
    world.stop()
    assert world.told(Stopping)
    assert (world.document().can_stop, world.document().is_stopping) == (False, True)


def test_names_of_metrics_that_peers_make_up_are_bounded():
    world = trained()
    world.run_until(is_training(world))
    cluster = next(each for each in world.hub.clusters if each.is_running)
    lease = next(each for each in world.open_leases if each.cluster_id == cluster.cluster_id)
    metrics = tuple((f"{number}" + "x" * 5000, 1.0) for number in range(500))
    facts = (cluster.build_id, lease.first_microbatch, 1, 0, 4, 0.1, 0.1, 0.0, 0.0, 1.0, metrics)
    world.recorder.observe(world.tracker, Received(cluster.leaf, StepReport(*facts), world.now + 10.0), ())
    curves = world.recorder.curves
    assert len(curves) <= 40
    assert max(map(len, curves)) <= 60


# Updates, and what the web's thread knows.


def test_updates_put_together_are_the_whole():
    world, replica = trained(), RunReplica()
    cutter = UpdateCutter(world.recorder)
    while not world.is_finished:
        replica.apply(cutter.cut(AT_WORK))
        num_seen = len(world.happened)
        world.run_until(lambda: world.is_finished or len(world.happened) > num_seen + 20)  # noqa: B023
    replica.apply(cutter.cut(AT_WORK))
    assert replica.run == world.document()
    assert tuple(replica.news) == tuple(world.recorder.news)
    assert replica.curves == curves_of(world.recorder)
    assert cutter.cut(AT_WORK).news == ()
    assert cutter.cut(AT_WORK).curves == {}


def test_a_log_shows_the_same_run_but_for_telemetry(tmp_path):
    world = trained()
    world.run()
    with EventLog(tmp_path) as store:
        for event, orders in zip(world.log, world.answers, strict=True):
            if not orders or type(orders[0]).__name__ != "Refusal":
                store.append(event)
    follower = LogFollower(tmp_path, lambda: False)
    update = follower.read(False)
    assert update.is_whole
    assert follower.read(False) is None, "nothing is new"
    assert follower.read(True) is not None
    live = world.document(HubFacts())
    assert (update.run.phase, update.run.training.num_samples) == (JobPhase.FINISHED, live.training.num_total)
    assert [each.text for each in update.news] == [each.text for each in world.recorder.news]
    assert asdict(update.run.rounds) == asdict(live.rounds)
    assert len(update.curves["loss"].points) > 1
    assert update.curves["validation loss"].points == curves_of(world.recorder)["validation loss"].points


def test_a_log_that_grows_is_read_on_and_a_damaged_one_is_told(tmp_path):
    world = trained()
    world.run()
    with EventLog(tmp_path) as store:
        for event in world.log[:20]:
            store.append(event)
        follower = LogFollower(tmp_path, lambda: True, TIMEOUTS)
        first = follower.read(False)
        store.append(world.log[20])
        second = follower.read(False)
        assert first.run.is_live
        assert second is not None
        assert second.run.now >= first.run.now
        write_beside(tmp_path, "Nonsense", b"\x00")
        third = follower.read(False)
    assert third.news[-1].kind == "Damaged"
    assert "damaged" in third.news[-1].text


def test_a_log_on_a_server_that_is_away_is_read_on_when_it_is_back(tmp_path):
    class Away(LogFolder):
        is_away = False

        def read(self, after):
            self.check()
            return super().read(after)

        def identify(self):
            self.check()
            return super().identify()

        def check(self):
            if self.is_away:
                raise StoreAway("it does not answer")

    world, place = trained(), Away(tmp_path)
    world.run()
    with EventLog(tmp_path) as store:
        for event in world.log[:20]:
            store.append(event)
        follower = LogFollower(place, lambda: True, TIMEOUTS)
        assert follower.read(False) is not None
        store.append(world.log[20])
        place.is_away = True
        assert follower.read(False) is None
        place.is_away = False
        again = follower.read(False)
    assert again.run.now >= world.log[20].now
    assert not [each for each in again.news if each.kind == "Damaged"]


def test_of_a_folder_that_goes_while_it_is_shown_what_was_read_stays(tmp_path):
    world, folder = trained(), tmp_path / "run"
    world.run()
    with EventLog(folder) as store:
        for event in world.log[:20]:
            store.append(event)

    def is_running():
        if not folder.exists():
            raise ConfigError("it holds no run of a hub")
        return True

    follower = LogFollower(folder, is_running)
    first = follower.read(False)
    shutil.rmtree(folder)
    second = follower.read(False)
    assert (first.run.is_live, second.run.is_live, second.is_whole) == (True, False, False)
    assert (second.run.job, len(second.run.nodes)) == (first.run.job, len(first.run.nodes))
    assert "there is no log" in second.news[-1].text
    assert follower.read(False) is None


def test_a_log_that_was_cut_short_is_shown_up_to_there(tmp_path):
    world = trained()
    world.run()
    with EventLog(tmp_path) as store:
        for event in world.log:
            store.append(event)
    path = tmp_path / "hub.sqlite"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    update = LogFollower(tmp_path, lambda: False).read(False)
    assert update.run.job == world.document().job
    assert update.run.clusters
    assert "damaged" in update.news[-1].text


# Metrics.


def test_metrics_are_of_the_document_and_escape_what_peers_say():
    world = trained()
    world.run_until(is_training(world))
    found = world.document()
    cluster = found.clusters[0]
    stage = replace(cluster.stages[0], node='a"}\n' + HOSTILE, busy=0.5)
    found = replace(found, clusters=(replace(cluster, stages=(stage, *cluster.stages[1:])),))
    text = write_metrics(found).decode()
    assert f"ravnest_trained_samples {float(found.training.num_samples)}" in text
    assert 'ravnest_job_phase{phase="training"} 1.0' in text
    assert f'ravnest_nodes{{phase="hosting"}} {float(sum(x.phase == "hosting" for x in found.nodes))}' in text
    busy = [line for line in text.splitlines() if line.startswith("ravnest_stage_busy_ratio{")]
    assert any('node="a\\"}\\n' in line and line.endswith(" 0.5") for line in busy)
    assert write_metrics(None) == b""


def test_the_metrics_of_the_documents_and_of_the_board_for_grafana_are_there():
    world = trained()
    world.run_until(lambda: world.recorder.rounds and world.told(Evaluated) and is_training(world)())
    told = {
        line.split("{")[0].split(" ")[0] for line in write_metrics(world.document()).decode().splitlines()
    }
    root = Path(__file__).parents[5]
    for file in ("docs/dashboard.md", "examples/grafana/ravnest.json"):
        named = set(re.findall(r"\bravnest_[a-z_]+", (root / file).read_text()))
        assert len(named) > 10
        assert named - told <= {"ravnest_stage_busy_ratio", "ravnest_eta_seconds"}, file


def test_evaluations_are_on_the_curve_of_their_metric():
    recorder = RunRecorder()
    recorder.observe_notice(Evaluated(1, "A", 10, 0.5, (("accuracy", 0.9), ("broken", None))))
    assert curves_of(recorder)["validation accuracy"].points == ((0.0, 0, 0.9),)
    assert "validation broken" not in curves_of(recorder)


def test_a_node_whose_work_is_undone_is_named_and_its_samples_count_as_redone():
    recorder = RunRecorder()
    recorder.observe_notice(WorkUndone("liar", 64))
    recorder.observe_notice(RoundEnded(3, True, False, "", unlike=(("B", "its weights are far away"),)))
    undone, ended = recorder.news
    assert (undone.tone, undone.names, recorder.samples_redone) == ("bad", ("liar",), 64)
    assert ended.tone == "warning", "it was committed, and somebody is unlike the others"
