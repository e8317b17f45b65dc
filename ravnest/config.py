"""Every knob on one page, as frozen records read from TOML tables; an unknown key is an error.

Measure or derive before adding a knob. `ravnest plan --set KEY=VALUE` and the `[plan]` table of a
TOML file set the fields of PlanConfig by the names below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Literal

import msgspec

from ravnest.foreign import Document, Quantity, parse_table, quote
from ravnest.units import Dimension


class WireFormat(StrEnum):
    """How numbers travel. int8 and int4 carry one 4-byte scale per 256 values."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def ratio(self) -> float:
        """Bytes on the wire per byte of fp32."""
        bytes_per_value = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}[self]
        scale_bytes = 4 / 256 if self in (WireFormat.INT8, WireFormat.INT4) else 0.0
        return (bytes_per_value + scale_bytes) / 4


class OptimizerKind(StrEnum):
    """What updates a stage; `muon` is the default recipe (Muon on matrices, NAdam on the rest)."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    NADAM = "nadam"
    MUON = "muon"


class Recompute(StrEnum):
    """Whether a stage re-runs its forward before the backward instead of keeping activations."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Averaging(StrEnum):
    """Whether clusters train on while a round runs."""

    OVERLAPPED = "overlapped"
    BLOCKING = "blocking"


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the planner may assume and how it weighs things."""

    optimizer: OptimizerKind = OptimizerKind.MUON
    predict_weights: bool = True  # one more copy of the weights in every stage but the last
    max_lag: int = 2  # updates a batch may be late; batches are accumulated into an update to keep it
    accumulates: bool = False  # updates are sums over batches: one more copy of the gradients
    recompute: Recompute = Recompute.AUTO
    activations: WireFormat = WireFormat.BF16
    gradients: WireFormat = WireFormat.BF16
    deltas: WireFormat = WireFormat.INT4
    averaging: Averaging = Averaging.OVERLAPPED
    averaging_share: float = 0.1  # of each link (overlapped) or of the time (blocking)
    max_round_seconds: float = 600.0  # no node hosts more than it can average in this time
    speed_ratio: float = 4.0  # fastest over slowest cluster; a faster one is held back to it
    max_stages: int = 48
    max_window: int = 128
    in_flight_per_hop: int = 4  # batches a stage may keep under way for each stage after it
    relay_bytes_per_second: float = 2.5e6  # per pair of neighbours that only the hub can connect
    overhead_bytes: float = 5e8  # the program itself and the device's context
    recover_seconds: float = 30.0  # a cluster stands still when one of its nodes dies


_DIMENSIONS = {
    "max_round_seconds": Dimension.SECONDS,
    "relay_bytes_per_second": Dimension.BYTES_PER_SECOND,
    "overhead_bytes": Dimension.BYTES,
    "recover_seconds": Dimension.SECONDS,
}
_BOUNDS = {
    "max_lag": (1, 64),
    "averaging_share": (0.001, 0.9),
    "max_round_seconds": (1, 1e9),
    "speed_ratio": (1, 1e6),
    "max_stages": (1, 256),
    "max_window": (1, 1024),
    "in_flight_per_hop": (1, 64),
    "relay_bytes_per_second": (1e3, 1e12),
    "overhead_bytes": (0, 1e12),
    "recover_seconds": (0, 1e6),
}


def parse_plan_table(text: str, where: str) -> dict[str, object] | None:
    """Return the [plan] table of a TOML file; None if it has none."""
    document = parse_table(text, where)
    table = document.values.get("plan")
    if not isinstance(table, dict | None):
        document.refuse(("plan",), f"is {quote(table)}, not a table; write [plan]")
    return table


def read_plan_config(table: Mapping[str, object], where: str) -> PlanConfig:
    """Return the default PlanConfig with the keys of `table` set; errors name `where`."""
    read = Document(dict(table), where, is_table=True).read_as(_plan_table())
    return replace(PlanConfig(), **{name: _plain(name, getattr(read, name)) for name in table})


def _plain(name: str, value: Any) -> Any:
    kind = type(getattr(PlanConfig(), name))
    return value in (True, "true") if kind is bool else kind(value)


@cache
def _plan_table() -> type[msgspec.Struct]:
    """Return the schema of a [plan] table; every key may be left out."""
    keys = [(field.name, _kind_of(field.name, field.default), field.default) for field in fields(PlanConfig)]
    return msgspec.defstruct("_PlanTable", keys, forbid_unknown_fields=True)


def _kind_of(name: str, default: Any) -> Any:
    if isinstance(default, StrEnum):
        return type(default)
    if isinstance(default, bool):
        return bool | Literal["true", "false"]  # the words of a command line
    low, high = (f"{end:g}" for end in _BOUNDS[name])

    class Knob(
        Quantity,
        low=low,
        high=high,
        dimension=_DIMENSIONS.get(name),
        example="" if name in _DIMENSIONS else f"{default:g}",
        is_whole=isinstance(default, int),
        takes_text=True,
    ): ...

    return Knob
