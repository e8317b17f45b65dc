"""Recipes: which optimizer trains which parameter; ours, and the user's own torch.optim.

The default recipe tolerates lag: Muon on matrices, NAdam on the rest, weights predicted over the measured
lag, each gradient clipped by itself. Its rate follows from the length of the job.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ravnest.config import OptimizerKind as OptimizerName
from ravnest.engine.optimizers import (
    Adafactor,
    Adagrad,
    Adam,
    FusedAdam,
    Group,
    Lion,
    Muon,
    NAdam,
    OptimizerRule,
    OptimizerSettings,
    RmsProp,
    Sgd,
)
from ravnest.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]

_SUPPORTED = ("SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adafactor", "Muon")
_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "dampening": 0,
    "initial_accumulator_value": 0,
    "ns_steps": 5,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
}
_DECAY = 0.1
_LION_DECAY = 1.0  # its rate is a tenth of AdamW's, so what decays in a step is the same
_RATES = {
    OptimizerName.SGD: 1e-2,
    OptimizerName.MOMENTUM: 1e-2,
    OptimizerName.ADAM: 1e-3,
    OptimizerName.ADAMW: 3e-3,
    OptimizerName.ADAMW_8BIT: 3e-3,
    OptimizerName.NADAM: 2e-3,
    OptimizerName.RMSPROP: 1e-3,
    OptimizerName.ADAGRAD: 1e-2,
    OptimizerName.ADAFACTOR: 1e-2,
    OptimizerName.LION: 3e-4,
    OptimizerName.MUON: 4e-3,
}
_CAREFUL_ADAMW = 1e-3  # trained weights are not moved far
_LONG_JOB = 4800  # updates; Muon's rate was tuned at this length
_MOST_RAISE = 5.0


def choose_rate(
    optimizer: OptimizerName, planned_updates: int = 0, *, has_trained_weights: bool = False
) -> float:
    """Return the rate of a recipe; 0 updates are an unknown number.

    A step of Muon is short, so a short job needs a higher rate for its weights to arrive; trained weights
    are near their place already.
    """
    if has_trained_weights and optimizer in (OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT):
        return _CAREFUL_ADAMW
    rate = _RATES[optimizer]
    if has_trained_weights or optimizer is not OptimizerName.MUON or planned_updates < 1:
        return rate
    return rate * min(max(math.sqrt(_LONG_JOB / planned_updates), 1.0), _MOST_RAISE)


def make_settings(
    optimizer: OptimizerName,
    learning_rate: float,
    shapes: Shapes,
    matrices: Collection[str],
    planned_updates: int = 0,
) -> OptimizerSettings:
    """Return the recipe of this name for the trainable parameters, given by their shapes."""
    match optimizer:
        case OptimizerName.SGD | OptimizerName.MOMENTUM:
            rule = Sgd(momentum=0.9 if optimizer is OptimizerName.MOMENTUM else 0.0)
            return OptimizerSettings((Group(tuple(shapes), rule),), learning_rate)
        case OptimizerName.ADAM:
            return OptimizerSettings((Group(tuple(shapes), Adam()),), learning_rate)
        case OptimizerName.ADAMW | OptimizerName.ADAMW_8BIT:
            return OptimizerSettings(_decay(shapes, Adam()), learning_rate)
        case OptimizerName.NADAM:
            # Without prediction, a long memory and a lower rate early on bear lag best.
            groups = _decay(shapes, NAdam(beta1=0.99, beta2=0.99))
            return OptimizerSettings(groups, learning_rate, clip=1.0, lag_updates=planned_updates // 2)
        case OptimizerName.RMSPROP | OptimizerName.ADAGRAD | OptimizerName.ADAFACTOR:
            plain: dict[OptimizerName, OptimizerRule] = {
                OptimizerName.RMSPROP: RmsProp(),
                OptimizerName.ADAGRAD: Adagrad(),
                OptimizerName.ADAFACTOR: Adafactor(),
            }
            return OptimizerSettings((Group(tuple(shapes), plain[optimizer]),), learning_rate)
        case OptimizerName.LION:
            return OptimizerSettings(_decay(shapes, Lion(), _LION_DECAY), learning_rate)
        case OptimizerName.MUON:
            wide = {name: shape for name, shape in shapes.items() if name in matrices}
            rest = {name: shape for name, shape in shapes.items() if name not in matrices}
            muon = Muon(momentum=0.95, matches_adam=True, precision="auto")
            groups = (*_decay(wide, muon), *_decay(rest, NAdam(beta1=0.95, beta2=0.99)))
            return OptimizerSettings(groups, learning_rate, clip=1.0, has_prediction=True)


def _decay(shapes: Shapes, rule: OptimizerRule, decay: float = _DECAY) -> tuple[Group, ...]:
    """Return groups in which biases and the gains of norms do not decay."""
    wide = tuple(name for name, shape in shapes.items() if len(shape) > 1)
    thin = tuple(name for name, shape in shapes.items() if len(shape) <= 1)
    groups = (Group(wide, rule, decay, is_decoupled=True), Group(thin, rule))
    return tuple(group for group in groups if group.names)


def base_rate(options: Mapping[str, Any], is_scheduled: bool = False) -> float:
    """Return the learning rate of a group; a schedule of torch has changed it already, and kept the first."""
    return float(options.get("initial_lr", options["lr"]) if is_scheduled else options["lr"])


def from_torch(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    *,
    is_scheduled: bool = False,
) -> OptimizerSettings:
    """Return the settings of the user's own optimizer, or optimizers, for the same tensors under our names.

    Learning rates stay in proportion to that of the first group, which the hub's schedule replaces.
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    names = {id(tensor): name for name, tensor in parameters.items()}
    found = [(_check_kind(one), options) for one in given for options in one.param_groups]
    rates = [base_rate(options, is_scheduled) for _, options in found]
    first_rate = rates[0] if rates else 0.0
    groups = [
        _read_group(kind, options, names, 1.0 if rate == first_rate else rate / first_rate)
        for (kind, options), rate in zip(found, rates, strict=True)
    ]
    if not any(group.names for group in groups):
        raise ConfigError("the optimizer has no parameter of this model; build it from model.parameters()")
    return OptimizerSettings(tuple(group for group in groups if group.names), first_rate)


def _check_kind(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    # A subclass may step differently, so it is not taken for its parent.
    if name in _SUPPORTED and type(optimizer) is getattr(torch.optim, name, None):
        return name
    given = name if name not in _SUPPORTED else f"{type(optimizer).__module__}.{name}"
    raise ConfigError(
        f"optimizer {given} is not supported; choose one of torch.optim: {', '.join(_SUPPORTED)}, "
        "or leave it out for the default recipe"
    )


Options = Mapping[str, Any]  # of one group of a torch optimizer


def _read_group(kind: str, options: Options, names: Mapping[int, str], rate: float) -> Group:
    for option, fixed in _FIXED.items():
        if (value := options.get(option, fixed)) != fixed:
            raise ConfigError(f"{option}={value} of torch.optim.{kind} is not supported; leave it out")
    return Group(
        names=tuple(names[id(tensor)] for tensor in options["params"] if id(tensor) in names),
        rule=_read_rule(kind, options),
        weight_decay=float(options["weight_decay"]),
        is_decoupled=kind in ("Muon", "Adafactor") or bool(options.get("decoupled_weight_decay")),
        rate=rate,
    )


def _read_rule(kind: str, options: Options) -> OptimizerRule:
    if kind == "SGD":
        return Sgd(float(options["momentum"]), bool(options["nesterov"]))
    if kind == "Muon":
        return Muon(
            momentum=float(options["momentum"]),
            nesterov=bool(options["nesterov"]),
            epsilon=float(options["eps"]),
            matches_adam=options["adjust_lr_fn"] == "match_rms_adamw",
        )
    if kind == "RMSprop":
        alpha, epsilon, momentum = (float(options[name]) for name in ("alpha", "eps", "momentum"))
        return RmsProp(alpha, epsilon, momentum, is_centered=bool(options["centered"]))
    if kind == "Adagrad":
        return Adagrad(float(options["eps"]), float(options["lr_decay"]))
    if kind == "Adafactor":
        least, least_scale = options["eps"]
        numbers = (None if least is None else float(least), float(least_scale), float(options["d"]))
        return Adafactor(float(options["beta2_decay"]), *numbers)
    beta1, beta2 = (float(beta) for beta in options["betas"])
    if kind == "NAdam":
        return NAdam(beta1, beta2, float(options["eps"]), float(options["momentum_decay"]))
    return (FusedAdam if options.get("fused") else Adam)(beta1, beta2, float(options["eps"]))
