"""A job from a Trainer of transformers trains as the trainer would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from ravnest.errors import ConfigError
from ravnest.requester.from_trainer import from_trainer

DATA = [
    {"text": "left out", "input_ids": [*range(2, 2 + n)], "attention_mask": [1] * n, "label": n % 2}
    for n in (3, 5, 9, 4, 6, 3, 7, 8, 5, 4)
]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of a batch, as collators do."""
    rows = _pad(samples, {"input_ids": 0, "attention_mask": 0})
    return rows | {"labels": torch.tensor([sample["label"] for sample in samples])}


def pad_tokens(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Do so with a label for each token."""
    given = [{**sample, "labels": [token % 2 for token in sample["input_ids"]]} for sample in samples]
    return _pad(given, {"input_ids": 0, "attention_mask": 0, "labels": -100})


def _pad(samples: list[dict[str, Any]], fills: dict[str, int]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        name: torch.tensor([[*each[name], *[fill] * (longest - len(each[name]))] for each in samples])
        for name, fill in fills.items()
    }


def trainer(
    folder: Path,
    kind: type[Trainer] = Trainer,
    architecture: type[PreTrainedModel] = BertForSequenceClassification,
    collate: Any = pad,
    **arguments: Any,
) -> Trainer:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    settings = {"num_train_epochs": 2.5, "warmup_steps": 3, "learning_rate": 1e-3, "seed": 7} | arguments
    given = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        **settings,
    )
    return kind(
        architecture(config),
        given,
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        data_collator=collate,
    )


def test_a_trainer_becomes_a_job_of_the_same_training(tmp_path: Path) -> None:
    reference = trainer(tmp_path)
    job = from_trainer(trainer(tmp_path))
    assert (job.batch_size, job.max_steps, job.epochs, job.seed) == (4, 8, 3, 7)
    assert (job.clip_norm, job.precision) == (1.0, "auto")
    batch = job.samples.batch([0, 2])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert job.val_samples is not None
    job.val_samples.check_like(job.samples)
    reference.create_optimizer_and_scheduler(8)
    for update in range(8):
        rate = reference.optimizer.param_groups[0]["lr"]
        assert 1e-3 * job.rates.factor(update, 8) == pytest.approx(rate, abs=1e-12), update
        reference.optimizer.step()
        reference.lr_scheduler.step()
    settings = job.settings(job.capture(), 8)
    assert settings.learning_rate == 1e-3
    assert {group.weight_decay for group in settings.groups} == {0.0, 0.1}


def test_arguments_may_be_changed(tmp_path: Path) -> None:
    job = from_trainer(trainer(tmp_path, max_steps=5), optimizer="muon", max_length=32, name="mine")
    assert (job.max_steps, job.name, job.learning_rate) == (5, "mine", None)
    assert job.samples.batch([0])["input_ids"].shape == (1, 32)


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, None),
        ({"eval_strategy": "epoch"}, None),
        ({"eval_strategy": "steps", "eval_steps": 3}, 3),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, 2),  # of 8 updates
    ],
)
def test_evaluations_by_steps_are_taken_over(
    given: dict[str, Any], every: int | None, tmp_path: Path
) -> None:
    assert from_trainer(trainer(tmp_path, **given)).evaluate_every == every


def test_workers_of_its_loaders_read(tmp_path: Path) -> None:
    job = from_trainer(trainer(tmp_path, dataloader_num_workers=1))
    assert job.train_data.num_workers == job.val_data.num_workers == 1
    assert job.num_workers is None  # so that data which cannot be given to a process is still read


class _OwnLoss(Trainer):
    def compute_loss(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (_OwnLoss, {}, "computes its loss in Python of its own; give it as from_trainer"),
        (
            Trainer,
            {"label_smoothing_factor": 0.1, "architecture": BertForMaskedLM, "collate": pad_tokens},
            "label_smoothing_factor=0.1 of the trainer is not taken over for BertForMaskedLM",
        ),
        (Trainer, {"optim": "adafactor"}, "it steps by the learning rate alone, and torch.optim.Adafactor"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    kind: type[Trainer], arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_trainer(trainer(tmp_path, kind, **arguments))


def test_a_loss_in_python_of_its_own_may_be_given_in_its_place(tmp_path: Path) -> None:
    def own(out: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.logits, batch["labels"])

    assert from_trainer(trainer(tmp_path, _OwnLoss), loss=own).loss is own


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_adamw_of_bitsandbytes_is_that_of_torch(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, plain = trainer(tmp_path, optim=name, adam_beta2=0.95), trainer(tmp_path, adam_beta2=0.95)
    job = from_trainer(given)
    assert type(job.optimizer) is torch.optim.AdamW
    plain.args.optim = type(plain.args.optim)("adamw_torch")
    plain.create_optimizer()
    found, wanted = (
        [
            {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            for group in each
        ]
        for each in (job.optimizer.param_groups, plain.optimizer.param_groups)
    )
    assert [each | {"lr": 1e-3} for each in found] == wanted
    assert job.rates.factor(1, 8) == pytest.approx(1 / 3)
    assert (given.optimizer, given.args.optim) == (None, name), "the trainer is left as it was"
    assert ("--set states=int8" in caplog.text) is name.endswith("8bit")


def test_an_optimizer_given_in_place_of_adafactor_is_taken(tmp_path: Path) -> None:
    given = trainer(tmp_path, optim="adafactor")
    own = torch.optim.Adafactor(given.model.parameters())
    assert from_trainer(given, optimizer=own).optimizer is own


@pytest.mark.parametrize(
    ("architecture", "collate"),
    [(BertForSequenceClassification, pad), (BertForTokenClassification, pad_tokens)],
)
def test_smoothed_labels_have_the_loss_of_the_trainer(
    architecture: type[PreTrainedModel], collate: Any, tmp_path: Path
) -> None:
    facts: dict[str, Any] = {"architecture": architecture, "collate": collate, "label_smoothing_factor": 0.2}
    reference, job = trainer(tmp_path, **facts), from_trainer(trainer(tmp_path, **facts))
    model, batch = reference.model.eval(), dict(collate(DATA))
    model.classifier.weight.data.mul_(50)  # so that it is sure of some classes
    count = int((batch["labels"] != -100).sum())
    assert job.loss is not None
    assert job.inputs == ["input_ids", "attention_mask"]
    ours = job.loss(model(**{name: batch[name] for name in job.inputs}), batch)
    for num_items in (None, count):  # of one batch, and of all that are accumulated
        theirs = reference.compute_loss(model, dict(batch), num_items_in_batch=num_items)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    plain = model(**batch).loss
    assert abs((ours - plain).item()) > 1e-3, "smoothing makes a difference"
    job.capture()
