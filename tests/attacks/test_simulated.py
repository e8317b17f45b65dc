"""One liar of four: it is named and sent away or harms nobody, and nobody else is named."""

import pytest
from attacks.lies import LIES
from support.attack_world import HONEST, LIAR, AttackWorld, outcome_of, tell


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
