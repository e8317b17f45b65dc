"""A job checks what it is given when it is made, and its first batch is what training would begin with."""

import inspect
import math
import subprocess
import sys
from collections import namedtuple
from dataclasses import fields, replace
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch
from support.plan_world import node
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ravnest
from ravnest.config import Averaging, OptimizerKind, StateFormat, WireChoice, WireFormat
from ravnest.engine.optimizers import Adam, Group
from ravnest.errors import CaptureError, ConfigError
from ravnest.hub.coordinator.events import MakePlan
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.requester.job import Job
from ravnest.requester.job_file import load_job
from ravnest.requester.prepare import prepare
from ravnest.requester.session import LOCAL_PLAN, SWARM_PLAN

MODEL = nn.Linear(3, 2)
OPTIMIZERS = f"one of torch.optim, made from model.parameters(), or of {', '.join(OptimizerKind)}"
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
    assert "'text' of the train data is 'a'" in refused(strings)


# ---- mistakes in the data


@pytest.mark.parametrize(
    "data", [{"x": torch.zeros(0, 3)}, [], iter(()), Rows(None, length=0), TensorDataset(torch.zeros(0, 3))]
)
def test_empty_data(data):
    assert "train data is empty; give at least one sample" in refused(data)


def test_empty_loaders_and_dicts():
    assert "data is empty" in refused(DataLoader(TensorDataset(torch.zeros(0, 3))))
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
    assert "(a length of 2 in sample 0 and 3 in sample 1)" in ragged
    assert "sample 3 of the train data has other parts" in refused(
        Rows(lambda k: {"x": 1} if k != 3 else {"z": 1})
    )
    assert "sample 1 of the train data has other parts" in refused(Rows(lambda k: (1,) * (2 + k)))
    assert "a sample of the train data is 7; give a dict" in refused(Rows(lambda _: 7))


# ---- mistakes in the job


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimiser", r"did you mean optimizer\?"),
        ("batchsize", r"did you mean batch_size\?"),
        ("qqq", "there are model, train_data, val_data, batch_size, .*, name"),
    ],
)
def test_unknown_keywords_are_refused_with_the_nearest_one(name, hint):
    with pytest.raises(ConfigError, match=f"^Job has no setting '{name}'; {hint}$"):
        job(**{name: 8})
    with pytest.raises(ConfigError, match=f"^Job has no setting '{name}'"):
        replace(job(), **{name: 8})


@pytest.mark.parametrize("record", [ravnest.PlanConfig, ravnest.AveragingRule])
def test_other_records_of_settings_name_the_nearest_keyword_too(record):
    first = next(iter(inspect.signature(record).parameters))
    with pytest.raises(
        ConfigError, match=rf"^{record.__name__} has no setting '{first}x'; did you mean {first}\?$"
    ):
        record(**{f"{first}x": 1})


def test_a_job_is_a_dataclass_whose_signature_python_knows():
    found = inspect.signature(Job).parameters
    assert [each.name for each in fields(Job)] == list(found)
    assert found["batch_size"].default == 32
    assert found["batch_size"].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError):
        Job(MODEL, ROWS, ROWS)


@pytest.mark.parametrize("model", [3, nn.Linear, lambda x: x, None])
def test_a_model_is_a_module(model):
    with pytest.raises(ConfigError, match=r"^model is .*; give an instance of torch\.nn\.Module$"):
        Job(model, ROWS)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "8", None])
def test_a_batch_size_is_a_positive_whole_number(batch_size):
    assert refused(batch_size=batch_size).startswith(f"batch_size is {batch_size!r}; give a whole number")


def test_no_metrics_may_be_none():
    assert not Job(nn.Linear(2, 2), ROWS, loss=lambda out, _: out.sum(), metrics=None).metrics


def test_other_settings():
    assert "loss is 'mse'; give a function" in refused(loss="mse")
    assert "metrics is of type list" in refused(metrics=[abs])
    assert "metrics has 'acc': 3" in refused(metrics={"acc": 3})
    assert "give a list of fields: ['x']" in refused(inputs="x")
    assert "is_padded is 'no'" in refused(is_padded="no")
    for name in ("", " a", "a\nb", "x" * 65, 3, "<b>"):
        assert refused(name=name).startswith("name is ")


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("epochs", [0, -1, 1.5, True, "2", None], "a whole number, 1 or more"),
        ("max_steps", [0, -1, 1.5, True, "2"], "a whole number of updates, 1 or more"),
        ("average_every", [0, 1.5, "often", None, True], '"auto" or batches, a whole number above 0'),
        ("averaging_rule", [None, "momentum"], "an rv.AveragingRule(...)"),
        ("seed", [-1, 2**63, 0.5, None, True], "a whole number from 0 to 2**63 - 1"),
        ("clip", [0, -1, math.nan, "1", True], "a number above 0, or math.inf for no clipping"),
        ("precision", ["fp16", 32, None], "auto, fp32 or bf16"),
        (
            "weights",
            ["/nowhere/model", 3, b"x"],
            "a safetensors file, a folder or a mirror's list that exists",
        ),
        ("learning_rate", [0, -0.1, math.inf, math.nan, "fast", True], "a number above 0"),
        ("optimizer", ["adamax", "", "Muon"], OPTIMIZERS),
    ],
)
def test_how_to_train_is_checked_when_the_job_is_made(name, values, wanted):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            job(**{name: value})
        assert str(caught.value) == f"{name} is {value!r}; give {wanted}"


def test_schedules_are_checked_when_the_job_is_made():
    with pytest.raises(ConfigError, match="schedule is 'cosine'; give"):
        job(schedule="cosine")
    with pytest.raises(ConfigError, match="schedule returned -1"):
        job(schedule=lambda _: -1)
    assert job(schedule=ravnest.constant()).rates.factor(5, 10) == 1
    assert job(schedule=lambda update: update / 2).rates.factor(5, 10) == 2.5


def test_a_scheduler_of_torch_begins_from_the_rate_before_it():
    optimizer = adamw(0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1.0))
    assert optimizer.param_groups[0]["lr"] == 0
    made = job(optimizer=optimizer, schedule=ravnest.per_update(scheduler))
    assert [made.rates.factor(update, 8) for update in (0, 2, 6)] == [0, 0.5, 1]
    with pytest.raises(ConfigError, match="lr of the optimizer's first group is 0"):
        job(optimizer=optimizer)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "num_updates", "num_total"),
    [(None, 2, 6, 20), (1, 1, 1, 4), (3, 1, 3, 10), (4, 2, 4, 14), (8, 3, 8, 28)],
)
def test_the_length_of_a_job_in_updates_is_its_steps(max_steps, epochs, num_updates, num_total):
    made = job(batch_size=4, epochs=2, max_steps=max_steps)  # ten samples
    assert (made.epochs, made.num_updates, made.num_total) == (epochs, num_updates, num_total)


def test_validation_data_is_checked_too():
    with pytest.raises(ConfigError, match="the validation data is 3; give"):
        job(val_data=3)
    other = job(val_data={"x": ROWS["x"], "label": ROWS["y"]})
    with pytest.raises(ConfigError, match="'y' is missing in the validation data"):
        other.capture()
    assert job().val_samples is None
    good = job(val_data=ROWS)
    assert len(good.val_samples) == 10
    assert torch.equal(good.val_samples.batch([3])["x"], good.samples.batch([3])["x"])


# ---- the optimizer


def adamw(lr=0.1, **options):
    return torch.optim.AdamW(MODEL.parameters(), lr=lr, **options)


adamw()  # the first optimizer of a process imports half of torch, which is no test's doing


def test_an_optimizer_of_torch_is_checked_when_the_job_is_made():
    with pytest.raises(ConfigError, match=r"Rprop is not supported; choose one of torch.optim: SGD, Adam"):
        job(optimizer=torch.optim.Rprop(MODEL.parameters()))
    with pytest.raises(ConfigError, match=r"no parameter of this model; build it from model.parameters"):
        job(optimizer=torch.optim.Adam(nn.Linear(3, 2).parameters()))
    with pytest.raises(
        ConfigError, match=r"learning_rate is 0.5; give none: the optimizer brings its own, 0.1"
    ):
        job(optimizer=adamw(), learning_rate=0.5)
    with pytest.raises(ConfigError, match=r"lr of the optimizer's first group is 0.0; give a number above 0"):
        job(optimizer=adamw(lr=0.0))
    for wrong in (torch.optim.Adam, [], [3], 3, lambda: adamw()):
        with pytest.raises(ConfigError, match=r"optimizer is .*; give one of torch.optim, made from"):
            job(optimizer=wrong)


def loss(out, batch):
    return nn.functional.cross_entropy(out, batch["y"])


@cache
def captured(model):
    return Job(model, ROWS, loss=loss).capture()


def settings(model=MODEL, planned_updates=0, **given):
    return Job(model, ROWS, loss=loss, **given).settings(captured(model), planned_updates)


def test_an_optimizer_of_torch_is_taken_by_name():
    own = settings(optimizer=adamw(betas=(0.8, 0.9), weight_decay=0.2))
    assert own.groups == (Group(("weight", "bias"), Adam(0.8, 0.9), 0.2, is_decoupled=True),)
    assert (own.learning_rate, own.clip, own.has_prediction) == (0.1, None, False)
    muon = torch.optim.Muon([MODEL.weight], lr=0.1)
    both = settings(optimizer=[muon, torch.optim.SGD([MODEL.bias], lr=0.05)])
    assert [(group.names, group.rate) for group in both.groups] == [(("weight",), 1.0), (("bias",), 0.5)]
    assert settings(optimizer=torch.optim.SGD([MODEL.bias])).groups[0].names == ("bias",)


def test_recipes_are_taken_by_name():
    default = settings()
    assert default == settings(optimizer="muon", learning_rate=4e-3)
    assert (default.clip, default.has_prediction) == (1.0, True)
    assert settings(optimizer="sgd", learning_rate=1).learning_rate == 1.0
    assert settings(optimizer="adam").groups == (Group(("weight", "bias"), Adam()),)
    assert settings(optimizer="adam").clip is None
    assert settings(clip=2).clip == 2.0
    assert settings(clip=math.inf).clip is None
    assert settings(optimizer=adamw(), clip=0.5).clip == 0.5
    assert settings(optimizer="nadam", planned_updates=100).lag_updates == 50


def test_a_short_job_has_a_higher_rate_unless_it_gives_its_own():
    rates = {updates: settings(planned_updates=updates).learning_rate for updates in (168, 340, 1000, 9600)}
    assert rates == pytest.approx({168: 20e-3, 340: 15.03e-3, 1000: 8.76e-3, 9600: 4e-3}, rel=1e-3)
    assert settings(planned_updates=0).learning_rate == 4e-3  # unknown
    assert settings(planned_updates=168, learning_rate=1e-3).learning_rate == 1e-3
    assert settings(planned_updates=168, optimizer="adamw").learning_rate == 3e-3
    assert settings(planned_updates=168, optimizer=adamw()).learning_rate == 0.1


def test_trained_weights_are_seen_by_the_gains_of_norms_and_their_rate_is_not_raised():
    new = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    assert not Job(new, ROWS).has_trained_weights
    assert settings(new, planned_updates=168).learning_rate == 20e-3
    assert settings(new, planned_updates=168, is_pretrained=True).learning_rate == 4e-3
    used = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    used[1].weight.data[0] = 0.9
    assert Job(nn.Sequential(used, nn.Identity()), ROWS).has_trained_weights
    assert settings(used, planned_updates=168).learning_rate == 4e-3
    assert settings(used, planned_updates=168, optimizer="adamw").learning_rate == 1e-3
    assert settings(used, planned_updates=168, is_pretrained=False).learning_rate == 20e-3
    with pytest.raises(ConfigError, match="is_pretrained is 'yes'; give True, False or nothing"):
        job(is_pretrained="yes")
    assert settings(new, planned_updates=168, weights="/").learning_rate == 4e-3  # whatever they hold


def test_a_recipe_brings_its_schedule_and_torch_a_constant_rate():
    assert job().rates == ravnest.cosine(warmup=0.05, final=0.1)
    assert job(optimizer=adamw()).rates == ravnest.constant()
    assert job(optimizer=adamw(), schedule=ravnest.linear()).rates == ravnest.linear()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.first(x))


def test_tied_parameters_are_trained_once_and_frozen_ones_not():
    model = Tied()
    for optimizer in (torch.optim.Adam(model.parameters()), "adam"):
        names = [name for group in settings(model, optimizer=optimizer).groups for name in group.names]
        assert sorted(names) == ["first.weight", "last.bias"]


def test_a_loss_with_parameters_may_be_trained():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out, batch):
            return loss(out * self.scale, batch)

    scaled = Scaled()
    given = Job(MODEL, ROWS, loss=scaled, optimizer=torch.optim.SGD(scaled.parameters()))
    assert given.settings(given.capture()).groups[0].names == ("job_loss.scale",)


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
    one = job({name: rows[:1] for name, rows in ROWS.items()}, loss=short.loss)
    assert "has 1 sample, fewer" in one.capture().notes[0]


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
    assert "'cosine'" in done.stdout
    assert done.stdout.endswith("False\n")
    assert ravnest.Job is Job
    assert callable(ravnest.capture)
    with ravnest.empty_weights():
        assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(AttributeError, match="'jobs'"):
        _ = ravnest.jobs


def test_notices_are_public_and_need_no_torch():
    code = (
        "import sys, ravnest as rv; from ravnest import notices; assert rv.notices is notices\n"
        "shown = notices.show_notice(notices.Joined('ana'))\n"
        "print(shown, 'notices' in dir(rv), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ana joined True False\n"
    kinds = get_args(ravnest.notices.Notice)
    assert len(kinds) > 20
    assert all(getattr(ravnest.notices, kind.__name__) is kind for kind in kinds)


def test_every_public_name_is_there():
    assert sorted(ravnest.__all__) == list(ravnest.__all__)
    assert all(getattr(ravnest, name) is not None for name in ravnest.__all__)
    assert set(ravnest.__all__) <= set(dir(ravnest))


@pytest.mark.parametrize("place", ["", ":", ":job", "model", "model:job", "a.py:", "a.py:b-c", "a.txt:job"])
def test_a_place_is_a_file_and_a_name(place):
    with pytest.raises(ConfigError, match=r"write FILE\.py:NAME"):
        load_job(place)


def test_a_file_without_a_job_may_have_a_function_called_job(tmp_path):
    file = tmp_path / "made.py"
    head = "import ravnest as rv, torch\nx = {'x': torch.ones(4, 1)}\n"
    file.write_text(head + "def job(tiny=False):\n    return rv.Job(torch.nn.Linear(1, 1), x, name='made')\n")
    assert load_job(str(file)).name == "made"
    file.write_text(head + "def make():\n    return rv.Job(torch.nn.Linear(1, 1), x)\n")
    with pytest.raises(ConfigError, match="has no Job; add job"):
        load_job(str(file))


def test_changes_of_weights_do_not_travel_as_fp16():
    with pytest.raises(ConfigError, match="deltas is fp16, too narrow"):
        prepare(job(batch_size=1), replace(LOCAL_PLAN, deltas=WireFormat.FP16), 1, 1.0)


@pytest.mark.parametrize("wire_format", [WireFormat.FP16, WireFormat.INT8])
def test_gradients_of_exact_updates_do_not_travel_coarsely(wire_format):
    with pytest.raises(ConfigError, match="too coarse for gradients; choose fp32 or bf16"):
        prepare(job(batch_size=1), replace(LOCAL_PLAN, exact_gradients=wire_format), 1, 1.0)


def test_activations_without_channels_are_planned_as_int8():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    classifier = Job(model, tuple(ROWS.values()), batch_size=4, loss=nn.CrossEntropyLoss())
    given = prepare(classifier, replace(LOCAL_PLAN, activations=WireChoice.INT4), 1, 1.0)
    assert given.job.config.activations is WireChoice.INT8
    assert given.job.config.gradients is WireChoice.FP32


def prepared(loss, **settings):
    return prepare(job(tuple(ROWS.values()), batch_size=4, loss=loss, **settings), LOCAL_PLAN, 1, 1.0)


def contrastive(out, _):
    return nn.functional.cross_entropy(out @ out.T, torch.arange(out.shape[0]))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (contrastive, "the loss needs the whole batch"),
        (nn.CrossEntropyLoss(reduction="sum"), "the loss is a sum over the batch"),
    ],
)
def test_a_loss_of_a_whole_batch_is_not_cut(loss, reason):
    given = prepared(loss)
    assert given.job.settings.is_whole_batch
    assert given.job.settings.microbatches == 1
    assert any(note.startswith(reason) for note in given.captured.notes)
    assert prepared(loss, microbatches=1).job.settings.is_whole_batch
    with pytest.raises(ConfigError, match=f"^microbatches is 2, but {reason}"):
        prepared(loss, microbatches=2)


def test_a_mean_is_cut_as_asked():
    given = prepared(nn.CrossEntropyLoss(), microbatches=2)
    assert (given.job.settings.is_whole_batch, given.job.settings.microbatches) == (False, 2)
    assert prepared(nn.CrossEntropyLoss()).job.settings.microbatches == 0


@pytest.mark.parametrize(
    ("optimizer", "is_adam"),
    [
        (lambda: torch.optim.AdamW(MODEL.parameters()), True),
        (lambda: torch.optim.NAdam(MODEL.parameters()), True),
        (lambda: torch.optim.SGD(MODEL.parameters()), False),
        (lambda: [torch.optim.Muon([MODEL.weight]), torch.optim.AdamW([MODEL.bias])], False),
        (lambda: "adamw", False),  # a recipe has rates of ours
    ],
)
def test_the_rate_of_an_adam_may_follow_the_noise_where_nothing_else_is_beside_it(optimizer, is_adam):
    given = prepared(nn.CrossEntropyLoss(), optimizer=optimizer())
    assert given.job.settings.has_own_adam is is_adam


def test_what_a_peer_lends_is_for_tensors_so_that_a_little_will_do_for_a_small_model():
    loss = nn.CrossEntropyLoss()
    data = (ROWS["x"], ROWS["y"])
    given = prepare(Job(MODEL, data, batch_size=2, loss=loss), SWARM_PLAN, 2, 1.0).job
    nodes = (node("a", memory_mb=200.0), node("b", memory_mb=200.0))
    made = SearchPlanner().make_plan(given, MakePlan(1, nodes), 0.0)
    assert made.plan is not None, made.shortage


@pytest.mark.parametrize(
    ("optimizer", "plan", "states"),
    [
        (None, {}, StateFormat.BF16),
        ("torch", {}, StateFormat.FP32),
        (None, {"averaging": Averaging.EXACT}, StateFormat.FP32),
        ("torch", {"states": StateFormat.INT8}, StateFormat.INT8),
    ],
)
def test_moments_are_exact_where_people_compare_them_with_one_process(optimizer, plan, states):
    own = {"optimizer": torch.optim.AdamW(MODEL.parameters())} if optimizer else {}
    given = job(batch_size=4, loss=lambda out, batch: nn.functional.cross_entropy(out, batch["y"]), **own)
    assert prepare(given, replace(LOCAL_PLAN, **plan), 0, 0.0).job.config.states is states


class Watched(nn.Module):
    """A model with a buffer of this type, which every forward changes."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, x):
        self.seen.add_(1)
        return self.layer(x)


@pytest.mark.parametrize(("dtype", "has"), [(torch.int64, False), (torch.float32, True)])
def test_a_model_that_only_counts_has_no_statistics_of_batches(dtype, has):
    """Else its batches are cut and shared as those of a batch norm."""
    data = {"x": torch.randn(8, 3)}
    counting = Job(Watched(dtype), data, batch_size=4, loss=lambda out, _: out.square().mean())
    assert prepare(counting, LOCAL_PLAN, 1, 1.0).job.settings.has_statistics is has


def test_the_hub_knows_the_metrics_that_leaves_may_report():
    def accuracy(out, target):
        return (out.argmax(-1) == target).float().mean()

    given = Job(
        MODEL,
        (ROWS["x"], ROWS["y"]),
        loss=nn.functional.cross_entropy,
        metrics={"acc": accuracy},
        batch_size=4,
    )
    assert prepare(given, SWARM_PLAN, 0, 1.0).job.settings.metrics == ("acc",)
    plain = Job(MODEL, (ROWS["x"], ROWS["y"]), loss=nn.functional.cross_entropy, batch_size=4)
    assert prepare(plain, SWARM_PLAN, 0, 1.0).job.settings.metrics == ()
