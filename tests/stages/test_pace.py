"""A cluster on a virtual clock: the slowest stage stays busy, lag stays bounded, work takes its time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ravnest.config import TIMEOUTS
from ravnest.engine.stage import StageEngine, Updated
from ravnest.engine.staleness import StalenessPolicy
from ravnest.model.capture.capture import Captured
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import Pace, StepReport
from tests.support.timed_world import TimedWorld, capture_layers, layer_batch, plain_settings

EQUAL = [(1.0, 1.0, 1.0)] * 4
UNEQUAL = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)]
SLOW_ROOT = [(2.0, 2.0, 2.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)]
SLOW_LEAF = [(1.0, 0.5, 0.5), (0.7, 0.7, 0.7), (1.5, 1.5, 1.5)]
NUM_SYNCHRONOUS, BOUND_2_UPDATES, NUM_UPDATES = 4, 16, 30

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_layers(8)


def make_world(
    captured: Captured, seconds: Sequence[tuple[float, float, float]], window: int, accumulate: int, **options
) -> TimedWorld:
    num_positions = captured.blueprint.num_positions
    cuts = [num_positions * index // len(seconds) for index in range(1, len(seconds))]
    settings = plain_settings(captured)
    return TimedWorld(captured, cuts, settings, window, accumulate, seconds=seconds, **options)


def plan(seconds: Sequence[tuple[float, float, float]], delay: float) -> tuple[int, int, float]:
    """Return window, batches per update and the seconds of the slowest stage, as the planner chooses them."""
    slowest = max(map(sum, seconds))
    around = sum(map(sum, seconds)) + 2 * (len(seconds) - 1) * delay
    window = math.ceil(1.5 * around / slowest) + 2
    return window, math.ceil((window - 1) / 2), slowest


@pytest.mark.parametrize("delay", [0.0, 1.5])
@pytest.mark.parametrize("seconds", [EQUAL, UNEQUAL, SLOW_ROOT, SLOW_LEAF])
def test_the_slowest_stage_is_busy_and_lag_bounded(captured, seconds, delay):
    window, accumulate, slowest = plan(seconds, delay)
    policy = StalenessPolicy(
        planned_updates=20 * NUM_SYNCHRONOUS,
        accumulate_min=accumulate,
        accumulate_max=accumulate,
        window_max=window,
        max_lag=2,
        growth=1.0,
    )
    world = make_world(captured, seconds, window, accumulate, delay_seconds=delay, policy=policy)
    world.lease([layer_batch(seed) for seed in range(NUM_UPDATES * accumulate)])
    world.run()
    ends = [report.version for report in world.reports[world.nodes[0]]]
    assert ends[-1] == NUM_UPDATES
    for reports in world.reports.values():
        assert len(reports) == NUM_UPDATES * accumulate
        for report in reports:
            bound = 0 if report.version <= NUM_SYNCHRONOUS else policy.lag_bound(report.version)
            assert report.lag <= bound
    # Batches that queue make no link longer.
    middle = world.reports[world.nodes[0]][-2 * window]
    assert middle.link_seconds <= 2 * (len(seconds) - 1) * delay
    # Busy once the bound is what the plan was made for, and until the last batches drain.
    node = world.nodes[[*map(sum, seconds)].index(slowest)]
    first = (BOUND_2_UPDATES + 1) * accumulate
    stop, start = world.ended[node][-window], world.ended[node][first]
    assert world.busy_share(node, start, stop) >= 0.95
    assert (stop - start) / (len(ends) - window - first) <= slowest / 0.95


def test_the_root_measures_links_and_tells_the_cluster_when_the_start_is_over(captured):
    policy = StalenessPolicy(100, accumulate_min=4, accumulate_max=4, window_max=9, max_lag=2, growth=1.0)
    world = make_world(captured, EQUAL, 9, 4, delay_seconds=2.0, policy=policy)
    world.lease([layer_batch(seed) for seed in range(40)])
    world.run()
    assert [(pace.update, pace.is_synchronous) for pace in world.paces[:1]] == [(5, False)]
    # Six hops; the root cannot see that gradients leave before the weights' part of a backward.
    assert world.reports[world.nodes[0]][-1].link_seconds == pytest.approx(6 * 2.0 - 3 * 1.0)
    assert {report.link_seconds for report in world.reports[world.nodes[1]]} == {0.0}
    # Each other stage reports its batches 1, 2, 4, 8, 17 and 34 to the root.
    assert sorted(report.microbatch for report in world.at_root) == sorted([0, 1, 3, 7, 16, 33] * 3)


@pytest.mark.parametrize(
    ("share", "others"),
    [(0.01, [0, 1, 3, 7, 16]), (10.0, [*range(20)])],  # by batches; and after five seconds at the latest
)
def test_the_leaf_tells_the_hub_of_every_batch_and_the_others_now_and_then(captured, share, others):
    world = make_world(captured, [(share, share, share)] * 4, 9, 4, timeouts=TIMEOUTS.peer)
    world.lease([layer_batch(seed) for seed in range(20)])
    world.run()
    told = [message for message in world.at_hub if isinstance(message, StepReport)]
    assert sorted(report.microbatch for report in told if report.loss is not None) == [*range(20)]
    assert sorted(report.microbatch for report in told if report.loss is None) == sorted(others * 3)


def test_a_narrow_window_shows_as_idle_time(captured):
    world = make_world(captured, EQUAL, 1, 1)
    world.lease([layer_batch(seed) for seed in range(20)])
    world.run()
    for node in world.nodes:
        # Of nine seconds, four forwards, four halves of backwards and the root's other half, it works three.
        assert world.reports[node][14].idle_share == pytest.approx(2 / 3)


def test_the_gradient_leaves_before_the_weights_are_done(captured):
    world = make_world(captured, [(1.0, 2.0, 4.0), (1.0, 2.0, 4.0)], 1, 1)
    world.lease([layer_batch(0)])
    world.run()
    root, leaf = world.nodes
    assert world.now[leaf] == 1.0 + 1.0 + 2.0 + 4.0
    assert world.now[root] == 1.0 + 1.0 + 2.0 + 2.0 + 4.0
    assert (world.reports[leaf][0].forward_seconds, world.reports[leaf][0].backward_seconds) == (1.0, 6.0)
    world.lease([layer_batch(1)], first=1, is_evaluation=True)
    before = world.now[leaf]
    world.run()
    assert world.now[leaf] >= before + 1.0


def test_only_the_root_sets_the_pace_and_only_its_cluster_reports(captured):
    policy = StalenessPolicy(0, window_max=3)
    world = make_world(captured, EQUAL, 9, 1, policy=policy)
    root, second, third = world.nodes[:3]
    pace = Pace(1, 0, 8, 1, False)
    assert isinstance(world.deliver(second, pace, (), third), Refusal)
    assert world.deliver(second, pace, (), root) == ()
    assert world.workers[second].schedule._window == 3  # its own memory was planned for no more
    world.lease([layer_batch(seed) for seed in range(4)])
    world.run()
    report = world.reports[world.nodes[1]][0]
    assert world.deliver(root, report, (), second) == ()
    assert isinstance(world.deliver(second, report, (), third), Refusal)
    hostile = replace(report, forward_seconds=1e308, backward_seconds=1e308, num_samples=2**60, lag=2**60)
    assert world.deliver(root, hostile, (), second) == ()  # and it goes on
    hostile = replace(hostile, num_samples=report.num_samples)
    for _ in range(5):
        assert world.deliver(root, hostile, (), second) == ()
    assert world.workers[root].timekeeper._decide().window == 3
    world.lease([layer_batch(seed) for seed in range(4, 20)], first=4)
    world.run()
    assert len(world.reports[world.nodes[0]]) == 20


def test_gradients_without_an_update_are_applied_before_an_evaluation(captured):
    world = make_world(captured, EQUAL[:2], 4, 4)
    world.lease([layer_batch(seed) for seed in range(6)])
    world.run()
    versions = {node: worker.stage.version for node, worker in world.workers.items()}
    assert set(versions.values()) == {1}
    before = world.state()
    world.lease([layer_batch(7)], first=6, is_evaluation=True)
    world.run()
    for worker in world.workers.values():
        assert (worker.stage.version, worker.schedule.version) == (2, 2)
    assert all(not torch.equal(before[name], tensor) for name, tensor in world.state().items())


class NeverFinite(StageEngine):
    """Leaves out every update of the last stage."""

    def __init__(self, program, *given):
        super().__init__(program, *given)
        self.is_last = bool(program.blueprint.train.results)

    def update(self, rate):
        return Updated(7, "the gradient is not finite") if self.is_last else super().update(rate)


def test_updates_that_are_left_out_are_told_once_in_a_hundred(captured, caplog):
    world = make_world(captured, EQUAL[:2], 1, 1, engine=NeverFinite)
    world.lease([layer_batch(seed) for seed in range(101)])
    world.run()
    lines = [record.getMessage() for record in caplog.records if record.name == "ravnest.peer.worker"]
    assert [line.partition("; ")[2] for line in lines] == [
        f"{count} updates were left out before" for count in (0, 100)
    ]
    assert "stage 2 leaves update 7 out: the gradient is not finite" in lines[0]


class Weighing(StageEngine):
    """Notes how much each microbatch counts."""

    def __init__(self, *given):
        super().__init__(*given)
        self.weights = []

    def backward_weights(self, batch, weight, num_samples, rate=None):
        self.weights.append(weight)
        return super().backward_weights(batch, weight, num_samples, rate)


def test_a_straggler_counts_less(captured):
    policy = StalenessPolicy(0, accumulate_min=1, accumulate_max=1, window_max=9)
    world = make_world(captured, EQUAL[:2], 9, 1, policy=policy, engine=Weighing)
    root = world.workers[world.nodes[0]]
    root.schedule.resize(9, 1, False)  # wider than the bound allows, as after a change of mind
    world.lease([layer_batch(seed) for seed in range(5)])
    world.turn(world.nodes[0])
    for _ in range(4):
        world.turn(world.nodes[0])
    world.run()
    assert [report.lag for report in world.reports[world.nodes[0]]] == [0, 1, 2, 3, 4]
    assert root.stage.weights == [1.0, 1.0, 1.0, 1 / 3, 1 / 4]
