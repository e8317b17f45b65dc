"""One liar of four: it is named and sent away or harms nobody, and nobody else is named."""

import pytest
from attacks.lies import LIES, claim_at_once, false_losses
from support.attack_world import HONEST, LIAR, AttackWorld, outcome_of, tell, true_loss
from support.hub_world import check_replay

from ravnest.hub.coordinator.notices import EpochDone, RoundEnded, WorkUndone


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name.replace(" ", "-"))
def test_one_liar_of_four_changes_nothing(lie):
    found = tell(lie)
    assert found.is_finished
    assert not found.is_false
    assert not set(found.left) & set(HONEST), "no honest one is named"
    assert found.evicted == ((LIAR,) if lie.is_caught else ())


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_named_when_nobody_lies(seed):
    world = AttackWorld(seed)
    world.run()
    found = outcome_of(world)
    assert found.is_finished
    assert found.left == found.evicted == ()
    assert found.num_agreeing == 3
    assert not found.is_contradicted


@pytest.mark.parametrize("average_every", [3, 10**6], ids=["rounds", "the-last-round-only"])
def test_what_a_proven_liar_counted_is_trained_again_though_its_epochs_are_over(average_every):
    """The others are slow, so the liar claims most of a small job before it can be compared with them."""
    world = AttackWorld(0, num_samples=96, epochs=3, average_every=average_every)
    for name in HONEST:
        world.slow(name, 20.0, at=0.0)
    claim_at_once(world)
    world.liar_again = lambda _: 50.0  # it computes nothing, when it is asked either
    world.run(until=5_000.0)
    found = outcome_of(world)
    assert found.is_finished
    assert found.evicted == found.left == (LIAR,)
    told = [type(news) for news in world.news]
    assert EpochDone in told[: told.index(WorkUndone)], "an epoch was over before"
    assert told.count(EpochDone) == 3, "each is told once"
    assert not world.counted_by.get(LIAR), "all samples are trained by others"
    assert world.hub.ledger.num_counted == sum(world.ledger.values()) == 3 * 96
    check_replay(world)


def test_the_loss_that_is_shown_is_what_leaves_found():
    """Metrics of the same name were summed with it, and no spot check looks at them."""
    (naming,) = [lie for lie in LIES if "metrics of that name" in lie.name]
    world = AttackWorld(0)
    naming.tell(world)
    shown = [news.loss for news in world.run().told(EpochDone)]
    assert shown
    assert max(shown) <= max(true_loss(microbatch) for microbatch in range(2000))


def test_samples_that_are_others_when_they_are_read_again_hold_nothing_up():
    plain, world = AttackWorld(0).run(), AttackWorld(0)
    world.has_changing_samples = True
    found, before = outcome_of(world.run()), outcome_of(plain)
    assert found.is_finished
    assert found.left == ()
    assert found.seconds < before.seconds + 5.0


def test_rounds_wait_for_those_who_find_losses_again():
    """Else the next round takes the average away on which they look, and nobody is ever found out."""
    world = AttackWorld(0, num_samples=960, average_every=1)
    world.recheck_seconds = 4.0
    false_losses(lambda _: 1.0)(world)
    found = outcome_of(world.run())
    assert found.evicted == found.left == (LIAR,)


def test_who_is_kept_from_the_last_round_stays_and_its_work_is_done_again():
    """It cannot be compared with others; a liar had it left out, so nobody goes for that."""
    world = AttackWorld(0, num_samples=96, average_every=10**6)
    (blaming,) = [lie for lie in LIES if lie.name == "every round given up, another blamed"]
    blaming.tell(world)
    world.run(until=5_000.0)
    assert outcome_of(world).is_finished
    assert {news.node for news in world.told(WorkUndone)} & set(HONEST)
    assert not set(outcome_of(world).left) & set(HONEST)


def test_nobody_waits_for_ever_for_those_who_do_not_find_losses_again():
    world = AttackWorld(0, average_every=24)
    world.recheck_seconds = 1e6
    for name in (*HONEST, LIAR):
        world.slow(name, 5.0, at=0.0)  # so that a check has no time left before the next round is due
    world.run(until=3_000.0)
    assert outcome_of(world).is_finished
    assert outcome_of(world).left == ()
    assert len([news for news in world.told(RoundEnded) if news.is_committed]) > 1
