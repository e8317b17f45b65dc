"""How a stage keeps time: waiting on an emulated device, idle shares, the policy of a plan."""

from dataclasses import replace

import pytest

from ravnest.ids import NodeId, SegmentId
from ravnest.peer.pacing import Device, IdleTime, make_policy
from ravnest.plan.types import Ring, Stage
from ravnest.protocol.placement import PlanOrder


def test_work_that_is_done_too_soon_waits_for_the_rest():
    waits: list[float] = []
    device = Device(lambda: 10.0, waits.append)
    device.stretch(9.5, 2.0)
    device.stretch(9.5, 0.5)
    device.stretch(9.5, 0.1)  # this PC is slower than that
    device.stretch(9.5, 0.0)
    assert waits == [1.5]


def test_a_wait_that_ends_late_does_not_slow_the_device_down():
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds + 0.25

    device = Device(lambda: now[0], wait)
    for _ in range(20):
        device.stretch(now[0], 1.0)
    assert now[0] == 20.25
    now[0] += 5.0  # real work that takes longer owes nothing
    device.stretch(20.25, 1.0)
    device.stretch(now[0], 1.0)
    assert now[0] == 26.5


def test_idle_share_counts_time_with_nothing_to_run():
    idle = IdleTime(10.0)
    assert idle.share(10.0) == 0.0
    idle.record(False, 11.0)
    idle.record(True, 12.0)
    idle.record(True, 13.0)  # still the same pause
    idle.record(False, 14.0)
    idle.record(False, 15.0)
    assert idle.share(20.0) == pytest.approx(0.2)
    idle.record(True, 20.0)
    idle.record(False, 23.0)
    assert idle.share(30.0) == pytest.approx(0.25)


def test_the_policy_is_the_plans_and_updates_are_shared_by_clusters():
    stage = Stage(NodeId("a"), 0, 4, 9, False)
    policy = make_policy(1001, 2, stage, 4)
    assert (policy.planned_updates, policy.max_lag, policy.window_max) == (1001, 2, 9)
    assert (policy.accumulate_min, policy.accumulate_max) == (4, 4)
    ring = Ring(0, 4, (NodeId("a"), NodeId("c"), NodeId("d")))
    order = PlanOrder(1, 1, 0, stage, (NodeId("a"), NodeId("b")), ((SegmentId(0), ring),), (), 4)
    assert order.num_clusters == 3
    assert replace(order, rings=()).num_clusters == 1
