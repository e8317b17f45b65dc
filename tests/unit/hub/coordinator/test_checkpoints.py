"""Whose weights are kept: drawn, confirmed by others, and never far worse than the best."""

from dataclasses import replace

from support.attack_world import HONEST, LIAR, AttackWorld, outcome_of, true_loss
from support.hub_world import check_replay

from ravnest.hub.coordinator.events import CheckpointAsked, Collect
from ravnest.hub.coordinator.notices import (
    BestIsResult,
    Checkpointed,
    Evaluated,
    NotCheckpointed,
    RoundEnded,
    WorkLost,
)
from ravnest.hub.coordinator.phases import JobPhase
from ravnest.protocol.placement import SnapshotOrder
from ravnest.protocol.training import StepReport


def collected(world):
    return [order for orders in world.answers for order in orders if isinstance(order, Collect)]


def test_evaluators_and_sources_are_drawn_and_the_seed_says_which():
    evaluators, sources = set(), set()
    for seed in range(6):
        world = AttackWorld(seed, num_samples=160)
        world.run()
        evaluators |= {news.cluster for news in world.told(Evaluated)}
        sources |= {part.node for part in world.finish.parts}
        again = AttackWorld(seed, num_samples=160)
        again.run()
        assert again.finish == world.finish
    assert len(evaluators) > 2
    assert len(sources) > 1


def test_checkpoints_of_several_clusters_are_of_an_average_that_others_confirm():
    world = AttackWorld(0)
    world.run()
    kept = [order for order in collected(world) if not order.is_result]
    assert len(kept) > 1
    for order in kept:
        assert len(order.others) == 3
        assert order.key
        assert {each.node for each in order.others} == {*HONEST, LIAR} - {order.parts[0].node}
    keys = [order.key for order in collected(world)]
    assert len(set(keys)) == len(keys), "each has a key of its own"
    check_replay(world)


def test_no_checkpoint_is_kept_before_there_is_an_average():
    world = AttackWorld(0, checkpoint_every=1.0, average_every=12)
    world.run_until(lambda: world.told(Checkpointed))
    assert any(news.is_committed for news in world.told(RoundEnded))


def test_without_an_average_no_single_cluster_gives_the_best_weights():
    world = AttackWorld(0, epochs=4, num_samples=160, average_every=10_000, checkpoint_every=1e6)
    world.run()
    assert len(world.told(Evaluated)) > 2
    assert not any(news.is_committed and not news.is_final for news in world.told(RoundEnded))
    assert all(order.others for order in collected(world))


def test_a_checkpoint_whose_average_has_moved_on_is_not_kept_and_nobody_is_blamed():
    world = AttackWorld(0)
    deliver = world.deliver

    def deliver_late(peer, message):
        if type(message).__name__ == "SnapshotOrder" and not message.is_final:
            message = type(message)(message.build_id, message.number, message.is_final, 1)
        deliver(peer, message)

    world.deliver = deliver_late
    world.run()
    assert any("the next average came" in news.reason for news in world.told(NotCheckpointed))
    assert outcome_of(world).evicted == ()


def ends_badly(seed, is_bad):
    """Let the last evaluation be fifty times the best, as `is_bad` of a cluster's node says."""
    world = AttackWorld(seed, epochs=5, num_samples=160, checkpoint_every=2.0)
    speak = world.speak

    def say(name, peer, message):
        is_last = world.hub.phase is JobPhase.EVALUATING and hasattr(message, "loss")
        if is_last and is_bad(name):
            message = type(message)(
                *(50.0 if x == "loss" else getattr(message, x) for x in message.__slots__)
            )
        speak(name, peer, message)

    world.speak = say
    return world.run()


def test_the_best_checkpoint_is_the_result_where_clusters_agree_that_the_last_weights_are_far_worse():
    world = ends_badly(1, lambda _: True)
    assert world.told(BestIsResult)
    assert world.finish.is_best
    check_replay(world)


def test_one_cluster_that_says_so_does_not_have_the_result_replaced():
    for seed in range(4):
        world = ends_badly(seed, lambda name: name == LIAR)
        assert not world.told(BestIsResult)
        assert world.finish.parts
    assert true_loss(1) != true_loss(2)


def test_one_cluster_that_says_so_twice_does_not_have_the_result_replaced():
    """It is drawn before and after a restart of the hub."""
    world = AttackWorld(0, num_samples=160, epochs=3, num_validation=8)

    def lie(message):
        is_last = world.hub.phase is JobPhase.EVALUATING and isinstance(message, StepReport)
        return [replace(message, loss=1000.0) if is_last and message.loss is not None else message]

    world.lie = lie
    world.run_until(lambda: world.told(Evaluated) and world.told(Evaluated)[-1].loss == 1000.0)
    world.random.choice = lambda _: 0.5
    world.restart()
    world.run()
    assert [news.loss for news in world.told(Evaluated)].count(1000.0) == 2
    assert not world.told(BestIsResult)
    assert world.finish.parts
    check_replay(world)


def untold_of_each_other(**changes):
    """Four clusters that train, and have no average yet that one could confirm of another."""
    world = AttackWorld(0, **({"average_every": 1000, "checkpoint_every": None, "epochs": 40} | changes))
    world.run_until(lambda: len(world.ledger) > 20)
    assert len(world.hub.clusters) == 4
    return world


def test_who_asks_for_a_checkpoint_gets_one_before_there_is_an_average():
    world = untold_of_each_other()
    world.feed(CheckpointAsked(world.now))
    world.run(until=world.now + 3.0)
    assert len(world.told(Checkpointed)) == 1


def test_what_all_take_away_is_kept_before_there_is_an_average():
    world = untold_of_each_other(keeps_last=True)
    for name in (*HONEST, LIAR):
        world.leave(name)
    world.run(until=world.now + 30.0)
    assert len(world.told(Checkpointed)) == 1
    assert not world.told(WorkLost)
    check_replay(world)


def test_a_job_that_is_stopped_while_a_checkpoint_is_awaited_does_not_look_for_it_again_and_again():
    world = AttackWorld(0, names="a", num_validation=0, checkpoint_every=1000.0, epochs=40)
    world.run_until(lambda: len(world.ledger) > 4)
    deliver = world.deliver

    def forget(peer, message):
        if not isinstance(message, SnapshotOrder) or message.is_final:
            deliver(peer, message)

    world.deliver = forget
    world.slow("a", 300.0)
    world.feed(CheckpointAsked(world.now))
    world.at(world.now + 110.0, world.stop)
    world.run()  # the world checks that no Tick comes again for ever
    assert world.is_finished
