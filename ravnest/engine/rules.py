"""How parameters are updated, as data: a rule for each group of them. Applied by engine.optimizers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain descent, with momentum and Nesterov's look-ahead if asked."""

    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam; with decoupled weight decay it is AdamW."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True, slots=True)
class FusedAdam(Adam):
    """Adam by torch's fused kernel: less than half the time on a CPU, but the last bits are other ones."""


@dataclass(frozen=True, slots=True)
class NAdam(Adam):
    """Adam with Nesterov's look-ahead, which gives the fresh gradient more weight."""

    momentum_decay: float = 4e-3


@dataclass(frozen=True, slots=True)
class Muon:
    """Momentum made orthogonal by Newton-Schulz, for matrices and for filters flattened to matrices.

    `matches_adam` gives updates the size of Adam's, so that both share one learning rate. `precision`
    "auto" is float32 on a CPU, where bfloat16 may be fifty times slower, and bfloat16 elsewhere.
    """

    momentum: float = 0.95
    nesterov: bool = True
    epsilon: float = 1e-7
    matches_adam: bool = False
    precision: Literal["auto", "bfloat16", "float32"] = "bfloat16"


Rule = Sgd | Adam | Muon


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that one rule updates; `rate` is their part of the learning rate that the hub gives."""

    names: tuple[str, ...]
    rule: Rule
    weight_decay: float = 0.0
    is_decoupled: bool = False  # decay shrinks the weights, instead of being added to the gradient
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How a model is trained, by name: each stage uses what concerns its parameters. In no group: frozen."""

    groups: tuple[Group, ...]
    learning_rate: float
    clip: float | None = None  # largest norm of one tensor's gradient
    predicts: bool = False  # forward sees the weights expected when its gradient will be applied
    lag_updates: int = 0  # so long lag lowers the learning rate, less and less
