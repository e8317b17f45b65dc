"""Peers are measured before they are planned with: what nobody has stated, within reason, not for long."""

import math
from dataclasses import replace

import pytest
from support.hub_world import HubWorld, Trouble, check_replay, job
from support.plan_world import node

from ravnest.config import TIMEOUTS
from ravnest.hub.coordinator.events import MakeParts, MakePlan, Probed, Send
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import Measured, PlanFormed
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.ids import NodeId
from ravnest.protocol.membership import Fact, ProbeOrder
from ravnest.protocol.messages import Refusal

ALL = tuple(Fact)
A = NodeId("a")


def orders_of(world: HubWorld, kind: type) -> list:
    return [order for orders in world.answers for order in orders if isinstance(order, kind)]


def sent(world: HubWorld) -> list[tuple[str, ProbeOrder]]:
    return [
        (each.to, each.message) for each in orders_of(world, Send) if isinstance(each.message, ProbeOrder)
    ]


def probe(world: HubWorld, *facts: float | None, name: NodeId = A) -> tuple:
    return world.feed(Probed(name, *facts, world.now))


def test_a_plan_is_made_of_what_was_measured() -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=ALL))
    world.join(*"abc")
    world.run()
    assert world.is_finished
    (asked,) = orders_of(world, MakePlan)
    said = node("a", 150.0)
    measured = {"upload_bytes_per_second": 5e8, "download_bytes_per_second": 6e8}
    expected = replace(said, flops_per_second=said.flops_per_second / 2, **measured)
    assert asked.nodes == tuple(replace(expected, name=NodeId(name)) for name in "abc")
    assert [news.node.name for news in world.told(Measured)] == [*"abc"]
    text = "a was measured: 50 GFLOP/s, 4 Gbit/s up, 4.8 Gbit/s down, 0.001 ms away"
    assert show_notice(world.told(Measured)[0]) == text
    check_replay(world)


def test_all_run_the_same_piece_of_the_model_its_busiest_position() -> None:
    given = job(expected_nodes=3)
    flops = (1e9, 1e9, 3e9, 1e9, 1e9, 1e9)
    world = HubWorld(
        replace(given, profile=replace(given.profile, forward_flops=flops)), Trouble(guessed=ALL)
    )
    world.join(*"abc")
    world.run_until(lambda: world.told(PlanFormed))
    assert orders_of(world, MakeParts)[0] == MakeParts(2, 3, has_weights=False)
    assert orders_of(world, MakeParts).count(MakeParts(2, 3, has_weights=False)) == 1
    orders = sent(world)
    assert [to for to, _ in orders] == [*"abc"]
    assert {order.times_link for _, order in orders} == {True}
    assert len({order.blueprint for _, order in orders}) == 1


@pytest.mark.parametrize("fact", ALL)
def test_what_was_stated_is_not_measured(fact: Fact) -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=(fact,)))
    world.join(*"abc")
    world.run_until(lambda: world.told(PlanFormed))
    (asked,), said = orders_of(world, MakePlan), node("a", 150.0)
    found = asked.nodes[0]
    assert (found.flops_per_second == said.flops_per_second) is (fact is not Fact.SPEED)
    assert (found.upload_bytes_per_second == 1e9) is (fact is not Fact.BANDWIDTH)
    assert (found.download_bytes_per_second == 1e9) is (fact is not Fact.BANDWIDTH)
    order = sent(world)[0][1]
    assert (order.blueprint is not None) is (fact is Fact.SPEED)
    assert order.times_link is (fact is not Fact.SPEED)


def test_nobody_waits_where_all_is_stated() -> None:
    world = HubWorld(job(expected_nodes=3))
    world.join(*"abc")
    world.run_until(lambda: orders_of(world, MakePlan))
    assert world.now == 0.0
    assert not sent(world)
    assert not orders_of(world, MakeParts)


def test_who_does_not_answer_is_believed_after_a_while_and_people_are_told() -> None:
    world = HubWorld(job(expected_nodes=3), Trouble(guessed=ALL, silent=1.0))
    world.join(*"abc")
    world.run_until(lambda: orders_of(world, MakePlan))
    assert world.now == TIMEOUTS.hub.probe_seconds
    assert orders_of(world, MakePlan)[0].nodes[0] == node("a", 150.0)
    text = show_notice(world.told(Measured)[0])
    assert text.startswith("a was not measured within 15 s, so what it says of itself counts: 100 GFLOP/s")
    assert "came too late" in probe(world, 1e9, 1e6, 1e6, 0.01)[0].reason


def test_who_dies_while_it_is_measured_is_not_waited_for() -> None:
    world = HubWorld(job(expected_nodes=0, settle_seconds=1.0), Trouble(guessed=ALL, silent=1.0))
    world.join("a")
    world.kill("a", at=2.0)
    world.run()
    assert world.now < TIMEOUTS.hub.probe_seconds
    assert not orders_of(world, MakePlan)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", range(3))
def test_nonsense_is_refused(nonsense: float, place: int) -> None:
    world = HubWorld(job(), Trouble(guessed=ALL, silent=1.0))
    world.join("a")
    world.run(until=1.0)
    facts = [1e9, 1e6, 1e6, 0.01]
    facts[place] = nonsense
    (refusal,) = probe(world, *facts)
    assert isinstance(refusal, Refusal)
    assert "no machine is like" in refusal.reason
    assert not world.told(Measured)
    assert "nobody asked" in probe(world, 1e9, 1e6, 1e6, 0.01, name=NodeId("z"))[0].reason


def test_what_is_measured_is_believed_within_bounds_and_in_part() -> None:
    world = HubWorld(job(), Trouble(guessed=ALL, silent=1.0))
    world.join("a", "b")
    world.run(until=1.0)
    probe(world, 1e29, 1.0, 1e29, 1e5)
    probe(world, None, 2e6, 3e6, 0.02, name=NodeId("b"))
    first, second = world.told(Measured)
    low, high, latency = (
        first.node.upload_bytes_per_second,
        first.node.flops_per_second,
        first.node.latency_seconds,
    )
    assert 1.0 < low < 1e5
    assert 1e14 < high < 1e29
    assert 1.0 < latency < 1e5
    assert second.node.flops_per_second == node("b").flops_per_second
    assert second.node.upload_bytes_per_second == 2e6
    assert "could not measure all" in second.fault


def test_who_comes_while_others_train_is_measured_before_the_next_plan() -> None:
    world = HubWorld(job(expected_nodes=2))
    world.join("a", "b", memory_mb=250.0)
    world.run_until(lambda: world.hub.phase is JobPhase.TRAINING)
    world.trouble.guessed = ALL
    world.join("c", memory_mb=250.0)
    world.run(until=world.now + 1.0)
    assert [to for to, _ in sent(world)] == ["c"]
    for name in "ab":
        world.kill(name)
    world.join("d", memory_mb=250.0)
    world.run()
    assert world.is_finished
    assert sorted(to for to, _ in sent(world)) == ["c", "d"]
