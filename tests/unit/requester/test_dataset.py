"""Whatever form data has, a batch is the samples of its numbers, by field; what differs is named."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ravnest.errors import CaptureError, ConfigError
from ravnest.requester.dataset import Samples, loader_batch_size
from ravnest.requester.job import Job
from ravnest.requester.sample_stream import SampleSpool, StreamLimits

X = torch.arange(30.0).reshape(10, 3)
Y = torch.arange(10)
NAMED = [{"x": X[k], "y": int(Y[k])} for k in range(10)]
PAIRS = [(X[k], int(Y[k])) for k in range(10)]


class Rows(Dataset):
    def __init__(self, make, length=20):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert type(index) is int
        return self.make(index)


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class ManyAtOnce(Rows):
    """As Hugging Face datasets do."""

    asked = ()

    def __getitems__(self, indices):
        self.asked = (*self.asked, tuple(indices))
        return [self.make(index) for index in indices]


def collate(samples):
    return {"x": torch.stack([sample[0] for sample in samples]), "y": torch.tensor([s[1] for s in samples])}


def samples(data, batch_size=4, **settings):
    return Samples(data, batch_size, **settings)


def refused(data, indices=(0,), batch_size=4):
    with pytest.raises(ConfigError) as caught:
        samples(data, batch_size).batch(indices)
    return str(caught.value)


FORMS = {
    "dict": {"x": X, "y": Y},
    "dict of arrays": {"x": X.numpy(), "y": Y.numpy()},
    "tuple": (X, Y),
    "tuple of arrays": (X.numpy(), Y.numpy()),
    "dataset": TensorDataset(X, Y),
    "list of dicts": NAMED,
    "list of pairs": PAIRS,
    "many at once": ManyAtOnce(NAMED.__getitem__, 10),
    "part": Subset(ManyAtOnce(NAMED.__getitem__, 10), range(10)),
    "iterable dataset": Stream(PAIRS),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, drop_last=True),
    "loader with collate_fn": DataLoader(PAIRS, batch_size=3, collate_fn=collate),
    "loader of a stream": DataLoader(Stream(PAIRS), batch_size=3),
    "loader of ready batches": DataLoader([(X[:4], Y[:4]), (X[4:], Y[4:])], batch_size=None),
    "loader of ready dicts": DataLoader([{"x": X, "y": Y}], batch_size=None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_the_samples_of_its_numbers(form):
    read = samples(FORMS[form])
    for indices in ([7, 2, 9], range(3, 6), np.array([4]), (5, 5, 0), np.arange(10)):
        batch = read.batch(indices)
        assert list(batch) == ["x", "y"]
        assert torch.equal(batch["x"], X[list(indices)])
        assert torch.equal(batch["y"], Y[list(indices)])
    assert len(read) == 10
    first = read.first_batch()
    fields = first if isinstance(first, dict) else dict(zip("xy", first, strict=True))
    assert torch.equal(fields["x"], X[:4])


def test_only_the_first_batch_of_a_generator_is_read_for_it():
    numbers = iter(range(10))
    read = samples((PAIRS[k] for k in numbers), batch_size=2)
    read.first_batch()
    assert next(numbers) == 2
    assert len(read) == 9  # but for the one taken here
    assert len(read) == 9


def test_parts_of_a_tuple_are_inputs_and_target():
    assert list(samples((X, X, Y)).batch([1])) == ["x0", "x1", "y"]
    with pytest.raises(CaptureError, match="give a dict of tensors or a tuple"):
        samples((X,)).batch([1])


def test_unpadded_data_loses_its_mask():
    masked = {"x": X, "attention_mask": torch.ones(10, 3)}
    assert "attention_mask" in samples(masked).batch([1])
    assert list(samples(masked, is_padded=False).batch([1])) == ["x"]


def test_neighbouring_rows_are_not_copied():
    read = samples({"x": X, "array": X.numpy()})
    batch = read.batch(np.arange(3, 7))
    assert batch["x"].data_ptr() == X[3].data_ptr()
    assert batch["array"].data_ptr() == X[3].data_ptr()
    assert read.batch([3, 5])["x"].data_ptr() != X[3].data_ptr()
    assert read.batch([6, 5, 4])["x"][:, 0].tolist() == [18, 15, 12]


def test_arrays_that_torch_does_not_take_as_they_are():
    array = np.arange(30.0).reshape(10, 3)
    fixed = array.copy()
    fixed.flags.writeable = False
    for odd in (array[::-1], fixed, array.astype(">f8"), array[:, ::2]):
        assert np.array_equal(samples({"x": odd}).batch([2, 7])["x"].numpy(), odd[[2, 7]])
    assert samples([{"x": fixed[0]}] * 4).batch([1])["x"].dtype == torch.float64
    assert "has 'x', an array of <U1;" in refused({"x": np.array(["a", "b"])})
    assert "has 'x', a single number;" in refused({"x": np.array(1.0)})


def test_many_samples_are_asked_for_at_once():
    data = ManyAtOnce(NAMED.__getitem__, 10)
    samples(data).batch([8, 1])
    assert data.asked == (tuple(range(10)), (0, 1, 2, 3), (8, 1))  # lengths, the first batch, what is asked


# ---- samples that differ from the first batch


def test_a_sample_of_another_shape_type_or_field_is_named():
    def odd(sample):
        return Rows(lambda k: sample if k == 17 else {"ids": [k, 1], "y": 0.5})

    alone = refused(odd({"ids": [1, 2, 3], "y": 0.5}), [17])
    assert alone == (
        "'ids' of the train data differs in shape (a length of 2 in sample 0 and 3 in sample 17); "
        "pad={'ids': VALUE} pads all samples to the longest, or cut them to one length"
    )
    beside = refused(odd({"ids": [1, 2, 3], "y": 0.5}), [3, 17])
    assert "differs in shape (a length of 2 in sample 0 and 3 in sample 17)" in beside
    assert "'y' is int64 () in sample 17" in refused(odd({"ids": [1, 2], "y": 1}), [17])
    typed = refused(odd({"ids": [1, 2], "y": 1}), [3, 17])
    assert "'y' of the train data differs in type (float32 () in sample 3 and int64 () in sample 17)" in typed
    assert "'y' is missing in sample 17" in refused(odd({"ids": [1, 2]}), [17])
    assert "sample 17 of the train data has other parts than sample 3" in refused(
        odd({"ids": [1, 2]}), [3, 17]
    )
    assert "sample 17 of the train data has other parts" in refused(odd((1, 2)), [3, 17])
    assert "a sample of the train data is 3; give a dict" in refused(odd(3), [17])


def one_bad(bad, length=200):
    """Samples of which one raises, or is of another shape; of many it is none that are looked at first."""

    def make(index):
        if index == 7 and bad == "raises":
            raise OSError("7.png is truncated")
        return {"x": torch.full((2 if index == 7 else 3,), float(index)), "y": index}

    return Rows(make, length)


@pytest.mark.parametrize(
    ("bad", "reason"), [("raises", "OSError: 7.png is truncated"), ("other", "'x' is float32 (2,)")]
)
def test_others_take_the_place_of_a_sample_that_cannot_be_read(bad, reason, caplog):
    """A broken file must not end a training of days; it is told once, with its number."""
    read = samples(one_bad(bad))
    groups = [(1, 2), (5, 7, 6, 9), (9, 7, 8)]
    found = [batch["y"].tolist() for batch in read.batches(groups, replaces=True)]
    assert found == [[1, 2], [5, 6, 6, 9], [9, 8, 8]]
    assert list(read.unreadable) == [7]
    assert read.unreadable[7].startswith(reason)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "sample 7 of the train data cannot be read"
    ]


def test_what_mostly_cannot_be_read_ends_a_training():
    read = samples(one_bad("raises"))
    with pytest.raises(OSError, match=r"7\.png"):
        list(read.batches([(7,)], replaces=True))
    gone = samples(Rows(lambda index: {"x": X[0], "y": 1} if index not in (5, 7) else 1 / 0, 200))
    with pytest.raises(ZeroDivisionError):
        list(gone.batches([(0, 5, 7)], replaces=True))
    assert not gone.unreadable


def test_a_sample_that_cannot_be_read_is_told_before_anybody_trains():
    with pytest.raises(ConfigError, match=r"test_dataset\.py:\d+ failed: OSError: 7\.png is truncated"):
        Job(
            torch.nn.Linear(3, 1), one_bad("raises", 20), batch_size=4, loss=lambda out, _: out.mean()
        ).capture()


def test_a_collate_fn_that_pads_each_batch_to_its_own_length_is_told():
    data = [[1] * (2 if k < 4 else 5) for k in range(8)]
    loader = DataLoader(data, batch_size=4, collate_fn=lambda rows: {"ids": torch.tensor(rows)})
    assert samples(loader).batch([1, 2])["ids"].shape == (2, 2)
    assert "'ids' is int64 (5,) in sample 4" in refused(loader, [4, 5])
    drops = DataLoader(PAIRS, batch_size=4, collate_fn=lambda rows: collate(rows[1:]))
    assert "the collate_fn of the train data made 3 samples of 4" in refused(drops)
    text = DataLoader(PAIRS, batch_size=4, collate_fn=lambda _: "text")
    assert "a batch of the DataLoader of the train data is 'text'" in refused(text)


def test_a_collate_fn_that_pads_is_found_before_anybody_trains():
    data = [[1] * (2 + k % 5) for k in range(50)]

    def pad(rows):
        longest = max(map(len, rows))
        return {"ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}

    with pytest.raises(ConfigError, match=r"'ids' is int64 \(\d,\) in sample \d+ .*max_length=... pad them"):
        samples(DataLoader(data, batch_size=8, collate_fn=pad)).check_some()
    fixed = DataLoader(data, batch_size=8, collate_fn=lambda rows: {"ids": pad([*rows, [0] * 6])["ids"][:-1]})
    samples(fixed).check_some()
    for few in (1, 2, 3):
        samples({"x": X[:few], "y": Y[:few]}).check_some()


def test_only_what_is_read_of_a_stream_is_tried():
    def endless():
        for number in itertools.count():
            assert number < 8
            yield {"x": float(number)}

    stream = samples(endless())
    stream.first_batch()
    stream.check_some()


def test_validation_data_must_be_like_the_train_data():
    train = samples({"x": X, "y": Y})
    samples(NAMED, what="validation data").check_like(train)
    for data, problem in (
        ({"x": X}, "'y' is missing in the validation data, but int64 () in the train data"),
        ({"x": X, "y": Y, "z": Y}, "'z' is int64 () in the validation data, but missing in the train data"),
        ({"x": X.double(), "y": Y}, "'x' is float64 (3,) in the validation data, but float32 (3,) in"),
    ):
        with pytest.raises(ConfigError) as caught:
            samples(data, what="validation data").check_like(train)
        assert problem in str(caught.value)


# ---- iterables


SPOOLED = {
    "dict": {"ids": torch.arange(5), "mask": torch.tensor([True, False]), "label": torch.tensor(3)},
    "tuple": (torch.randn(2, 3), torch.tensor(0.5, dtype=torch.bfloat16)),
    "other sizes": {
        "ids": torch.arange(7, dtype=torch.uint8),
        "mask": torch.zeros(0),
        "label": torch.tensor(1),
    },
}


def test_an_iterable_without_an_end_is_refused():
    endless = samples(
        ({"x": X[0], "y": [k, 2]} for k in itertools.count()), limits=StreamLimits(most_bytes=100_000)
    )
    assert endless.batch([3])["y"].tolist() == [[3, 2]]
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"kept on disk, after 3,571 samples \(100 kB\) that is enough; give max_steps"
        ):
            len(endless)
    counted = samples(({"x": X[0], "y": [k, 2]} for k in itertools.count()), limits=StreamLimits(50))
    assert len(counted) == 50
    assert counted.batch([49, 3])["y"].tolist() == [[49, 2], [3, 2]]


def test_a_collate_fn_gets_the_samples_of_a_stream_as_they_are():
    class Words(IterableDataset):
        def __iter__(self):
            return iter(["a", "bb", "ccc"])

    def count(words):
        assert all(isinstance(word, str) for word in words)
        return {"x": torch.tensor([len(word) for word in words])}

    loader = DataLoader(Words(), batch_size=2, collate_fn=count)
    assert samples(loader).batch([2, 0])["x"].tolist() == [3, 1]
    refused = samples(loader, limits=StreamLimits(most_bytes=40))
    with pytest.raises(ConfigError, match=r"no end after 2 samples \(67 B\); give max_steps="):
        len(refused)


@given(st.lists(st.sampled_from(list(SPOOLED)), min_size=1, max_size=6), st.randoms())
def test_what_is_kept_on_disk_comes_back_as_it_was(kinds, random):
    spool = SampleSpool("train data")
    for kind in kinds:
        spool.append(SPOOLED[kind])
    for number in random.sample(range(len(kinds)), len(kinds)):
        found, expected = spool[number], SPOOLED[kinds[number]]
        pairs = zip(found, expected, strict=True)
        if isinstance(expected, dict):
            assert list(found) == list(expected)
            pairs = zip(found.values(), expected.values(), strict=True)
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_an_iterable_that_fails_does_not_look_finished():
    def broken():
        yield from PAIRS[:6]
        raise OSError("disk gone")

    read = samples(broken())
    assert read.batch([5])["y"].tolist() == [5]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            len(read)


# ---- loaders


def test_a_loader_brings_its_batch_size():
    dataset = TensorDataset(X, Y)
    assert loader_batch_size(DataLoader(dataset, batch_size=7)) == 7
    batches = BatchSampler(RandomSampler(dataset), 5, drop_last=False)
    assert loader_batch_size(DataLoader(dataset, batch_sampler=batches)) == 5
    assert loader_batch_size(DataLoader([(X, Y)], batch_size=None)) is None
    assert loader_batch_size(dataset) is None


@pytest.mark.parametrize(
    "choice",
    [
        {"sampler": SubsetRandomSampler([1, 2, 3])},
        {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        {"sampler": RandomSampler(Y, replacement=True)},
        {"sampler": RandomSampler(Y, num_samples=4)},
        {"sampler": SequentialSampler(range(4))},
        {"sampler": [3, 4]},
        {"batch_sampler": [[3, 4], [5]]},
    ],
)
def test_a_sampler_that_leaves_samples_out_is_not_ignored(choice):
    message = refused(DataLoader(TensorDataset(X, Y), **choice))
    assert "chooses samples by " in message
    assert "give torch.utils.data.Subset(dataset, indices)" in message


# ---- threads


def together(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_readers_of_one_stream_get_what_they_ask_for():
    read = samples({"x": float(k)} for k in range(400))
    found = {}

    def ask(start):
        for k in range(start, 400, 4):
            found[k] = read.batch([k, 399 - k])["x"].tolist()

    together(*(lambda start=start: ask(start) for start in range(4)))
    assert found == {k: [k, 399 - k] for k in range(400)}


def test_a_dataset_has_one_reader_at_a_time():
    inside = threading.Semaphore(1)
    second_came = threading.Event()

    def make(k):
        if not inside.acquire(blocking=False):
            second_came.set()
        second_came.wait(0.02)  # with the lock nobody comes
        inside.release()
        return {"x": k}

    read = samples(Rows(make), batch_size=1)
    together(*(lambda k=k: read.batch([k]) for k in (3, 5)))
    assert not second_came.is_set()
