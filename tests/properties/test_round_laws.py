"""The law of rounds, with the hub that ships: every surviving owner commits one, with the same bits, or none.

After a crash the log alone says what became of a round, and no hub ever told anything else.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.round_world import FINAL, HUB, RoundWorld, Trouble

from ravnest.averaging.round import RoundPhase
from ravnest.hub.service.event_log import EventLog
from ravnest.protocol.averaging import RoundAbort, RoundCommit

SMALL = ((2,), (1,))  # two clusters of two nodes, three segments
ALONE = ((), (), ())  # three clusters of one node
layouts = st.lists(
    st.lists(st.integers(1, 3), unique=True, max_size=2).map(lambda cuts: tuple(sorted(cuts))),
    min_size=2,
    max_size=4,
)
seeds = st.integers(0, 2**32)


def run_world(cuts, seed, is_final=False, log=None, **trouble) -> RoundWorld:
    world = RoundWorld(cuts, seed, Trouble(**trouble), is_final, log)
    world.run()
    check_law(world)
    return world


def check_law(world: RoundWorld) -> None:
    decisions = world.decisions()
    assert (HUB in world.dead) <= (not world.trouble.hub_returns)
    for number, members in world.rounds.items():
        decided = world.phases(number) & FINAL  # the dead included: none may contradict
        assert len(decided) <= 1, decided
        told = world.told.get(number, set())
        assert len(told) <= 1, "no hub tells two outcomes of one round"
        if decided == {RoundPhase.COMMITTED} or told == {RoundCommit}:
            assert decisions[number]
            assert not world.passed_over.get(number), "a commit is heard before the next round"
        if decided == {RoundPhase.ABORTED} or told == {RoundAbort}:
            assert not decisions.get(number)
        if HUB not in world.dead:
            assert number in decisions
            left = set(world.survivors) - world.passed_over.get(number, set())
            assert world.phases(number, left) <= {
                RoundPhase.COMMITTED if decisions[number] else RoundPhase.ABORTED
            }
        committed = {name for name, each in members.items() if each.phase is RoundPhase.COMMITTED}
        assert {name for at, name in world.averages if at == number} == committed
        check_averages(world, number, committed)


def check_averages(world: RoundWorld, number: int, committed: set[str]) -> None:
    for segment in {segment for segment, _ in world.vectors}:
        bits = {
            np.concatenate(world.averages[number, name][segment]).tobytes()
            for name in world.owners(number, segment)
            if name in committed
        }
        assert len(bits) <= 1
        for mean in bits:
            expected = world.expected(number, segment)
            np.testing.assert_allclose(np.frombuffer(mean), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(layouts, seeds, st.booleans())
def test_without_trouble_the_round_commits(cuts, seed, is_final):
    world = run_world(cuts, seed, is_final)
    assert world.phases() == {RoundPhase.COMMITTED}
    assert world.decisions() == {1: True}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_final", [False, True])
def test_every_single_crash_point(is_final, seed):
    phases, decisions = set(), set()
    calm = run_world(SMALL, seed, is_final)
    for process, num_actions in calm.num_actions.items():
        for action in range(num_actions + 1):
            for hub_returns in {True, process != HUB}:
                trouble = {"crash_at": {process: action}, "hub_returns": hub_returns}
                world = run_world(SMALL, seed, is_final, **trouble)
                phases |= world.phases(names=world.survivors)
                decisions |= set(world.decisions().values())
    assert phases == {RoundPhase.COMMITTED, RoundPhase.ABORTED, RoundPhase.READY}
    assert decisions == {True, False}


@pytest.mark.parametrize("process", ["c0.0", "c0.1", "c1.0", "c1.1"])
def test_every_pair_of_a_hub_and_a_member_crash(process):
    calm = run_world(SMALL, seed=1)
    for hub_action in range(calm.num_actions[HUB] + 1):
        for action in range(0, calm.num_actions[process] + 1, 2):
            run_world(SMALL, seed=1, crash_at={HUB: hub_action, process: action})


@pytest.mark.parametrize("first", range(4))
def test_every_crash_point_of_a_hub_that_comes_back_and_dies_again(first):
    calm = run_world(SMALL, seed=2)
    for action in range(first, calm.num_actions[HUB] + 1, 4):
        for again_at in range(16):
            run_world(SMALL, seed=2, crash_at={HUB: action}, again_at=again_at)


@pytest.mark.parametrize("seed", range(3))
def test_every_crash_point_of_a_hub_that_is_asked_before_it_can_decide(seed):
    calm = run_world(SMALL, seed, has_slow_link=True)
    assert calm.decisions() == {1: True}
    for action in range(calm.num_actions[HUB] + 1):
        run_world(SMALL, seed, crash_at={HUB: action}, has_slow_link=True)


@pytest.mark.parametrize("dies_at", range(0, 7, 2))
def test_every_crash_point_of_a_hub_whose_second_try_commits(dies_at):
    calm = run_world(ALONE, seed=0, is_final=True, crash_at={"c0.0": dies_at})
    assert calm.decisions() == {1: False, 2: True}
    for action in range(calm.num_actions[HUB] + 1):
        run_world(ALONE, seed=0, is_final=True, crash_at={"c0.0": dies_at, HUB: action})


def test_every_crash_point_of_a_hub_whose_log_is_on_disk(tmp_path):
    calm = run_world(SMALL, seed=3)
    for action in range(0, calm.num_actions[HUB] + 1, 2):
        with EventLog(tmp_path / str(action)) as store:
            run_world(SMALL, seed=3, log=store, crash_at={HUB: action})


@st.composite
def troubles(draw):
    names = [HUB, *(f"c{cluster}.{stage}" for cluster in range(4) for stage in range(3))]
    return {
        "crash_at": draw(st.dictionaries(st.sampled_from(names), st.integers(0, 60), max_size=4)),
        "again_at": draw(st.none() | st.integers(0, 30)),
        "hub_returns": draw(st.booleans()),
        "loss": draw(st.sampled_from([0.0, 0.0, 0.02, 0.2])),
        "haste": draw(st.sampled_from([0.0, 0.01, 0.1])),
        "has_slow_link": draw(st.booleans()),
    }


@pytest.mark.parametrize("is_final", [False, True])
@settings(max_examples=250)
@given(layouts, seeds, troubles())
def test_any_trouble(is_final, cuts, seed, trouble):
    run_world(cuts, seed, is_final, **trouble)
