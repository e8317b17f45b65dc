"""Rounds of real hosts with unlike cuts: the mean by name, data-parallel descent, catching up, guards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.codec import describe, encode_tensor
from ravnest.config import DELTA_FORMATS, WireFormat
from ravnest.engine.optimizers import Group, OptimizerSettings, Sgd
from ravnest.engine.recipe import from_torch
from ravnest.engine.train_config import AveragingRule
from ravnest.errors import ProtocolError
from ravnest.ids import RoundId, SegmentId
from ravnest.model.capture.capture import Captured, capture
from ravnest.protocol.averaging import AnchorPart, AnchorQuery, RingPart, RoundAbort, RoundReady
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import TensorSpec
from tests.support.tied_world import TiedWorld

CUTS = ([2], [1, 3], [4])
RATE = 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 40), nn.BatchNorm1d(40)
        self.second, self.third = nn.Linear(40, 30), nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(F.relu(self.second(F.relu(self.norm(self.first(x))))))


def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out, batch["y"])


def batch_of(seed: int, num_samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    return {"x": x, "y": torch.randint(3, (num_samples,), generator=generator)}


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Net(), batch_of(0), loss, name="net")


def settings_of(captured: Captured) -> OptimizerSettings:
    names = tuple(entry.name for entry in captured.blueprint.state if entry.is_trainable)
    return OptimizerSettings((Group(names, Sgd()),), RATE)


def make_world(captured: Captured, *cuts: list[int], settings=None, **options) -> TiedWorld:
    assert captured.blueprint.num_positions >= 5
    return TiedWorld(captured, settings or settings_of(captured), cuts or CUTS, **options)


def train(world: TiedWorld, first: int, num_batches: int = 1) -> None:
    """Let every cluster train some batches of its own."""
    for cluster in range(len(world.clusters)):
        batches = [batch_of(1000 * cluster + first + k) for k in range(num_batches)]
        world.lease(batches, 10_000 * cluster + first, cluster)
    world.run()


def names_of(captured: Captured) -> list[str]:
    changing = [e.name for e in captured.blueprint.state if e.is_trainable or e.is_written]
    return [name for name in changing if captured.state[name].is_floating_point()]


def anchors_of(world: TiedWorld) -> list[bytes]:
    """Return the anchors of all owners, segment by segment."""
    found: dict[int, set[bytes]] = {}
    for host in world.hosts.values():
        for segment, averaged in host.stage.averager.segments.items():
            found.setdefault(segment, set()).add(
                b"".join(x.numpy().tobytes() for x in averaged.anchors.values())
            )
    assert all(len(bits) == 1 for bits in found.values()), "owners differ"
    return [next(iter(bits)) for _, bits in sorted(found.items())]


@pytest.mark.parametrize("wire_format", [WireFormat.FP32, WireFormat.INT8])
@pytest.mark.parametrize("seed", range(2))
def test_the_average_of_unlike_cuts_is_the_plain_mean_by_name(
    captured: Captured, wire_format: WireFormat, seed: int
) -> None:
    world = make_world(captured, seed=seed, deltas=wire_format)
    train(world, 0, num_batches=3)
    states = [world.state(cluster) for cluster in range(3)]
    world.open_round(1, is_blocking=True)
    world.run()
    anchors_of(world)
    for name in names_of(captured):
        mean = sum(state[name].double() for state in states) / 3
        largest = max(float((state[name] - captured.state[name].detach()).abs().max()) for state in states)
        is_exact = wire_format is WireFormat.FP32 or "running" in name
        for cluster in range(3):
            off = (world.state(cluster)[name] - mean).abs().max()
            assert off <= (1e-6 if is_exact else 4 * max(largest, 0.05) / 254), name


def test_averaging_after_every_update_is_data_parallel_descent(captured: Captured) -> None:
    world = make_world(captured, [2], [4])
    model = Net()
    model.load_state_dict({name: captured.state[name] for name in model.state_dict()})
    for number in range(6):
        train(world, number)
        world.open_round(1 + number, is_blocking=True)
        world.run()
        batches = [batch_of(number), batch_of(1000 + number)]
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        after = []
        for batch in batches:  # the statistics of each batch are its own, as in a cluster
            model.load_state_dict({**model.state_dict(), **buffers})
            (loss(model(batch["x"]), batch) / 2).backward()
            after.append({name: tensor.clone() for name, tensor in model.named_buffers()})
        with torch.no_grad():
            for name, tensor in model.named_buffers():
                if tensor.is_floating_point():
                    tensor.copy_((after[0][name] + after[1][name]) / 2)
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    for cluster in range(2):
        state = world.state(cluster)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(state[name], tensor, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("seed", "wire_format"), list(enumerate(DELTA_FORMATS)))
def test_rounds_beside_training_leave_all_owners_with_the_same_anchor(
    captured: Captured, seed: int, wire_format: WireFormat
) -> None:
    world = make_world(captured, seed=seed, window=3, deltas=wire_format)
    for number in range(1, 4):
        for cluster in range(3):
            batches = [batch_of(1000 * cluster + 10 * number + k) for k in range(3)]
            world.lease(batches, 10_000 * cluster + 10 * number, cluster)
        world.run(num_steps=20)
        world.open_round(number, is_blocking=False)
        world.run()
        anchors_of(world)
    assert world.last_committed == 3
    assert world.num_trained() == 3 * 3 * 3 * 4
    hashes = [message.hashes for _, message in world.at_hub if isinstance(message, RoundReady)]
    assert all(found for found in hashes)


def test_a_late_average_moves_half_the_way(captured: Captured) -> None:
    world = make_world(captured, [2], [4], is_averaging_slow=True)
    train(world, 0, num_batches=2)
    start = [world.state(cluster) for cluster in range(2)]
    world.open_round(1, is_blocking=False)
    while not all(host.stage.averager.is_open for host in world.hosts.values()):
        world.run(num_steps=1)
    alone = make_world(captured, [2], [4])
    train(alone, 0, num_batches=2)
    for each in (world, alone):
        train(each, 50, num_batches=2)  # as much as before: the round is a whole one late
    for name in ("first.weight", "third.bias"):
        mean = (start[0][name] + start[1][name]) / 2
        for cluster in range(2):
            expected = alone.state(cluster)[name] + 0.5 * (mean - start[cluster][name])
            torch.testing.assert_close(world.state(cluster)[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_blocking", [False, True])
def test_who_was_left_out_catches_up_in_the_next_round(
    captured: Captured, seed: int, is_blocking: bool
) -> None:
    world = make_world(captured, seed=seed, deltas=WireFormat.INT4)
    asked, sent = [], []
    world.before = lambda name, message: (
        asked.append(name) if isinstance(message, AnchorQuery) else sent.append(message)
    )
    for number in (1, 2):
        train(world, 10 * number)
        world.open_round(number, is_blocking, left_out=world.clusters[1])
        world.run()
        assert world.last_committed == number
    assert not asked
    train(world, 30)
    world.open_round(3, is_blocking)
    world.run()
    assert asked
    assert any(isinstance(message, AnchorPart) for message in sent)
    assert world.last_committed == 3
    anchors_of(world)
    stages = [host.stage for host in world.hosts.values()]
    weights = {each.worker.num_trained - each.averager.anchor_state.num_samples for each in stages}
    assert weights == {12}  # what was trained meanwhile counts, in every cluster


def test_two_who_missed_rounds_wait_for_each_other_no_longer_than_for_the_third(captured: Captured) -> None:
    world = make_world(captured, [2], [1, 3], [4], [1])
    train(world, 0)
    world.open_round(1, True, left_out=(*world.clusters[0], *world.clusters[1]))
    world.run()
    world.open_round(2, True)
    world.run()
    assert world.last_committed == 2
    anchors_of(world)


def spoil(world: TiedWorld, name: str, value: float) -> None:
    """Let a node's weights be this number."""
    stage = world.hosts[name].stage.worker.stage
    some = next(iter(stage._versions.weights))
    stage.add({some: torch.full_like(stage.state[some], value)})


def test_who_has_no_finite_weights_names_itself(captured: Captured) -> None:
    world = make_world(captured)
    spoil(world, "c1.1", float("nan"))
    world.open_round(1, True)
    world.run()
    aborts = [(sender, each) for sender, each in world.at_hub if isinstance(each, RoundAbort)]
    assert [(sender, each.suspect) for sender, each in aborts] == [("c1.1", "c1.1")]
    assert "not finite" in aborts[0][1].reason


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_who_gets_what_no_honest_member_sends_names_who_sent_it(captured: Captured, value: float) -> None:
    world = make_world(captured)
    train(world, 0)
    before = anchors_of(world)
    liar = "c1.1"
    deliver = world.deliver

    def lie(key: tuple) -> None:
        message, _ = world.queues[key][0]
        if key[0] == liar and isinstance(message, RingPart):
            wrong = torch.full(message.value.shape, value)
            assert message.value == describe(wrong, WireFormat.FP32)
            world.queues[key][0] = (message, (encode_tensor(wrong, WireFormat.FP32),))
        deliver(key)

    world.deliver = lie
    world.open_round(1, True)
    world.run()
    aborts = [each for _, each in world.at_hub if isinstance(each, RoundAbort)]
    assert aborts
    assert {each.suspect for each in aborts} == {liar}
    assert world.last_committed == 0
    assert anchors_of(world) == before


def test_a_part_in_another_format_is_refused_as_the_sender_s_fault(captured: Captured) -> None:
    world = make_world(captured, [2], [4], deltas=WireFormat.INT8)
    deliver = world.deliver

    def lie(key: tuple) -> None:
        message, _ = world.queues[key][0]
        if key[0] == "c0.1" and isinstance(message, RingPart):
            wrong = torch.zeros(message.value.shape)
            part = replace(message, value=describe(wrong, WireFormat.BF16))
            world.queues[key][0] = (part, (encode_tensor(wrong, WireFormat.BF16),))
        deliver(key)

    world.deliver = lie
    world.open_round(1, True)
    world.run()
    aborts = [each for _, each in world.at_hub if isinstance(each, RoundAbort)]
    assert {each.suspect for each in aborts} == {"c0.1"}
    assert all("came as bf16" in each.reason for each in aborts)


def test_a_part_from_anyone_but_the_owner_before_is_ignored(captured: Captured) -> None:
    world = make_world(captured)
    train(world, 0)
    deliver = world.deliver

    def meddle(key: tuple) -> None:
        message, _ = world.queues[key][0]
        if isinstance(message, RingPart):  # first from a stranger, with other numbers in it
            wrong = torch.full(message.value.shape, 3.0)
            world.hosts[key[1]].stage.receive(message, (encode_tensor(wrong, WireFormat.FP32),), "stranger")
        deliver(key)

    states = [world.state(cluster) for cluster in range(3)]
    world.deliver = meddle
    world.open_round(1, True)
    world.run()
    assert world.last_committed == 1
    for name in names_of(captured):
        mean = sum(state[name] for state in states) / 3
        torch.testing.assert_close(world.state(1)[name], mean, rtol=1e-5, atol=1e-6)


def test_nobody_fills_the_memory_with_rounds_to_come(captured: Captured) -> None:
    host = next(iter(make_world(captured).hosts.values()))
    spec = TensorSpec("float32", (1000,), WireFormat.FP32)
    for number in range(1000):
        part = RingPart(RoundId(9 + number), SegmentId(0), 0, 0, 1, 1.0, spec)
        found = host.stage.receive(part, (memoryview(bytearray(4000)),), "c1.0")
        if isinstance(found, Refusal):
            break
    assert 0 < number < 100
    assert "more of round" in found.reason
    for _ in range(number):  # it took nobody else's room
        honest = replace(part, round_id=RoundId(1))
        assert host.stage.receive(honest, (memoryview(bytearray(4000)),), "c2.0") == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (3, 1)])
def test_a_part_without_a_number_is_a_fault_of_its_sender(captured: Captured, shape: tuple[int, ...]) -> None:
    host = next(iter(make_world(captured).hosts.values()))
    spec = TensorSpec("float32", shape, WireFormat.FP32)
    part = RingPart(RoundId(9), SegmentId(0), 0, 0, 1, 1.0, spec)
    with pytest.raises(ProtocolError, match="a part of a round"):
        host.stage.receive(part, (memoryview(bytearray(spec.num_bytes)),), "c1.0")


class CountingWorld(TiedWorld):
    """Notes how many items each part of a ring has."""

    def post(self, sender: str, parcel: Any) -> None:
        if isinstance(parcel.message, RingPart):
            self.__dict__.setdefault("sizes", []).append(parcel.message.value.shape[0])
        super().post(sender, parcel)


def test_a_round_goes_around_in_chunks_as_large_as_the_hub_says() -> None:
    wide = nn.Sequential(nn.Linear(8, 700), nn.Linear(700, 700), nn.Linear(700, 3))
    captured = capture(wide, batch_of(0), loss, name="wide")
    longest = []
    for least_chunk in (0, 10**6):
        world = CountingWorld(captured, settings_of(captured), ([1], [1], [1]))
        world.open_round(1, True, least_chunk=least_chunk)
        world.run()
        longest.append((max(world.sizes), len(world.sizes)))
    (size, count_small), (whole, count_large) = longest
    assert size < whole
    assert count_small > 3 * count_large


def test_at_its_deadline_a_member_names_whom_it_waits_for(captured: Captured) -> None:
    world = make_world(captured, [2], [4], [3])
    world.open_round(1, True)
    silent = "c1.0"
    deliver = world.deliver

    def lose(key: tuple) -> None:
        if key[0] == silent:
            world.queues[key].popleft()
        else:
            deliver(key)

    world.deliver = lose
    world.run()
    late = next(
        name for name in ("c0.0", "c2.0") if silent in world.hosts[name].stage.averager._before.values()
    )
    (parcel,) = world.hosts[late].tick(2e9)
    assert parcel.message.suspect == silent
    assert f"waits for {silent} most" in parcel.message.reason


def test_an_anchor_that_is_not_finite_is_a_fault_of_its_sender(captured: Captured) -> None:
    world = make_world(captured, [2], [4], [3])
    world.open_round(1, True, left_out=world.clusters[0])
    world.run()
    world.open_round(2, True)
    deliver = world.deliver

    def lie(key: tuple) -> None:
        message, _ = world.queues[key][0]
        if isinstance(message, AnchorPart):
            wrong = torch.full(message.value.shape, float("nan"))
            world.queues[key][0] = (message, (encode_tensor(wrong, WireFormat.FP32),))
        deliver(key)

    world.deliver = lie
    with pytest.raises(ProtocolError, match="not finite"):
        world.run()


def test_who_waits_for_an_anchor_names_its_owner_at_the_deadline(captured: Captured) -> None:
    world = make_world(captured, [2], [4], [3])
    world.open_round(1, True, left_out=world.clusters[0])
    world.run()
    host = world.hosts["c0.0"]
    world.open_round(2, True)
    deliver = world.deliver
    world.deliver = lambda key: (
        world.queues[key].popleft() if isinstance(world.queues[key][0][0], AnchorPart) else deliver(key)
    )
    world.run()
    segment = next(iter(host.stage.averager.segments.values()))
    before = {name: anchor.clone() for name, anchor in segment.anchors.items()}
    (parcel,) = host.tick(2e9)
    assert isinstance(parcel.message, RoundAbort)
    assert parcel.message.suspect in host.stage.averager._before.values()
    assert "has not sent its last average" in parcel.message.reason
    assert not host.stage.averager.is_open
    assert before
    assert all(anchor.equal(before[name]) for name, anchor in segment.anchors.items())


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda weights, lr: torch.optim.SGD(weights, lr, 0.9)])
def test_momenta_are_averaged_by_name_if_asked_for(captured: Captured, make) -> None:
    weights = [tensor for tensor in captured.state.values() if tensor.requires_grad]
    settings = from_torch(make(weights, lr=1e-3), captured.state)
    for is_averaged in (False, True):
        rule = AveragingRule(momentum=is_averaged)
        world = make_world(captured, settings=settings, averaging=rule)
        train(world, 0, num_batches=2)
        before = [moments_of(world, cluster) for cluster in range(3)]
        world.open_round(1, True)
        world.run()
        for name in before[0]:
            mean = sum(moments[name] for moments in before) / 3
            for cluster in range(3):
                expected = mean if is_averaged else before[cluster][name]
                torch.testing.assert_close(moments_of(world, cluster)[name], expected, rtol=1e-5, atol=1e-7)


def test_a_liar_within_range_is_trimmed_away_among_four(captured: Captured) -> None:
    world = make_world(captured, [2], [1, 3], [4], [3], averaging=AveragingRule(is_trimmed=True))
    train(world, 0)
    states = [world.state(cluster) for cluster in range(4)]
    for name in world.clusters[1]:
        spoil(world, name, 100.0)
    world.open_round(1, True)
    world.run()
    assert world.last_committed == 1
    anchors_of(world)
    for name in ("first.weight", "second.weight", "third.weight"):
        low = torch.stack([state[name] for state in states]).amin(0)
        high = torch.stack([state[name] for state in states]).amax(0)
        found = world.state(0)[name]
        assert ((low - 1e-6 <= found) & (found <= high + 1e-6)).all()


def moments_of(world: TiedWorld, cluster: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in world.clusters[cluster]:
        found |= {key: tensor.clone() for key, tensor in world.hosts[name].stage.worker.stage.moments.items()}
    return found
