"""PlanConfig: TOML values and command-line strings set fields, everything else is refused."""

from dataclasses import fields

import pytest

from ravnest.config import (
    _BOUNDS,
    _DIMENSIONS,
    Averaging,
    OptimizerKind,
    PlanConfig,
    Recompute,
    WireChoice,
    WireFormat,
    read_plan_config,
)
from ravnest.errors import ConfigError


def test_an_empty_table_gives_the_defaults():
    assert read_plan_config({}, "plan.toml") == PlanConfig()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer", "adamw", OptimizerKind.ADAMW),
        ("recompute", "never", Recompute.NEVER),
        ("averaging", "blocking", Averaging.BLOCKING),
        ("deltas", "fp32", WireFormat.FP32),
        ("deltas", "int4", WireFormat.INT4),
        ("activations", "int4", WireChoice.INT4),
        ("gradients", "auto", WireChoice.AUTO),
        ("exact_gradients", "bf16", WireFormat.BF16),
        ("predict_weights", False, False),
        ("predict_weights", "false", False),
        ("predict_weights", "true", True),
        ("max_stages", 8, 8),
        ("max_stages", "8", 8),
        ("max_stages", 8.0, 8),
        ("averaging_share", "0.5", 0.5),
        ("overhead_bytes", "1 GB", 1e9),
        ("overhead_bytes", 0, 0.0),
        ("relay_bytes_per_second", "8 Mbit/s", 1e6),
        ("recover_seconds", "2 min", 120.0),
    ],
)
def test_a_key_sets_its_field(key, value, expected):
    config = read_plan_config({key: value}, "plan.toml")
    assert getattr(config, key) == expected
    assert type(getattr(config, key)) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", "sdg"),
        ("optimizer", 3),
        ("optimizer", ["adam"]),
        ("activations", "int4-stochastic"),
        ("gradients", "int4-channels"),
        ("deltas", "int4-stochastic"),
        ("predict_weights", "yes"),
        ("predict_weights", 1),
        ("max_stages", 0),
        ("max_stages", 2.5),
        ("max_stages", True),
        ("max_stages", "many"),
        ("max_stages", None),
        ("averaging_share", float("nan")),
        ("averaging_share", float("inf")),
        ("averaging_share", "nan"),
        ("speed_ratio", -1),
        ("speed_ratio", 10**400),
        ("overhead_bytes", "1 GHz"),
        ("recover_seconds", "-1 s"),
    ],
)
def test_refusal_names_file_key_and_value(key, value):
    with pytest.raises(ConfigError) as error:
        read_plan_config({key: value}, "plan.toml")
    message = str(error.value)
    assert message.startswith(f"plan.toml: key {key!r} is ")
    assert (repr(value) if value != 10**400 else "an integer of") in message


def test_an_unknown_key_suggests_the_closest():
    with pytest.raises(ConfigError, match=r"plan\.toml: key 'max_stage' = 4 is unknown; .*'max_stages'"):
        read_plan_config({"max_stage": 4}, "plan.toml")


@pytest.mark.parametrize("key", _BOUNDS)
def test_bounds_are_part_of_what_is_allowed(key):
    low, high = _BOUNDS[key]
    assert getattr(read_plan_config({key: low}, "plan.toml"), key) == low
    assert getattr(read_plan_config({key: high}, "plan.toml"), key) == high
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match="outside"):
            read_plan_config({key: value}, "plan.toml")


def test_every_number_has_bounds_that_hold_its_default():
    for field in fields(PlanConfig):
        if type(field.default) in (int, float):
            low, high = _BOUNDS[field.name]
            assert low <= field.default <= high
    assert set(_DIMENSIONS) <= set(_BOUNDS) <= {field.name for field in fields(PlanConfig)}


@pytest.mark.parametrize(
    ("wire", "bits"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("fp16", 16),
        ("int8", 8 + 32 / 256),
        ("int4", 4 + 32 / 256),
        ("int4-channels", 4.5),
        ("int4-stochastic", 4.5),
    ],
)
def test_wire_ratio_counts_the_scales(wire, bits):
    assert WireFormat(wire).ratio == pytest.approx(bits / 32)


def test_gradients_never_travel_in_a_format_that_ruins_them():
    assert PlanConfig(gradients=WireChoice.INT4).gradient_formats == (WireFormat.INT4_STOCHASTIC,)
    with pytest.raises(ConfigError, match="gradients is int4-channels; choose one of auto"):
        PlanConfig(gradients=WireFormat.INT4_CHANNELS)
