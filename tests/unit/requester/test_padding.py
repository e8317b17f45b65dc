"""Samples of different lengths become one length, where it is known what stands for padding."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ravnest.errors import ConfigError
from ravnest.requester.dataset import Samples
from ravnest.requester.job import Job
from ravnest.requester.padding import PaddingWish


def texts(*lengths):
    return [
        {"input_ids": [*range(1, n + 1)], "attention_mask": [1] * n, "labels": [*range(1, n + 1)]}
        for n in lengths
    ]


def test_tokens_with_a_mask_are_padded_to_the_longest():
    samples = Samples(texts(3, 5, 2, 11, 4), 2)
    batch = samples.batch([0, 3])
    assert {name: tuple(field.shape) for name, field in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["input_ids"][0].tolist() == [1, 2, 3, *[0] * 13]
    assert batch["attention_mask"].sum(1).tolist() == [3, 11]
    assert batch["labels"][0].tolist() == [1, 2, 3, *[-100] * 13]
    assert batch["labels"].dtype is torch.int64
    samples.check_some()


def test_validation_gets_the_length_of_the_train_data():
    train = Samples(texts(3, 5), 2)
    like = Samples(texts(2, 2), 2, what="validation data", like=train)
    assert like.batch([0])["labels"].shape == (1, 8)
    like.check_like(train)
    longer = Samples(texts(2, 9), 1, what="validation data", like=train)
    with pytest.raises(
        ConfigError,
        match=r"'input_ids' has a length of 9 in sample 1 of the validation data, "
        r"more than 8; cut it, or set max_length=16",
    ):
        longer.batch([1])


def test_other_fields_are_padded_with_what_the_requester_says():
    ragged = [(torch.ones(n, 2), float(n)) for n in (1, 3, 2)]
    with pytest.raises(
        ConfigError,
        match=r"'x' of the train data differs in shape \(a length of 1 in sample 0 and 3 in "
        r"sample 1\); pad=\{'x': VALUE\} pads all samples",
    ):
        Samples(ragged, 2).first_batch()
    batch = Samples(ragged, 2, padding=PaddingWish({"x": -1.0})).batch([1, 2])
    assert batch["x"].shape == (2, 8, 2)
    assert batch["x"][:, :, 0].sum(1).tolist() == [3 - 5, 2 - 6]
    assert batch["y"].tolist() == [3, 2]
    without_mask = [{"input_ids": one["input_ids"]} for one in texts(2, 3)]
    with pytest.raises(ConfigError, match="'input_ids' of the train data differs"):
        Samples(without_mask, 2).first_batch()


def test_a_length_may_be_given_and_a_collate_fn_may_pad_each_batch():
    assert Samples(texts(3, 5), 2, padding=PaddingWish(max_length=12)).batch([0])["labels"].shape == (1, 12)

    def collate(samples):
        longest = max(len(one["input_ids"]) for one in samples)
        full = [[*one["input_ids"], *[0] * (longest - len(one["input_ids"]))] for one in samples]
        return {"input_ids": torch.tensor(full), "label": torch.ones(len(samples))}

    loader = DataLoader(texts(3, 5, 7, 2), batch_size=2, collate_fn=collate)
    samples = Samples(loader, 2, padding=PaddingWish(max_length=8))
    assert samples.batch([0, 3])["input_ids"].shape == (2, 8)
    assert samples.batch([2])["input_ids"].shape == (1, 8)
    samples.check_some()


def pad_together(samples):
    """As collators of transformers do: to the longest of the batch."""
    longest = max(len(one["input_ids"]) for one in samples)
    return {
        name: torch.stack(
            [
                functional.pad(torch.tensor(one[name]), (0, longest - len(one[name])), value=v)
                for one in samples
            ]
        )
        for name, v in (("input_ids", 9), ("attention_mask", 0), ("labels", -100))
    }


def test_batches_of_a_collate_fn_with_a_mask_are_padded_to_the_longest_sample():
    read = Samples(DataLoader(texts(3, 5, 13, 2, 4, 4), batch_size=2, collate_fn=pad_together), 2)
    read.check_some()
    batch = read.batch([0, 3])
    assert {name: tuple(field.shape) for name, field in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["attention_mask"].sum(1).tolist() == [3, 2]
    assert batch["labels"][0].tolist()[3:] == [-100] * 13
    equal = Samples(DataLoader(texts(4, 4, 4, 4), batch_size=2, collate_fn=pad_together), 2)
    assert equal.batch([0])["input_ids"].shape == (1, 4)
    bare = DataLoader(
        texts(3, 5, 13), batch_size=2, collate_fn=lambda rows: {"input_ids": pad_together(rows)["input_ids"]}
    )
    with pytest.raises(ConfigError, match=r"pad=\{'input_ids': VALUE\} and max_length=... pad them"):
        Samples(bare, 2).check_some()  # without a mask padding would be trained on
    told = Samples(bare, 2, padding=PaddingWish({"input_ids": 0}))
    assert told.batch([0])["input_ids"].shape == (1, 16)


def test_equal_lengths_are_left_alone():
    assert Samples(texts(5, 5, 5), 2).batch([1])["labels"].shape == (1, 5)
    assert Samples([(torch.ones(3), 1.0)] * 4, 2).batch([1])["x"].shape == (1, 3)


@pytest.mark.parametrize(
    ("wish", "words"),
    [({"pad": 3}, "pad is 3; give a dict"), ({"max_length": 0}, "max_length is 0; give a whole number")],
)
def test_a_wish_is_checked_when_the_job_is_made(wish, words):
    with pytest.raises(ConfigError, match=words):
        Job(nn.Linear(1, 1), texts(3, 4), **wish)


def test_nobody_is_asked_whether_samples_are_padded_when_they_are():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(16, 2), nn.Linear(2, 1)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask[..., None].float()
            return self.head((self.words(input_ids) * mask).sum(1)).square().mean()

    def notes(*lengths):
        samples = [{k: v for k, v in text.items() if k != "labels"} for text in texts(*lengths)]
        return Job(Mean(), samples, batch_size=4).capture().notes

    assert any("is_padded" in note for note in notes(4, 4, 4, 4))
    assert not any("is_padded" in note for note in notes(3, 5, 2, 4))
