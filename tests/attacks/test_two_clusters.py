"""One liar of two: no third can tell which is right, so a wrong result is never kept; people are told."""

import pytest
from attacks.lies import LIES
from support.attack_world import FALSE_SKETCH, LIAR, AttackWorld, outcome_of

from ravnest.hub.coordinator.notices import Contradicted, NotCheckpointed

BY_NAME = {lie.name: lie for lie in LIES}


def world_of_two(seed, name):
    world = AttackWorld(seed, names=("a", LIAR))
    BY_NAME[name].tell(world)
    return world.run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["other weights given, right sketch", "a false sketch"])
def test_two_that_contradict_each_other_end_without_a_wrong_result(seed, name):
    world = world_of_two(seed, name)
    found = outcome_of(world)
    assert not found.is_false
    assert found.evicted == (), "nobody knows which of them lies"
    if world.finish is None:
        assert world.abandoned.is_guarded
        assert "contradict each other" in world.abandoned.reason
        assert "--resume" in world.abandoned.reason
    else:
        assert found.num_agreeing == 1, "what is kept is what both hold"


def test_a_checkpoint_of_two_that_contradict_each_other_is_not_kept():
    world = AttackWorld(1, names=("a", LIAR))
    world.liar_sketch = world.liar_gives = FALSE_SKETCH
    world.run()
    reasons = [news.reason for news in world.told(NotCheckpointed)]
    assert any("contradict each other" in reason for reason in reasons)
    assert world.books is None


def test_two_that_find_different_losses_are_told_once_and_nobody_is_sent_away():
    world = world_of_two(0, "constant losses at an honest pace")
    assert len(world.told(Contradicted)) == 1
    assert outcome_of(world).evicted == ()


def test_a_liar_without_a_second_cluster_is_not_found_and_that_is_said():
    world = AttackWorld(0, names=(LIAR,))
    world.liar_gives = FALSE_SKETCH
    world.run()
    assert outcome_of(world).num_agreeing == 0
