"""A cluster of workers, message by message: in lockstep it is the single process, ahead of it it learns."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from ravnest.config import OptimizerKind as OptimizerName
from ravnest.config import WireFormat
from ravnest.engine.recipe import from_torch, make_settings
from ravnest.engine.stage import StageEngine
from ravnest.errors import ProtocolError
from ravnest.ids import LeaseId, MicrobatchId
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.profile import find_matrices
from ravnest.protocol import messages
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import RingOrder
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    Gradient,
    LeaseBegin,
    LeaseDone,
    LeaseGrant,
    StepReport,
)
from tests.support.model_zoo import OwnGPT, token_batch, token_loss
from tests.support.worker_world import ClusterWorld, batches_of


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    model = OwnGPT(dropout=0.0)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())  # untied
    return capture(model, token_batch(4, torch.Generator()), token_loss, name="gpt")


def adamw(captured: Captured, rate: float = 3e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [tensor for tensor in captured.state.values() if tensor.requires_grad], lr=rate, weight_decay=0.1
    )


def world(captured: Captured, **options: object) -> ClusterWorld:
    settings = from_torch(adamw(captured), captured.state)
    return ClusterWorld(captured, [6, 15], settings, **options)


def test_in_lockstep_three_workers_are_the_single_process_bit_for_bit(captured: Captured) -> None:
    batches = batches_of(token_batch, 10)
    cluster = world(captured)
    cluster.lease(batches)
    cluster.run()
    model = OwnGPT(dropout=0.0)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    model.load_state_dict(captured.state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = token_loss(model(batch["ids"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert cluster.losses() == losses
    trained = cluster.state()
    assert {
        name for name, tensor in model.state_dict().items() if not torch.equal(trained[name], tensor)
    } == set()


class _Watching(StageEngine):
    """Notes what the inputs of microbatches in flight take."""

    held_bytes: ClassVar[list[int]] = []

    def forward(self, microbatch, inputs, *rest, **options):  # type: ignore[no-untyped-def,override]
        passed = super().forward(microbatch, inputs, *rest, **options)
        if inputs:
            sizes = [tensor.untyped_storage().nbytes() for tensor in inputs.values()]
            self.held_bytes.append(max(sizes))
        return passed


@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.INT8, WireFormat.FP32])
def test_stages_that_recompute_hold_their_inputs_as_they_travelled(
    captured: Captured, wire_format: WireFormat
) -> None:
    batches = batches_of(token_batch, 6)
    options = {"window": 3, "seed": 5, "wire_format": wire_format}
    worlds = [world(captured, **options), world(captured, recomputes=True, engine=_Watching, **options)]
    _Watching.held_bytes.clear()
    for cluster in worlds:
        cluster.lease(batches)
        cluster.run()
    kept, recomputed = worlds
    assert kept.losses() == recomputed.losses()
    before, after = kept.state(), recomputed.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    is_narrow = wire_format is not WireFormat.FP32
    assert len(_Watching.held_bytes) == 2 * len(batches)
    assert all((size == 0) == is_narrow for size in _Watching.held_bytes)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ahead_of_lockstep_every_batch_is_counted_and_the_loss_falls(captured: Captured, seed: int) -> None:
    shapes = {entry.name: entry.shape for entry in captured.blueprint.state if entry.is_trainable}
    recipe = make_settings(OptimizerName.MUON, 4e-3, shapes, find_matrices(captured.blueprint))
    cluster = ClusterWorld(captured, [6, 15], recipe, window=4, seed=seed)
    batches = batches_of(token_batch, 4) * 10
    cluster.lease(batches[:20])
    cluster.lease(batches[20:], first=20)
    cluster.run()
    assert [(done.lease, done.num_samples) for done in cluster.leases_done()] == [(0, 80), (20, 80)]
    losses = cluster.losses()
    assert len(losses) == 40
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(worker.stage.num_live_versions <= 2 for worker in cluster.workers.values())  # one predicted
    assert all(worker.stage.version == 40 for worker in cluster.workers.values())


def test_evaluation_passes_through_the_same_stages_and_changes_nothing(captured: Captured) -> None:
    cluster = world(captured)
    before = cluster.state()
    for _ in range(2):  # nothing of the first time is left in flight
        cluster.lease(batches_of(token_batch, 3), is_evaluation=True)
        cluster.run()
    assert len(cluster.losses()) == 6
    assert all(torch.equal(before[name], tensor) for name, tensor in cluster.state().items())


def test_compressed_activations_train_almost_as_exact_ones(captured: Captured) -> None:
    batches = batches_of(token_batch, 12)
    runs = {}
    four_bits = {WireFormat.INT4_CHANNELS: WireFormat.INT4_STOCHASTIC}
    for wire_format in (WireFormat.FP32, WireFormat.BF16, WireFormat.INT8, WireFormat.INT4_CHANNELS):
        cluster = world(captured, wire_format=wire_format, gradients=four_bits.get(wire_format))
        cluster.lease(batches)
        cluster.run()
        runs[wire_format] = cluster.losses()
    assert runs[WireFormat.BF16] == pytest.approx(runs[WireFormat.FP32], rel=0.01)
    assert runs[WireFormat.INT8] == pytest.approx(runs[WireFormat.FP32], rel=0.03)
    assert runs[WireFormat.INT4_CHANNELS] == pytest.approx(runs[WireFormat.FP32], rel=0.05)
    assert runs[WireFormat.INT4_CHANNELS] != runs[WireFormat.INT8]


def test_a_batch_that_is_not_finite_is_dropped_by_all_and_training_goes_on(captured: Captured) -> None:
    cluster = world(captured)
    middle = cluster.nodes[1]
    batches = batches_of(token_batch, 3)
    cluster.lease(batches)
    cluster.turn(cluster.nodes[0])
    activation, buffers = cluster.queues[middle].pop()
    assert isinstance(activation, Activation)
    broken = tuple(bytearray(b"\xff" * len(buffer)) for buffer in buffers)  # all NaN
    cluster.queues[middle].append((activation, broken))
    cluster.run()
    dropped = [message for message in cluster.at_hub if isinstance(message, DroppedMicrobatch)]
    assert [message.microbatch for message in dropped] == [activation.microbatch]
    assert [done.num_samples for done in cluster.leases_done()] == [8]
    assert all(worker.stage.num_live_versions == 1 for worker in cluster.workers.values())


@pytest.mark.parametrize("is_evaluation", [False, True])
@pytest.mark.parametrize(
    ("name", "reason"), [("ids", "index out of range"), ("y", "Target 99 is out of bounds")]
)
def test_a_bad_sample_is_dropped_by_all_and_training_goes_on(
    captured: Captured, name: str, reason: str, is_evaluation: bool
) -> None:
    cluster = world(captured)
    batches = batches_of(token_batch, 3)
    batches[1][name][2, 0] = 99
    cluster.lease(batches, is_evaluation=is_evaluation)
    cluster.run()
    (dropped,) = [message for message in cluster.at_hub if isinstance(message, DroppedMicrobatch)]
    assert dropped.microbatch == 1
    assert dropped.reason.startswith("evaluation: IndexError" if is_evaluation else "forward: IndexError")
    assert reason in dropped.reason
    assert [done.num_samples for done in cluster.leases_done()] == ([] if is_evaluation else [8])
    assert len(cluster.losses()) == 2
    assert all(worker.stage.num_live_versions == 1 for worker in cluster.workers.values())


def test_what_is_late_repeated_or_not_for_this_stage_is_refused(captured: Captured) -> None:
    cluster = world(captured)
    root, middle, last = cluster.nodes
    grant = LeaseGrant(1, LeaseId(1), False, MicrobatchId(0), (4,))
    assert isinstance(cluster.deliver(middle, grant), Refusal)
    assert isinstance(cluster.deliver(root, Gradient(1, MicrobatchId(5), ())), Refusal)
    assert isinstance(cluster.deliver(root, LeaseDone(1, LeaseId(1), 4)), Refusal)
    cluster.lease(batches_of(token_batch, 1))
    cluster.turn(cluster.nodes[0])
    activation, buffers = cluster.queues[cluster.nodes[1]][0]
    assert cluster.deliver(middle, activation, buffers) == ()
    assert isinstance(cluster.deliver(middle, activation, buffers), Refusal)
    other = world(captured)
    with pytest.raises(ProtocolError, match="not"):  # it is not for this stage
        other.deliver(last, activation, buffers)
    cluster.queues[cluster.nodes[1]].clear()
    cluster.turn(cluster.nodes[1])
    passed_on, buffers = cluster.queues[cluster.nodes[2]][-1]
    assert other.deliver(last, passed_on, buffers) == ()  # it waits for the labels
    assert isinstance(other.deliver(last, passed_on, buffers), Refusal)
    short = replace(passed_on, microbatch=MicrobatchId(7), num_samples=3)
    with pytest.raises(ProtocolError, match="not its own"):
        other.deliver(last, short, buffers)
    (value, spec), *others = passed_on.values
    whole = replace(short, num_samples=4, values=((value, replace(spec, dtype="int32")), *others))
    with pytest.raises(ProtocolError, match="int32"):  # nothing that torch would choke on later
        other.deliver(last, whole, buffers)
    with pytest.raises(ProtocolError, match="num_samples"):
        messages.pack(replace(passed_on, num_samples=0), buffers)
    cluster.run()
    assert [type(message) for message in cluster.at_hub].count(LeaseDone) == 1


def test_microbatches_of_unequal_size_make_the_update_of_their_batch(captured: Captured) -> None:
    whole = batches_of(token_batch, 1, num_samples=8)[0]
    parts = [{name: field[rows] for name, field in whole.items()} for rows in (slice(0, 5), slice(5, 8))]
    trained = [tensor for tensor in captured.state.values() if tensor.requires_grad]
    settings = from_torch(
        torch.optim.SGD(trained, lr=0.1), captured.state
    )  # a step is as long as its gradient
    at_once = ClusterWorld(captured, [6, 15], settings)
    in_parts = ClusterWorld(captured, [6, 15], settings, window=2, accumulate=2, synchronous=True)
    at_once.lease([whole])
    in_parts.lease(parts)
    for cluster in (at_once, in_parts):
        cluster.run()
    expected, found = at_once.state(), in_parts.state()
    for name, tensor in expected.items():
        moved = (tensor - captured.state[name]).abs().max()
        assert (found[name] - tensor).abs().max() <= 1e-2 * moved + 1e-7, name


def test_a_metric_that_is_no_number_is_told_as_none() -> None:
    model = torch.nn.Linear(4, 2)
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 2)}
    found = capture(
        model,
        batch,
        lambda out, batch: (out - batch["y"]).square().mean(),
        {"ratio": lambda out, batch: (batch["y"] * 0).sum() / (batch["y"] * 0).sum()},
        self_test=False,
    )
    cluster = ClusterWorld(found, [], from_torch(adamw(found), found.state))
    for first, is_evaluation in ((0, False), (1, True)):
        cluster.lease([batch], first, is_evaluation=is_evaluation)
        cluster.run()
    assert [report.metrics for report in cluster.at_hub if isinstance(report, StepReport)] == [
        (("ratio", None),)
    ] * 2


def test_the_norm_of_the_whole_gradient_is_limited_across_stages(captured: Captured) -> None:
    limit = 1e-3  # the weights hardly move, so the gradient of the one batch stays what it is
    settings = from_torch(torch.optim.SGD(captured.state.values(), lr=1.0), captured.state)
    (batch,) = batches_of(token_batch, 1)
    states = []
    for count in (4, 8):
        cluster = ClusterWorld(captured, [6, 15], replace(settings, clip_norm=limit))
        cluster.lease([batch] * count)
        cluster.run()
        states.append(cluster.state())
    whole = [
        worker.stage.squares_before + worker.stage.squares_after + worker.stage.norm_square
        for worker in cluster.workers.values()
    ]
    moved = sum(float((states[1][name] - states[0][name]).square().sum()) for name in states[0]) ** 0.5
    assert moved == pytest.approx(4 * limit, rel=1e-2)
    model = OwnGPT(dropout=0.0)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    model.load_state_dict(captured.state)
    token_loss(model(batch["ids"]), batch).backward()
    length = float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]))
    assert length > 100 * limit
    assert whole == pytest.approx([length**2] * 3, rel=1e-2)


def test_a_lease_that_came_ahead_is_begun_when_the_hub_says_so_and_once(captured: Captured) -> None:
    cluster = world(captured, window=2)
    batches = batches_of(token_batch, 6)
    for number in range(3):
        cluster.lease(batches[2 * number : 2 * number + 2], 2 * number, is_ahead=number > 0)
    cluster.run()
    assert [done.lease for done in cluster.leases_done()] == [0]
    root = cluster.nodes[0]
    cluster.deliver(root, LeaseBegin(1, LeaseId(2)))
    assert isinstance(cluster.deliver(root, LeaseBegin(1, LeaseId(2))), Refusal)
    cluster.run()
    assert [done.lease for done in cluster.leases_done()] == [0, 2]
    assert len(cluster.losses()) == 4


def test_a_root_that_has_lost_the_hub_trains_all_that_came_ahead_and_waits_again_with_it(
    captured: Captured,
) -> None:
    cluster = world(captured, window=2)
    batches = batches_of(token_batch, 8)
    for number in range(3):
        cluster.lease(batches[2 * number : 2 * number + 2], 2 * number, is_ahead=number > 0)
    for stage in cluster.stages.values():
        stage.follow_hub(is_lost=True)
    cluster.run()
    assert [done.lease for done in cluster.leases_done()] == [0, 2, 4]
    for stage in cluster.stages.values():
        stage.follow_hub(is_lost=False)
    cluster.lease(batches[6:], 6, is_ahead=True)
    cluster.run()
    assert len(cluster.losses()) == 6
    assert isinstance(cluster.deliver(cluster.nodes[0], LeaseBegin(1, LeaseId(4))), Refusal), "it was begun"


def test_stages_that_sum_gradients_have_nothing_ahead(captured: Captured) -> None:
    cluster = world(captured)
    cluster.lease(batches_of(token_batch, 2), is_ahead=True)
    cluster.run()
    for stage in cluster.stages.values():
        stage.rearrange(RingOrder(1, 2, (), (), is_exact=True))
        stage.rearrange(RingOrder(1, 3, (), ()))
        stage.follow_hub(is_lost=True)
    cluster.run()
    assert cluster.losses() == []
