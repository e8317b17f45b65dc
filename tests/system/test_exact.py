"""Exact mode in the whole system, on virtual time: clusters of unlike cuts and speeds equal one process."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from torch import Tensor

import ravnest as rv
from ravnest.config import Averaging
from ravnest.hub.coordinator.events import Action, Event, Send, SendFields
from ravnest.hub.coordinator.leases import permute
from ravnest.hub.coordinator.notices import ClusterBroken, EpochDone, RoundEnded, WorkLost
from ravnest.ids import LeaseId, NodeId
from ravnest.plan.assembly import form_rings
from ravnest.plan.types import Cluster, ModelProfile, Plan, Stage, Swarm
from ravnest.protocol.averaging import RingPart, RoundCommit, RoundOpen, RoundReady
from ravnest.protocol.messages import Message
from ravnest.protocol.training import Activation, FieldParts, Gradient, LeaseDone, LeaseGrant
from tests.support.system_world import (
    NUM_VALIDATION,
    PLAN,
    Ended,
    Ledger,
    Pc,
    World,
    cross_entropy,
    make_mlp,
    make_points,
)

EXACT = replace(PLAN, averaging=Averaging.EXACT)
NUM_SAMPLES, BATCH, EPOCHS, SEED = 320, 16, 2, 5
SIX = (Pc(900e3, 1.0), Pc(900e3, 2.0), Pc(900e3, 1.0), Pc(900e3, 3.0), Pc(900e3, 1.0), Pc(900e3, 1.0))


def form_unlike(profile: ModelProfile, swarm: Swarm, _: object, seed: int, plan_id: int = 0) -> Plan:
    """Return clusters of one, two and three stages, as long as there are nodes; the rest are spares."""
    length, names = profile.num_positions, [node.name for node in swarm.nodes]
    clusters = []
    for cuts in ((), (length // 2,), (length // 3, 2 * length // 3)):
        bounds = (0, *cuts, length)
        if len(names) > len(cuts):
            nodes = [names.pop(0) for _ in range(len(bounds) - 1)]
            clusters.append(
                Cluster(tuple(Stage(*each) for each in zip(nodes, bounds, bounds[1:], strict=False)))
            )
    nodes = {node.name: node for node in swarm.nodes}
    return Plan(plan_id, seed, tuple(clusters), form_rings(tuple(clusters), nodes), tuple(names))


def make_exact_job(optimizer: str = "adamw") -> rv.Job:
    model = make_mlp(2, dropout=0.0)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "loss": cross_entropy, "seed": SEED}
    rates = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
    data, validation = make_points(NUM_SAMPLES, 1), make_points(NUM_VALIDATION, 2)
    return rv.Job(model, data, val_data=validation, **rates, **options)


@dataclass(frozen=True)
class Update:
    """An update that was committed: the samples in it, in no order, and its rate."""

    samples: tuple[int, ...]
    rate: float


@dataclass
class Updates(Ledger):
    """Sees from the hub's orders which samples are in each update."""

    made: list[Update] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        self._granted: dict[LeaseId, tuple[NodeId, int]] = {}  # to which root of which build
        self._shares: dict[tuple[NodeId, int], deque[Sequence[int]]] = {}  # that it is to train
        self._opened: dict[int, dict[tuple[NodeId, int], RoundOpen]] = {}  # by round

    def note(self, event: Event, orders: Iterable[Action]) -> None:
        super().note(event, orders)
        committed = set()
        for order in orders:
            match order:
                case Send(root, LeaseGrant(is_evaluation=False) as grant):
                    self._granted[grant.lease] = (root, grant.build_id)
                case SendFields(is_evaluation=False, lease=lease, samples=samples):
                    share = [sample for microbatch in samples for sample in microbatch]
                    self._shares.setdefault(self._granted[lease], deque()).append(share)
                case Send(name, RoundOpen(sums_gradients=True) as opened):
                    self._opened.setdefault(opened.round_id, {})[name, opened.build_id] = opened
                case Send(_, RoundCommit(round_id)) if round_id in self._opened:
                    committed.add(round_id)
        for round_id in committed:
            opened = self._opened.pop(round_id)
            shares = [
                self._shares[key]
                for key, each in opened.items()
                if each.num_microbatches and key in self._shares
            ]
            taken = [share.popleft() for share in shares]
            (rate,) = {each.rate for each in opened.values()}
            self.made.append(Update(tuple(sample for share in taken for sample in share), rate))

    @property
    def counted(self) -> Counter[int]:
        """How often each sample is in an update."""
        return Counter(sample for update in self.made for sample in update.samples)


def train_alone(updates: Iterable[Update]) -> dict[str, Tensor]:
    """Return the weights of one process that makes these updates."""
    model, data = make_mlp(2, dropout=0.0), make_points(NUM_SAMPLES, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in updates:
        samples = torch.tensor(update.samples)
        optimizer.param_groups[0]["lr"] = update.rate
        optimizer.zero_grad()
        cross_entropy(model(data["x"][samples]), {"y": data["y"][samples]}).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def plain_updates() -> list[Update]:
    """Return the updates of a plain loop over the data."""
    found = []
    for epoch in range(EPOCHS):
        order = permute(torch.arange(NUM_SAMPLES).numpy(), NUM_SAMPLES, SEED, epoch)
        found += [Update(tuple(map(int, each)), 1e-2) for each in torch.from_numpy(order).split(BATCH)]
    return found


@dataclass
class Told:
    """A run, and the updates that were made in it."""

    ended: Ended
    updates: Updates

    def check(self) -> None:
        """Every sample is counted, and in an update, once in each epoch; the weights are those updates."""
        counted = [(news.epoch, news.num_samples, news.num_dropped) for news in self.ended.of(EpochDone)]
        assert sorted(counted) == [(epoch + 1, NUM_SAMPLES, 0) for epoch in range(EPOCHS)]
        assert self.updates.counted == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
        assert self.ended.result is not None
        self.compare(train_alone(self.updates.made))

    def compare(self, weights: dict[str, Tensor]) -> None:
        assert self.ended.result is not None
        for name, tensor in weights.items():
            torch.testing.assert_close(self.ended.result.state[name], tensor, rtol=1e-4, atol=1e-5)


def run(pcs: Sequence[Pc] = SIX, **options) -> Told:
    world = World(make_exact_job(), pcs, plan=EXACT, form_plan=form_unlike, **options)
    world.ledger = updates = Updates()
    return Told(world.run(), updates)


def test_three_clusters_of_unlike_cuts_and_speeds_are_one_process() -> None:
    told = run()
    assert [len(cluster.stages) for cluster in told.ended.plan.clusters] == [1, 2, 3]
    assert told.ended.of(RoundEnded) == []
    told.check()
    told.compare(train_alone(plain_updates()))
    assert [sorted(each.samples) for each in told.updates.made] == [
        sorted(each.samples) for each in plain_updates()
    ]


Matches = Callable[[Message], bool]
MOMENTS: dict[str, Matches] = {
    "share": lambda message: isinstance(message, LeaseGrant) and not message.is_evaluation,
    "fields": lambda message: isinstance(message, FieldParts),
    "activation": lambda message: isinstance(message, Activation) and not message.is_evaluation,
    "gradient": lambda message: isinstance(message, Gradient),
    "share done": lambda message: isinstance(message, LeaseDone),
    "round": lambda message: isinstance(message, RoundOpen),
    "ring": lambda message: isinstance(message, RingPart),
    "vote": lambda message: isinstance(message, RoundReady),
    "commit": lambda message: isinstance(message, RoundCommit),
}


@pytest.mark.parametrize("num_spares", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_inside_a_batch_loses_nothing(moment: str, num_spares: int) -> None:
    random = Random(f"{moment} {num_spares}")
    num_left, kills_receiver = random.randint(5, 40), random.random() < 0.5
    victims: list[NodeId] = []

    def leaving(world: World, sender: NodeId, to: NodeId, message: Message) -> Sequence[float]:
        nonlocal num_left
        if MOMENTS[moment](message):
            num_left -= 1
            victim = to if sender == "hub" or (kills_receiver and to != "hub") else sender
            if num_left <= 0 and not victims and victim in world.alive:
                victims.append(victim)
                world.kill(victim, is_silent=random.random() < 0.3)
        return (0.0,)

    told = run((*SIX, *[Pc(900e3)] * num_spares), leaving=leaving, limit_seconds=300)
    assert len(victims) == 1
    assert told.ended.of(WorkLost) == []
    assert told.ended.of(ClusterBroken)
    told.check()
