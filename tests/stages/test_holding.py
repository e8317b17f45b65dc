"""A stage outlives its plan: held and kept bit for bit, recovered by name from others, in other rings."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.joining import ForkedCompute
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.recipe import from_torch
from ravnest.engine.train_config import AveragingRule
from ravnest.errors import WeightsError
from ravnest.ids import HUB, MicrobatchId, RoundId, SegmentId
from ravnest.model.blueprint.program import CONSTANT, PARAMETER, StateEntry
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.state.state_dict import read_finite_snapshot, read_snapshot, to_snapshot
from ravnest.peer.compute import ComputeThread
from ravnest.peer.compute_process import ComputeProcess
from ravnest.peer.compute_protocol import (
    Build,
    ComputeSetup,
    Delivered,
    FromCompute,
    ProviderLimits,
    StageBuilt,
)
from ravnest.peer.stage_host import write_snapshot
from ravnest.protocol.averaging import AnchorPart, AnchorQuery
from ravnest.protocol.messages import Refusal
from ravnest.protocol.placement import RingOrder, SnapshotOrder, StageMissing, StageReady
from ravnest.protocol.training import DroppedMicrobatch
from tests.stages.test_averaging import Net, anchors_of, batch_of, loss, names_of, train
from tests.support.model_zoo import OwnGPT, token_batch, token_loss
from tests.support.tied_world import EPOCH, PLAN, TiedWorld
from tests.support.worker_world import batches_of

CUTS = ([2], [1, 3])
NEXT = 50  # epoch and plan after the first
MAKE = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
    "muon": lambda weights: torch.optim.Muon([each for each in weights if each.dim() == 2], lr=1e-2),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Net(), batch_of(0), loss, name="net")


def settings_of(captured: Captured, kind: str = "adamw") -> OptimizerSettings:
    weights = [tensor for tensor in captured.state.values() if tensor.requires_grad]
    return from_torch(MAKE[kind](weights), captured.state)


def make_world(captured: Captured, *cuts: list[int], kind: str = "adamw", **options) -> TiedWorld:
    return TiedWorld(captured, settings_of(captured, kind), cuts or CUTS, **options)


def replan(world: TiedWorld, *cuts: list[int]) -> None:
    """Begin another plan in which every cluster has changed."""
    world.queues.clear()
    world.build_id = world.plan = NEXT
    world.arrange(cuts or CUTS)
    for name, host in world.hosts.items():
        host.handle(world.order(name))


def everything(world: TiedWorld, cluster: int) -> dict[str, Tensor]:
    """Return weights, moments, anchors and outer momenta of a cluster by name."""
    found: dict[str, Tensor] = {}
    for name in world.clusters[cluster]:
        host = world.hosts[name]
        snapshot = host.stage.worker.stage.snapshot()
        found |= snapshot.state | dict(snapshot.optimizer)
        anchor_state = host.stage.averager.anchor_state
        found |= {f"anchor of {key}": each.clone() for key, each in anchor_state.anchors.items()}
        found |= {f"outer of {key}": each.clone() for key, each in anchor_state.outer.items()}
    return found


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def snapshot_of(world: TiedWorld, name: str) -> bytes:
    saved = world.hosts[name].save(is_final=False)
    return to_snapshot(saved.state, saved.optimizer)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_kept_stage_goes_on_bit_for_bit_as_if_the_batches_in_flight_had_been_dropped(
    captured: Captured, kind: str
) -> None:
    rule = AveragingRule(outer_momentum=0.5, outer_rate=0.7)
    world, twin = (make_world(captured, kind=kind, averaging=rule) for _ in range(2))
    for each in (world, twin):
        train(each, 0, num_batches=2)
        each.open_round(1, is_blocking=True)
        each.run()
        train(each, 10)
        each.lease([batch_of(77)], 77)
        (root, *others), lost = each.clusters[0], MicrobatchId(77)
        while each.hosts[root].stage.worker.schedule.num_in_flight == 0:
            each.run(num_steps=1)
    for name in (root, *others):
        twin.queues.clear()
        twin.hosts[name].stage.receive(DroppedMicrobatch(twin.build_id, lost, "for the test"), (), HUB)
    before = everything(twin, 0)
    replan(world)
    assert all(host.next_work() is None for host in world.hosts.values())
    late = DroppedMicrobatch(world.build_id, lost, "late")
    assert world.hosts[root].handle(Delivered(late, (), HUB)) == ()
    for name in world.hosts:
        assert world.build(name, version=3, sources=(), keeps=True, base=None) == StageReady(NEXT)
        assert world.hosts[name].held is None
        assert world.hosts[name].stage.averager.anchor_state.anchor_round == 1
        assert (
            world.hosts[name].stage.worker.stage.version
            == world.hosts[name].stage.worker.schedule.version
            == 3
        )
    assert are_equal(everything(world, 0), before)
    for each in (world, twin):
        each.at_hub.clear()
        train(each, 100, num_batches=3)
        each.open_round(2, is_blocking=True, base=1)
        each.run()
    assert world.losses() == twin.losses()
    assert len(world.losses()) == 6
    assert are_equal(everything(world, 1), everything(twin, 1))
    assert anchors_of(world) == anchors_of(twin)


def test_what_is_held_stays_through_orders_and_goes_with_the_order_of_a_spare(captured: Captured) -> None:
    world = make_world(captured, [2])
    train(world, 0)
    before = everything(world, 0)
    replan(world, [2])
    for host in world.hosts.values():
        host.handle(world.order("c0.0"))  # a second order, before anything was built
    for name in world.hosts:
        assert world.build(name, version=1, sources=(), keeps=True) == StageReady(NEXT)
    assert are_equal(everything(world, 0), before)
    host = world.hosts["c0.0"]
    order = world.order("c0.0")
    host.handle(type(order)(NEXT + 1, NEXT + 1, 0, None, (), (), ()))
    assert host.save() is None
    missing = world.build("c0.0", version=1, sources=(), keeps=True)
    assert isinstance(missing, StageMissing)
    assert missing.node == "c0.0", "it was to keep what it does not have"


@pytest.mark.parametrize("kind", MAKE)
def test_a_stage_of_another_cut_is_assembled_by_name_from_what_two_others_saved(
    captured: Captured, kind: str
) -> None:
    world = make_world(captured, [2], [1, 3], kind=kind)
    train(world, 0, num_batches=2)
    before = everything(world, 0)
    saved = [(name, snapshot_of(world, name)) for name in world.clusters[0]]
    replan(world, [2], [4])
    for name in world.hosts:
        keeps = name in world.clusters[0]
        assert isinstance(world.build(name, 2, () if keeps else saved, keeps, base=0), StageReady)
    after = everything(world, 1)
    plain = {key: each for key, each in before.items() if " of " not in key}
    assert are_equal({key: each for key, each in after.items() if " of " not in key}, plain)
    assert any("/" in key for key in plain)
    for name in names_of(captured):  # what it was built with is its anchor
        assert torch.equal(after[f"anchor of {name}"], after[name])
    world.at_hub.clear()
    world.lease([batch_of(9)], 9, 0)
    world.lease([batch_of(9)], 10, 1)
    world.run()
    assert len(set(world.losses())) == 1
    assert are_equal(world.state(0), world.state(1))


def test_kept_names_win_and_the_first_source_that_has_a_name(captured: Captured) -> None:
    world = make_world(captured, [2], [1])
    train(world, 0)
    name = world.clusters[0][0]
    held = world.state(0)
    whole = {key: tensor.detach() for key, tensor in captured.state.items()}
    first = {key: whole[key] + 1 for key in ("second.weight", "second.bias")}
    second = {key: tensor + 2 if tensor.is_floating_point() else tensor for key, tensor in whole.items()}
    replan(world, [4], [1])
    sources = [("c0.1", to_snapshot(first, {})), (HUB, to_snapshot(second, {}))]
    assert world.build(name, 1, sources, keeps=True, base=5) == StageReady(NEXT)
    stage, averager = world.hosts[name].stage.worker.stage, world.hosts[name].stage.averager
    assert torch.equal(stage.state["first.weight"], held["first.weight"])
    assert "exp_avg/first.weight" in stage.snapshot().optimizer
    for key, tensor in stage.state.items():
        if key in first:
            assert torch.equal(tensor, first[key])
            assert f"exp_avg/{key}" not in stage.snapshot().optimizer
    assert averager.anchor_state.anchor_round == 5  # not all was held, so its weights are the anchor
    assert torch.equal(averager.anchor_state.anchors["first.weight"], held["first.weight"])


def spoiled(content: dict[str, Tensor], name: str, value: float) -> dict[str, Tensor]:
    return content | {name: torch.full_like(content[name], value)}


@pytest.mark.parametrize("fault", ["nan", "moments", "shape", "slot", "step", "garbage"])
def test_a_source_that_cannot_be_used_is_named_and_what_is_held_stays(captured: Captured, fault: str) -> None:
    world = make_world(captured, [2])
    train(world, 0)
    before = everything(world, 0)
    replan(world, [2])
    host = world.hosts["c0.0"]
    state, slots = host.held.snapshot.state, dict(host.held.snapshot.optimizer)
    match fault:
        case "nan":
            content = to_snapshot(spoiled(state, "first.weight", float("nan")), slots)
        case "moments":
            content = to_snapshot(state, spoiled(slots, "exp_avg/first.weight", float("inf")))
        case "shape":
            content = to_snapshot(state | {"first.weight": torch.zeros(1, 8)}, slots)
        case "slot":
            content = to_snapshot(state, slots | {"exp_avg/first.weight": torch.zeros(3)})
        case "step":
            content = to_snapshot(state, slots | {"step/first.weight": torch.tensor(-1.0)})
        case "garbage":
            content = b"\x08" + bytes(100)
    found = world.build("c0.0", 1, [("c0.1", content)])
    assert isinstance(found, StageMissing)
    assert (found.build_id, found.node) == (NEXT, "c0.1")
    assert host.next_work() is None
    with pytest.raises(WeightsError):  # the hub's own: there is no other to ask
        world.build("c0.0", 1, [(HUB, content)])
    assert world.build("c0.0", 1, [("c0.1", content)], keeps=True) == StageReady(
        NEXT
    )  # nothing is needed of it
    assert world.build("c0.1", 1, (), keeps=True) == StageReady(NEXT)
    assert are_equal(everything(world, 0), before)


@pytest.mark.parametrize(("gives", "blamed"), [(True, "c0.1"), (False, "elsewhere")])
def test_a_source_that_lacks_a_tensor_is_named_and_another_one_helps(
    captured: Captured, gives: bool, blamed: str
) -> None:
    world = make_world(captured, [2])
    state, slots = world.state(0), {}
    part = {key: tensor for key, tensor in state.items() if key.startswith("first") and gives}
    replan(world, [])
    (name,) = world.clusters[0]
    world.hosts[name].handle(replace(world.order(name), stage=None))  # it holds nothing
    world.hosts[name].handle(world.order(name))
    rest = {key: tensor for key, tensor in state.items() if key == "second.bias"}
    sources = [("c0.1", to_snapshot(rest, slots)), ("elsewhere", to_snapshot(part, slots))]
    found = world.build(name, 1, sources)
    assert isinstance(found, StageMissing)
    assert (found.build_id, found.node) == (NEXT, blamed)
    assert "no source of the stage has" in found.reason
    assert world.build(name, 1, [("c0.1", to_snapshot(state, slots))]) == StageReady(NEXT)


def test_only_what_training_changes_must_be_finite() -> None:
    mask = StateEntry("mask", CONSTANT, "float32", (2,), (0,))
    weight = StateEntry("weight", PARAMETER, "float32", (2,), (0,), is_trainable=True)
    low = torch.full((2,), float("-inf"))
    state, _ = read_finite_snapshot(to_snapshot({"mask": low, "weight": torch.ones(2)}, {}), [mask, weight])
    assert torch.equal(state["mask"], low)
    with pytest.raises(WeightsError, match="'weight' of a snapshot is not finite"):
        read_finite_snapshot(to_snapshot({"mask": low, "weight": low.clone()}, {}), [mask, weight])


@pytest.mark.parametrize("kind", MAKE)
def test_a_snapshot_comes_back_bit_for_bit_with_the_state_of_its_optimizer(
    captured: Captured, kind: str
) -> None:
    world = make_world(captured, [2], kind=kind)
    train(world, 0, num_batches=2)
    for name in world.hosts:
        stage = world.hosts[name].stage.worker.stage.snapshot()
        state, slots = read_snapshot(snapshot_of(world, name), world.blueprint(name).state)
        assert are_equal(state, stage.state)
        assert are_equal(slots, stage.optimizer)
        assert slots or kind == "muon"


def test_a_live_and_a_held_stage_are_saved_alike_and_beside_other_work(captured: Captured) -> None:
    world = make_world(captured, [2], accumulate=2)
    train(world, 0, num_batches=3)  # one batch is in no update yet
    host, order = world.hosts["c0.0"], SnapshotOrder(world.build_id, 1, is_final=False)
    (saved,) = host.handle(order)
    written = write_snapshot(None, saved)
    assert (written.order, written.version) == (order, 1)
    stage = host.stage.worker.stage.snapshot()
    state, slots = read_snapshot(written.blob.content, world.blueprint("c0.0").state)
    assert are_equal(state, stage.state)
    assert are_equal(slots, stage.optimizer)
    replan(world, [2])
    (saved,) = host.handle(SnapshotOrder(NEXT, 2))
    written = write_snapshot(None, saved)
    assert written.version == 2  # what was summed up is not lost
    held, _ = read_snapshot(written.blob.content, world.blueprint("c0.0").state)
    assert are_equal(held, host.held.snapshot.state)
    assert not torch.equal(held["first.weight"], state["first.weight"])


def make_compute(kind: str, folder: Path) -> ComputeThread | ComputeProcess:
    return ComputeThread() if kind == "thread" else ComputeProcess(str(folder), start=ForkedCompute)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_compute_builds_saves_and_holds(captured: Captured, tmp_path: Path, kind: str) -> None:
    world = make_world(captured, [])
    (name,) = world.hosts
    sent: list[FromCompute] = []

    async def main() -> None:
        compute, moved = make_compute(kind, tmp_path), asyncio.Event()

        def deliver(item: FromCompute) -> None:
            sent.append(item)
            moved.set()

        async def wait_for(count: int) -> None:
            while len(sent) < count:
                moved.clear()
                await moved.wait()

        setup = ComputeSetup(ProviderLimits(1e9), str(tmp_path))
        running = asyncio.create_task(compute.run(setup, deliver))
        compute.put(Build(*world.parts(name)))
        compute.put(SnapshotOrder(world.build_id, 1))
        await wait_for(2)
        world.build_id = NEXT
        compute.put(world.order(name))
        compute.put(SnapshotOrder(NEXT, 2))
        await wait_for(3)
        compute.put(Build(*world.parts(name, 6, (), keeps=True)))
        await wait_for(4)
        compute.put(Build(*world.parts(name, 6, [(HUB, to_snapshot({}, {}))])))
        await wait_for(5)
        compute.close()
        await running

    asyncio.run(main())
    built, first, second, again, failed = sent
    assert (built, again) == (StageBuilt(EPOCH), StageBuilt(NEXT))
    assert [written.order.number for written in (first, second)] == [1, 2]
    assert first.blob == second.blob
    state, _ = read_snapshot((tmp_path / first.blob.ref.blob).read_bytes(), world.blueprint(name).state)
    assert all(torch.equal(state[key], captured.state[key]) for key in state)
    assert isinstance(failed.error, WeightsError)
    assert "no source of the stage has" in str(failed.error)


def rearrange(world: TiedWorld, *cuts: list[int], changed: int) -> None:
    """Cut one cluster anew; the others train on, in other rings."""
    states = [dict(world.hosts[name].save(is_final=False).state) for name in world.clusters[changed]]
    whole: dict[str, Tensor] = {}
    for state in states:
        whole |= state
    kept = {name for number, names in enumerate(world.clusters) if number != changed for name in names}
    epoch, world.plan = world.build_id, NEXT
    world.arrange(cuts)
    world.queues = {key: queue for key, queue in world.queues.items() if key[1] in kept}
    for name, host in world.hosts.items():
        if name in kept:
            host.handle(RingOrder(epoch, NEXT, world.rings_of(name), ()))
        else:
            host.handle(world.order(name))
            world.build(name, 9, [("elsewhere", to_snapshot(whole, {}))], base=None)


@pytest.mark.parametrize("seed", range(2))
def test_other_rings_do_not_stop_training_and_the_next_round_is_the_mean_by_name(
    captured: Captured, seed: int
) -> None:
    rule = AveragingRule(outer_momentum=0.5)
    world = make_world(captured, [2], [1, 3], [4], seed=seed, averaging=rule)
    train(world, 0)
    world.open_round(1, is_blocking=True)
    world.run()
    anchors = everything(world, 0)
    train(world, 10)
    world.open_round(2, is_blocking=False)
    world.run(num_steps=3)
    world.lease([batch_of(20 + k) for k in range(2)], 20)
    world.run(num_steps=8)
    rearrange(world, [2], [3], [4], changed=1)
    assert not any(world.hosts[name].stage.averager.is_open for name in world.clusters[0])
    assert {world.hosts[name].stage.averager.anchor_state.anchor_round for name in world.clusters[0]} == {1}
    after = everything(world, 0)
    carried = [key for key in anchors if " of " in key]
    assert any(key.startswith("outer") for key in carried)
    assert all(torch.equal(after[key], anchors[key]) for key in carried)
    world.run()
    assert {each.microbatch for _, each in world.at_hub if getattr(each, "loss", None)} >= {20, 21}
    states = [world.state(cluster) for cluster in range(3)]
    asked: list[object] = []
    world.before = lambda name, message: asked.append(name) if isinstance(message, AnchorQuery) else None
    world.open_round(3, is_blocking=True, base=1)
    world.run()
    assert world.last_committed == 3
    assert asked
    anchors_of(world)
    # A weight is as far from the anchor as its mean is, times what the outer momentum makes of it.
    samples = torch.tensor([1.0 + 4 + 8, 1.0, 1.0 + 4])
    for name in ("first.weight", "second.weight", "third.bias"):
        mean = sum(share * state[name] for share, state in zip(samples, states, strict=True)) / samples.sum()
        change = mean - anchors[f"anchor of {name}"]
        momentum = 0.5 * anchors[f"outer of {name}"] + change
        expected = anchors[f"anchor of {name}"] + change + 0.5 * momentum
        for cluster in range(3):
            torch.testing.assert_close(world.state(cluster)[name], expected, rtol=1e-4, atol=1e-6)


def test_who_averaged_with_nobody_has_no_anchor_when_others_come(captured: Captured) -> None:
    world = make_world(captured, [2])
    train(world, 0)
    world.plan = NEXT
    alone = [*world.hosts]
    world.arrange([[2], [4]])
    for name in world.hosts:
        if name in alone:
            world.hosts[name].handle(RingOrder(world.build_id, NEXT, world.rings_of(name), ()))
        else:
            world.build(name, 1, base=None)
    assert {host.stage.averager.anchor_state.anchor_round for host in world.hosts.values()} == {None}
    states = [world.state(cluster) for cluster in range(2)]
    world.open_round(1, is_blocking=True, base=7, anchors=alone)
    world.run()
    assert world.last_committed == 1
    anchors_of(world)
    for name in names_of(captured):
        mean = (5 * states[0][name] + states[1][name]) / 6  # by samples, and one more each
        torch.testing.assert_close(world.state(1)[name], mean, rtol=1e-4, atol=1e-6)


def test_a_query_waits_for_its_plan_and_an_older_one_is_refused(captured: Captured) -> None:
    world = make_world(captured, [2], [4])
    host = world.hosts["c0.0"]
    (segment, _), *_ = world.rings_of("c0.0")
    for plan, count in ((PLAN, True), (PLAN + 1, False)):
        found = host.stage.receive(AnchorQuery(plan, segment, RoundId(0)), (), "c1.0")
        assert bool(found) is count
    assert isinstance(host.stage.receive(AnchorQuery(PLAN - 1, segment, RoundId(0)), (), "c1.0"), Refusal)
    assert isinstance(host.stage.receive(AnchorQuery(PLAN, SegmentId(99), RoundId(0)), (), "c1.0"), Refusal)
    assert host.stage.receive(AnchorQuery(PLAN + 2, segment, RoundId(0)), (), "c1.1") == []
    found = host.handle(RingOrder(world.build_id, PLAN + 1, world.rings_of("c0.0"), ()))
    assert found
    assert all(part.to == "c1.0" and part.message.plan_id == PLAN + 1 for part in found)
    assert isinstance(host.stage.receive(AnchorQuery(PLAN, segment, RoundId(0)), (), "c1.0"), Refusal)
    assert host.handle(RingOrder(world.build_id, PLAN + 1, world.rings_of("c0.0"), ())) == []


@pytest.mark.parametrize("chain", [(0,), (2,)])
def test_whose_weights_are_the_anchor_gives_them_to_who_has_none_in_a_chain(
    captured: Captured, chain: tuple[int]
) -> None:
    world = make_world(captured, [2], [1, 3], [4], averaging=AveragingRule(outer_momentum=0.5))
    train(world, 0)
    world.open_round(1, is_blocking=True)
    world.run()
    train(world, 10)
    states = [world.state(cluster) for cluster in range(3)]
    for host in world.hosts.values():
        host.stage.averager._anchor_round = None
    asked: list[tuple[str, int]] = []
    parts: list[object] = []
    world.before = lambda name, message: (
        asked.append(name) if isinstance(message, AnchorQuery) else parts.append(message)
    )
    (cluster,) = chain
    world.open_round(2, is_blocking=True, base=2, anchors=world.clusters[cluster])
    world.run()
    assert world.last_committed == 2
    assert any(isinstance(part, AnchorPart) for part in parts)
    assert {name[:2] for name in asked} >= {f"c{number}" for number in range(3)} - {"c9"} or len(asked) > 3
    anchors_of(world)
    for name in names_of(captured):
        mean = sum(state[name] for state in states) / 3
        anchor = states[cluster][name]
        is_statistic = "running" in name
        expected = mean if is_statistic else anchor + 1.5 * (mean - anchor)  # momentum from zero on
        for number in range(3):
            torch.testing.assert_close(world.state(number)[name], expected, rtol=1e-4, atol=1e-5)


TIED = "tokens.weight"


@pytest.fixture(scope="module")
def tied() -> Captured:
    torch.manual_seed(0)
    return capture(OwnGPT(dropout=0.0), token_batch(4, torch.Generator()), token_loss, name="gpt")


@pytest.mark.parametrize(("window", "seed"), [(1, 0), (3, 1)])
def test_after_a_rebuild_all_have_the_home_s_copy_of_a_tied_weight_before_they_use_it(
    tied: Captured, window: int, seed: int
) -> None:
    world = make_world(tied, [9], window=window, seed=seed, is_averaging_slow=True)
    world.lease(batches_of(token_batch, 3), 0)
    world.run()
    home, leaf = world.clusters[0]
    at_home = world.hosts[home].stage.worker.stage.snapshot()
    other = world.hosts[leaf].save()
    other.state[TIED] += 1.0
    slots = {key: slot * 0.5 if key.endswith(TIED) else slot for key, slot in other.optimizer.items()}
    source = [("elsewhere", to_snapshot(other.state, slots))]
    replan(world, [9])
    assert world.build(leaf, 3, source) == StageReady(NEXT)
    assert world.hosts[leaf].save() is None  # it does not know its weights yet
    assert world.build(home, 3, (), keeps=True) == StageReady(NEXT)
    world.lease(batches_of(token_batch, 1), 10)
    worker = world.hosts[leaf].stage.worker
    while not worker.tied._order.is_ready:
        assert worker.schedule.num_in_flight == 0
        world.run(num_steps=1)
    found = world.hosts[leaf].stage.worker.stage.snapshot()
    assert torch.equal(found.state[TIED], at_home.state[TIED])
    slots = [key for key in at_home.optimizer if key.endswith(TIED)]
    assert len(slots) == 3
    assert all(torch.equal(found.optimizer[key], at_home.optimizer[key]) for key in slots)
    world.lease(batches_of(token_batch, 4), 20)
    world.run()
    copies = world.copies(TIED)
    assert torch.equal(*copies)
    assert not torch.equal(copies[0], at_home.state[TIED])
