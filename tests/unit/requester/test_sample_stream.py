"""A stream is read as training goes: in windows, a little ahead; what is trained is let go, or read over."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ravnest.errors import ConfigError
from ravnest.hub.coordinator.leases import LeaseBook, find_position, lengthen
from ravnest.requester.dataset import Samples
from ravnest.requester.job import Job
from ravnest.requester.prepare import prepare
from ravnest.requester.sample_stream import StreamLimits
from ravnest.requester.session import LOCAL_PLAN


class Counted:
    """Endless samples that count how many were asked for; `length` ends each pass."""

    def __init__(self, length=None):
        self.num_read, self.length = 0, length

    def __iter__(self):
        for number in itertools.count() if self.length is None else range(self.length):
            self.num_read += 1
            yield {"x": torch.tensor([float(number)]), "y": number}


def stream(data, most=1000, window=10, most_bytes=None):
    return Samples(data, 4, limits=StreamLimits(most, most_bytes, window))


def read(samples, *numbers):
    return samples.batch(numbers)["y"].tolist()


def test_a_long_stream_is_read_a_window_ahead_and_not_further():
    data = Counted()
    samples = stream(data)
    assert (len(samples), samples.window) == (1000, 10)
    assert data.num_read == 11
    for start in range(0, 200, 10):
        for number in range(start + 9, start - 1, -1):
            assert read(samples, number) == [number]
            assert data.num_read <= max(start, 10) + 20  # lengths are compared in the second window, too
    assert data.num_read == 210  # the next window is there before it is begun


def test_a_short_stream_is_read_whole_and_shuffled_whole():
    samples = stream(Counted(9))
    assert (len(samples), samples.window) == (9, 0)
    assert stream(Counted(), most=10).window == 0
    assert stream(Counted(), window=0).window == 0


@pytest.mark.parametrize("begins_again", [True, False])
def test_a_stream_that_ends_early_is_read_again(begins_again):
    data = Counted(25)
    samples = stream(data if begins_again else iter(data))
    found = [read(samples, number)[0] for number in range(60)]
    assert found == [*range(25), *range(25), *range(10)]


def test_a_generator_that_ends_when_its_beginning_is_gone_says_so():
    samples = stream(iter(Counted(100)), most_bytes=16 * 16)
    for number in range(0, 60, 10):
        read(samples, number)
    samples.forget(60)
    with pytest.raises(ConfigError, match="ended after 100 samples, and training needs 1,000; set a lower"):
        read(samples, 120)


@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate])
def test_what_is_trained_for_good_is_let_go_when_much_is_kept(collate_fn):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(Counted())

    collate = None if collate_fn is None else lambda samples: collate_fn(samples)
    most_bytes = 16 * 64 if collate is None else 1000 * 40  # samples
    samples = stream(DataLoader(Endless(), batch_size=4, collate_fn=collate), most_bytes=most_bytes)
    for number in range(500):
        assert read(samples, number) == [number]
        if number % 10 == 9:
            samples.forget(number - 9)
    assert read(samples, 495) == [495]
    with pytest.raises(ConfigError, match="sample 3 of the train data was read before and is not kept"):
        read(samples, 3)


def test_what_is_kept_stays_while_there_is_room():
    samples = stream(Counted())
    read(samples, 50)
    samples.forget(40)
    assert read(samples, 3) == [3]


def test_another_program_goes_on_at_the_sample_that_is_next():
    data = Counted()
    samples = stream(data)
    samples.skip_to(70)
    assert read(samples, 77, 70) == [77, 70]
    with pytest.raises(ConfigError, match="is not kept any more"):
        read(samples, 69)
    assert samples.first_batch()["y"].tolist() == [0, 1, 2, 3]  # as capture saw it


def test_the_longest_sample_of_a_stream_must_be_said():
    rows = ({"x": torch.ones(1 + number % 3), "y": number} for number in itertools.count())
    samples = Samples(rows, 4, limits=StreamLimits(1000, window=10))
    with pytest.raises(ConfigError, match="'x' of the train data differs in shape"):
        samples.first_batch()
    ids = ({"input_ids": [1] * (1 + k % 3), "attention_mask": [1] * (1 + k % 3)} for k in itertools.count())
    with pytest.raises(ConfigError, match="the longest is not known; set max_length="):
        Samples(ids, 4, limits=StreamLimits(1000, window=10)).first_batch()


# ---- the order of training


def test_windows_are_shuffled_each_in_its_own_way():
    book = LeaseBook(1000, 1, seed=3, num_total=1000, window=50)
    order = np.concatenate([book.samples(book.lease("a", 70)) for _ in range(14)])
    windows = [order[start : start + 50] for start in range(0, 950, 50)]
    for number, window in enumerate(windows):
        assert sorted(window) == list(range(number * 50, number * 50 + 50))
    assert len({tuple(window % 50) for window in windows}) == len(windows)
    again = LeaseBook.restore(book.state(), 1000, 50)
    longer = LeaseBook(5000, 1, seed=3, num_total=5000, window=50)
    assert np.array_equal(longer.samples(longer.lease("a", 980)), order)  # however many are to come
    lease = again.lease("b", 20)
    assert sorted(np.concatenate([order, again.samples(lease)])) == list(range(1000))


def test_the_position_is_the_first_place_that_is_not_counted():
    book = LeaseBook(1000, 1, window=50)
    first, second, _ = (book.lease("a", 60), book.lease("b", 60), book.lease("a", 60))
    assert find_position(book.state()) == 0
    assert book.complete(first.number, "a") is None
    assert find_position(book.state()) == 60
    book.release("b")
    assert find_position(book.state()) == 60
    again = book.lease("a", 60)
    assert again.start == second.start
    assert book.complete(again.number, "a") is None
    assert find_position(book.state()) == 120


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.inner(x).squeeze(1)


def make_job(data, **settings):
    return Job(
        Line(), data, batch_size=4, loss=lambda out, batch: (out - batch["y"]).square().mean(), **settings
    )


def test_a_job_goes_on_where_its_checkpoint_was_also_with_more_steps():
    before = prepare(make_job(Counted(), max_steps=100, shuffle_window=32), LOCAL_PLAN, 1, 1.0)
    assert (before.job.settings.num_samples, before.job.settings.shuffle_window) == (400, 32)
    book = LeaseBook(400, 1, num_total=400, window=32)
    for _ in range(3):
        book.complete(book.lease("a", 40).number, "a")
    data = Counted()
    job = make_job(data, max_steps=200, shuffle_window=32)
    after = prepare(job, LOCAL_PLAN, 1, 1.0)
    counts = {"num_counted": 120, "num_reported": 120, "num_updates": 30, "num_evaluated": 0}
    saved = SimpleNamespace(
        books=SimpleNamespace(**counts, leases=book.state(), history=[]), read=lambda: iter(())
    )
    books = after.owner.go_on_from(saved)
    assert books.leases["num_samples"] == 800
    assert data.num_read == 96  # what was trained is read over, up to the window of the next sample
    again = LeaseBook.restore(books.leases, 800, 32)
    numbers = again.samples(again.lease("a", 8))
    assert job.samples.batch(numbers)["y"].tolist() == numbers.tolist()
    assert min(numbers) >= 96


@pytest.mark.parametrize("is_given_back", [False, True])
def test_a_stream_that_was_trained_to_its_end_goes_on_behind_it(is_given_back):
    book = LeaseBook(100, 1, num_total=100, window=32)
    leases = [book.lease("a", 50), book.lease("b", 50)]
    assert book.complete(leases[1].number, "b") is None
    if is_given_back:
        book.release("a")
    else:
        assert book.complete(leases[0].number, "a") is None
    longer = LeaseBook.restore(lengthen(book.state(), 150), 150, 32)
    found = []
    while lease := longer.lease("a", 64):
        found.append((lease.epoch, lease.start, lease.stop))
        assert longer.complete(lease.number, "a") is None
    assert found == ([(0, 0, 50)] if is_given_back else []) + [(0, 100, 150)]
    assert longer.is_finished
    assert longer.num_counted(0) == 150


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (Counted(), {"shuffle_window": 1, "max_steps": 5}, "shuffle_window is 1; give a number of samples"),
        (Counted(40), {"shuffle_window": 8}, "2 or more, and max_steps"),
        (
            {"x": torch.ones(8, 1), "y": torch.ones(8)},
            {"shuffle_window": 8, "max_steps": 5},
            "all of this data",
        ),
    ],
)
def test_a_window_is_for_iterables_of_known_length(data, settings, words):
    with pytest.raises(ConfigError, match=words):
        make_job(data, **settings)
