"""First weights of empty models: drawn by the modules' own rules, one at a time, the same in any order."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ravnest.errors import WeightsError
from ravnest.model.capture.capture import empty_weights
from ravnest.model.state.initialiser import InitialiserSource, fill_modules
from ravnest.model.state.state_source import read_tensor


class Scale(nn.Module):
    """A module whose constructor alone knows the first values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 3.0))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm, self.scale = nn.BatchNorm1d(width), Scale(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight


class WithRule(Net):
    """As many models do it: a rule for all modules, applied from the inside out."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, nn.ModuleList):
            for name, parameter in module.named_parameters():
                if name == "1.bias":
                    nn.init.constant_(parameter, 7.0)


def drawn(make: type[nn.Module], seed: int = 0) -> dict[str, torch.Tensor]:
    with empty_weights():
        model = make()
    return {name: tensor for part in fill_modules(model, seed) for name, tensor in part.items()}


def test_every_parameter_is_filled_as_its_module_would() -> None:
    found, real = drawn(Net), Net()
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in real.named_parameters()
    }
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert (found["norm.weight"] == 1).all()
    assert (found["scale.gain"] == 3).all()
    assert (found["attention.out_proj.bias"] == 0).all()  # its parent says so
    assert (found["attention.in_proj_bias"] == 0).all()
    assert 0.5 < found["embed.weight"].std() < 2
    limit = 1 / 8**0.5
    assert 0.5 * limit < found["blocks.0.weight"].abs().max() <= limit
    assert not torch.equal(found["blocks.0.weight"], found["blocks.1.weight"])


def test_numbers_are_drawn_by_name_and_seed_alone() -> None:
    state = torch.get_rng_state()
    one, again, other = drawn(Net), drawn(Net), drawn(Net, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert not torch.equal(one["embed.weight"], other["embed.weight"])

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = self._modules.pop("embed")  # now the last one
            self.head.weight = self.embed.weight

    turned = drawn(Turned)
    shared = turned.pop("head.weight")  # by its new first name
    assert shared.shape == one["embed.weight"].shape
    assert turned.keys() == one.keys() - {"embed.weight"}
    assert all(torch.equal(tensor, one[name]) for name, tensor in turned.items())


def test_a_model_that_was_cast_is_filled_in_its_type() -> None:
    with empty_weights():
        model = Net().bfloat16()
    found = {name: tensor for part in fill_modules(model, 0) for name, tensor in part.items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert (found["scale.gain"] == 3).all()


def test_the_rule_of_the_model_has_the_last_word() -> None:
    found = drawn(WithRule)
    assert (found["blocks.0.weight"] == 0.5).all()
    assert (found["blocks.1.bias"] == 7).all()
    assert (found["blocks.0.bias"] != 7).all()


def test_hugging_face_models_are_filled_by_their_own_rule() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=32)
    llama = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=500
    )
    for kind, given in ((transformers.GPT2LMHeadModel, config), (transformers.LlamaForCausalLM, llama)):
        found, real = drawn(lambda: kind(given)), dict(kind(given).named_parameters())  # noqa: B023
        assert found.keys() == real.keys()
        for name, tensor in found.items():
            wanted = real[name].detach()
            one, two = float(tensor.std()), float(wanted.std())
            assert abs(one - two) <= 0.1 * two + 1e-9, (name, one, two)
            assert abs(float(tensor.mean() - wanted.mean())) < 0.01, name


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.table = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.table)


def test_what_nothing_fills_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        WeightsError, match=r"how 'table' of Unknown is first filled; give Unknown a method res"
    ):
        drawn(Unknown)

    class Broken(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.is_built = True

        def reset_parameters(self) -> None:
            if hasattr(self, "is_built"):
                raise RuntimeError("no\nmore")

    with pytest.raises(
        WeightsError, match=r"'Broken' cannot be drawn: RuntimeError: no; give the Job weights="
    ):
        drawn(Broken)


def test_modules_are_as_they_were() -> None:
    with empty_weights():
        model = Net()
    model.norm.running_mean.fill_(5)
    before = dict(model.named_parameters())
    assert len([*fill_modules(model, 0)]) == 7
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert (model.norm.running_mean == 5).all()


def test_they_are_written_once_and_used_again(tmp_path: Path) -> None:
    with empty_weights():
        model = Net()
    source = InitialiserSource(model, 0, tmp_path / "first")
    assert not tmp_path.joinpath("first").exists()  # nobody needed them yet
    wanted = drawn(Net)
    assert source.types.keys() == wanted.keys()
    assert all(torch.equal(read_tensor(source, name), tensor) for name, tensor in wanted.items())
    (file,) = (tmp_path / "first").iterdir()
    made_at = file.stat().st_mtime_ns
    again = InitialiserSource(model, 0, tmp_path / "first")
    assert torch.equal(read_tensor(again, "scale.gain"), wanted["scale.gain"])
    assert file.stat().st_mtime_ns == made_at
    os.truncate(file, 100)  # a crash of the disk
    again = InitialiserSource(model, 0, tmp_path / "first")
    assert torch.equal(read_tensor(again, "scale.gain"), wanted["scale.gain"])
    nowhere = InitialiserSource(model, 1)
    assert not torch.equal(read_tensor(nowhere, "embed.weight"), wanted["embed.weight"])
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WeightsError, match=r"cannot be written to .*; make room, or give the hub another folder"
    ):
        InitialiserSource(model, 0, tmp_path / "file" / "first").fill()
