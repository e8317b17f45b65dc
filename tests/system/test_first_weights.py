"""A model without values trains like one with them, to the bit, wherever its first weights come from."""

import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ravnest as rv
from ravnest.errors import WeightsError
from ravnest.model.state.initialiser import InitialiserSource
from ravnest.model.state.shards import ShardWriter
from ravnest.model.state.state_source import MemorySource, SourceTensors, read_pieces
from ravnest.requester.checkpoint_store import Checkpoints
from ravnest.requester.prepare import prepare
from ravnest.transfer.mirror import write_mirror
from tests.support.mirror_server import serving
from tests.support.system_world import PLAN, Ended, Pc, World, cross_entropy, make_mlp, make_points

TWO = (Pc(195e3), Pc(195e3))


def empty_model() -> torch.nn.Module:
    with rv.empty_weights():
        return make_mlp()


@cache
def first_values() -> dict[str, Tensor]:
    return dict(SourceTensors(InitialiserSource(empty_model(), 5)))


def write_shards(folder: Path, state: dict[str, Tensor]) -> None:
    source = MemorySource(state)
    with ShardWriter(folder / "model.safetensors", source.types, 10_000) as writer:
        for name in source.types:
            writer.write(name, read_pieces(source, name))
        writer.finish()


def make_job(model: torch.nn.Module, **options: object) -> rv.Job:
    facts = {"batch_size": 16, "loss": cross_entropy, "optimizer": "adamw", "learning_rate": 1e-2, "seed": 5}
    return rv.Job(model, make_points(96, 1), val_data=make_points(32, 2), epochs=2, **facts, **options)


def train(job: rv.Job, **options: object) -> Ended:
    return World(job, TWO, **options).run()


def same(one: Ended, two: Ended) -> bool:
    assert one.result is not None
    assert two.result is not None
    states = one.result.state, two.result.state
    is_same = states[0].keys() == states[1].keys()
    is_same &= all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return is_same and (one.losses, one.validation) == (two.losses, two.validation)


def test_it_trains_to_the_same_bits_as_one_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_mlp()
    model.load_state_dict(first_values())
    wanted = train(make_job(model))
    assert len(wanted.losses) == 2
    with caplog.at_level(logging.WARNING):
        drawn = train(make_job(empty_model()))
    assert "14 tensors have no values yet (0.weight, 0.bias, 2.weight, ...)" in caplog.text
    assert "drawn layer by layer with seed 5; give the Job weights= to begin with others" in caplog.text
    assert same(drawn, wanted)
    write_shards(tmp_path, first_values())
    assert len([*tmp_path.glob("model-*")]) > 1
    assert same(train(make_job(empty_model(), weights=tmp_path)), wanted)
    drawn.result.export(tmp_path / "result.safetensors")
    found = load_file(tmp_path / "result.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.result.state.items())
    real = make_mlp()
    drawn.result.load_into(real)
    assert all(torch.equal(tensor, found[name]) for name, tensor in real.state_dict().items())


def test_it_goes_on_from_a_checkpoint_without_its_first_weights(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, max_shard_bytes=10_000)
    ended = train(make_job(empty_model()), keeper=kept)
    start = kept.find()
    assert start is not None
    assert len([*(tmp_path / "checkpoints").rglob("part-*-of-*")]) > 4
    owner = prepare(make_job(empty_model()), PLAN, 0, 1.0, kept, start).owner
    assert not (tmp_path / "first-weights").exists()
    result = owner.keep_saved()
    assert all(torch.equal(result.state[name], tensor) for name, tensor in ended.result.state.items())


def test_what_the_weights_lack_or_have_otherwise_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def owner_of(state: dict[str, Tensor], **options: object) -> object:
        write_shards(tmp_path, state)
        return prepare(make_job(empty_model(), weights=str(tmp_path), **options), PLAN, 0, 1.0).owner

    state = first_values()
    last = max(state, key=lambda name: int(name.partition(".")[0]))
    with caplog.at_level(logging.WARNING):
        result = owner_of({name: x.bfloat16() for name, x in state.items() if name != last}).keep_saved()
    assert f"1 tensors have no values yet ({last}): they are drawn layer by layer with seed 5" in caplog.text
    assert torch.equal(result.state[last], state[last])
    assert torch.equal(result.state["0.weight"], state["0.weight"].bfloat16().float())
    with pytest.raises(
        WeightsError, match=r"weight '0\.weight' should be float32 \[32, 16\], is float32 \[3\]"
    ):
        owner_of(state | {"0.weight": torch.ones(3)})
    with pytest.raises(
        WeightsError, match=r"has 1 of the model's 14 tensors by name, so it is of another mod"
    ):
        owner_of({"0.weight": state["0.weight"]})


def test_a_mirror_gives_the_same_stages_as_the_files_behind_it(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    write_shards(tmp_path / "served", first_values())
    with serving(tmp_path / "served") as server:
        (tmp_path / "mirror.json").write_bytes(write_mirror(tmp_path / "served", server.url))
        job = make_job(empty_model(), weights=tmp_path / "mirror.json")
        parts = prepare(job, PLAN, 0, 1.0).owner.make_parts(0, 3)
        files = prepare(make_job(empty_model(), weights=tmp_path / "served"), PLAN, 0, 1.0).owner
        assert b"".join(parts.weights()) == b"".join(files.make_parts(0, 3).weights())
        server.fault = "lies"
        broken = prepare(job, PLAN, 0, 1.0).owner.make_parts(0, 3)
        with pytest.raises(WeightsError, match="its hash is another"):
            b"".join(broken.weights())
