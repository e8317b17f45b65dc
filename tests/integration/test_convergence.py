"""Four stages that never wait for each other reach the loss of synchronous training at equal samples."""

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ravnest.config import OptimizerKind as OptimizerName
from ravnest.engine.recipe import make_settings
from ravnest.engine.staleness import StalenessPolicy
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.profile import find_matrices
from ravnest.protocol.training import LearningRate, Pace, StepReport
from ravnest.requester.lr_schedules import cosine, factors
from ravnest.transfer.outbox import Outgoing
from tests.support.model_zoo import Block, token_loss
from tests.support.worker_world import ClusterWorld

NUM_STAGES = 4
LENGTH, WIDTH, BATCH_SIZE = 32, 64, 32
NUM_UPDATES = 200
RATE = 16e-3  # the best for synchronous training of this length: a lower one hides what lag costs
POLICY = StalenessPolicy(planned_updates=NUM_UPDATES, max_lag=1)
MICROBATCHES, WINDOW = 4, 4  # as many in flight as keep four equal stages busy

BATCHES_PER_LEASE = 400


class ByteGpt(nn.Module):
    """One block for each stage; the head is not tied, so that stages exchange nothing but batches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 4, dropout=0.0) for _ in range(NUM_STAGES)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def draw_batches(count: int, size: int, *, is_held_out: bool) -> list[dict[str, Tensor]]:
    """Return batches from the standard library's sources; every tenth file is held out."""
    files = enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    text = b"".join(file.read_bytes() for index, file in files if (index % 10 == 0) == is_held_out)
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(corpus) - LENGTH, (count, size, 1), generator=generator)
    pieces = corpus[starts + torch.arange(LENGTH + 1)].long()
    return [{"ids": piece[:, :-1].contiguous(), "y": piece[:, 1:].contiguous()} for piece in pieces]


def make_world(captured: Captured, num_stages: int, window: int, accumulate: int) -> ClusterWorld:
    """Return a cluster cut before blocks, with the default recipe and its schedule of rates."""
    whole = captured.blueprint
    states = [
        {entry.name for entry in slice_blueprint(whole, position, position + 1).state}
        for position in range(whole.num_positions)
    ]
    firsts = [f"blocks.{number}.norm_attention.weight" for number in range(1, num_stages)]
    cuts = [next(position for position, names in enumerate(states) if name in names) for name in firsts]
    shapes = {entry.name: entry.shape for entry in whole.state if entry.is_trainable}
    settings = make_settings(OptimizerName.MUON, RATE, shapes, find_matrices(whole), NUM_UPDATES)
    world = ClusterWorld(captured, cuts, settings, window, accumulate, synchronous=True)
    for update, factor in enumerate(factors(cosine(warmup=0.05), NUM_UPDATES)):
        for node in world.nodes:
            world.post(Outgoing(node, LearningRate(1, update, RATE * factor)))
    return world


def train(world: ClusterWorld, batches: list[dict[str, Tensor]], first: int = 0) -> None:
    for begin in range(0, len(batches), BATCHES_PER_LEASE):
        world.lease(batches[begin : begin + BATCHES_PER_LEASE], first + begin)
    world.run()


def evaluate(world: ClusterWorld) -> float:
    world.at_hub.clear()
    batches = draw_batches(8, 128, is_held_out=True)
    world.lease(batches, first=NUM_UPDATES * MICROBATCHES, is_evaluation=True)
    world.run()
    return sum(world.losses()) / len(batches)


def cut(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the microbatches of a batch."""
    parts = {name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}
    return [{name: parts[name][index] for name in parts} for index in range(MICROBATCHES)]


@pytest.mark.timeout(900)
def test_stages_that_run_ahead_reach_the_synchronous_loss_within_one_percent() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = draw_batches(NUM_UPDATES, BATCH_SIZE, is_held_out=False)
    captured = capture(ByteGpt(), batches[0], token_loss, name="gpt")

    together = make_world(captured, 1, window=1, accumulate=1)
    train(together, batches)
    synchronous = evaluate(together)

    ahead = make_world(captured, NUM_STAGES, MICROBATCHES, MICROBATCHES)
    small = [part for batch in batches for part in cut(batch)]
    start = POLICY.synchronous_updates * MICROBATCHES
    train(ahead, small[:start])
    for node in ahead.nodes:
        pace = Pace(1, POLICY.synchronous_updates, WINDOW, MICROBATCHES, False)
        assert not ahead.deliver(node, pace, sender=ahead.nodes[0]), "the root sets the pace"
    train(ahead, small[start:], first=start)
    lags = [report.lag for report in ahead.at_hub if isinstance(report, StepReport)]
    asynchronous = evaluate(ahead)
    torch.set_num_threads(num_threads)

    assert [worker.stage.version for worker in ahead.workers.values()] == [NUM_UPDATES] * NUM_STAGES
    assert max(lags) == POLICY.lag_bound(NUM_UPDATES)
    assert synchronous < 2.1  # it has learned: one byte after another alone is worth 2.5
    # Measured 1.0060; with the prediction reversed 1.0101, which this bound only just tells apart.
    assert asynchronous <= 1.01 * synchronous
