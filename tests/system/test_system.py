"""The whole system in one process on virtual time: the same seed gives the same bits, whoever dies.

Golden curves: `python -m tests.support.system_world` writes tests/golden/system.json anew; when they move,
the lab log says why.
"""

import asyncio
import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load, save

import ravnest as rv
from ravnest.config import TIMEOUTS, Averaging
from ravnest.errors import RavnestError
from ravnest.hub.coordinator.leases import permute
from ravnest.hub.coordinator.notices import (
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    CutOff,
    EpochDone,
    Evaluated,
    Left,
    Measured,
    Missing,
    Notice,
    PlanFormed,
    Returned,
    RoundEnded,
    SamplesDropped,
    Trained,
    Waiting,
    WorkLost,
)
from ravnest.ids import NodeId
from ravnest.net.memory import Wire
from ravnest.peer.compute_protocol import Build, Delivered, ToCompute
from ravnest.protocol.averaging import RingPart, RoundCommit, RoundOpen
from ravnest.protocol.membership import Fact
from ravnest.protocol.placement import SnapshotOrder
from ravnest.protocol.training import Activation, LeaseGrant
from ravnest.requester.checkpoint_store import Checkpoints
from tests.support.effort import pick
from tests.support.system_world import (
    GOLDEN,
    NUM_VALIDATION,
    PLAN,
    SIX,
    Ended,
    Pc,
    World,
    cross_entropy,
    golden_worlds,
    make_job,
    make_mlp,
    make_points,
    prepare,
)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Ended]:
    return {name: world.run() for name, world in golden_worlds().items()}


def check_books(ended: Ended, job: rv.Job) -> None:
    """Every epoch counts each sample once, since training last began from the first weights."""
    lost = [index for index, news in enumerate(ended.news) if isinstance(news, WorkLost)]
    counted = [news for news in ended.news[lost[-1] if lost else 0 :] if isinstance(news, EpochDone)]
    num_samples = len(job.samples)
    assert sorted((news.epoch, news.num_samples, news.num_dropped) for news in counted) == [
        (epoch + 1, num_samples, 0) for epoch in range(job.epochs)
    ]
    assert ended.counts == dict.fromkeys(range(num_samples), job.epochs)
    evaluated = ended.of(Evaluated)
    assert {news.num_samples for news in evaluated} <= {NUM_VALIDATION}
    if job.val_data is not None:
        assert evaluated[-1].epoch == job.epochs


def check_result(ended: Ended, job: rv.Job) -> None:
    """What the swarm says of the trained model is what it does here."""
    assert ended.result is not None
    model = copy.deepcopy(job.model)  # the job's own has the first weights
    ended.result.load_into(model)
    with torch.no_grad():
        out = model.eval()(job.val_data["x"])
    assert ended.validation[-1] == pytest.approx(float(cross_entropy(out, job.val_data)), rel=1e-4)


def sizes(ended: Ended) -> list[int]:
    return sorted(len(cluster.stages) for cluster in ended.plan.clusters)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "microbatches"])
def test_six_peers_in_two_clusters_of_unlike_cuts_train_to_the_end(
    undisturbed: dict[str, Ended], kind: str
) -> None:
    ended, job = undisturbed[kind], golden_worlds()[kind].job
    assert sizes(ended) == {"mlp": [2, 3], "cnn": [2, 3], "microbatches": [3, 3]}[kind]
    cuts = [{stage.start for stage in cluster.stages} for cluster in ended.plan.clusters]
    assert kind == "microbatches" or cuts[0] != cuts[1]
    assert len(ended.plan.spares) == 6 - sum(sizes(ended))
    check_books(ended, job)
    check_result(ended, job)
    assert ended.validation[-1] < 1.38  # no better than nothing: ln 4
    assert kind == "microbatches" or ended.losses[-1] < 0.8 * ended.losses[0]
    rounds = ended.of(RoundEnded)
    assert [news.reason for news in rounds if not news.is_committed] == []
    assert len(rounds) >= 3
    assert rounds[-1].is_final


@pytest.mark.parametrize("kind", ["mlp", "cnn", "microbatches"])
def test_the_same_seed_gives_the_same_bits_at_the_same_times(
    undisturbed: dict[str, Ended], kind: str
) -> None:
    first, again = undisturbed[kind], golden_worlds()[kind].run()
    assert again.told == first.told
    assert first.result is not None
    assert again.result is not None
    assert again.result.state.keys() == first.result.state.keys()
    for name, tensor in first.result.state.items():
        assert torch.equal(again.result.state[name], tensor), name


@pytest.mark.parametrize("seed", [1, 2])
def test_other_delays_and_keys_train_as_well(undisturbed: dict[str, Ended], seed: int) -> None:
    world = replace(golden_worlds()["cnn"], wire=Wire(0.005 * seed, 1e6), seed=seed)
    ended = world.run()
    assert ended.told != undisturbed["cnn"].told
    check_books(ended, world.job)
    assert ended.validation[-1] == pytest.approx(undisturbed["cnn"].validation[-1], rel=0.2)


def test_the_losses_are_the_golden_ones(undisturbed: dict[str, Ended]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = {name: {"losses": e.losses, "validation": e.validation} for name, e in undisturbed.items()}
    assert found.keys() == golden.keys()
    for name, curves in golden.items():
        for curve, values in curves.items():
            assert found[name][curve] == pytest.approx(values, rel=1e-3), (name, curve)


def test_one_batch_at_a_time_is_training_in_one_process() -> None:
    model, data = make_mlp(dropout=0.0), make_points(160, 1)
    options = {"batch_size": 16, "epochs": 2, "loss": cross_entropy, "seed": 5}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = rv.Job(model, data, optimizer=optimizer, **options)
    ended = World(job, [Pc(52e3)] * 3, plan=replace(PLAN, max_window=1)).run()
    assert sizes(ended) == [3]
    assert {stage.window for cluster in ended.plan.clusters for stage in cluster.stages} == {1}

    alone = make_mlp(dropout=0.0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        order, total = torch.from_numpy(permute(torch.arange(160).numpy(), 160, 5, epoch)), 0.0
        for samples in order.split(16):
            optimizer.zero_grad()
            loss = cross_entropy(alone(data["x"][samples]), {"y": data["y"][samples]})
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * 16
        losses.append(total / 160)
    assert ended.losses == pytest.approx(losses, rel=1e-6)
    assert ended.result is not None
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ended.result.state[name], tensor, rtol=1e-6, atol=1e-7)


MOMENTS = {
    "formation": lambda item: isinstance(item, Build),
    "training": lambda item: _is(item, Activation, is_evaluation=False),
    "round": lambda item: _is(item, RoundOpen),
    "ring": lambda item: _is(item, RingPart),
    "commit": lambda item: _is(item, RoundCommit),
    "evaluation": lambda item: (
        _is(item, LeaseGrant, is_evaluation=True) or _is(item, Activation, is_evaluation=True)
    ),
    "keeping": lambda item: isinstance(item, SnapshotOrder),
}


def _is(item: ToCompute, kind: type, **facts: object) -> bool:
    if not isinstance(item, Delivered) or not isinstance(item.message, kind):
        return False
    return all(getattr(item.message, name) == value for name, value in facts.items())


@pytest.mark.parametrize("seed", range(1, pick(3, 10)))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_peer_that_dies_costs_its_cluster_not_the_job(moment: str, seed: int) -> None:
    is_silent = seed % 2 == 0
    num_left = Random(f"{moment} {seed}").randint(1, {"keeping": 2, "formation": 5}.get(moment, 8))
    victims: list[NodeId] = []

    def watch(world: World, name: NodeId, item: ToCompute) -> None:
        nonlocal num_left
        if MOMENTS[moment](item):
            num_left -= 1
            if num_left == 0:
                victims.append(name)
                world.kill(name, is_silent=is_silent)

    job = make_job("mlp", epochs=2)
    ended = World(job, SIX, seed=seed, watch=watch, limit_seconds=120).run()
    assert len(victims) == 1
    if moment not in ("formation", "keeping"):  # there it may be over before the death is noticed
        assert [news.node for news in ended.of(Left)] == victims
        assert len([*ended.of(ClusterBroken), *ended.of(ClusterDissolved)]) >= 1
    check_books(ended, job)
    check_result(ended, job)


def test_what_was_averaged_survives_a_death() -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, RoundEnded) and news.round_id == 3:
            world.kill(min(started, key=lambda each: len(each.nodes)).nodes[-1])  # the others can do without
        if isinstance(news, ClusterStarted):
            started.append(news)

    started: list[ClusterStarted] = []
    job = make_job("mlp")
    ended = World(job, SIX, hear=hear).run()
    assert len(ended.of(ClusterDissolved)) == 1
    assert len(ended.of(PlanFormed)) == 1
    assert ended.of(WorkLost) == []
    check_books(ended, job)
    check_result(ended, job)
    assert ended.losses[-1] < 0.8 * ended.losses[0]


def test_when_nobody_can_hold_the_model_it_waits_and_says_so_until_somebody_can() -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, EpochDone) and not killed:
            killed.append(world.alive[0])
            world.kill(world.alive[0])
        if isinstance(news, Waiting):
            asyncio.get_running_loop().call_later(30.0, world.join, Pc(70e3))

    killed: list[NodeId] = []
    job = make_job("mlp", epochs=2)
    ended = World(job, [Pc(70e3)] * 3, hear=hear).run()
    reasons = [news.reason for news in ended.of(Waiting)]
    assert len(reasons) == 1
    assert "needs" in reasons[0]
    assert [news.num_samples for news in ended.of(WorkLost)] == [len(job.samples)]
    check_books(ended, job)
    check_result(ended, job)


def test_what_a_hub_waits_for_is_said_again_every_minute() -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, EpochDone) and not killed:
            killed.append(world.alive[0])
            world.kill(world.alive[0])
        if isinstance(news, Waiting) and not joins:
            joins.append(asyncio.get_running_loop().call_later(150.0, world.join, Pc(70e3)))

    killed: list[NodeId] = []
    joins: list[object] = []
    ended = World(make_job("mlp", epochs=2), [Pc(70e3)] * 3, hear=hear).run()
    assert ended.result is not None
    times = [at for at, news in ended.told if isinstance(news, Waiting)]
    assert [later - before for before, later in itertools.pairwise(times)] == pytest.approx([60.0, 60.0])


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("name", ["node2", "node5"])
def test_an_outage_within_the_grace_loses_nothing(name: str, seconds: float) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, EpochDone) and news.epoch == 1:
            world.isolate(NodeId(name), seconds)

    assert seconds < TIMEOUTS.hub.grace_seconds
    job = make_job("mlp")
    ended = World(job, SIX, hear=hear).run()
    assert ended.of(Left) == ended.of(WorkLost) == ended.of(ClusterDissolved) == []
    assert len(ended.of(PlanFormed)) == 1
    check_books(ended, job)
    check_result(ended, job)


@pytest.mark.parametrize(
    ("seconds", "resets"),
    [(2.0, True), (3.5, True), (4.5, True), (4.5, False), (8.0, False), (30.0, True), (300.0, False)],
)
def test_a_hub_whose_line_is_cut_keeps_its_peers_and_nothing_is_trained_again(
    seconds: float, resets: bool
) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.epoch == 2 and not cut:
            cut.append(world.now)
            world.isolate(NodeId("hub"), seconds, resets=resets)

    cut: list[float] = []
    job = make_job("mlp", num_samples=768, average_every=8)
    ended = World(job, SIX, hear=hear, limit_seconds=900).run()
    assert ended.of(Left) == ended.of(WorkLost) == ended.of(ClusterBroken) == []
    assert len(ended.of(PlanFormed)) == 1
    assert (seconds > 5.0) <= len(ended.of(CutOff)) <= (seconds > 4.0), "at 4.5 s it may be just over"
    assert {news.node for news in ended.of(Returned)} == {news.node for news in ended.of(Missing)}
    check_books(ended, job)
    check_result(ended, job)
    assert ended.seconds > cut[0] + seconds


def test_a_hub_whose_line_is_cut_while_it_collects_the_result_gets_it_later() -> None:
    def watch(world: World, _: NodeId, item: ToCompute) -> None:
        if isinstance(item, SnapshotOrder) and item.is_final and not cut:
            cut.append(world.now)
            world.isolate(NodeId("hub"), 200.0)

    cut: list[float] = []
    job = make_job("mlp", epochs=1)
    ended = World(job, SIX, watch=watch).run()
    assert ended.of(Left) == ended.of(WorkLost) == []
    check_books(ended, job)
    check_result(ended, job)


def test_a_hub_that_is_cut_off_for_too_long_goes_back_to_what_it_has_and_trains_with_who_comes() -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.epoch == 2 and not killed:
            killed.extend(world.alive)
            for name in killed:
                world.kill(name, is_silent=True)
        elif isinstance(news, WorkLost):
            for pc in SIX:
                world.join(pc)

    killed: list[NodeId] = []
    job = make_job("mlp", epochs=2)
    ended = World(job, SIX, hear=hear, limit_seconds=900).run()
    assert {news.node for news in ended.of(Left)} == {*killed}
    lost_at = next(at for at, news in ended.told if isinstance(news, Missing))
    assert next(at for at, news in ended.told if isinstance(news, Left)) == pytest.approx(
        lost_at + 603, abs=1
    )
    check_books(ended, job)


@pytest.mark.parametrize("returns", [True, False])
def test_a_job_that_is_stopped_while_its_hub_is_cut_off_ends_soon(returns: bool) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.epoch == 2 and not cut:
            cut.append(world.now)
            world.isolate(NodeId("hub"), 15.0 if returns else 900.0)
        elif isinstance(news, CutOff):
            world.stop()

    cut: list[float] = []
    world = World(make_job("mlp", num_samples=768), SIX, hear=hear, limit_seconds=900)
    if returns:
        ended = world.run()
        assert ended.result is not None
        assert ended.of(Left) == []
    else:
        with pytest.raises(RavnestError, match="stopped"):
            world.run()
        assert world.ended_at < cut[0] + 90.0


@pytest.mark.parametrize(("num_peers", "seconds"), [(1, 3.0), (2, 20.0)])
def test_a_newcomer_is_used_soon_by_a_hub_whose_peers_are_all_gone(num_peers: int, seconds: float) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, Trained) and news.epoch == 2 and not joined:
            for name in world.alive:
                world.kill(name, is_silent=True)
            asyncio.get_running_loop().call_later(50.0, join, world)
            joined.append(world.now + 50.0)

    def join(world: World) -> None:
        for _ in range(num_peers):
            world.join(Pc(400e3 / num_peers))

    joined: list[float] = []
    job = make_job("mlp", epochs=2)
    ended = World(job, [Pc(400e3 / num_peers)] * num_peers, hear=hear).run()
    times = [at - joined[0] for at, news in ended.told if isinstance(news, Left)]
    assert times == pytest.approx([seconds] * num_peers, abs=1.0)
    check_books(ended, job)


@pytest.mark.parametrize("averaging", [Averaging.OVERLAPPED, Averaging.BLOCKING])
def test_a_slow_peer_holds_others_back_no_longer_than_a_rounds_deadline(averaging: Averaging) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, ClusterStarted):
            started[news.cluster] = news.nodes
        if isinstance(news, ClusterStarted) and len(started) == 2:
            healthy.extend(started["A"])
            for other in ("hub", *world.alive):
                slow = Wire(0.01, 3e3)
                world.network.set_wire(world.peer(started["B"][-1]), world.peer(other), slow)

    def watch(world: World, name: NodeId, item: ToCompute) -> None:
        if _is(item, RoundOpen):
            deadlines.append(item.message.deadline_seconds)
        if name in healthy and _is(item, Activation):
            worked_at.append(world.now)

    started: dict[str, tuple[NodeId, ...]] = {}
    healthy: list[NodeId] = []
    deadlines: list[float] = []
    worked_at: list[float] = []
    job = make_job("mlp", epochs=2, validates=False)
    ended = World(job, SIX, plan=replace(PLAN, averaging=averaging), hear=hear, watch=watch).run()
    check_books(ended, job)
    longest = max(after - before for before, after in itertools.pairwise(worked_at))
    if averaging is Averaging.BLOCKING:
        assert 1.0 < longest < max(deadlines) + 1.0
    else:
        assert longest < 1.0  # who trains on meanwhile is not held back at all


def cut_link(world: World, one: NodeId, other: NodeId) -> None:
    """Let nothing that is sent between two peers arrive before everything is over."""
    world.network.set_wire(world.peer(one), world.peer(other), Wire(1e6))


@pytest.mark.parametrize("num_spare", [0, 1])
def test_two_neighbours_without_a_link_cost_one_of_them_not_the_job(num_spare: int) -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, PlanFormed) and not pair:
            pair.extend(stage.node for stage in news.plan.clusters[0].stages[:2])
            cut_link(world, pair[0], pair[1])

    pair: list[NodeId] = []
    job = make_job("mlp", epochs=2)
    ended = World(job, [Pc(70e3)] * (3 + num_spare), hear=hear, limit_seconds=120).run()
    (left,) = ended.of(Left)
    assert left.node in pair
    (other,) = set(pair) - {left.node}
    assert left.reason.startswith(
        f"no link to {other} for 20 s, so the two cannot train side by side; tried "
    )
    assert f"{other} (no answer within " in left.reason  # ever longer
    (broken,) = ended.of(ClusterBroken)
    assert left.node in broken.reason
    if num_spare:
        check_books(ended, job)
        check_result(ended, job)
    else:
        assert ended.result is None
        assert "needs" in ended.of(Waiting)[-1].reason


def test_clusters_without_a_link_between_them_train_on_each_by_itself() -> None:
    def hear(world: World, news: Notice) -> None:
        if isinstance(news, PlanFormed):
            sides = [[stage.node for stage in cluster.stages] for cluster in news.plan.clusters]
            for one, other in itertools.product(*sides):
                cut_link(world, one, other)

    job = make_job("mlp", epochs=2)
    ended = World(job, SIX, hear=hear).run()
    assert ended.seconds > 30
    assert ended.of(Left) == ended.of(ClusterDissolved) == []
    assert not any(news.is_committed for news in ended.of(RoundEnded))
    check_books(ended, job)


def test_a_peer_that_only_guesses_is_measured_on_its_way_in() -> None:
    job = make_job("tiny", num_samples=64, epochs=1)
    ended = World(job, [TINY_LARGE] * 2, wire=Wire(0.02, 2e6), guessed=(Fact.BANDWIDTH, Fact.LATENCY)).run()
    check_books(ended, job)
    measured = [news.node for news in ended.of(Measured)]
    assert {node.name for node in measured} == {"node1", "node2"}
    for node in measured:
        assert node.latency_seconds == pytest.approx(0.02, rel=0.1)
        assert node.upload_bytes_per_second == pytest.approx(2e6, rel=0.1)
        assert node.download_bytes_per_second == pytest.approx(2e6, rel=0.1)


TINY_SMALL, TINY_LARGE = Pc(50e3), Pc(130e3, 1.3)


def random_deeds(world: World, random: Random) -> None:
    """Let peers come, die and be cut off at random times."""
    loop = asyncio.get_running_loop()

    def act(deed: str) -> None:
        if deed == "join":
            world.join(random.choice((TINY_SMALL, TINY_LARGE)))
        elif world.alive:
            name = random.choice(world.alive)
            if deed == "outage":
                world.isolate(name, random.uniform(0.2, 9.0))
            else:
                world.kill(name, is_silent=deed == "power cut")

    for _ in range(random.randint(2, 6)):
        deed = random.choice(("reset", "power cut", "join", "join", "outage"))
        loop.call_later(random.uniform(0.0, random.choice((1, 3, 15))), act, deed)


@pytest.mark.parametrize("seed", range(pick(10, 100)))
def test_whoever_comes_and_goes_the_job_ends_or_says_what_it_waits_for(seed: int) -> None:
    random = Random(seed)
    job = make_job("tiny", num_samples=192, epochs=2, average_every=2)
    pcs = [random.choice((TINY_SMALL, TINY_LARGE)) for _ in range(random.randint(2, 6))]
    begun: list[World] = []

    def hear(world: World, _: Notice) -> None:
        if not begun:
            begun.append(world)
            random_deeds(world, random)

    wire = Wire(random.choice((0.002, 0.01, 0.1)))
    ended = World(job, pcs, hear=hear, wire=wire, seed=seed, limit_seconds=120).run()
    assert max(ended.counts.values(), default=0) <= job.epochs
    if ended.result is None:
        assert isinstance(ended.news[-1], Waiting)
    else:
        check_books(ended, job)
        check_result(ended, job)


@pytest.mark.parametrize("pcs", [SIX, [Pc(130e3)] * 3])
def test_the_best_weights_are_those_that_were_evaluated(pcs: Sequence[Pc], tmp_path: Path) -> None:
    data = make_points(64, 1)
    others = {"x": data["x"], "y": (data["y"] + 1) % 4}  # the more is learned, the worse it is for these
    facts = {"loss": cross_entropy, "optimizer": "adamw", "learning_rate": 1e-2}
    job = rv.Job(make_mlp(), data, val_data=others, batch_size=16, epochs=4, **facts)
    plan = replace(PLAN, averaging=Averaging.BLOCKING)  # no average arrives while it is evaluated
    ended = World(job, pcs, plan, checkpoint_every=1000.0, keeper=Checkpoints(tmp_path)).run()
    assert ended.result is not None
    best = ended.result.best
    assert best is not None
    if len(pcs) == len(SIX):  # of several clusters the first to evaluate has nobody who backs it
        assert best.loss in ended.validation[1:]
    else:
        assert best.loss == min(ended.validation) < ended.validation[-1]
    assert best.epoch in [news.epoch for news in ended.of(Evaluated) if news.loss == best.loss]
    assert best.metrics["val_loss"] == best.loss
    model = copy.deepcopy(job.model)
    best.load_into(model)
    with torch.no_grad():
        out = model.eval()(job.val_data["x"])
    assert best.loss == pytest.approx(float(cross_entropy(out, job.val_data)), rel=1e-4)
    best.export(tmp_path / "best.safetensors")


def test_means_of_weights_over_time_are_part_of_the_result(tmp_path: Path) -> None:
    facts = {"loss": cross_entropy, "optimizer": "adamw", "learning_rate": 1e-2}
    job = rv.Job(make_mlp(), make_points(64, 1), batch_size=16, epochs=4, ema=0.8, **facts)
    result = World(job, SIX, PLAN).run().result
    assert result is not None
    assert result.ema is not None
    model, mean = copy.deepcopy(job.model), copy.deepcopy(job.model)
    result.load_into(model)
    result.ema.load_into(mean)
    last, means, first = (list(each.state_dict().values()) for each in (model, mean, job.model))
    for one, other, begun in zip(last, means, first, strict=True):
        assert 0 < float((one - other).norm()) < float((one - begun).norm())
    result.ema.export(tmp_path / "ema.safetensors")


def test_a_checkpoint_takes_what_adafactor_keeps(tmp_path: Path) -> None:
    model = make_mlp()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    job = rv.Job(model, make_points(64, 1), batch_size=16, epochs=8, loss=cross_entropy, optimizer=optimizer)
    keeper = Checkpoints(tmp_path)
    assert World(job, SIX, PLAN, keeper=keeper).run().result is not None
    saved = keeper.find()
    assert saved is not None
    assert any("/row_var/" in tensor.name for tensor in saved.read())


def with_bad_rows(every: int) -> rv.Job:
    """Return a short job whose data goes bad when its model is captured: each so many rows are no numbers."""
    given = make_job("tiny", num_samples=64, epochs=2)
    data = {name: part.clone() for name, part in given.train_data.items()}
    facts = {"val_data": given.val_data, "loss": cross_entropy, "optimizer": "adamw", "learning_rate": 1e-2}
    job = rv.Job(given.model, data, batch_size=16, epochs=2, **facts)
    prepare(job, PLAN)
    data["x"][::every] = torch.nan
    return job


def test_a_run_in_which_everything_is_dropped_has_failed_and_says_why() -> None:
    world = World(with_bad_rows(1), [Pc(400e3)])
    with pytest.raises(
        RavnestError, match=r"all 128 samples were dropped, so nothing was trained: .*; look at"
    ):
        world.run()
    assert world.given.owner.result is None


def test_a_run_in_which_much_is_dropped_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ended = World(with_bad_rows(4), [Pc(400e3)], microbatches=16).run()
    assert ended.result is not None
    assert [news.num_dropped for news in ended.of(EpochDone)] == [16, 16]
    (warning,) = [each.message for each in caplog.records if "were dropped" in each.message]
    assert warning.startswith("warning: 32 of 128 samples were dropped and not trained (")


def test_state_that_lacks_something_or_is_not_finite_is_found_out() -> None:
    owner = prepare(make_job("mlp"), PLAN).owner
    weights = b"".join(owner.make_parts(0, 2).weights())
    tensors = load(weights)
    name = next(iter(tensors))
    assert owner.find_fault(0, 2, weights) == ""
    assert "is not finite" in owner.find_fault(0, 2, save(tensors | {name: tensors[name] * torch.nan}))
    assert "float64" in owner.find_fault(0, 2, save(tensors | {name: tensors[name].double()}))
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    assert f"it lacks {name!r}" in owner.find_fault(0, 2, save(others))
    assert "no safetensors" in owner.find_fault(0, 2, b"junk")


def test_bad_samples_cost_their_microbatches_and_are_named_and_no_peer_ends() -> None:
    train, validation = make_points(128, 1), make_points(NUM_VALIDATION, 2)
    train["y"][78], train["x"][100, 3], validation["y"][40] = 9, float("nan"), -7
    job = rv.Job(
        make_mlp(), train, val_data=validation, batch_size=16, epochs=4, loss=cross_entropy, optimizer="adamw"
    )
    ended = World(job, SIX).run()
    assert ended.result is not None
    assert ended.of(Left) == []
    assert sorted((news.is_evaluation, news.samples, news.reason) for news in ended.of(SamplesDropped)) == [
        (False, (78,), "IndexError: Target 9 is out of bounds"),
        (False, (100,), "'x' has a number that is NaN"),
        (True, (40,), "IndexError: Target -7 is out of bounds"),
    ]
    epochs = {news.epoch: news.num_dropped for news in ended.of(EpochDone)}
    assert epochs[1] in (16, 32)  # one batch may have both
    assert epochs[4] == 0  # others take their places
    assert {news.num_samples for news in ended.of(Evaluated)} == {NUM_VALIDATION - 16}
