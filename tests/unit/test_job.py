"""A job checks what it is given when it is made, and its first batch is what training would begin with."""

import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ravnest
from ravnest.errors import CaptureError, ConfigError
from ravnest.job import Job, load_job

MODEL = nn.Linear(3, 2)
ROWS = {"x": torch.arange(30.0).reshape(10, 3), "y": torch.arange(10) % 2}


def job(data=ROWS, **settings):
    return Job(MODEL, data, **settings)


def first(data, batch_size=4):
    return job(data, batch_size=batch_size).first_batch()


def refused(data=ROWS, **settings):
    with pytest.raises(ConfigError) as caught:
        job(data, **settings).first_batch()
    return str(caught.value)


class Rows:
    """A map-style dataset of one kind of sample."""

    def __init__(self, make, length=10):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert index < self.length
        return self.make(index)


# ---- the first batch


def test_a_dict_of_tensors_gives_its_first_rows():
    batch = first(ROWS)
    assert torch.equal(batch["x"], ROWS["x"][:4])
    assert torch.equal(batch["y"], ROWS["y"][:4])
    assert torch.equal(first({"x": np.eye(5)})["x"], torch.eye(5, dtype=torch.float64)[:4])


def test_a_tuple_of_tensors_gives_its_first_rows():
    batch = first(tuple(ROWS.values()))
    assert isinstance(batch, tuple)
    assert torch.equal(batch[0], ROWS["x"][:4])


def test_tuple_samples_give_a_tuple_and_dict_samples_a_dict():
    pair = first(TensorDataset(*ROWS.values()))
    assert isinstance(pair, tuple)
    assert torch.equal(pair[1], ROWS["y"][:4])
    named = first(Rows(lambda k: {"x": ROWS["x"][k], "y": k % 2}))
    assert torch.equal(named["x"], ROWS["x"][:4])
    assert named["y"].tolist() == [0, 1, 0, 1]
    point = namedtuple("point", "x y")
    assert len(first(Rows(lambda k: point(float(k), k)))) == 2


def test_numbers_and_lists_become_tensors_of_torchs_usual_types():
    batch = first(Rows(lambda k: {"ids": [k, 2, 3], "weight": 0.5, "is_real": True, "array": np.ones(2)}))
    assert batch["ids"].shape == (4, 3)
    kinds = {name: field.dtype for name, field in batch.items()}
    assert kinds == {
        "ids": torch.int64,
        "weight": torch.float32,
        "is_real": torch.bool,
        "array": torch.float64,
    }


def test_iterables_give_samples():
    class Stream(IterableDataset):
        def __iter__(self):
            return ((torch.full((3,), float(k)), k) for k in range(10))

        def __len__(self):
            return 10

    for data in (Stream(), ((torch.full((3,), float(k)), k) for k in range(10)), list(Stream())):
        batch = first(data)
        assert batch[0].shape == (4, 3)
        assert batch[1].tolist() == [0, 1, 2, 3]


def test_the_first_batch_is_read_once():
    stream = job(((torch.zeros(3), k) for k in range(10)), batch_size=2)
    assert stream.first_batch() is stream.first_batch()


def test_a_loader_brings_ready_batches_and_its_size():
    loader = DataLoader(TensorDataset(*ROWS.values()), batch_size=3)
    loaded = job(loader)
    assert loaded.batch_size == 3
    assert torch.equal(loaded.first_batch()[0], ROWS["x"][:3])
    unbatched = job(DataLoader([ROWS], batch_size=None))
    assert unbatched.batch_size == 32
    assert torch.equal(unbatched.first_batch()["x"], ROWS["x"])
    strings = DataLoader(Rows(lambda k: {"text": "a", "x": ROWS["x"][k]}), batch_size=2)
    assert job(strings).first_batch()["text"] == ["a", "a"]  # capture names it


# ---- mistakes in the data


@pytest.mark.parametrize(
    "data", [{"x": torch.zeros(0, 3)}, [], iter(()), Rows(None, length=0), TensorDataset(torch.zeros(0, 3))]
)
def test_empty_data(data):
    assert "train data is empty; give at least one sample" in refused(data)


def test_empty_loaders_and_dicts():
    assert "empty DataLoader" in refused(DataLoader(TensorDataset(torch.zeros(0, 3))))
    assert "empty dict" in refused({})


@pytest.mark.parametrize("data", [3, "text", b"bytes", torch.zeros(4, 3), None, Rows])
def test_what_is_no_data(data):
    assert "give a dict of tensors, a dataset, an iterable of samples or a DataLoader" in refused(data)


def test_a_dict_of_something_else():
    assert "has 'train', of type TensorDataset" in refused({"train": TensorDataset(torch.zeros(2, 2))})
    assert "has 'x', a single number" in refused({"x": torch.tensor(1.0)})
    assert "unequal length (x 10, y 9)" in refused({**ROWS, "y": torch.zeros(9)})


def test_a_column_of_text_is_named_with_the_way_to_drop_it():
    message = refused(Rows(lambda _: {"ids": [1, 2], "text": "hello"}))
    assert "'text' of the train data is 'hello'" in message
    assert ".remove_columns(['text'])" in message
    for value in (None, ["a", "b"], [[1, 2], [3]], object()):
        assert "'odd' of the train data" in refused(Rows(lambda _, value=value: {"odd": value}))


def test_samples_that_differ():
    ragged = refused(Rows(lambda k: {"ids": [1] * (2 + k % 2)}))
    assert "'ids' of the train data differs in shape" in ragged
    assert "(2,) in sample 0 and (3,) in sample 1" in ragged
    assert "sample 3 of the train data has other parts" in refused(
        Rows(lambda k: {"x": 1} if k != 3 else {"z": 1})
    )
    assert "sample 1 of the train data has other parts" in refused(Rows(lambda k: (1,) * (2 + k)))
    assert "a sample of the train data is 7; give a dict" in refused(Rows(lambda _: 7))


# ---- mistakes in the job


def test_unknown_keywords_are_refused_by_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimiser'"):
        job(optimiser="adam")
    with pytest.raises(TypeError):
        Job(MODEL, ROWS, ROWS)


@pytest.mark.parametrize("model", [3, nn.Linear, lambda x: x, None])
def test_a_model_is_a_module(model):
    with pytest.raises(ConfigError, match=r"model is .*; (give a torch.nn.Module|make one: Linear\(...\))"):
        Job(model, ROWS)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "8", None])
def test_a_batch_size_is_a_positive_whole_number(batch_size):
    assert refused(batch_size=batch_size).startswith(f"batch_size is {batch_size!r}; give a whole number")


def test_other_settings():
    assert "loss is 'mse'; give a function" in refused(loss="mse")
    assert "metrics is of type list" in refused(metrics=[abs])
    assert "metrics has 'acc': 3" in refused(metrics={"acc": 3})
    assert "give a list of fields: ['x']" in refused(inputs="x")
    assert "is_padded is 'no'" in refused(is_padded="no")
    for name in ("", " a", "a\nb", "x" * 65, 3, "<b>"):
        assert refused(name=name).startswith("name is ")


def test_a_job_is_named_after_its_model_and_shows_no_weights():
    assert job().name == "Linear"
    assert job(name="my job").name == "my job"
    assert "tensor" not in repr(job())
    with pytest.raises(AttributeError):
        job().batch_size = 3


# ---- capture


def test_capture_passes_everything_on():
    captured = job(
        batch_size=8,
        loss=lambda out, batch: nn.functional.cross_entropy(out, batch["y"]),
        metrics={"top": lambda out, _: out.amax()},
        name="two classes",
    ).capture()
    assert captured.blueprint.name == "two classes"
    assert captured.batch_size == 8
    assert captured.notes == ()
    assert [name for name, _ in captured.blueprint.train.results] == ["loss", "top"]


def test_short_data_is_used_and_noted():
    short = job(loss=lambda out, batch: nn.functional.cross_entropy(out, batch["y"]))
    captured = short.capture()
    assert captured.batch_size == 10
    assert "has 10 samples, fewer than batch_size 32" in captured.notes[0]
    assert "has 1 sample, fewer" in job({name: rows[:1] for name, rows in ROWS.items()})._first[1][0]


def test_inputs_and_padding_reach_capture():
    with pytest.raises(CaptureError, match="inputs names 'z'"):
        job(inputs=["z"]).capture()
    masked = {**ROWS, "attention_mask": torch.ones(10, 3)}
    given = {"loss": lambda out, batch: nn.functional.cross_entropy(out, batch["y"]), "batch_size": 10}
    assert len(job(masked, **given).capture().notes) == 1
    assert job(masked, is_padded=False, **given).capture().notes == ()


# ---- the package


def test_names_of_the_package_are_loaded_when_used():
    code = "import sys, ravnest; print(sorted(dir(ravnest)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'Job'" in done.stdout
    assert "'capture'" in done.stdout
    assert "'empty_weights'" in done.stdout
    assert done.stdout.endswith("False\n")
    assert ravnest.Job is Job
    assert callable(ravnest.capture)
    with ravnest.empty_weights():
        assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(AttributeError, match="'jobs'"):
        _ = ravnest.jobs


@pytest.mark.parametrize("place", ["", ":", ":job", "model", "model:job", "a.py:", "a.py:b-c", "a.txt:job"])
def test_a_place_is_a_file_and_a_name(place):
    with pytest.raises(ConfigError, match=r"write FILE\.py:NAME"):
        load_job(place)
