"""A job on a frozen base in 4 bits: what peers get, what checkpoints hold, and what comes back."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest as rv
from ravnest.config import FrozenFormat, PlanConfig
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.leases import LeaseBook, LedgerState
from ravnest.model.blueprint.blueprint_json import read_blueprint
from ravnest.model.state.safetensors_header import FileTensor, read_tensors
from ravnest.model.state.state_dict import read_snapshot, to_snapshot
from ravnest.requester.checkpoint_store import Checkpoints
from ravnest.requester.prepare import PreparedJob, prepare

PLAN = PlanConfig(frozen=FrozenFormat.INT4)
NUM_SAMPLES = 8

pytestmark = pytest.mark.usefixtures("one_thread")


class Adapted(nn.Module):
    """Two frozen layers with a trained vector each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(64, 128), nn.Linear(128, 64)
        self.requires_grad_(False)
        self.scale, self.shift = nn.Parameter(torch.ones(128)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)) * self.scale) + self.shift


def job_of(seed: int = 0) -> rv.Job:
    data = {"x": torch.randn(NUM_SAMPLES, 64), "y": torch.randn(NUM_SAMPLES, 64)}
    return rv.Job(
        Adapted(seed), data, batch_size=4, epochs=2, loss=lambda out, batch: F.mse_loss(out, batch["y"])
    )


def train_a_little(prepared: PreparedJob) -> list[tuple[int, int, bytes]]:
    """Return the snapshots of all stages, as peers send them back."""
    owner, parts = prepared.owner, []
    for position in range(prepared.captured.blueprint.num_positions):
        made = owner.make_parts(position, position + 1)
        stage = read_blueprint(made.blueprint.partition(b"\n")[2])
        state, _ = read_snapshot(b"".join(made.weights()), stage.state)
        names = [entry.name for entry in stage.state if entry.is_trainable]
        content = to_snapshot({**state, **{name: state[name] + 1 for name in names}}, {})
        assert owner.find_fault(position, position + 1, content) == ""
        parts.append((position, position + 1, content))
    return parts


def leave_out_frozen(parts: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Return the snapshots as peers send them at the end."""
    changing = ("scale", "shift")
    return [
        (
            start,
            stop,
            to_snapshot({x.name: tensor_of(x) for x in read_tensors(content) if x.name in changing}, {}),
        )
        for start, stop, content in parts
    ]


def tensor_of(found: FileTensor) -> Tensor:
    return torch.frombuffer(bytearray(found.buffer), dtype=torch.float32).reshape(found.shape)


def books() -> LedgerState:
    return LedgerState(0, 0, 0, 0, LeaseBook(NUM_SAMPLES, 2, 0).state())


def test_peers_get_blocks_checkpoints_hold_what_is_trained_and_the_base_comes_back_as_given(tmp_path: Path):
    job = job_of()
    prepared = prepare(job, PLAN, 1, 0.0, Checkpoints(tmp_path))
    parts = train_a_little(prepared)
    kinds = {tensor.name: tensor.dtype for *_, content in parts for tensor in read_tensors(content)}
    assert (kinds["one.weight"], kinds["two.weight"], kinds["one.bias"]) == ("uint8", "uint8", "float32")
    assert prepared.owner.keep(parts, books()) == ""
    checkpoint = Checkpoints(tmp_path).find()
    assert checkpoint is not None
    assert {tensor.name for tensor in checkpoint.read()} == {"scale", "shift", "one.bias", "two.bias"}
    prepared.owner.keep_result(parts, books())
    result = prepared.owner.result
    assert result is not None
    assert torch.equal(result.state["one.weight"], job.model.one.weight)
    assert torch.equal(result.state["scale"], torch.full((128,), 2.0))


def test_a_base_that_no_peer_sends_back_is_in_the_result_and_in_what_goes_on(tmp_path: Path):
    job = job_of()
    owner = prepare(job, PlanConfig(), 1, 0.0, Checkpoints(tmp_path)).owner
    parts = leave_out_frozen(train_a_little(prepare(job, PlanConfig(), 1, 0.0, Checkpoints(tmp_path))))
    assert {x.name for *_, content in parts for x in read_tensors(content)} == {"scale", "shift"}
    assert [owner.find_fault(*part) for part in parts] == [""] * len(parts)
    owner.keep_result(parts, books())
    assert torch.equal(owner.result.state["one.weight"], job.model.one.weight)
    assert torch.equal(owner.result.state["scale"], torch.full((128,), 2.0))
    start = Checkpoints(tmp_path).find()  # of a base that was only in memory, and may be drawn anew
    assert {"one.weight", "two.weight", "scale"} <= {tensor.name for tensor in start.read()}
    again = prepare(job_of(seed=1), PlanConfig(), 1, 0.0, Checkpoints(tmp_path), start).owner
    again.keep_result(leave_out_frozen(parts), books())
    assert torch.equal(again.result.state["one.weight"], job.model.one.weight)


def test_a_run_goes_on_with_the_same_base_and_with_no_other(tmp_path: Path):
    first = prepare(job_of(), PLAN, 1, 0.0, Checkpoints(tmp_path))
    assert first.owner.keep(train_a_little(first), books()) == ""
    start = Checkpoints(tmp_path).find()
    again = prepare(job_of(), PLAN, 1, 0.0, Checkpoints(tmp_path), start)
    (scale,) = (
        tensor
        for position in range(again.captured.blueprint.num_positions)
        for tensor in read_tensors(b"".join(again.owner.make_parts(position, position + 1).weights()))
        if tensor.name == "scale"
    )
    assert bytes(scale.buffer) == torch.full((128,), 2.0).numpy().tobytes()
    with pytest.raises(ConfigError, match="the frozen weights are not those that the checkpoint was trained"):
        prepare(job_of(seed=1), PLAN, 1, 0.0, Checkpoints(tmp_path), start)


def test_what_was_trained_before_it_was_frozen_stays_as_it_was_trained(tmp_path: Path):
    job = job_of()
    job.model.one.requires_grad_(True)
    first = prepare(job, PlanConfig(), 1, 0.0, Checkpoints(tmp_path))
    parts = train_a_little(first)
    assert first.owner.keep(parts, books()) == ""
    start = Checkpoints(tmp_path).find()
    again = prepare(job_of(), PlanConfig(), 1, 0.0, Checkpoints(tmp_path), start)
    assert again.owner.keep(train_a_little(again), books()) == ""
    again.owner.keep_result(train_a_little(again), books())
    assert torch.equal(again.owner.result.state["one.weight"], job.model.one.weight + 1)
    last = Checkpoints(tmp_path).find()
    assert "one.weight" in {tensor.name for tensor in last.read()}
    with pytest.raises(ConfigError, match=r"its own 'one\.weight', frozen now and stored in fewer bits"):
        prepare(job_of(), PLAN, 1, 0.0, Checkpoints(tmp_path), start)
