"""A result goes into a module, a file or a folder under the model's own names, and whole or not at all."""

import json
import os
import stat
import tempfile
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ravnest.errors import ConfigError, WeightsError
from ravnest.model.capture.capture import empty_weights
from ravnest.requester.job import Job
from ravnest.requester.result import Result, keep_weights


class Net(nn.Module):
    """Tied weights, a buffer that training writes, a frozen and an unused parameter."""

    def __init__(self, width=3):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(width), persistent=False)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale)


@pytest.fixture(scope="module")
def trained():
    """Return a result whose values are all sevens, with a loss that has a buffer of its own."""
    data = (torch.randn(8, 3), torch.arange(8) % 3)
    job = Job(Net(), data, batch_size=8, loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    captured = job.capture()
    state = {name: torch.full_like(tensor, 7) for name, tensor in captured.state.items()}
    assert "job_loss.weight" in state
    assert "last.weight" not in state
    return Result(job.model, captured.blueprint, state)


def test_weights_that_find_no_room_in_the_end_are_kept_elsewhere(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / "gone" / "net.safetensors"
    with pytest.raises(ConfigError, match=r"gone/net.safetensors cannot be written: No such file") as caught:
        keep_weights(trained, place)
    saved = str(caught.value).rpartition("meanwhile the weights are in ")[2]
    assert "first.weight" in load_file(saved)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"has room for \S+ k?B$"):
        keep_weights(trained, place)


def test_metrics_are_the_last_values():
    history = [{"update": 1, "loss": 3.0}, {"update": 2, "loss": 2.0, "val_loss": 4.0}, {"loss": 1.0}]
    result = Result(nn.Linear(1, 1), None, {}, history)
    assert result.metrics == {"update": 2, "loss": 1.0, "val_loss": 4.0}
    assert result.history == history
    assert Result(nn.Linear(1, 1), None, {}).metrics == {}
    assert "Linear" not in repr(result)


# ---- into a module


def test_a_module_gets_what_was_trained_and_keeps_the_rest(trained):
    model = Net()
    unused = model.unused.weight.clone()
    trained.load_into(model)
    sevens = [model.first.weight, model.first.bias, model.last.bias, model.norm.running_mean]
    assert all((tensor == 7).all() for tensor in sevens)
    assert model.norm.num_batches_tracked == 7
    assert model.last.weight is model.first.weight
    assert torch.equal(model.unused.weight, unused)
    assert (model.scale == 1).all()
    assert (trained.model.first.weight != 7).all()


def test_a_module_keeps_its_type_and_what_is_trained(trained):
    model = Net().double()
    trained.load_into(model)
    assert model.first.weight.dtype == torch.float64
    assert (model.first.weight == 7).all()
    assert model.last.bias.requires_grad
    assert not model.first.bias.requires_grad


def test_both_names_of_a_tied_weight_are_known(trained):
    model = Net()
    model.last.weight = nn.Parameter(torch.zeros(3, 3))
    trained.load_into(model)
    assert (model.last.weight == 7).all()
    again = replace(trained, state={**trained.state, "last.weight": torch.zeros(3, 3)})
    again.load_into(model)
    assert (model.last.weight == 7).all()


def test_another_model_is_refused_untouched(trained):
    other = Net(width=4)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        trained.load_into(other)
    assert "of shape (3, 3) in the result, is of shape (4, 4) in the model; give a model" in str(caught.value)
    smaller = Net()
    del smaller.norm
    first = smaller.first.weight.clone()
    with pytest.raises(
        WeightsError, match=r"'norm\.\w+', of shape \(3,\) in the result, is missing in the mo"
    ):
        trained.load_into(smaller)
    assert torch.equal(smaller.first.weight, first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(WeightsError, match=r"without memory \(empty_weights\)"):
        trained.load_into(Net().to("meta"))


def test_a_result_that_lacks_something_is_refused(trained):
    state = {name: tensor for name, tensor in trained.state.items() if name != "last.bias"}
    with pytest.raises(WeightsError, match=r"lack 'last\.bias'"):
        replace(trained, state=state).load_into(Net())
    with pytest.raises(WeightsError, match="hold 'more'"):
        replace(trained, state={**trained.state, "more": torch.zeros(1)}).load_into(Net())


# ---- into a file


def test_a_file_has_every_name_of_the_state_dict(trained, tmp_path):
    file = trained.export(tmp_path / "net.safetensors")
    found = load_file(file)
    assert found.keys() == Net().state_dict().keys()
    assert (found["last.weight"] == 7).all()
    assert torch.equal(found["unused.weight"], trained.model.unused.weight)
    model = Net()
    model.load_state_dict(found)
    assert (model.first.weight == 7).all()
    assert os.listdir(tmp_path) == ["net.safetensors"]
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_views_of_one_vector_can_be_written(trained, tmp_path):
    vector = torch.full((1000,), 5.0)
    state = {
        name: vector[: t.numel()].view(t.shape) if t.is_floating_point() else t
        for name, t in trained.state.items()
    }
    found = load_file(replace(trained, state=state).export(str(tmp_path / "net.safetensors")))
    assert (found["norm.weight"] == 5).all()


def test_nothing_is_overwritten_unless_told(trained, tmp_path):
    file = tmp_path / "net.safetensors"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"exists already; give another name, or overwrite=True"):
        trained.export(file)
    assert file.read_text() == "mine"
    trained.export(file, overwrite=True)
    assert (load_file(file)["first.bias"] == 7).all()


def test_a_write_that_fails_leaves_the_old_file(trained, tmp_path, monkeypatch):
    file = tmp_path / "net.safetensors"
    file.write_text("mine")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device; .* room for \d+ B"):
        trained.export(file, overwrite=True)
    assert os.listdir(tmp_path) == ["net.safetensors"]
    assert file.read_text() == "mine"


def test_places_that_cannot_be_written(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"would hold safetensors; give a name that ends in \.safetensors"):
        trained.export(tmp_path / "net.pt")
    model = Net()
    model.save_pretrained = print
    with pytest.raises(
        ConfigError, match=r"; for a Hugging Face folder: result\.save_pretrained\('a/folder'\)$"
    ):
        replace(trained, model=model).export("a/folder")
    with pytest.raises(
        ConfigError, match=r"cannot be written: .*No such file.*; give a file in a folder that e"
    ):
        trained.export(tmp_path / "none" / "net.safetensors")
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        trained.export(folder)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        trained.export(folder, overwrite=True)
    assert os.listdir(tmp_path) == ["folder.safetensors"]


def test_a_large_result_becomes_shards_that_replace_each_other(trained, tmp_path):
    file = tmp_path / "net.safetensors"
    index = trained.export(file, max_shard_bytes=60)
    assert index == tmp_path / "net.safetensors.index.json"
    assert not file.exists()
    wanted = json.loads(index.read_text())["weight_map"]
    assert wanted.keys() == Net().state_dict().keys()
    found = {name: load_file(tmp_path / shard)[name] for name, shard in wanted.items()}
    assert (found["last.weight"] == 7).all()
    with pytest.raises(ConfigError, match=r"net\.safetensors exists already"):
        trained.export(file)
    assert trained.export(file, overwrite=True) == file
    assert os.listdir(tmp_path) == ["net.safetensors"]


# ---- into a folder


def test_a_hugging_face_folder_is_written_in_shards_and_read_by_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    ids = torch.arange(32).view(4, 8) % 50
    with empty_weights():
        model = transformers.GPT2LMHeadModel(config)
    captured = Job(model, {"input_ids": ids, "labels": ids}, batch_size=4).capture()
    values = transformers.GPT2LMHeadModel(config).state_dict()
    state = {name: values.get(name, tensor) for name, tensor in captured.state.items()}
    for most_bytes in (10_000, 10**9):
        place = Result(model, captured.blueprint, state).save_pretrained(
            tmp_path / str(most_bytes), max_shard_bytes=most_bytes
        )
        again = transformers.GPT2LMHeadModel.from_pretrained(place).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in values.items())
    assert (tmp_path / "10000/model.safetensors.index.json").exists()
    assert not (tmp_path / "10000/model.safetensors").exists()


class Pretrained(Net):
    def save_pretrained(self, folder, state_dict=None):
        folder.mkdir(exist_ok=True)
        (folder / "names").write_text(" ".join(state_dict))
        assert (state_dict["last.weight"] == 7).all()


def test_a_model_that_can_writes_itself(trained, tmp_path):
    result = replace(trained, model=Pretrained())
    folder = result.save_pretrained(tmp_path / "ours")
    assert (folder / "names").read_text().split() == list(Net().state_dict())
    assert (result.model.first.weight != 7).all()
    with pytest.raises(ConfigError, match="ours has files in it; give another folder, or overwrite=True"):
        result.save_pretrained(folder)
    result.save_pretrained(folder, overwrite=True)
    with pytest.raises(ConfigError, match=r"cannot be written: .*; give a folder that can be made"):
        result.save_pretrained(folder / "names")
    with pytest.raises(
        ConfigError, match=r"model has no save_pretrained\(folder, state_dict\); use result\.expo"
    ):
        trained.save_pretrained(tmp_path)
