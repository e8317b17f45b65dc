"""Laws of the hub over random histories: joins, deaths, delays, second copies, drops, silent members."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hub_world import HubWorld, Trouble, check_replay, job, quick_plans

from ravnest.hub.events import RoundEnded

NAMES = "abcdefgh"
RESCUE = ("x", "y", "z")
LATE = 400.0


@pytest.fixture(autouse=True, scope="module")
def _quick_plans():
    with quick_plans():
        yield


troubles = st.builds(
    Trouble,
    seed=st.integers(0, 2**32),
    latency=st.sampled_from([0.0, 0.1, 2.0]),
    twice=st.sampled_from([0.0, 0.2]),
    dropped=st.sampled_from([0.0, 0.1]),
    gives_up=st.sampled_from([0.0, 0.1]),
    silent=st.sampled_from([0.0, 0.1]),
    detect_seconds=st.sampled_from([0.0, 1.0, 5.0]),
)
jobs = st.builds(
    job,
    num_samples=st.sampled_from([3, 50, 64]),
    num_validation=st.sampled_from([0, 7, 23]),
    epochs=st.integers(1, 3),
    chunk_batches=st.integers(1, 4),
    average_every=st.sampled_from([1, 4, None]),
    evaluate_every=st.integers(0, 2),
    expected_nodes=st.sampled_from([0, 4]),
    rates=st.sampled_from([(0.1,), (0.1, 0.2, 0.3, 0.2)]),
)
moments = st.one_of(st.just(0.0), st.floats(0.0, 40.0))
joins = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(moments, st.sampled_from([250.0, 150.0])), min_size=2
)
deaths = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=6)
returns = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=2)


def run_history(given_job, trouble, joined, died, returned):
    world = HubWorld(given_job, trouble)
    for name, (moment, memory_mb) in joined.items():
        world.join(name, memory_mb=memory_mb, at=moment)
    for name, moment in returned:
        world.join(name, at=moment)
    for name, moment in died:
        world.kill(name, at=moment)
    world.join(*RESCUE, at=LATE)  # enough to hold the model, and they live
    return world.run()


@settings(max_examples=150)
@given(jobs, troubles, joins, deaths, returns)
def test_every_history_with_enough_memory_in_the_end_finishes_with_balanced_books(
    given_job, trouble, joined, died, returned
):
    world = run_history(given_job, trouble, joined, died, returned)
    assert world.is_finished
    assert world.finish is not None
    assert set(world.ledger.values()) == {1}
    assert len(world.ledger) == given_job.settings.num_samples * given_job.settings.epochs
    intervals = [(part.start, part.stop) for part in world.finish.parts]
    assert intervals[0][0] == 0
    assert intervals[-1][1] == 6
    assert world.open_round is None


@settings(max_examples=60)
@given(jobs, troubles, joins, deaths, returns)
def test_replaying_the_log_gives_the_same_orders_and_the_same_state(
    given_job, trouble, joined, died, returned
):
    check_replay(run_history(given_job, trouble, joined, died, returned))


@settings(max_examples=60)
@given(troubles, deaths, st.floats(0.0, 30.0))
def test_a_restart_in_the_middle_changes_nothing(trouble, died, moment):
    world = HubWorld(job(), trouble)
    world.join(*"abcde", memory_mb=250.0)
    for name, when in died:
        world.kill(name, at=when)
    world.run(until=moment)
    check_replay(world)
    world.run()
    ends = [news for news in world.news if isinstance(news, RoundEnded)]
    assert [news.round_id for news in ends] == list(range(1, len(ends) + 1))
