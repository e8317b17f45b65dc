"""What a stage does next: order of work, bounds, refusals and the odd cases of forget and resize."""

from ravnest.engine.schedule import StageSchedule, Task, Work


def run_all(schedule: StageSchedule) -> list[Task]:
    tasks = []
    while (task := schedule.next()) is not None:
        tasks.append(task)
    return tasks


def started(schedule: StageSchedule, *batches: int) -> StageSchedule:
    for batch in batches:
        assert schedule.offer_input(batch) is None
        assert schedule.next() == Task(Work.FORWARD, batch)
    return schedule


def test_gradients_go_first_and_in_order_of_arrival():
    schedule = started(StageSchedule(window=3), 1, 2)
    schedule.offer_input(3)
    schedule.offer_gradient(2)
    schedule.offer_gradient(1)
    assert run_all(schedule) == [
        Task(Work.BACKWARD, 2, lag=0, is_update=True),
        Task(Work.BACKWARD, 1, lag=1, is_update=True),
        Task(Work.FORWARD, 3),
    ]


def test_window_holds_forwards_back_behind_the_oldest_unfinished():
    schedule = started(StageSchedule(window=2), 1, 2)
    schedule.offer_input(3)
    assert schedule.next() is None
    schedule.offer_gradient(2)  # out of order: batch 1 still holds the window
    assert [task.microbatch for task in run_all(schedule)] == [2]
    schedule.offer_gradient(1)
    assert [task.microbatch for task in run_all(schedule)] == [1, 3]


def test_version_rises_after_every_mth_backward():
    schedule = started(StageSchedule(window=4, accumulate=2, version=7), 1, 2, 3, 4)
    for batch in (1, 2, 3):
        schedule.offer_gradient(batch)
    assert [(task.lag, task.is_update) for task in run_all(schedule)] == [
        (0, False),
        (0, True),
        (1, False),
    ]
    assert (schedule.version, schedule.num_accumulated, schedule.num_in_flight) == (8, 1, 1)


def test_fifo_lag_bound_is_reached():
    schedule = started(StageSchedule(window=4), 1, 2, 3, 4)  # ceil((4 - 1) / 1) = 3
    for batch in (1, 2, 3, 4):
        schedule.offer_gradient(batch)
    assert [task.lag for task in run_all(schedule)] == [0, 1, 2, 3]


def test_refusals_name_the_batch_and_change_nothing():
    schedule = StageSchedule(window=2)
    assert "batch 1 is not in flight" in schedule.offer_gradient(1)
    schedule.offer_input(1)
    assert "batch 1 is here already" in schedule.offer_input(1)
    assert "batch 1 is not in flight" in schedule.offer_gradient(1)  # queued, not run
    schedule.next()
    assert "batch 1 is here already" in schedule.offer_input(1)
    assert schedule.offer_gradient(1) is None
    assert "batch 1 has its gradient already" in schedule.offer_gradient(1)
    assert [task.microbatch for task in run_all(schedule)] == [1]
    assert "batch 1 is not in flight" in schedule.offer_gradient(1)
    assert "batch 1 is not here" in schedule.forget(1)


def test_forget_a_queued_input():
    schedule = StageSchedule(window=2)
    schedule.offer_input(1)
    schedule.offer_input(2)
    assert schedule.forget(1) is None
    assert run_all(schedule) == [Task(Work.FORWARD, 2)]


def test_forget_in_flight_frees_its_place_even_from_the_middle():
    for gone in (1, 2, 3):
        schedule = started(StageSchedule(window=3), 1, 2, 3)
        schedule.offer_input(4)
        assert schedule.next() is None
        assert schedule.forget(gone) is None
        assert schedule.next() == Task(Work.FORWARD, 4)
        schedule.offer_input(5)
        assert schedule.next() is None
        assert "not in flight" in schedule.offer_gradient(gone)


def test_forget_with_its_gradient_queued_makes_no_update():
    schedule = started(StageSchedule(window=2), 1)
    schedule.offer_gradient(1)
    assert schedule.forget(1) is None
    assert schedule.next() is None
    assert schedule.version == 0
    assert schedule.offer_input(1) is None  # it may be run again


def test_synchronous_admits_one_update_at_a_time():
    schedule = StageSchedule(window=9, accumulate=2, synchronous=True)
    for batch in range(5):
        schedule.offer_input(batch)
    assert [task.microbatch for task in run_all(schedule)] == [0, 1]
    schedule.offer_gradient(1)
    assert [task.microbatch for task in run_all(schedule)] == [1]  # half an update: 2 has to wait
    schedule.offer_gradient(0)
    assert [(task.microbatch, task.lag) for task in run_all(schedule)] == [(0, 0), (2, 0), (3, 0)]


def test_synchronous_forget_makes_room_for_a_replacement():
    schedule = StageSchedule(window=9, accumulate=2, synchronous=True)
    for batch in range(3):
        schedule.offer_input(batch)
    run_all(schedule)
    schedule.forget(0)
    assert [task.microbatch for task in run_all(schedule)] == [2]


def test_resize_below_what_is_in_flight_drops_nothing():
    schedule = started(StageSchedule(window=3), 1, 2, 3)
    schedule.resize(window=1, accumulate=1, synchronous=False)
    schedule.offer_input(4)
    for batch in (1, 2):
        schedule.offer_gradient(batch)
    assert [task.microbatch for task in run_all(schedule)] == [1, 2]
    schedule.offer_gradient(3)
    assert [task.microbatch for task in run_all(schedule)] == [3, 4]


def test_smaller_accumulate_in_the_middle_completes_the_update_at_the_next_backward():
    schedule = StageSchedule(window=4, accumulate=4, synchronous=True)
    for batch in range(5):
        schedule.offer_input(batch)
    run_all(schedule)
    for batch in (0, 1, 2):
        schedule.offer_gradient(batch)
    run_all(schedule)
    schedule.forget(3)
    schedule.resize(window=4, accumulate=2, synchronous=True)  # three are summed already
    assert [task.microbatch for task in run_all(schedule)] == [4]  # never stuck: one more may go
    schedule.offer_gradient(4)
    assert run_all(schedule) == [Task(Work.BACKWARD, 4, lag=0, is_update=True)]


def test_larger_accumulate_in_the_middle_makes_the_update_longer():
    schedule = started(StageSchedule(window=4, accumulate=2), 1, 2, 3)
    for batch in (1, 2, 3):
        schedule.offer_gradient(batch)
    schedule.next()
    schedule.resize(window=4, accumulate=3, synchronous=False)
    assert [task.is_update for task in run_all(schedule)] == [False, True]


def test_an_update_of_fewer_batches_is_closed_once():
    schedule = started(StageSchedule(window=4, accumulate=3, version=5), 1, 2)
    assert not schedule.is_empty
    assert not schedule.close_update()
    schedule.offer_gradient(1)
    schedule.offer_gradient(2)
    run_all(schedule)
    assert schedule.is_empty
    assert schedule.close_update()
    assert not schedule.close_update()
    assert (schedule.version, schedule.num_accumulated) == (6, 0)


def test_an_exact_update_waits_and_nothing_goes_forward_meanwhile():
    schedule = StageSchedule(window=8, accumulate=2, is_exact=True, version=4)
    for batch in (1, 2, 3, 4):
        schedule.offer_input(batch)
    assert schedule.is_lockstep
    assert [task.microbatch for task in run_all(schedule)] == [1, 2]
    schedule.offer_gradient(2)
    schedule.offer_gradient(1)
    assert run_all(schedule) == [Task(Work.BACKWARD, 2), Task(Work.BACKWARD, 1)]
    assert schedule.is_complete
    assert not schedule.close_update()
    assert (schedule.version, schedule.num_accumulated) == (4, 2)
    schedule.end_exact()
    assert not schedule.is_complete
    assert (schedule.version, schedule.num_accumulated) == (5, 0)
    assert [task.microbatch for task in run_all(schedule)] == [3, 4]


def test_a_pace_does_not_loosen_exact_updates():
    schedule = StageSchedule(window=1, accumulate=2, is_exact=True)
    schedule.resize(8, 2, synchronous=False)
    for batch in (1, 2, 3):
        schedule.offer_input(batch)
    assert [task.microbatch for task in run_all(schedule)] == [1, 2]


def test_a_dropped_microbatch_counts_once_in_an_exact_update():
    schedule = started(StageSchedule(window=8, accumulate=3, is_exact=True), 1)
    schedule.forget(2)  # before it came: another stage dropped it
    schedule.forget(2)
    schedule.offer_gradient(1)
    run_all(schedule)
    schedule.forget(1)  # after its backward here
    assert (schedule.num_accumulated, schedule.is_complete) == (2, False)
    started(schedule, 3)
    schedule.forget(3)
    assert schedule.is_complete
    schedule.end_exact()
    schedule.forget(1)  # late: its update is made
    schedule.forget(3)
    assert schedule.num_accumulated == 0


def test_what_was_dropped_before_exact_updates_began_does_not_count_in_them():
    schedule = started(StageSchedule(window=8, accumulate=2), 1, 2)
    schedule.offer_gradient(2)
    run_all(schedule)
    schedule.forget(1)
    schedule.close_update()
    schedule.set_exact(True)
    schedule.forget(1)
    schedule.forget(2)
    assert schedule.num_accumulated == 0


def test_a_short_exact_update_has_as_many_microbatches_as_it_is_told():
    schedule = StageSchedule(window=8, accumulate=3, is_exact=True)
    schedule.expect(1)
    for batch in (1, 2, 3, 4):
        schedule.offer_input(batch)
    assert [task.microbatch for task in run_all(schedule)] == [1]
    schedule.offer_gradient(1)
    run_all(schedule)
    assert schedule.is_complete
    schedule.end_exact()
    schedule.expect(0)
    assert schedule.is_complete
    assert schedule.next() is None
    schedule.end_exact()
    assert [task.microbatch for task in run_all(schedule)] == [2, 3, 4]


def test_when_exact_updates_end_what_is_done_of_one_counts_in_the_next():
    schedule = started(StageSchedule(window=8, accumulate=2, is_exact=True), 1, 2)
    schedule.offer_gradient(1)
    run_all(schedule)
    schedule.set_exact(False)
    schedule.offer_gradient(2)
    assert run_all(schedule) == [Task(Work.BACKWARD, 2, is_update=True)]
    assert (schedule.version, schedule.num_accumulated) == (1, 0)


def test_exact_updates_take_microbatches_by_number():
    schedule = StageSchedule(window=8, accumulate=1, is_exact=True)
    schedule.offer_input(5)
    schedule.offer_input(3)
    assert schedule.next_input == 3
    assert run_all(schedule) == [Task(Work.FORWARD, 3)]
    later = StageSchedule(window=8)
    later.offer_input(5)
    later.offer_input(3)
    assert later.next_input == 5
