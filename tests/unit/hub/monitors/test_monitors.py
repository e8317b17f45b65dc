"""Telemetry stays out of the log: monitors sum it and conclude, and the coordinator replays without them."""

import asyncio
from dataclasses import replace

from support.hub_world import HubWorld, Trouble, check_replay, freeze, job
from support.memory_store import MemoryStore

from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import (
    ClusterSilent,
    EvaluationReported,
    LossAlarm,
    Notify,
    Received,
    SpeedMeasured,
    Tick,
    TrainingReported,
)
from ravnest.hub.coordinator.notices import (
    ClusterStarted,
    EpochDone,
    Evaluated,
    Left,
    SpeedChanged,
    WentWrong,
)
from ravnest.hub.monitors.monitors import MonitoredCoordinator
from ravnest.hub.service.event_log import write_event
from ravnest.hub.service.status import Happening, HubStream
from ravnest.protocol.messages import Refusal
from ravnest.protocol.training import LearningRate, LeaseDone, StepReport


def world_of(names, memory_mb=250.0, trouble=None, **changes):
    world = HubWorld(job(**changes), trouble)
    world.join(*names, memory_mb=memory_mb)
    return world


def logged(world, kind):
    return [event for event in world.log if isinstance(event, kind)]


def reports(world):
    """Reports that counted, and those that were refused."""
    found = [(x, orders) for x, orders in world.happened if isinstance(x, Received)]
    found = [(x.message, orders) for x, orders in found if isinstance(x.message, StepReport)]
    is_refused = [bool(orders) and isinstance(orders[0], Refusal) for _, orders in found]
    return (
        [report for (report, _), refused in zip(found, is_refused, strict=True) if not refused],
        [report for (report, _), refused in zip(found, is_refused, strict=True) if refused],
    )


def test_no_report_is_in_the_log_and_there_are_two_events_a_lease():
    world = world_of("a", num_samples=4000, epochs=1, num_validation=0, chunk_batches=8, microbatches=4)
    world.run()
    num_leases = sum(isinstance(getattr(event, "message", None), LeaseDone) for event in world.log)
    assert not any(isinstance(getattr(event, "message", None), StepReport) for event in world.log)
    assert len(reports(world)[0]) == 4000
    assert num_leases == 125
    assert len(world.log) < 2.2 * num_leases
    assert sum(len(write_event(event)[1]) for event in world.log) < 300 * num_leases
    check_replay(world)


def test_the_books_know_what_was_reported_when_a_lease_is_done():
    world = world_of("abcde", memory_mb=150.0, num_samples=64, epochs=1, num_validation=0)
    world.run()
    counted, _ = reports(world)
    losses = [report for report in counted if report.loss is not None]
    (ended,) = world.told(EpochDone)
    assert ended.loss == sum(x.loss * x.num_samples for x in losses) / 64
    assert world.hub.ledger.num_reported == 64
    assert world.hub.ledger.num_updates == 16


def test_a_report_counts_once_also_after_its_lease_is_done():
    trouble = Trouble(seed=4, latency=2.0, twice=0.5)  # many come twice, and after their lease
    world = world_of("ab", trouble=trouble, num_samples=64, epochs=1, num_validation=0)
    world.run()
    counted, refused = reports(world)
    assert refused
    microbatches = [report.microbatch for report in counted if report.loss is not None]
    assert len(microbatches) == len(set(microbatches))
    assert world.hub.ledger.num_reported <= 64
    check_replay(world)


def test_monitors_that_are_lost_cost_nothing_if_leaves_say_again_what_they_said_last():
    world = world_of("abc", memory_mb=150.0, num_samples=200, epochs=1, num_validation=0, chunk_batches=5)
    world.run_until(lambda: len(world.ledger) > 60)
    num_before = len(reports(world)[0])
    world.run_until(lambda: len(reports(world)[0]) > num_before + 4)  # in the middle of a lease
    said = [event for event, _ in world.happened if isinstance(getattr(event, "message", None), StepReport)]
    world.monitored = MonitoredCoordinator(world.hub, watch=world.note)
    for event in said:
        world.feed(replace(event, now=world.now))
    world.run()
    assert world.is_finished
    assert set(world.ledger.values()) == {1}
    assert len(world.ledger) == 200
    (ended,) = world.told(EpochDone)
    assert ended.loss is not None
    assert 180 <= world.hub.ledger.num_reported <= 220, "of two leases what was summed may be summed again"
    assert 0 <= 50 - world.hub.ledger.num_updates <= 5
    check_replay(world)


def test_rates_are_told_for_the_updates_to_come():
    """At every grant the position is that of the reports so far, so no rate comes later than before."""
    rates = tuple(0.1 - 0.001 * number for number in range(100))
    world = world_of("a", num_samples=400, epochs=1, num_validation=0, chunk_batches=4, rates=rates)
    world.run()
    told = {}
    for orders in world.answers:
        for order in orders:
            if isinstance(getattr(order, "message", None), LearningRate):
                told.setdefault(order.message.update, order.message.rate)
    assert told == {update: rates[update] for update in range(100)}


def test_one_event_for_each_lease_of_an_evaluation():
    world = world_of("a", num_samples=16, epochs=1, num_validation=23, trouble=Trouble(seed=2, dropped=0.3))
    world.run()
    found = logged(world, EvaluationReported)
    assert len(found) == 3  # of 8 samples each, the last one of 7
    (evaluated,) = world.told(Evaluated)
    assert evaluated.num_samples == sum(each.num_samples for each in found) < 23
    check_replay(world)


def test_what_monitors_conclude_is_in_the_log_and_replayed_without_them():
    world = world_of("abcd", memory_mb=150.0, num_samples=4000, epochs=1, num_validation=0)
    for name in "abcd":
        world.slow(name, 2.0, at=0.5)
    world.run_until(lambda: world.told(ClusterStarted))
    world.slow(world.hub.clusters[0].nodes[1], 40.0, at=60.0)
    world.run_until(lambda: world.told(SpeedChanged))
    assert [each.node for each in logged(world, SpeedMeasured)] == [x.node for x in world.told(SpeedChanged)]
    world.loss = lambda _: 1e6
    world.run_until(lambda: world.told(WentWrong))
    assert logged(world, LossAlarm)[0].reason == world.told(WentWrong)[0].reason
    world.muted.add(world.hub.clusters[0].nodes[0])
    world.from_cluster = lambda *_: None
    world.run_until(lambda: world.told(Left))
    assert logged(world, ClusterSilent)
    check_replay(world)


def test_a_tick_for_the_monitors_alone_is_no_event():
    world = world_of("a", num_samples=16, epochs=1, num_validation=0)
    world.run_until(lambda: world.told(ClusterStarted))
    num_before, due = len(world.log), world.monitored.due
    assert world.hub.due is None or due < world.hub.due
    world.monitored.apply(Tick(due - 1.0))
    assert len(world.log) == num_before


def test_any_store_of_events_makes_the_coordinator_again():
    world = world_of("abc", num_samples=64)
    world.run()
    store = MemoryStore()
    for event, orders in zip(world.log, world.answers, strict=True):
        if not (orders and isinstance(orders[0], Refusal)):
            store.append(event)
    events = list(store.events())
    again = Coordinator(events[0])
    for event in events:
        again.apply(event)
    assert freeze(again) == freeze(world.hub)
    assert list(store.events(after=len(store.kept) - 1)) == store.kept[-1:]


def test_an_event_that_says_how_far_clusters_are_orders_nothing():
    given = job()
    hub = Coordinator(given)
    hub.apply(given)
    assert hub.apply(TrainingReported(4, 0.5, ((0, ("loss", 2.0, 4)),), (), 1.0)) == ()
    assert (hub.ledger.num_reported, hub.ledger.trained.loss) == (4, 0.5)


# The stream.


def test_readers_of_the_stream_come_and_go():
    stream, seen, others = HubStream(), [], []
    leave = stream.subscribe(lambda event, _: seen.append(event))
    stream.subscribe(lambda event, _: others.append(event))
    stream.publish(Tick(1.0), ())
    leave()
    leave()
    stream.publish(Tick(2.0), ())
    assert (seen, others) == ([Tick(1.0)], [Tick(1.0), Tick(2.0)])


def test_a_slow_reader_of_the_stream_loses_the_oldest_and_delays_nobody():
    stream = HubStream()

    async def main():
        following = stream.follow(most_waiting=3)
        first = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)  # the reader is there
        for number in range(10):
            stream.publish(Tick(float(number)), (Notify(Left("a", "?")),))
        found = [await first, *[await anext(following) for _ in range(2)]]
        await following.aclose()
        stream.publish(Tick(99.0), ())
        return found

    assert asyncio.run(main()) == [
        Happening(Tick(float(number)), (Notify(Left("a", "?")),)) for number in (7, 8, 9)
    ]
