"""Laws of the hub over random histories: joins, deaths, delays, second copies, drops, silent members."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import pick
from support.hub_world import HubWorld, Trouble, check_replay, freeze, job
from support.plan_world import check_laws, configs, profiles, swarms

from ravnest.hub.coordinator import planner
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import MakePlan
from ravnest.hub.coordinator.notices import PlanFormed, RoundEnded
from ravnest.hub.monitors.monitors import apply_logged
from ravnest.hub.service.event_log import EventLog, read_watch
from ravnest.protocol.membership import Fact

NAMES = "abcdefgh"
RESCUE = ("x", "y", "z")
LATE = 400.0


troubles = st.builds(
    Trouble,
    seed=st.integers(0, 2**32),
    latency=st.sampled_from([0.0, 0.1, 2.0]),
    twice=st.sampled_from([0.0, 0.2]),
    dropped=st.sampled_from([0.0, 0.1]),
    gives_up=st.sampled_from([0.0, 0.1]),
    silent=st.sampled_from([0.0, 0.1]),
    wrong=st.sampled_from([0.0, 0.1]),
    blames=st.sampled_from([0.0, 0.8]),
    detect_seconds=st.sampled_from([0.0, 1.0, 5.0]),
    guessed=st.sampled_from([(), (Fact.SPEED,), tuple(Fact)]),
    misses=st.sampled_from([0.0, 0.3]),
    no_room=st.sampled_from([0.0, 0.5]),
)
jobs = st.builds(
    job,
    num_samples=st.sampled_from([3, 50, 64]),
    batch_size=st.sampled_from([4, 16, 24]),
    microbatches=st.sampled_from([0, 0, 1, 3, 5]),
    num_validation=st.sampled_from([0, 7, 23]),
    epochs=st.integers(1, 3),
    chunk_batches=st.integers(1, 4),
    average_every=st.sampled_from([1, 4, None]),
    evaluate_every=st.integers(0, 2),
    evaluate_updates=st.sampled_from([0, 0, 2, 5]),
    expected_nodes=st.sampled_from([0, 4]),
    rates=st.sampled_from([(0.1,), (0.1, 0.2, 0.3, 0.2)]),
    checkpoint_every=st.sampled_from([None, 3.0, 10.0]),
)
moments = st.one_of(st.just(0.0), st.floats(0.0, 40.0))
joins = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(moments, st.sampled_from([250.0, 150.0])), min_size=2
)
deaths = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=6)
departures = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=3)
restarts = st.lists(st.floats(1.0, 40.0), max_size=2)
slowings = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([0.5, 2.0, 5.0]), moments), max_size=2)
hangs = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=1)
returns = st.lists(st.tuples(st.sampled_from(NAMES), moments), max_size=2)


def run_history(
    given_job, trouble, joined, died, returned, stopped=None, departed=(), restarted=(), slowed=(), hung=()
):
    world = HubWorld(given_job, trouble)
    for name, (moment, memory_mb) in joined.items():
        world.join(name, memory_mb=memory_mb, at=moment)
    for name, moment in returned:
        world.join(name, at=moment)
    for name, moment in died:
        world.kill(name, at=moment)
    for name, moment in departed:
        world.leave(name, at=moment)
    for moment in restarted:
        world.restart(at=moment)
    for name, times, moment in slowed:
        world.slow(name, times, at=moment)
    for name, moment in hung:
        world.at(moment, world.muted.add, name)  # it lives, and does nothing
    world.join(*RESCUE, at=LATE)  # enough to hold the model, and they live
    if stopped is not None:
        world.at(stopped, world.stop)
    return world.run()


@settings(max_examples=pick(40, 400))
@given(jobs, troubles, joins, deaths, returns, departures, restarts, slowings, hangs)
def test_every_history_with_enough_memory_in_the_end_finishes_with_balanced_books(
    given_job, trouble, joined, died, returned, departed, restarted, slowed, hung
):
    world = run_history(given_job, trouble, joined, died, returned, None, departed, restarted, slowed, hung)
    assert world.is_finished
    assert world.finish is not None
    assert set(world.ledger.values()) == {1}
    assert len(world.ledger) == given_job.settings.num_samples * given_job.settings.epochs
    intervals = [(part.start, part.stop) for part in world.finish.parts]
    assert intervals[0][0] == 0
    assert intervals[-1][1] == 6
    assert world.open_round is None
    check_replay(world)  # the log gives the same orders and the same state


@settings(max_examples=pick(30, 300))
@given(jobs, troubles, joins, deaths, returns, st.floats(0.0, LATE), restarts)
def test_a_stopped_job_is_kept_if_somebody_can_and_leases_nothing_more(
    given_job, trouble, joined, died, returned, stopped, restarted
):
    world = run_history(given_job, trouble, joined, died, returned, stopped, restarted=restarted)
    assert world.is_finished
    assert (world.finish is None) != (world.abandoned is None)  # the world checks that it had to be
    check_replay(world)


plain_jobs = st.builds(
    job,
    batch_size=st.integers(1, 40),
    num_samples=st.integers(1, 6),
    microbatches=st.sampled_from([0, 0, 1, 2, 7, 50]),
    chunk_batches=st.integers(1, 4),
    rates=st.just((0.1, 0.2, 0.3)),
).map(
    lambda given: replace(
        given,
        settings=replace(given.settings, num_samples=given.settings.num_samples * given.settings.batch_size),
    )
)


@settings(max_examples=pick(30, 300))
@given(plain_jobs, st.sampled_from(["a", "abc", "abcde"]), deaths)
def test_every_update_is_of_one_batch(given_job, names, died):
    world = HubWorld(given_job)
    world.join(*names, memory_mb=250.0)
    for name, when in died:
        world.kill(name, at=when)
    world.join(*RESCUE, at=LATE)
    world.run()
    size = given_job.settings.batch_size
    assert world.updates
    for updates in world.updates.values():
        assert [sum(sizes) for sizes in updates.values()] == [size] * len(updates)
        for sizes in updates.values():
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 4 or given_job.settings.microbatches or len(sizes) == 1
    formed = next(news for news in world.news if isinstance(news, PlanFormed))
    config = given_job.config
    for cluster in formed.plan.clusters:
        assert cluster.accumulate == formed.microbatches
        assert all(stage.window - 1 <= formed.microbatches * config.max_lag for stage in cluster.stages)


@settings(max_examples=pick(20, 200))
@given(profiles(), swarms(most=6), configs, st.integers(1, 64), st.sampled_from([0, 0, 1, 3, 200]))
def test_a_plan_in_microbatches_is_a_plan(profile, swarm, config, batch_size, asked):
    given_job = job(batch_size=batch_size, microbatches=asked)
    given_job = replace(given_job, profile=profile, config=config)
    formed = planner.SearchPlanner().make_plan(given_job, MakePlan(1, swarm.nodes), 0.0)
    if formed.plan is None:
        assert formed.shortage
        return
    cut_profile = given_job.profile_microbatch(formed.microbatches, formed.sharing)
    assert cut_profile.samples_per_batch == -(-batch_size // formed.microbatches)
    assert {cluster.accumulate for cluster in formed.plan.clusters} == {formed.microbatches}
    assert formed.microbatches == min(asked, batch_size) if asked else formed.microbatches <= batch_size
    check_laws(formed.plan, cut_profile, swarm, config)


@settings(max_examples=pick(30, 300))
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


@settings(max_examples=pick(15, 150))
@given(troubles, deaths, st.floats(0.0, 30.0), st.sampled_from([None, 20.0]))
def test_a_hub_replayed_from_its_folder_goes_on_alike(trouble, died, moment, stopped):
    world = HubWorld(job(batch_size=16), trouble)
    world.join(*"abcde", memory_mb=250.0)
    for name, when in died:
        world.kill(name, at=when)
    if stopped is not None:
        world.at(stopped, world.stop)
    world.run(until=moment)
    num_before = len(world.log)
    with TemporaryDirectory() as folder, EventLog(Path(folder)) as store:
        hub = Coordinator(world.given)
        for event in world.log:
            apply_logged(hub, event, store.append)
        again = read_watch(Path(folder)).hub
    world.run()
    assert [again.apply(event) for event in world.log[num_before:]] == world.answers[num_before:]
    assert freeze(again) == freeze(world.hub)
