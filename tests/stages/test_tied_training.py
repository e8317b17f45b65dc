"""Weights tied across stages: in lockstep they are those of one process; ahead of it all copies are equal."""

import pytest
import torch

from ravnest.engine.recipe import from_torch
from ravnest.engine.train_config import AveragingRule
from ravnest.ids import HUB, RoundId
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.protocol.averaging import RoundAbort, RoundOpen, RoundReady, TiedGradient
from ravnest.protocol.placement import SnapshotOrder
from ravnest.protocol.training import Activation, DroppedMicrobatch
from tests.support.model_zoo import OwnGPT, token_batch, token_loss
from tests.support.tied_world import EPOCH, TiedWorld
from tests.support.worker_world import batches_of

TIED = "tokens.weight"
RATE = 3e-3


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(OwnGPT(dropout=0.0), token_batch(4, torch.Generator()), token_loss, name="gpt")


def make_world(captured: Captured, *cuts: list[int], **options: int) -> TiedWorld:
    weights = [tensor for tensor in captured.state.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.1)
    return TiedWorld(captured, from_torch(optimizer, captured.state), cuts, **options)


def train_alone(captured: Captured, batches: list, accumulate: int = 1) -> tuple[OwnGPT, list[float]]:
    model, losses = OwnGPT(dropout=0.0), []
    model.load_state_dict(
        {name: captured.state[TIED if name == "head.weight" else name] for name in model.state_dict()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    for number, batch in enumerate(batches, 1):
        loss = token_loss(model(batch["ids"]), batch)
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def are_equal(copies: list[torch.Tensor]) -> bool:
    return len(copies) > 1 and all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize(("cuts", "is_slow"), [([9], True), ([6, 15], False)])
def test_in_lockstep_a_tied_model_is_the_single_process_bit_for_bit(
    captured: Captured, cuts: list[int], is_slow: bool
) -> None:
    batches = batches_of(token_batch, 20)
    world = make_world(captured, cuts, is_averaging_slow=is_slow)
    world.lease(batches, 0)
    world.run()
    model, losses = train_alone(captured, batches)
    assert world.losses() == losses
    trained = world.state()
    assert [n for n, tensor in model.named_parameters() if not torch.equal(trained[n], tensor)] == []
    assert are_equal(world.copies(TIED))


def test_in_lockstep_batches_are_summed_as_in_a_single_process(captured: Captured) -> None:
    batches = batches_of(token_batch, 12)
    world = make_world(captured, [6, 15], accumulate=3)
    world.lease(batches, 0)
    world.run()
    model, losses = train_alone(captured, batches, accumulate=3)
    torch.testing.assert_close(torch.tensor(world.losses()), torch.tensor(losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(world.copies(TIED)[0], model.tokens.weight.data, rtol=1e-5, atol=1e-6)
    assert are_equal(world.copies(TIED))


@pytest.mark.parametrize("seed", range(4))
def test_ahead_of_lockstep_the_copies_are_equal_bit_for_bit_and_the_loss_falls(
    captured: Captured, seed: int
) -> None:
    batches = batches_of(token_batch, 4) * 10
    world = make_world(captured, [[9], [6, 15]][seed % 2], window=4, accumulate=1 + seed // 2, seed=seed)
    world.lease(batches[:20], 0)
    world.lease(batches[20:], 20)
    world.run()
    assert world.num_trained() == 160
    losses = world.losses()
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert are_equal(world.copies(TIED))
    assert not torch.equal(world.copies(TIED)[0], captured.state[TIED])


def test_ahead_of_lockstep_nobody_waits_for_a_tied_gradient(captured: Captured) -> None:
    world = make_world(captured, [9], window=4)
    world.run()
    world.lease(batches_of(token_batch, 12), 0)
    held = []
    post = world.post
    world.post = lambda sender, parcel: (
        held.append((sender, parcel)) if isinstance(parcel.message, TiedGradient) else post(sender, parcel)
    )
    world.run()
    assert world.num_trained() == 48
    assert [type(parcel.message) for _, parcel in held] == [TiedGradient]  # one call is open, no more
    assert torch.equal(world.copies(TIED)[0], captured.state[TIED])
    world.post = post
    for sender, parcel in held:
        post(sender, parcel)
    world.run()
    assert are_equal(world.copies(TIED))
    assert not torch.equal(world.copies(TIED)[0], captured.state[TIED])


@pytest.mark.parametrize("seed", range(3))
def test_after_a_blocking_round_all_copies_are_the_plain_mean(captured: Captured, seed: int) -> None:
    world = make_world(captured, [9], [6, 15], window=3, accumulate=2, seed=seed)
    for cluster in range(2):
        world.lease(batches_of(token_batch, 7), 100 * cluster, cluster)  # one update stays open
    while world.num_trained() < 56:
        world.run(num_steps=1)
    copied: dict[int, torch.Tensor] = {}

    def look(name: str, message: object) -> None:
        for cluster, (home, *_) in enumerate(world.clusters):
            averager = world.hosts[home].stage.averager
            if averager._round is not None and cluster not in copied:
                copied[cluster] = world.copies(TIED, cluster)[0]

    world.before = look
    world.open_round(1, is_blocking=True)
    world.run()
    copies = [copy for cluster in range(2) for copy in world.copies(TIED, cluster)]
    assert len(copies) == 4
    assert are_equal(copies[:2])
    assert are_equal(copies[2:])
    mean = (copied[0] + copied[1]) / 2
    for copy in copies:
        torch.testing.assert_close(copy, mean, rtol=1e-6, atol=1e-7)


def test_what_is_evaluated_after_a_round_is_the_average(captured: Captured) -> None:
    batch = token_batch(4, torch.Generator().manual_seed(99))
    for seed in range(3):
        world = make_world(captured, [9], [6, 15], window=3, seed=seed, is_averaging_slow=True)
        for cluster in range(2):
            world.lease(batches_of(token_batch, 3), 100 * cluster, cluster)
        while world.num_trained() < 24:
            world.run(num_steps=1)
        world.open_round(1, is_blocking=True)
        while sum(isinstance(message, RoundReady) for _, message in world.at_hub) < len(world.hosts):
            world.run(num_steps=1)
        world.lease([dict(batch)], 500, cluster=1, is_evaluation=True)
        world.run()
        state = world.state(cluster=1)
        expected = (
            build_stage_program(captured.blueprint)
            .forward(state, {}, dict(batch), training=False)
            .results["loss"]
        )
        assert world.losses()[-1] == pytest.approx(float(expected), rel=1e-6)
        assert are_equal(world.copies(TIED, 1))


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_round_in_the_middle_of_training_leaves_the_copies_equal(
    captured: Captured, is_blocking: bool
) -> None:
    world = make_world(captured, [9], [6, 15], window=3, seed=is_blocking)
    batches = batches_of(token_batch, 4) * 4
    for cluster in range(2):
        world.lease(batches, 100 * cluster, cluster)
    for number in (1, 2):
        while world.num_trained() == 0 and len(world.losses()) < 8 * number:
            world.run(num_steps=1)
        world.open_round(number, is_blocking)
        ready = 0
        while ready < len(world.hosts):
            world.run(num_steps=1)
            ready = sum(isinstance(m, RoundReady) and m.round_id == number for _, m in world.at_hub)
    world.run()
    assert world.num_trained() == 2 * 64
    assert all(are_equal(world.copies(TIED, cluster)) for cluster in range(2))


def test_averaged_momenta_leave_the_copies_of_a_tied_weight_equal(captured: Captured) -> None:
    world = make_world(captured, [9], [6, 15], window=2, averaging=AveragingRule(momentum=True))
    for number in (1, 2):
        for cluster in range(2):
            world.lease(batches_of(token_batch, 3), 100 * cluster + 10 * number, cluster)
        world.run()
        world.open_round(number, is_blocking=False)
        world.run()
    assert world.last_committed == 2
    assert all(are_equal(world.copies(TIED, cluster)) for cluster in range(2))


@pytest.mark.parametrize("window", [1, 3])
def test_a_dropped_batch_holds_nobody_up(captured: Captured, window: int) -> None:
    world = make_world(captured, [6, 15], window=window, accumulate=2, seed=window)
    world.lease(batches_of(token_batch, 9), 0)
    broken = []
    deliver = world.deliver

    def spoil(key: tuple) -> None:
        message, buffers = world.queues[key][0]
        if isinstance(message, Activation) and message.microbatch in (2, 5) and key[1] == "c0.1":
            broken.append(message.microbatch)
            world.queues[key][0] = (message, tuple(bytearray(b"\xff" * len(buffer)) for buffer in buffers))
        deliver(key)

    world.deliver = spoil
    world.run()
    assert sorted(broken) == [2, 5]
    assert sum(isinstance(message, DroppedMicrobatch) for _, message in world.at_hub) == 2
    assert world.num_trained() == 28
    world.lease(batches_of(token_batch, 2), 50, is_evaluation=True)
    world.run()
    assert len(world.losses()) == 7 + 2
    assert are_equal(world.copies(TIED))


def test_a_stage_is_saved_when_the_last_tied_gradient_has_come(captured: Captured) -> None:
    world = make_world(captured, [9], accumulate=2)
    batches = batches_of(token_batch, 2)
    world.lease(batches[1:], 50, is_evaluation=True)
    world.run()
    world.lease(batches[:1], 0)  # half an update
    home, leaf = (world.hosts[name] for name in world.clusters[0])
    while world.num_trained() == 0:
        world.run(num_steps=1)
    assert home.save() is None
    assert home.save(is_final=False).version == 1  # training need not stop for it
    assert home.handle(SnapshotOrder(EPOCH, 1)) == home.handle(SnapshotOrder(EPOCH, 2)) == []
    world.run()
    assert [saved.order.number for saved in home.handle(SnapshotOrder(EPOCH, 3))] == [1, 2, 3]
    assert [saved and saved.version for saved in (home.save(), leaf.save())] == [1, 1]
    assert are_equal(world.copies(TIED))
    model, _ = train_alone(captured, batches[:1])
    assert torch.equal(world.copies(TIED)[0], model.tokens.weight)


def test_a_blocking_round_waits_for_tied_gradients_and_nothing_is_trained_till_it_is_given_up(
    captured: Captured,
) -> None:
    world = make_world(captured, [9], [6], window=3)
    world.run()
    home = world.clusters[0][0]
    host = world.hosts[home]
    world.lease(batches_of(token_batch, 2), 0)
    while world.num_trained() == 0:
        world.run(num_steps=1)
    assert host.stage.receive(RoundOpen(EPOCH, RoundId(1), 1e9, True, False, ()), (), HUB) == ()
    world.lease(batches_of(token_batch, 1), 10)
    for key in [key for key in world.queues if key[:2] == (HUB, home)]:
        while world.queues[key]:
            world.deliver(key)
    for outgoing in host.next_work() or ():
        assert not isinstance(outgoing.message, Activation)
        world.post(home, outgoing)
    assert host.stage.receive(RoundAbort(RoundId(1), "somebody died"), (), HUB) == ()
    world.run()
    assert world.num_trained() == 12
    assert are_equal(world.copies(TIED))
