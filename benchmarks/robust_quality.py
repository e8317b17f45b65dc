"""What robust rounds cost honest clusters: the loss after training with them, against plain rounds.

    python -m benchmarks.robust_quality

A small network learns the digits; clusters share each batch, average every five updates and stand still
meanwhile. Changes are encoded, averaged and committed by the code that ships. Seeds draw data, weights and
batches; a pair of runs differs in nothing but the mean.
"""

import argparse
import statistics
from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import say, table
from ravnest.averaging.direct import Row
from ravnest.averaging.ring import RingPosition, RingReduce
from ravnest.config import Mean, WireFormat
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.train_config import TrainConfig
from ravnest.ids import RoundId, SegmentId
from ravnest.model.state.state_dict import FlatEntry, Layout
from ravnest.peer.segments import EncodedChunk, SegmentState
from ravnest.protocol.messages import Refusal

NUM_UPDATES, BATCH, RATE, UPDATES_BETWEEN = 400, 64, 3e-3, 5
LIMIT = 0.003  # of the loss
Pieces = Sequence[EncodedChunk]


class _Adam:
    def __init__(self, size: int) -> None:
        self._first, self._second, self._count = torch.zeros(size), torch.zeros(size), 0

    def step(self, gradient: Tensor, rate: float) -> Tensor:
        self._count += 1
        self._first.mul_(0.9).add_(gradient, alpha=0.1)
        self._second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        first, second = self._first / (1 - 0.9**self._count), self._second / (1 - 0.99**self._count)
        return first.div_(second.sqrt_().add_(1e-8)).mul_(-rate)


class _Swarm:
    """Clusters of one member each, with the same weights."""

    def __init__(self, weights: Tensor, count: int, mean: Mean, wire_format: WireFormat) -> None:
        layout = Layout(0, 1, (FlatEntry("w", (len(weights),), "float32", 0, 0),))
        training = TrainConfig(OptimizerSettings((), 0.0), 1, deltas=wire_format)
        given = (layout, (), training, "cpu")
        self.members = [SegmentState(*given, {"w": weights.clone()}) for _ in range(count)]
        self.live = [weights.clone() for _ in range(count)]
        self._mean, self._all = mean, slice(0, len(weights))

    def average(self, weight: float) -> None:
        for member, live in zip(self.members, self.live, strict=True):
            assert member.open({"w": live}, {}, weight, len(self.members)) is None
        found = self._robust(weight) if self._mean is Mean.ROBUST else self._ring(weight)
        for member, live in zip(self.members, self.live, strict=True):
            live += member.commit(found, 1.0, {"w": live}, {}, True)["w"]

    def _robust(self, weight: float) -> Pieces:
        rows = [Row(member.contribute(self._all), weight, 1.0) for member in self.members]
        return (self.members[0].combine(self._all, rows),)

    def _ring(self, weight: float) -> Pieces:
        count = len(self.members)
        rings = [
            RingReduce(RingPosition(RoundId(1), SegmentId(0), place, count), member, weight, 1 << 20)
            for place, member in enumerate(self.members)
        ]
        waiting = deque(
            ((place + 1) % count, part) for place in range(count) for part in rings[place].start()
        )
        while waiting:
            place, part = waiting.popleft()
            passed = rings[place].receive(part)
            assert not isinstance(passed, Refusal)
            waiting += [] if passed is None else [((place + 1) % count, passed)]
        return rings[0].pieces


def train(count: int, mean: Mean, wire_format: WireFormat, seed: int) -> tuple[float, float]:
    """Return the loss on samples that were not trained, and on those that were."""
    from sklearn import datasets  # type: ignore[import-untyped]

    data = datasets.load_digits()
    inputs, targets = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = list(model.parameters())
    order = torch.randperm(len(inputs), generator=chance)
    held, trained = order[:400], order[400:]
    weights = nn.utils.parameters_to_vector(parameters).detach()
    swarm = _Swarm(weights, count, mean, wire_format)
    optimizers = [_Adam(len(weights)) for _ in range(count)]
    share = BATCH // count
    for update in range(NUM_UPDATES):
        batch = trained[torch.randint(0, len(trained), (share * count,), generator=chance)]
        for number in range(count):
            chosen = batch[number * share : (number + 1) * share]
            nn.utils.vector_to_parameters(swarm.live[number], parameters)
            loss = F.cross_entropy(model(inputs[chosen]), targets[chosen])
            gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
            swarm.live[number] += optimizers[number].step(gradient, RATE * (1 - update / NUM_UPDATES))
        if (update + 1) % UPDATES_BETWEEN == 0:
            swarm.average(float(share * UPDATES_BETWEEN))
    nn.utils.vector_to_parameters(swarm.live[0], parameters)
    with torch.no_grad():
        found = [float(F.cross_entropy(model(inputs[x]), targets[x])) for x in (held, trained)]
    return found[0], found[1]


def compare(count: int, wire_format: WireFormat, seeds: Sequence[int]) -> list[float | str]:
    """Return a row: mean losses, and the mean ratio of pairs with its standard error."""
    runs = {
        mean: [train(count, mean, wire_format, seed) for seed in seeds] for mean in (Mean.PLAIN, Mean.ROBUST)
    }
    row: list[float | str] = []
    for place in (0, 1):
        plain, robust = ([each[place] for each in runs[mean]] for mean in (Mean.PLAIN, Mean.ROBUST))
        ratios = [b / a - 1 for a, b in zip(plain, robust, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        row += [round(statistics.mean(plain), 4), round(statistics.mean(robust), 4)]
        row += [f"{statistics.mean(ratios):+.2%} (error {error:.2%})"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)
    rows = []
    for count in (4, 8):
        for wire_format in (WireFormat.FP32, WireFormat.INT4):
            rows.append([count, wire_format, *compare(count, wire_format, seeds)])
            say(f"{rows[-1]}")
    head = ["clusters", "deltas"]
    head += [
        f"{kind} {what}" for kind in ("held out", "trained") for what in ("plain", "robust", "difference")
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
