"""One liar of four: it is named and sent away or harms nobody, and nobody else is named."""

import pytest
from attacks.lies import LIES, claim_at_once
from support.attack_world import HONEST, LIAR, AttackWorld, outcome_of, tell
from support.hub_world import check_replay

from ravnest.hub.coordinator.notices import EpochDone, WorkUndone


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
