"""When a model is evaluated by updates: at marks, each once, and never for one that is long past."""

import pytest

from ravnest.hub.coordinator.evaluations import Evaluation, EvaluationSchedule
from ravnest.hub.coordinator.events import JobSettings

SETTINGS = JobSettings(
    50, 7, 16, 3, (0.1,), evaluate_updates=3
)  # 4 batches in an epoch, the last of 2 samples
BY_EPOCHS = JobSettings(50, 7, 16, 3, (0.1,))


def schedule(settings=SETTINGS):
    return EvaluationSchedule(settings)


@pytest.mark.parametrize(
    ("num_before", "last_mark", "found"),
    [
        (47, 0, None),
        (48, 0, (0, 3)),
        (48, 3, None),
        (82, 3, (1, 6)),  # an epoch is 50 samples and 4 updates
        (132, 3, (2, 9)),  # another cluster has trained on: the mark at 6 is left out
        (150, 9, None),  # the last one comes when all is trained
    ],
)
def test_an_evaluation_is_due_at_the_last_mark_that_was_reached(num_before, last_mark, found):
    due = schedule().find_due(last_mark, 0, num_before)
    assert (due and (due.epoch, due.num_updates)) == found
    assert schedule().is_at_mark(num_before, last_mark) is (found is not None)


@pytest.mark.parametrize(
    ("num_before", "most"), [(0, 48), (40, 8), (48, 34), (50, 32), (81, 1), (82, 34), (115, 1), (116, 34)]
)
def test_a_lease_ends_at_the_next_mark(num_before, most):
    assert schedule().limit(1000, num_before) == most
    assert schedule().limit(1, num_before) == 1
    assert schedule(BY_EPOCHS).limit(1000, num_before) == 1000


def test_all_before_a_mark_is_leased_and_counted_first():
    at_mark = Evaluation(1, num_updates=6)
    assert [schedule().is_time_for(at_mark, 0, number) for number in (81, 82)] == [False, True]
    assert [schedule().is_trained(at_mark, 0, number) for number in (81, 82)] == [False, True]
    last = schedule().make_last(150)
    assert (last.epoch, last.num_updates, last.is_last) == (3, 12, True)
    assert schedule().is_time_for(last, 0, 0)
    assert schedule(BY_EPOCHS).make_last(120).num_updates == 0


def test_a_job_that_goes_on_evaluates_no_mark_of_another_kind():
    assert schedule().last_mark(2, 100) == 6  # two epochs were evaluated before
    assert schedule(BY_EPOCHS).last_mark(9, 120) == 2  # nine updates were
    assert schedule(BY_EPOCHS).last_mark(1, 120) == 1


def test_without_validation_samples_nothing_is_due():
    none = JobSettings(50, 0, 16, 3, (0.1,), evaluate_updates=3)
    assert schedule(none).find_due(0, 0, 48) is None
    assert schedule(none).limit(1000, 0) == 1000
    assert schedule(none).make_last(150) is None
