"""Processes read samples ahead: as one process would have read them, in order, once; what fails is told."""

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ravnest.errors import ConfigError
from ravnest.requester.dataset import Samples


class Images(Dataset):
    """Rows that are made when they are asked for; `fault` says what happens at sample 13 in a reader.

    With one, sample 14 is unlike the others.
    """

    def __init__(self, fault=""):
        self.fault = fault

    def __len__(self):
        return 20

    def __getitem__(self, index):
        in_reader = self.fault if multiprocessing.parent_process() is not None else ""
        fault = in_reader if index == 13 else ""
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise ValueError("a broken image")
        size = 5 if in_reader and index == 14 else 4
        return torch.full((size, 2), index, dtype=torch.uint8), {"a": index}["a"]


class Draws(Dataset):
    """Samples whose parts are drawn at random, and belong together."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return {"x": torch.tensor(drawn), "y": torch.tensor(drawn), "pid": os.getpid()}


def pair(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


def note_number(number):
    os.environ["READER"] = str(number)


class Numbered(Images):
    def __getitem__(self, index):
        return torch.tensor([index]), int(os.environ["READER"])


@pytest.fixture
def reading():
    """Open samples that are closed in the end."""
    opened = []

    def begin(data, **settings):
        opened.append(Samples(data, 4, **settings))
        return opened[-1]

    yield begin
    for samples in opened:
        samples.close_readers()


GROUPS = [(3, 1, 2), (7,), (0, 19), (5, 6), (8, 8, 9, 10), (12,), (2, 2), (11, 4)]


def test_readers_read_what_one_process_reads_in_order(reading):
    read = reading(Images(), num_readers=2)
    here = Samples(Images(), 4)
    for _ in range(2):
        found = list(read.batches(GROUPS))
        assert len(found) == len(GROUPS)
        for batch, group in zip(found, GROUPS, strict=True):
            expected = here.batch(group)
            assert list(batch) == ["x", "y"]
            assert batch["x"].dtype is torch.uint8
            assert all(torch.equal(batch[name], expected[name]) for name in expected)
    half = read.batches(GROUPS)
    next(half)
    half.close()  # what is not asked for any more is no trouble
    assert torch.equal(next(read.batches(GROUPS[1:]))["y"], torch.tensor([7]))


def test_what_is_drawn_belongs_together_and_differs_between_readers(reading):
    read = reading(Draws(), num_readers=2)
    groups = [(number,) for number in range(64)]
    found = list(read.batches(groups))
    assert all(torch.equal(batch["x"], batch["y"]) for batch in found)
    assert len({int(batch["pid"]) for batch in found} - {os.getpid()}) == 2
    for column in range(3):
        assert len({float(batch["x"][0, column]) for batch in found}) == 64


def test_a_loader_brings_its_workers_its_collate_fn_and_what_begins_them(reading):
    loader = DataLoader(Numbered(), batch_size=4, num_workers=1, collate_fn=pair, worker_init_fn=note_number)
    read = reading(loader)
    os.environ["READER"] = "7"  # of this process, which reads the first batch
    found = next(read.batches([(9, 4)]))
    assert found["x"].tolist() == [[9], [4]]
    assert found["y"].tolist() == [0, 0], "the reader's own number"


def refused(samples, groups):
    with pytest.raises(ConfigError) as caught:
        list(samples.batches(groups))
    return str(caught.value)


def test_a_reader_that_dies_is_told_with_its_samples(reading):
    told = refused(reading(Images("dies"), num_readers=1), [(1, 2), (12, 13)])
    assert told.startswith("a process that reads the train data ended at samples 12, 13 (signal 9); ")
    assert "num_workers=0 reads in this process" in told


def test_what_the_dataset_raises_is_told_with_its_line(reading):
    read = reading(Images("raises"), num_readers=1)
    told = refused(read, [(1, 2), (12, 13)])
    assert "test_readers.py" in told
    assert "ValueError: a broken image" in told
    assert next(read.batches([(1, 2)]))["y"].tolist() == [1, 2]  # it reads on
    assert "uint8 (5, 2) in sample 14" in refused(read, [(14,)])


def test_data_that_cannot_be_given_away_is_refused_or_read_here(reading, caplog):
    class Local(Images):
        pass

    told = refused(reading(Local(), num_readers=1), [(1,)])
    assert told.startswith("the train data cannot be given to other processes (")
    with caplog.at_level(logging.WARNING):
        read = reading(DataLoader(Local(), batch_size=4, num_workers=2))
        assert next(read.batches([(5,)]))["y"].tolist() == [5]
    assert "is read in this process, without the workers of its DataLoader" in caplog.text
    assert next(reading(DataLoader(Local(), num_workers=2), num_readers=0).batches([(5,)]))["y"].tolist() == [
        5
    ]


def test_tensors_and_iterables_need_no_readers(reading):
    rows = {"x": torch.arange(20.0), "y": torch.arange(20)}
    assert next(reading(rows, num_readers=3).batches([(5, 2)]))["y"].tolist() == [5, 2]
    stream = reading(((torch.ones(2), index) for index in range(20)), num_readers=3)
    assert next(stream.batches([(5, 2)]))["y"].tolist() == [5, 2]


SCRIPT = """
import os, signal, sys, torch
import ravnest as rv
from torch.utils.data import Dataset

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.ones(2), os.getpid()

job = rv.Job(torch.nn.Linear(2, 1), Rows(), batch_size=4, num_workers=1, loss=lambda out, y: out.mean())

def main():
    with rv.local(1):
        print(int(next(job.samples.batches([(1,)]))["y"]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess:
    file = folder / "script.py"
    file.write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, file], capture_output=True, text=True, env=environment, check=False
    )


def test_a_script_that_trains_when_it_is_imported_is_told(tmp_path):
    done = run_script(tmp_path, SCRIPT + "main()\n")
    assert "ended at its start (exit code 1); keep what trains under `if __name__" in done.stderr
    assert not done.stdout


@pytest.mark.skipif(os.name != "posix", reason="it kills itself")
def test_readers_end_with_their_process(tmp_path):
    done = run_script(tmp_path, SCRIPT + 'if __name__ == "__main__":\n    main()\n')
    assert done.returncode == -signal.SIGKILL, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)
