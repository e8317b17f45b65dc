"""A job from a Trainer of transformers trains as the trainer would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from ravnest.errors import ConfigError
from ravnest.requester.from_trainer import from_trainer

DATA = [
    {"text": "left out", "input_ids": [*range(2, 2 + n)], "attention_mask": [1] * n, "label": n % 2}
    for n in (3, 5, 9, 4, 6, 3, 7, 8, 5, 4)
]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of a batch, as collators do."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = {
        name: [[*sample[name], *[0] * (longest - len(sample[name]))] for sample in samples]
        for name in ("input_ids", "attention_mask")
    }
    return {name: torch.tensor(row) for name, row in rows.items()} | {
        "labels": torch.tensor([sample["label"] for sample in samples])
    }


def trainer(folder: Path, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
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
        BertForSequenceClassification(config),
        given,
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        data_collator=pad,
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
        (_OwnLoss, {}, "computes its loss in Python of its own; give it as Job"),
        (
            Trainer,
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor=0.1 of the trainer is not taken over",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(
    kind: type[Trainer], arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_trainer(trainer(tmp_path, kind, **arguments))
