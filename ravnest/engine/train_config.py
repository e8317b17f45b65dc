"""How a stage is trained, as data that travels beside its blueprint: known words and bounded numbers."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ravnest.config import (
    DELTA_FORMATS,
    EXACT_FORMATS,
    StateFormat,
    WeightFormat,
    WireFormat,
    with_known_settings,
)
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
from ravnest.errors import UnsafeBlueprint
from ravnest.foreign import Document, parse_json, quote

_MOST_BYTES = 4 << 20
_MOST_UPDATES = 1 << 40
_MOST_LAG = 64
_MOST_OUTER = 10.0
_MOST_SAMPLES = 1 << 20
_Number = Annotated[float, Meta(ge=-1e30, le=1e30)]  # NaN is not within any bounds
_RULES: dict[str, type[OptimizerRule]] = {
    "sgd": Sgd,
    "adam": Adam,
    "fused": FusedAdam,
    "nadam": NAdam,
    "muon": Muon,
    "rmsprop": RmsProp,
    "adagrad": Adagrad,
    "adafactor": Adafactor,
    "lion": Lion,
}


Precision = Literal["auto", "fp32", "bf16"]


@with_known_settings
@dataclass(frozen=True, slots=True)
class AveragingRule:
    """What a round does besides the plain mean: nothing, unless asked.

    `momentum` averages first moments too. With `outer_rate` and `outer_momentum` the mean change is a step of
    Nesterov's descent. `clip` shortens a contribution to so many times the length of the last mean change.
    `is_trimmed` leaves the smallest and the largest of four clusters or more out of the mean of each number.
    """

    momentum: bool = False
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    clip: float | None = None
    is_trimmed: bool = False

    def __post_init__(self) -> None:
        for name, is_good, wanted in (
            ("outer_rate", 0 < self.outer_rate <= _MOST_OUTER, f"above 0, at most {_MOST_OUTER:g}"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "0 or more, below 1"),
            ("clip", self.clip is None or self.clip > 0, "above 0, or None"),
        ):
            if not is_good:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number {wanted}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What every stage of a job does alike: optimizer, size of batches, precision, how far ahead it may run.

    `planned_updates` are those of the whole job, which its clusters share; 0 is unknown. `max_lag` caps how
    many updates late a gradient may be.
    """

    optimizer: OptimizerSettings
    batch_size: int
    precision: Precision = "fp32"
    planned_updates: int = 0
    max_lag: int | None = None
    deltas: WireFormat = WireFormat.FP32  # changes of weights, in rounds
    averaging: AveragingRule = AveragingRule()
    exact_gradients: WireFormat = WireFormat.FP32  # of exact updates, in gradient rounds


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    rule: str
    values: dict[str, bool | _Number | str | None]
    weight_decay: _Number
    is_decoupled: bool
    rate: _Number


class _TrainConfig(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[_Group]
    learning_rate: _Number
    clip: _Number | None
    clip_norm: Annotated[float, Meta(gt=0.0, le=1e30)] | None
    ema: Annotated[float, Meta(gt=0.0, lt=1.0)] | None
    has_prediction: bool
    lag_updates: Annotated[int, Meta(ge=0, le=_MOST_UPDATES)]
    versions: WeightFormat
    states: StateFormat
    batch_size: Annotated[int, Meta(ge=1, le=_MOST_SAMPLES)]
    precision: Precision
    planned_updates: Annotated[int, Meta(ge=0, le=_MOST_UPDATES)]
    max_lag: Annotated[int, Meta(ge=0, le=_MOST_LAG)] | None
    deltas: WireFormat
    averaging: AveragingRule
    exact_gradients: WireFormat


def write_train_config(training: TrainConfig, names: frozenset[str]) -> bytes:
    """Return the JSON for a stage that holds these parameters."""
    kinds = {kind: word for word, kind in _RULES.items()}
    settings = training.optimizer
    groups = [
        _Group(
            names=[name for name in group.names if name in names],
            rule=kinds[type(group.rule)],
            values=asdict(group.rule),
            weight_decay=group.weight_decay,
            is_decoupled=group.is_decoupled,
            rate=group.rate,
        )
        for group in settings.groups
    ]
    return msgspec.json.encode(
        _TrainConfig(
            groups=[group for group in groups if group.names],
            learning_rate=settings.learning_rate,
            clip=settings.clip,
            clip_norm=settings.clip_norm,
            ema=settings.ema,
            has_prediction=settings.has_prediction,
            lag_updates=settings.lag_updates,
            versions=settings.versions,
            states=settings.states,
            batch_size=training.batch_size,
            precision=training.precision,
            planned_updates=training.planned_updates,
            max_lag=training.max_lag,
            deltas=training.deltas,
            averaging=training.averaging,
            exact_gradients=training.exact_gradients,
        )
    )


def read_train_config(data: bytes) -> TrainConfig:
    """Return what the JSON says, or refuse it with the reason."""
    document = parse_json(data, "the training settings", _MOST_BYTES, UnsafeBlueprint)
    read = document.read_as(_TrainConfig)
    document.refuse_unknown(("averaging",), AveragingRule.__dataclass_fields__)
    if read.states is StateFormat.AUTO:
        document.refuse(("states",), "is auto; the hub's side chooses before it asks others to train")
    if read.deltas not in DELTA_FORMATS:
        document.refuse(("deltas",), f"is {read.deltas}; choose one of {', '.join(DELTA_FORMATS)}")
    if read.exact_gradients not in EXACT_FORMATS:
        document.refuse(
            ("exact_gradients",), f"is {read.exact_gradients}; choose {' or '.join(EXACT_FORMATS)}"
        )
    groups = tuple(_read_group(document, index, group) for index, group in enumerate(read.groups))
    optimizer = OptimizerSettings(
        groups,
        read.learning_rate,
        read.clip,
        read.has_prediction,
        read.lag_updates,
        read.versions,
        read.states,
        read.clip_norm,
        read.ema,
    )
    return TrainConfig(
        optimizer,
        read.batch_size,
        read.precision,
        read.planned_updates,
        read.max_lag,
        read.deltas,
        read.averaging,
        read.exact_gradients,
    )


def _read_group(document: Document, index: int, group: _Group) -> Group:
    place = ("groups", index)
    if group.rule not in _RULES:
        document.refuse((*place, "rule"), f"is {quote(group.rule)}; choose one of {', '.join(_RULES)}")
    kind = _RULES[group.rule]
    document.refuse_unknown((*place, "values"), kind.__dataclass_fields__)
    values = Document(group.values, f"{document.where}: groups[{index}].values", UnsafeBlueprint)
    rule: OptimizerRule = values.read_as(kind)
    return Group(tuple(group.names), rule, group.weight_decay, group.is_decoupled, group.rate)
