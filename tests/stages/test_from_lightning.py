"""A LightningModule becomes a job of the same training, or is refused with what is in the way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest.errors import ConfigError
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.requester.from_lightning import from_lightning


class LightningShape(nn.Module):
    """What a LightningModule has, as far as it matters here; its module says that it is the library's."""

    __module__ = "lightning.pytorch.core.module"
    automatic_optimization = True

    def log(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("there is no trainer")

    def on_train_batch_start(self, *_: Any) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def optimizer_step(self, *_: Any) -> None: ...

    def training_step(self, *_: Any) -> None: ...

    def validation_step(self, *_: Any) -> None: ...

    def train_dataloader(self) -> None: ...

    def val_dataloader(self) -> None: ...

    def configure_optimizers(self) -> None: ...


X, Y = torch.randn(40, 6), torch.randint(0, 3, (40,))


class Net(LightningShape):
    __module__ = __name__

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.inner(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.log("val_loss", F.cross_entropy(out, y) * 2)
        self.log("val_acc", (out.argmax(-1) == y).float().mean(), prog_bar=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X, Y), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def trainer(**settings: Any) -> Any:
    usual = {"max_epochs": 3, "max_steps": -1, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    return SimpleNamespace(**usual | {"precision": "32-true", "val_check_interval": 1.0} | settings)


def test_a_module_becomes_a_job_of_the_same_training() -> None:
    torch.manual_seed(0)
    module = Net()
    job = from_lightning(module, trainer=trainer(gradient_clip_val=0.5, val_check_interval=5))
    assert (job.batch_size, job.epochs, job.clip_norm, job.evaluate_every) == (4, 3, 0.5, 5)
    assert [round(job.rates.factor(update, 30), 6) for update in (0, 9, 10, 20)] == [1.0, 1.0, 0.5, 0.25]
    captured = job.capture()
    assert set(captured.state) == set(module.state_dict())
    assert job.settings(captured, 30).learning_rate == 0.1
    program = build_stage_program(captured.blueprint)
    batch = job.samples.batch([3, 5])
    found = program.forward(captured.state, {}, batch).results["loss"]
    assert torch.allclose(found, F.cross_entropy(module(X[[3, 5]]), Y[[3, 5]]))
    found = program.forward(captured.state, {}, batch, training=False).results
    expected = F.cross_entropy(module(X[[3, 5]]), Y[[3, 5]]) * 2
    assert torch.allclose(found["loss"], expected)
    assert float(found["acc"]) == float((module(X[[3, 5]]).argmax(-1) == Y[[3, 5]]).float().mean())
    assert "log" not in vars(module)


class _Dicts(Net):
    """Batches that are dicts, a loss in a dict, one argument, a validation_step that does nothing."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return {"loss": F.cross_entropy(self(batch["x"]), batch["y"]), "rest": 1}

    validation_step = LightningShape.validation_step

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)], []


def test_other_forms_of_steps_and_optimizers() -> None:
    rows = [{"x": X[k], "y": Y[k]} for k in range(40)]
    module = _Dicts()
    loader = DataLoader(rows, batch_size=5)
    job = from_lightning(
        module, trainer=trainer(max_steps=7, accumulate_grad_batches=2), train_data=loader, val_data=rows[:6]
    )
    assert (job.batch_size, job.max_steps, job.metrics) == (10, 7, {})
    assert job.rates.factor(6, 7) == 1.0
    captured = job.capture()
    batch = job.samples.batch([1, 2])
    found = build_stage_program(captured.blueprint).forward(captured.state, {}, batch).results["loss"]
    assert torch.allclose(found, F.cross_entropy(module(X[1:3]), Y[1:3]))


class _ByHand(Net):
    automatic_optimization = False


class _Hook(Net):
    def on_train_batch_start(self, *_: Any) -> None:
        pass


class _Epoch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class _Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.inner, self.head)], []


class _NoData(Net):
    train_dataloader = LightningShape.train_dataloader


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (_ByHand, {}, r"_ByHand optimizes by hand \(automatic_optimization=False\); a job makes"),
        (_Hook, {}, "_Hook.on_train_batch_start is code that runs during training"),
        (_Epoch, {}, "training_step uses self.current_epoch, which stands still"),
        (_Two, {}, "returned 2 optimizers; return one of torch.optim"),
        (_NoData, {}, "_NoData has no train_dataloader; give train_data=loader"),
        (lambda: nn.Linear(1, 1), {}, "Linear has no training_step; give a LightningModule"),
        (Net, {"precision": "16-mixed"}, "precision='16-mixed' of the trainer is not taken over"),
        (Net, {"limit_train_batches": 0.1}, "limit_train_batches of the trainer is not taken over"),
        (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clip by norm"),
    ],
)
def test_what_has_no_counterpart_is_refused(module: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_lightning(module(), trainer=trainer(**settings))


def test_what_only_looks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Looks(Net):
        def on_train_epoch_end(self) -> None:
            self.has_looked = True

    from_lightning(Looks())
    assert "on_train_epoch_end of Looks are not called" in caplog.text
