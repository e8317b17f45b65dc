"""Shards on disk: what Hugging Face writes is read by name, what we write it reads, junk is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.model.state.shards import ShardWriter, has_weights, index_of, open_weights
from ravnest.model.state.state_dict import type_of
from ravnest.model.state.state_source import FileSource, MemorySource, read_pieces, read_tensor


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "first.weight": torch.randn(10, 10),
        "flags": torch.tensor([True, False, True]),
        "first.bias": torch.randn(10).to(torch.bfloat16),
        "last.weight": torch.randn(10, 10),
        "count": torch.tensor(7),
        "nothing": torch.empty(0, 4),
    }


def write(file: Path, state: dict[str, Tensor], most_bytes: int) -> Path:
    source = MemorySource(state)
    with ShardWriter(file, source.types, most_bytes) as writer:
        for name in reversed([*state]):  # any order will do
            writer.write(name, read_pieces(source, name))
        return writer.finish()


def read(place: Path) -> dict[str, Tensor]:
    source = FileSource(open_weights(place))
    return {name: read_tensor(source, name) for name in source.types}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    kinds = [{name: type_of(tensor) for name, tensor in each.items()} for each in (one, two)]
    return kinds[0] == kinds[1] and all(torch.equal(one[name], two[name]) for name in one)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_small_state_is_one_file_that_the_library_reads(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", tensors(), 10**9)
    assert names(tmp_path) == ["model.safetensors"]
    assert file == tmp_path / "model.safetensors"
    assert same(load_file(file), tensors())
    assert same(read(file), tensors())
    assert same(read(tmp_path), tensors())


def test_a_large_state_is_shards_with_an_index(tmp_path: Path) -> None:
    index = write(tmp_path / "model.safetensors", tensors(), 500)
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert names(tmp_path) == [*shards, "model.safetensors.index.json"]
    assert index == index_of(tmp_path / "model.safetensors")
    assert has_weights(tmp_path / "model.safetensors")
    found = json.loads(index.read_text())
    assert found["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors().values())}
    assert found["weight_map"].keys() == tensors().keys()
    parts = {name: load_file(tmp_path / name) for name in shards}
    assert all(name in parts[shard] for name, shard in found["weight_map"].items())
    for place in (index, tmp_path):
        assert same(read(place), tensors())


def test_shards_that_hugging_face_wrote_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    found, own = read(tmp_path), model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in found.items())
    assert len(found) > 20


@pytest.mark.parametrize(("before", "after"), [(500, 10**9), (10**9, 500), (100, 500)])
def test_what_was_there_under_the_name_is_replaced(tmp_path: Path, before: int, after: int) -> None:
    (tmp_path / "model-mine.safetensors").write_text("mine")
    write(tmp_path / "model.safetensors", tensors(), before)
    write(tmp_path / "model.safetensors", {"other": torch.ones(3), "one": torch.ones(150)}, after)
    assert read(tmp_path).keys() == {"other", "one"}
    assert len(names(tmp_path)) == (2 if after > 500 else 4)
    assert (tmp_path / "model-mine.safetensors").read_text() == "mine"


def test_what_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"one": torch.ones(3)}, 10**9)

    def give_up() -> None:
        with ShardWriter(file, MemorySource(tensors()).types, 500) as writer:
            writer.write("first.weight", [bytes(400)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert names(tmp_path) == ["model.safetensors"]
    assert read(tmp_path).keys() == {"one"}


def spoil_index(folder: Path, **change: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda x: os.truncate(x / "model-00001-of-00002.safetensors", 100), "00001-of-00002.*no sound safe"),
        (lambda x: os.truncate(x / "model-00001-of-00002.safetensors", 0), "no sound safetensors file"),
        (lambda x: (x / "model-00002-of-00002.safetensors").unlink(), "00002 cannot be read|No such file"),
        (
            lambda x: save_file({"a": torch.ones(1)}, x / "model-00002-of-00002.safetensors"),
            r"lacks 'count', which model\.safetensors\.index\.json says is in it; fetch the shards again",
        ),
        (lambda x: spoil_index(x, weight_map={"a": "../other.safetensors"}), "no name of a shard"),
        (lambda x: spoil_index(x, weight_map={"a": "/etc/passwd"}), "no name of a shard"),
        (lambda x: spoil_index(x, weight_map={"a": "pytorch_model.bin"}), "no name of a shard"),
        (lambda x: spoil_index(x, weight_map={}), "names 0 shards"),
        (lambda x: spoil_index(x, weight_map=[1]), "weight_map"),
        (lambda x: (x / "model.safetensors.index.json").write_text("{"), "model.safetensors.index.json"),
    ],
)
def test_torn_and_foreign_shards_are_refused_with_a_sentence(tmp_path: Path, spoil, says: str) -> None:
    write(tmp_path / "model.safetensors", tensors(), 500)
    spoil(tmp_path)
    with pytest.raises(WeightsError, match=says):
        open_weights(tmp_path)


def test_places_without_weights_are_told(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(WeightsError, match=r"; give a \.safetensors file, a folder with model"):
            open_weights(place)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(WeightsError, match="no safetensors file by its name"):
        open_weights(tmp_path / "pytorch_model.bin")
    save_file(tensors(), tmp_path / "adapter.safetensors")
    assert same(read(tmp_path), tensors())  # the only one
