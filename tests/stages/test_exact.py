"""Exact updates: clusters with unlike cuts and shares train as one process does, whatever is aborted."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.config import OptimizerKind, WireFormat
from ravnest.engine.optimizers import Optimizer, OptimizerSettings
from ravnest.engine.recipe import from_torch, make_settings
from ravnest.ids import HUB, RoundId
from ravnest.model.capture.capture import Captured, capture
from ravnest.net.transport import Service
from ravnest.protocol.averaging import RoundAbort, RoundCommit
from ravnest.protocol.placement import SnapshotOrder, StageMissing
from ravnest.protocol.training import DroppedMicrobatch, LearningRate, StepReport
from ravnest.transfer.outbox import Outgoing
from tests.support.exact_world import ExactWorld

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = ([], [2], [1, 3])
SHARES = (5, 7, 4)
NUM_SAMPLES = sum(SHARES)
Batch = Mapping[str, Tensor]


class Net(nn.Module):
    """Smooth, so that rounding stays rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 24)
        self.third, self.last = nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def loss(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def batch_of(seed: int, num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    return {"x": x, "y": torch.randint(3, (num_samples,), generator=generator)}


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    found = capture(Net(), batch_of(0), loss, name="net")
    assert found.blueprint.num_positions >= 4
    return found


def weights_of(captured: Captured) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in captured.state.items() if tensor.requires_grad}


def settings_of(captured: Captured, kind: str = "adamw") -> OptimizerSettings:
    weights = weights_of(captured)
    if kind == "adamw":
        return from_torch(torch.optim.AdamW(weights.values(), lr=1e-3), captured.state)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    return make_settings(OptimizerKind.MUON, 1e-3, shapes, matrices)


def make_world(captured: Captured, *cuts: list[int], kind: str = "adamw", **options) -> ExactWorld:
    return ExactWorld(captured, settings_of(captured, kind), cuts or CUTS, **options)


def rate_of(update: int) -> float:
    return 2e-3 / (1 + update / 10)


class OneProcess:
    """The whole model on whole batches."""

    def __init__(self, captured: Captured, kind: str = "adamw", model: nn.Module | None = None) -> None:
        self.model = model or Net()
        self.model.load_state_dict({name: captured.state[name] for name in self.model.state_dict()})
        self.optimizer = Optimizer(settings_of(captured, kind), self.weights)

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def train(self, batch: Batch, rate: float) -> None:
        self.model.zero_grad()
        loss(self.model(batch["x"]), batch).backward()
        gradients = {name: tensor.grad for name, tensor in self.weights.items()}
        with torch.no_grad():
            assert isinstance(self.optimizer.step(self.weights, gradients, rate), dict)

    def compare(self, world: ExactWorld, clusters=(0, 1, 2), tolerance: float = 1e-6) -> None:
        for cluster in clusters:
            state = world.state(cluster)
            for name, weight in self.weights.items():
                torch.testing.assert_close(state[name], weight.detach(), rtol=tolerance, atol=tolerance)


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def update(world: ExactWorld, batch: Batch, rate: float, shares=SHARES, *, is_early: bool = False) -> None:
    """Let all clusters make one update; the round may be opened before they train."""
    if is_early:
        world.open_gradients(rate)
    world.grant_all(batch, shares)
    if not is_early:
        world.run()
        world.open_gradients(rate)
    world.run()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clusters_with_unlike_cuts_and_shares_train_as_one_process(
    captured: Captured, kind: str, accumulate: int
) -> None:
    world, alone = make_world(captured, kind=kind, accumulate=accumulate), OneProcess(captured, kind)
    for number in range(40):
        update(world, batch_of(number), rate_of(number), is_early=bool(number % 2))
        alone.train(batch_of(number), rate_of(number))
    assert world.versions() == {40}
    alone.compare(world)
    assert_equal(world.everything(0), world.everything(1))
    assert_equal(world.everything(0), world.everything(2))
    assert max(each.lag for _, each in world.at_hub if isinstance(each, StepReport)) == 0
    assert world.num_trained() == 40 * NUM_SAMPLES


def test_the_batch_and_the_rate_of_the_round_make_torch_s_own_update(captured: Captured) -> None:
    world, model = make_world(captured), Net()
    model.load_state_dict({name: captured.state[name] for name in model.state_dict()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(3):
        optimizer.param_groups[0]["lr"] = rate_of(number)
        optimizer.zero_grad()
        loss(model(batch_of(number)["x"]), batch_of(number)).backward()
        optimizer.step()
        update(world, batch_of(number), rate_of(number))
    for name, weight in model.named_parameters():
        torch.testing.assert_close(world.state(2)[name], weight.detach(), rtol=1e-6, atol=1e-6)


def test_a_rate_of_one_cluster_does_not_change_an_exact_update(captured: Captured) -> None:
    world, alone = make_world(captured), OneProcess(captured)
    world.grant_all(batch_of(0), SHARES)
    world.open_gradients(rate_of(0))
    members, world.members = world.members, []
    world.run()
    for name in world.clusters[1]:
        world.post(HUB, Outgoing(name, LearningRate(world.build_id, 0, 1.0)))
    world.run()
    for name in members:
        world.post(HUB, Outgoing(name, RoundCommit(RoundId(world.last_round))))
    world.run()
    alone.train(batch_of(0), rate_of(0))
    alone.compare(world)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_of_the_next_batch_is_trained_before_the_update(captured: Captured, seed: int) -> None:
    world, alone = make_world(captured, accumulate=2, seed=seed), OneProcess(captured)
    before = [world.everything(cluster) for cluster in range(3)]
    for number in range(3):
        world.grant_all(batch_of(number), SHARES)
    world.run()
    assert world.num_trained() == NUM_SAMPLES
    assert world.versions() == {0}
    for cluster in range(3):
        assert_equal(world.everything(cluster), before[cluster])
    for number in range(3):
        world.open_gradients(rate_of(number))
        world.run()
        alone.train(batch_of(number), rate_of(number))
        assert world.versions() == {number + 1}
    alone.compare(world)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shares_are_trained_in_order_whichever_fields_come_first(captured: Captured, accumulate: int) -> None:
    world, alone = make_world(captured, accumulate=accumulate), OneProcess(captured)
    world.grant_all(batch_of(0), SHARES)
    world.grant_all(batch_of(1), SHARES)
    for (sender, _, service), queue in world.queues.items():
        if sender == HUB and service is Service.ACTIVATION:
            queue.reverse()
    for number in range(2):
        world.open_gradients(rate_of(number))
        world.run()
        alone.train(batch_of(number), rate_of(number))
        assert world.versions() == {number + 1}
        alone.compare(world)


@pytest.mark.parametrize("seed", range(4))
def test_an_aborted_round_is_made_again_without_the_cluster_that_died(captured: Captured, seed: int) -> None:
    world, alone, batch = make_world(captured, seed=seed), OneProcess(captured), batch_of(1)
    before = world.everything(0)
    for name in world.clusters[1]:
        world.hosts[name].handle(SnapshotOrder(world.build_id, 1))
    world.grant_all(batch, SHARES)
    dead = world.clusters[1][0]
    working = world.work
    world.work = lambda name: name != dead and working(name)
    first = world.open_gradients(1.0)
    world.run()
    assert world.versions() == {0}
    world.abort(first)
    world.run()
    assert_equal(world.everything(0), before)
    world.open_gradients(rate_of(0), left_out=[1])
    world.run()
    kept = [*range(5), *range(12, 16)]  # all but the share of cluster 1
    alone.train({name: tensor[kept] for name, tensor in batch.items()}, rate_of(0))
    alone.compare(world, (0, 2))
    assert_equal(world.everything(0), world.everything(2))


@pytest.mark.parametrize("has_rings", [True, False])
def test_the_last_cluster_makes_its_updates_by_rounds_of_its_own(captured: Captured, has_rings: bool) -> None:
    world, alone = make_world(captured), OneProcess(captured)
    world.plan += 1
    if not has_rings:
        for name in world.clusters[2]:
            world.order_rings(name, is_exact=True, rings=())
    for number in range(2):
        world.grant(2, batch_of(number))
        world.run()
        assert world.hosts["c2.0"].stage.worker.stage.version == number
        world.open_gradients(rate_of(number), left_out=[0, 1])
        world.run()
        alone.train(batch_of(number), rate_of(number))
    alone.compare(world, [2])


def test_a_cluster_without_a_share_follows_the_others(captured: Captured) -> None:
    world, alone, batch = make_world(captured, accumulate=2), OneProcess(captured), batch_of(0, 3)
    world.grant(0, {name: tensor[:1] for name, tensor in batch.items()}, num_microbatches=1)
    world.grant(1, {name: tensor[1:] for name, tensor in batch.items()})
    world.open_gradients(rate_of(0), num_microbatches={0: 1, 2: 0})
    world.run()
    alone.train(batch, rate_of(0))
    alone.compare(world)
    update(world, batch_of(1), rate_of(1))
    alone.train(batch_of(1), rate_of(1))
    alone.compare(world)
    assert_equal(world.everything(0), world.everything(2))


def test_an_update_without_samples_is_left_out_everywhere(captured: Captured) -> None:
    world = make_world(captured)
    update(world, batch_of(0), rate_of(0))
    before = world.everything(0)
    world.open_gradients(rate_of(1), num_microbatches=dict.fromkeys(range(3), 0))
    world.run()
    assert world.versions() == {2}
    for cluster in range(3):
        assert_equal(world.everything(cluster), before)


@pytest.mark.parametrize("cluster", range(3))
def test_dropped_microbatches_do_not_count_and_hold_up_nobody(captured: Captured, cluster: int) -> None:
    world, alone = make_world(captured, accumulate=2), OneProcess(captured)
    for number in range(3):
        batch, bad = batch_of(number), (sum(SHARES[:cluster]), sum(SHARES[:cluster]) + 1)
        batch["x"][bad[0]] = float("nan")
        update(world, batch, rate_of(number), is_early=number == 1)
        dropped = -(-SHARES[cluster] // 2)  # the first microbatch of the share
        kept = [*range(bad[0]), *range(bad[0] + dropped, NUM_SAMPLES)]
        alone.train({name: tensor[kept] for name, tensor in batch.items()}, rate_of(number))
    assert sum(isinstance(each, DroppedMicrobatch) for _, each in world.at_hub) == 3
    assert world.versions() == {3}
    alone.compare(world)


def test_a_share_that_was_dropped_as_a_whole_has_no_weight(captured: Captured) -> None:
    world, alone, batch = make_world(captured), OneProcess(captured), batch_of(0)
    batch["x"][5:12] = float("nan")
    update(world, batch, rate_of(0))
    kept = [*range(5), *range(12, 16)]
    alone.train({name: tensor[kept] for name, tensor in batch.items()}, rate_of(0))
    alone.compare(world)


def test_an_update_that_waits_is_made_alone_when_exact_updates_end(captured: Captured) -> None:
    world = make_world(captured)
    alone = {cluster: OneProcess(captured) for cluster in range(3)}
    world.grant_all(batch_of(0), SHARES)
    round_id = world.open_gradients(rate_of(0))
    world.members = []  # nobody hears of an outcome
    world.run()
    assert world.versions() == {0}
    world.plan += 1
    for name in world.hosts:
        world.order_rings(name, is_exact=False)
    world.run()
    assert world.versions() == {1}
    for name in world.hosts:
        world.post(HUB, Outgoing(name, LearningRate(world.build_id, 1, rate_of(7))))
    world.run()
    world.grant_all(batch_of(1), SHARES)  # as in any cluster that trains alone
    world.run()
    assert world.versions() == {2}
    assert round_id == world.last_round
    for cluster, start in ((0, 0), (1, 5), (2, 12)):
        for number, rate in ((0, rate_of(0)), (1, rate_of(7))):
            share = slice(start, start + SHARES[cluster])
            alone[cluster].train({name: each[share] for name, each in batch_of(number).items()}, rate)
        alone[cluster].compare(world, [cluster])


def test_an_order_that_was_followed_before_changes_nothing(captured: Captured) -> None:
    world = make_world(captured)
    for name in world.hosts:
        world.order_rings(name, is_exact=False)  # of the plan there is
    world.grant_all(batch_of(0), SHARES)
    world.run()
    assert world.versions() == {0}


def test_exact_updates_begin_in_clusters_that_ran_ahead(captured: Captured) -> None:
    world = make_world(captured, kind="muon", is_exact=False, accumulate=2)
    for number in range(6):  # with lag, so weights are predicted
        for cluster in range(3):
            world.grant(cluster, batch_of(number, 4))
    world.run()
    world.open_round(1, is_blocking=True)  # all have the same weights now
    world.run()
    world.last_round = 1
    world.plan += 1
    for name in world.hosts:
        world.order_rings(name, is_exact=True)
    assert len(world.versions()) == 1
    for cluster in range(3):
        assert_equal(world.state(0), world.state(cluster))
    model = Net()
    model.load_state_dict({name: world.state(0)[name] for name in model.state_dict()})
    expected = loss(model(batch_of(9, 4)["x"]), batch_of(9, 4)).item()
    first = world.next_microbatch
    world.grant(2, batch_of(9, 4), num_microbatches=1)
    world.run()
    found = [x.loss for _, x in world.at_hub if isinstance(x, StepReport) and x.microbatch == first]
    assert found[-1] == pytest.approx(expected, rel=1e-5)


def test_half_an_update_is_made_when_exact_updates_begin(captured: Captured) -> None:
    world, alone = make_world(captured, [2], [], is_exact=False, accumulate=2), OneProcess(captured)
    for number in range(3):  # one after the other: nothing is late
        for cluster in range(2):
            world.grant(cluster, batch_of(number), num_microbatches=1)
        world.run()
    assert world.versions() == {1}
    world.plan += 1
    for name in world.hosts:
        world.order_rings(name, is_exact=True)
    assert world.versions() == {2}
    update(world, batch_of(3), rate_of(3), (9, 7))
    assert world.versions() == {3}
    alone.train({name: torch.cat((each, batch_of(1)[name])) for name, each in batch_of(0).items()}, 1e-3)
    alone.train(batch_of(2), 1e-3)
    alone.train(batch_of(3), rate_of(3))
    alone.compare(world, (0, 1))


def test_a_snapshot_is_of_the_time_before_an_update_that_waits(captured: Captured) -> None:
    world = make_world(captured)
    update(world, batch_of(0), rate_of(0))
    world.grant_all(batch_of(1), SHARES)
    world.open_gradients(rate_of(1))
    members, world.members = world.members, []
    world.run()  # all have voted
    before = {name: host.stage.worker.stage.snapshot() for name, host in world.hosts.items()}
    saved = {}
    for name, host in world.hosts.items():
        (saved[name],) = host.handle(SnapshotOrder(world.build_id, 1, is_final=name == "c0.0"))
    world.members = members
    world.open_gradients(rate_of(1))
    world.run()
    assert world.versions() == {2}
    for name, each in saved.items():
        assert each.snapshot.version == 1
        assert_equal(each.snapshot.state, before[name].state)
        assert_equal(each.snapshot.optimizer, before[name].optimizer)


def test_an_evaluation_waits_for_the_update(captured: Captured) -> None:
    world = make_world(captured)
    world.grant_all(batch_of(0), SHARES)
    world.run()
    world.lease([batch_of(9)], 100, 2, is_evaluation=True)
    world.run()
    assert not [each for _, each in world.at_hub if isinstance(each, StepReport) and each.microbatch == 100]
    world.open_gradients(rate_of(0))
    world.run()
    (found,) = [each for _, each in world.at_hub if isinstance(each, StepReport) and each.microbatch == 100]
    model = Net()
    model.load_state_dict({name: world.state(0)[name] for name in model.state_dict()})
    assert found.loss == pytest.approx(loss(model(batch_of(9)["x"]), batch_of(9)).item(), rel=1e-5)


def test_gradients_in_bf16_are_the_same_in_all_clusters(captured: Captured) -> None:
    world = make_world(captured, exact_gradients=WireFormat.BF16)
    alone = OneProcess(captured)
    for number in range(5):
        update(world, batch_of(number), rate_of(number))
        alone.train(batch_of(number), rate_of(number))
    assert_equal(world.everything(0), world.everything(1))
    assert_equal(world.everything(0), world.everything(2))
    alone.compare(world, tolerance=2e-3)
    with pytest.raises(AssertionError, match="not close"):
        alone.compare(world)


def test_a_weight_round_may_come_between_two_updates(captured: Captured) -> None:
    world, alone = make_world(captured), OneProcess(captured)
    update(world, batch_of(0), rate_of(0))
    world.last_round += 1
    world.open_round(world.last_round, is_blocking=True, base=0)
    world.run()
    assert world.last_committed == 2
    update(world, batch_of(1), rate_of(1))
    for number in range(2):
        alone.train(batch_of(number), rate_of(number))
    alone.compare(world)


def test_who_makes_updates_alone_takes_part_in_no_gradient_round(captured: Captured) -> None:
    world = make_world(captured, is_exact=False)
    world.open_gradients(rate_of(0))
    world.run()
    aborts = {sender: each for sender, each in world.at_hub if isinstance(each, RoundAbort)}
    assert aborts.keys() == set(world.hosts)
    assert all(each.suspect == sender and "alone" in each.reason for sender, each in aborts.items())


def test_who_has_not_trained_its_share_in_time_names_itself(captured: Captured) -> None:
    world = make_world(captured)
    world.grant(0, batch_of(0))
    world.open_gradients(rate_of(0), deadline_seconds=5.0)
    world.run()
    host = world.hosts["c2.1"]
    assert host.deadline == 5.0
    assert not list(host.tick(4.0))
    (sent,) = host.tick(5.0)
    assert (sent.message.round_id, sent.message.suspect) == (RoundId(1), "c2.1")
    assert "share of the batch" in sent.message.reason
    assert host.deadline is None


class NormedNet(nn.Module):
    """Its first statistics depend on nothing but the first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.parametrize("wire_format", [WireFormat.FP32, WireFormat.BF16])
def test_statistics_are_those_of_all_shares(wire_format: WireFormat) -> None:
    torch.manual_seed(0)
    captured = capture(NormedNet(), batch_of(0), loss, name="normed")
    world = make_world(captured, [], [1], [2], exact_gradients=wire_format)
    found = []
    for share in batch_of(1)["x"].split(SHARES):
        model = NormedNet()
        model.load_state_dict({name: captured.state[name] for name in model.state_dict()})
        model.train()(share)
        found.append(model.norm)
    update(world, batch_of(1), rate_of(0))
    for name in ("running_mean", "running_var"):
        pairs = zip(SHARES, found, strict=True)
        expected = sum(size * getattr(norm, name) for size, norm in pairs) / NUM_SAMPLES
        for cluster in range(3):
            mean = world.state(cluster)[f"norm.{name}"]
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


class TiedNet(nn.Module):
    """Its first weight is its last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.middle(torch.tanh(self.tied(x)))))


@pytest.fixture(scope="module")
def tied_model() -> Captured:
    torch.manual_seed(0)
    return capture(TiedNet(), batch_of(0), loss, name="tied")


def test_a_weight_tied_inside_one_stage_is_trained(tied_model: Captured) -> None:
    world, alone = make_world(tied_model, [], []), OneProcess(tied_model, model=TiedNet())
    for number in range(3):
        update(world, batch_of(number), rate_of(number), (11, 5))
        alone.train(batch_of(number), rate_of(number))
    alone.compare(world, (0, 1))


def test_a_weight_tied_across_stages_is_refused(tied_model: Captured) -> None:
    middle = tied_model.blueprint.num_positions // 2
    world = make_world(tied_model, [], [middle], is_exact=False)
    world.plan += 1
    world.order_rings("c1.0", is_exact=True)
    world.order_rings("c0.0", is_exact=True)
    world.is_exact = True
    found = world.build("c1.1")
    told = {sender: each for sender, each in world.at_hub if isinstance(each, StageMissing)}
    assert told.keys() == {"c1.0"}
    for each, node in ((told["c1.0"], "c1.0"), (found, "c1.1")):
        assert isinstance(each, StageMissing)
        assert each.node == node
        assert "shares a weight" in each.reason
