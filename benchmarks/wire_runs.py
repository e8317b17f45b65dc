"""Trains a model in one process as eight stages would: what crosses a cut goes through the product's codec.

Stages see weights that are some updates old, the more the nearer they are to the root, and predict them where
the recipe does. Each stage has an optimizer of its own, as in a peer.
"""

import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.wire_models import NUM_STAGES, SIZES, Batch, Corpus, Size, build_stages, find_loss, shrink
from ravnest.codec import describe, pack_tensor, unpack_tensor
from ravnest.config import OptimizerKind, WireFormat
from ravnest.engine.optimizers import Optimizer
from ravnest.engine.recipe import choose_rate, make_settings
from ravnest.protocol.messages import Refusal
from ravnest.requester.lr_schedules import cosine

FORMATS = {
    "fp32": (WireFormat.FP32, WireFormat.FP32),
    "bf16": (WireFormat.BF16, WireFormat.BF16),
    "int8": (WireFormat.INT8, WireFormat.INT8),
    "int8-int4": (WireFormat.INT8, WireFormat.INT4_STOCHASTIC),
    "int4": (WireFormat.INT4_CHANNELS, WireFormat.INT4_STOCHASTIC),
    "int4-nearest": (WireFormat.INT4, WireFormat.INT4),  # what must not be: both rounded to the nearest
}
_NUM_VALIDATION = 12  # batches
_WARMUP = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a model, how it is trained, and how numbers cross its cuts."""

    model: str
    optimizer: str
    lag: int
    formats: str
    seed: int
    updates: int
    is_tiny: bool = False

    @property
    def group(self) -> tuple[str, str, int]:
        """What its formats are compared within."""
        return self.model, self.optimizer, self.lag

    @property
    def size(self) -> Size:
        """The model's."""
        return shrink(SIZES[self.model]) if self.is_tiny else SIZES[self.model]


class OutOfTimeError(Exception):
    """The run would end too late."""


class _Crossing(torch.autograd.Function):
    """What happens to a tensor at a cut: forward in one format, its gradient back in the other."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, formats: tuple[WireFormat, WireFormat], key: tuple[int, ...]
    ) -> Tensor:
        ctx.gradients, ctx.key = formats[1], key
        return _pass_over(tensor, formats[0], key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _pass_over(gradient, ctx.gradients, ctx.key), None, None


def _pass_over(tensor: Tensor, wire_format: WireFormat, key: tuple[int, ...]) -> Tensor:
    if wire_format is WireFormat.FP32:
        return tensor.view_as(tensor)
    return unpack_tensor(pack_tensor(tensor, wire_format, key), describe(tensor, wire_format))


class _StageWeights:
    """The weights of one stage: the newest are updated, those of `lag` updates ago run."""

    def __init__(self, module: nn.Module, run: Run, index: int) -> None:
        self._lag = round(run.lag * (NUM_STAGES - 1 - index) / (NUM_STAGES - 1))
        self._parameters = dict(module.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        ends = ("embed.weight", "places", "head.weight")
        matrices = [name for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(ends)]
        kind = OptimizerKind(run.optimizer)
        rate = run.size.rate if kind is OptimizerKind.ADAMW else choose_rate(kind, run.updates)
        settings = replace(make_settings(kind, rate, shapes, matrices, run.updates), clip=1.0)
        self._rate = rate
        self._newest = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        self._optimizer = Optimizer(settings, self._newest)
        self._versions = deque([self._newest] * (self._lag + 1), maxlen=self._lag + 1)
        self.num_refused = 0

    def run_old(self) -> None:
        """Let the module compute with the weights that this stage would have."""
        for name, tensor in self._versions[0].items():
            self._parameters[name].data = tensor

    def run_newest(self) -> None:
        """Let the module compute with the newest weights, to be validated."""
        for name, tensor in self._newest.items():
            self._parameters[name].data = tensor

    def update(self, factor: float) -> None:
        """Apply the gradients that a backward left."""
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, name
            gradients[name], parameter.grad = parameter.grad, None
        rate = self._rate * factor
        changed = self._optimizer.step(self._newest, gradients, rate, self._lag, held=self._newest)
        if isinstance(changed, Refusal):
            self.num_refused += 1
            return
        self._newest = changed
        self._versions.append(changed | self._optimizer.take_predicted())


class _Trainee:
    """A model, its stages' weights and the wire between them."""

    def __init__(self, run: Run, device: str) -> None:
        self.run, self.device = run, device
        self.stages = build_stages(run.size, run.seed).to(device)
        if run.model == "conv":
            self.stages.to(memory_format=torch.channels_last)
        self.weights = [_StageWeights(stage, run, index) for index, stage in enumerate(self.stages)]
        self.formats = FORMATS[run.formats]

    def find_loss(self, batch: Batch, formats: tuple[WireFormat, WireFormat], update: int) -> Tensor:
        tensor = batch[0]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            for index, stage in enumerate(self.stages):
                if index:
                    tensor = _Crossing.apply(tensor, formats, (self.run.seed, update, index))
                tensor = stage(tensor)
        return find_loss(tensor, batch[1], batch[2])

    @torch.no_grad()
    def validate(self, corpus: Corpus, formats: tuple[WireFormat, WireFormat]) -> float:
        """Return the mean loss over the same batches for every run."""
        self.stages.eval()
        for weights in self.weights:
            weights.run_newest()
        generator = torch.Generator().manual_seed(12_345)
        count = 1 if self.run.is_tiny else _NUM_VALIDATION
        batches = (corpus.draw(self.run.size, "validation", generator) for _ in range(count))
        losses = [self.find_loss(batch, formats, -1) for batch in batches]
        self.stages.train()
        return float(torch.stack(losses).mean())


def train(run: Run, corpus: Corpus, device: str, deadline: float) -> dict[str, object]:
    """Train one model; return what is written down of it. `deadline` is a time of time.time()."""
    started = time.time()
    trainee = _Trainee(run, device)
    generator = torch.Generator().manual_seed(1_000_003 + run.seed)
    schedule = cosine(warmup=_WARMUP, final=0.0)
    losses = []
    for update in range(run.updates):
        if update % 10 == 0 and time.time() > deadline:
            raise OutOfTimeError(f"{run} was cut short after {update} updates")
        for weights in trainee.weights:
            weights.run_old()
        loss = trainee.find_loss(corpus.draw(run.size, "train", generator), trainee.formats, update)
        loss.backward()
        factor = schedule.factor(update, run.updates)
        for weights in trainee.weights:
            weights.update(factor)
        losses.append(loss.detach())
    tail = losses[-max(1, run.updates // 10) :]
    plain = (WireFormat.FP32, WireFormat.FP32)
    return {
        **asdict(run),
        "bits": [each.bits for each in trainee.formats],
        "parameters": sum(tensor.numel() for tensor in trainee.stages.parameters()),
        "train": float(torch.stack(tail).mean()),
        "validation": trainee.validate(corpus, trainee.formats),
        "without_wire": trainee.validate(corpus, plain),
        "refused": sum(weights.num_refused for weights in trainee.weights),
        "seconds": round(time.time() - started, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
