"""The law of rounds: they commit on every survivor with the same bits, or never happened."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.round_world import FINAL, HUB, RoundWorld, Trouble

from ravnest.averaging.round import RoundPhase
from ravnest.protocol.averaging import RoundCommit

SMALL = [(5,), (3,)]  # two clusters of two nodes, three segments
layouts = st.lists(
    st.lists(st.integers(1, 3), unique=True, max_size=2).map(lambda cuts: tuple(sorted(cuts))),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**32)


def run_world(cuts, seed, **trouble) -> RoundWorld:
    world = RoundWorld(cuts, seed, Trouble(**trouble))
    world.run()
    check_law(world)
    return world


def check_law(world: RoundWorld) -> None:
    decided = world.phases(world.members) & FINAL  # the dead included: none may contradict
    assert len(decided) <= 1, decided
    if world.trouble.hub_returns:
        assert world.phases(world.survivors) <= FINAL
    if decided == {RoundPhase.COMMITTED}:
        assert isinstance(world.log, RoundCommit)
    committed = {x for x in world.members if world.rounds[x].phase is RoundPhase.COMMITTED}
    assert set(world.averages) == committed
    for segment, ring in world.rings.items():
        bits = {np.concatenate(world.averages[name][segment]).tobytes() for name in ring if name in committed}
        assert len(bits) <= 1
        for mean in bits:
            np.testing.assert_allclose(np.frombuffer(mean), world.expected(segment), rtol=1e-9, atol=1e-12)


@given(layouts, seeds)
def test_without_trouble_the_round_commits(cuts, seed):
    world = run_world(cuts, seed)
    assert world.phases(world.members) == {RoundPhase.COMMITTED}


def test_every_single_crash_point():
    outcomes = set()
    for seed in range(12):
        calm = run_world(SMALL, seed)
        for process, num_actions in calm.num_actions.items():
            for action in range(num_actions + 1):
                for hub_returns in (True, False):
                    world = run_world(SMALL, seed, crash_at={process: action}, hub_returns=hub_returns)
                    outcomes |= world.phases(world.survivors)
    assert outcomes == {RoundPhase.COMMITTED, RoundPhase.ABORTED, RoundPhase.READY}


def test_every_crash_point_of_a_hub_that_is_asked_before_its_disk_is_done():
    for seed in range(12):
        calm = run_world(SMALL, seed, slow_disk=True)
        for action in range(calm.num_actions[HUB] + 1):
            run_world(SMALL, seed, crash_at={HUB: action}, slow_disk=True)


def test_every_pair_of_a_hub_and_a_member_crash():
    calm = run_world(SMALL, seed=1)
    for hub_action in range(calm.num_actions[HUB] + 1):
        for process in calm.members:
            for action in range(0, calm.num_actions[process] + 1, 2):
                run_world(SMALL, seed=1, crash_at={HUB: hub_action, process: action})


@st.composite
def troubles(draw):
    names = [HUB, *(f"c{cluster}.{stage}" for cluster in range(4) for stage in range(3))]
    return {
        "crash_at": draw(st.dictionaries(st.sampled_from(names), st.integers(0, 40), max_size=4)),
        "hub_returns": draw(st.booleans()),
        "loss": draw(st.sampled_from([0.0, 0.0, 0.02, 0.2])),
        "haste": draw(st.sampled_from([0.0, 0.01, 0.1])),
        "slow_disk": draw(st.booleans()),
    }


@settings(max_examples=600)
@given(layouts, seeds, troubles())
def test_any_trouble(cuts, seed, trouble):
    run_world(cuts, seed, **trouble)
