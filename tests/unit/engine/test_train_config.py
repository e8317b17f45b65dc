"""How a stage is trained travels as data: what is written is read, and nothing else is."""

import msgspec
import pytest

from ravnest.config import StateFormat, WeightFormat, WireFormat
from ravnest.engine.optimizers import Adam, FusedAdam, Group, Muon, OptimizerSettings
from ravnest.engine.train_config import AveragingRule, TrainConfig, read_train_config, write_train_config
from ravnest.errors import UnsafeBlueprint

OPTIMIZER = OptimizerSettings(
    (Group(("a", "b"), Adam(), 0.1, True), Group(("c",), Muon()), Group(("d",), FusedAdam())),
    3e-3,
    1.0,
    True,
    100,
    WeightFormat.BF16,
    StateFormat.INT8,
)
TRAINING = TrainConfig(
    OPTIMIZER,
    64,
    precision="bf16",
    planned_updates=500,
    max_lag=2,
    deltas=WireFormat.INT4,
    averaging=AveragingRule(True, 0.9, 0.5, 3.0, True),
    exact_gradients=WireFormat.BF16,
)


PLAIN_GROUP = {"weight_decay": 0.0, "is_decoupled": False, "rate": 1.0}


def test_what_is_written_is_read():
    assert read_train_config(write_train_config(TRAINING, frozenset("abcd"))) == TRAINING
    plain = TrainConfig(OPTIMIZER, 64)
    read = read_train_config(write_train_config(plain, frozenset("abcd")))
    assert (read.precision, read.planned_updates, read.max_lag) == ("fp32", 0, None)
    assert (read.deltas, read.averaging) == ("fp32", AveragingRule())


def test_a_stage_learns_of_its_own_parameters_only():
    read = read_train_config(write_train_config(TRAINING, frozenset("b")))
    assert [group.names for group in read.optimizer.groups] == [("b",)]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp64"},
        {"precision": None},
        {"planned_updates": -1},
        {"planned_updates": 1 << 60},
        {"planned_updates": 1.5},
        {"max_lag": -1},
        {"max_lag": 1000},
        {"batch_size": 0},
        {"window": 3},
        {"deltas": "int2"},
        {"deltas": "int4-stochastic"},
        {"exact_gradients": "int8"},
        {"averaging": {"momentum": 1}},
        {"averaging": {"outer_rate": -1.0}},
        {"averaging": {"outer_momentum": 1.0}},
        {"averaging": {"clip": 0.0}},
        {"averaging": {"clp": 1.0}},
        {"learning_rate": 1e31},
        {"lag_updates": -1},
        {"versions": "int8"},
        {"states": "int4"},
        {"states": "auto"},
        {"groups": [{"names": ["a"], "rule": "eval", "values": {}} | PLAIN_GROUP]},
        {"groups": [{"names": ["a"], "rule": "sgd", "values": {"beta": 1}} | PLAIN_GROUP]},
        {"groups": [{"names": ["a"], "rule": "sgd", "values": {"momentum": "x"}} | PLAIN_GROUP]},
        {"groups": [{"names": ["a"], "rule": "sgd", "values": {"momentum": [[]]}} | PLAIN_GROUP]},
    ],
)
def test_what_makes_no_sense_is_refused(change):
    written = msgspec.json.decode(write_train_config(TRAINING, frozenset("abcd")))
    with pytest.raises(UnsafeBlueprint, match="training settings"):
        read_train_config(msgspec.json.encode(written | change))
