"""An update that is launched before anybody looks at its gradients: the same as one that waits for that."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from ravnest.engine.optimizers import Adam, FusedAdam, Group, OptimizerSettings
from ravnest.engine.stage import DroppedWork, StageEngine
from ravnest.engine.weight_versions import Snapshot
from ravnest.model.capture.capture import capture
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.peer.stage_builder import find_roles

RATE = 0.05


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def fields_of(seed, bad=False):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x * (torch.nan if bad else 1.0), "labels": torch.arange(6) % 4}


@cache
def captured():
    torch.manual_seed(0)
    return capture(
        Plain(), fields_of(0), lambda logits, batch: functional.cross_entropy(logits, batch["labels"])
    )


def make_stage(decay=0.0, clip=None, rule=None):
    blueprint, state = captured().blueprint, captured().state
    names = tuple(entry.name for entry in blueprint.state)
    group = Group(names, rule or FusedAdam(), weight_decay=decay, is_decoupled=True)
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    settings = OptimizerSettings((group,), RATE, clip=clip)
    return StageEngine(
        build_stage_program(blueprint), Snapshot(0, state, {}), find_roles(blueprint), settings, defers=True
    )


def train(stage, number, fields, rate):
    """Train one update of one microbatch; return what was dropped and what the update says."""
    assert not isinstance(stage.forward(number, {}, fields, key=(1, number)), DroppedWork)
    assert stage.backward_inputs(number, {}) == {}
    dropped = stage.backward_weights(number, 1.0, 6, rate)
    return dropped, stage.update(RATE)


def assert_equal(one, other, **tolerance):
    here, there = one.snapshot(), other.snapshot()
    assert here.version == there.version
    # A moment of zeros and none at all are the same.
    slots = [{key: each for key, each in found.optimizer.items() if each.any()} for found in (here, there)]
    for mine, others in ((here.state, there.state), slots):
        assert mine.keys() == others.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, others[name], **(tolerance or {"rtol": 0, "atol": 0}))


def test_it_gives_the_same_bits():
    ahead, waiting = make_stage(), make_stage()
    for number in range(4):
        found = [
            train(ahead, number, fields_of(number), RATE),
            train(waiting, number, fields_of(number), None),
        ]
        assert found[0] == found[1]
        assert found[0][0] is None
        assert_equal(ahead, waiting)


def test_weights_decay_as_much():
    ahead, waiting = make_stage(decay=0.1), make_stage(decay=0.1)
    for number in range(3):
        train(ahead, number, fields_of(number), RATE)
        train(waiting, number, fields_of(number), None)
    assert_equal(ahead, waiting, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_no_number_changes_nothing(place):
    ahead, waiting = make_stage(decay=0.1), make_stage(decay=0.1)
    for number in range(4):
        fields = fields_of(number, bad=number == place)
        found = [train(ahead, number, fields, RATE), train(waiting, number, fields, None)]
        assert str(found[0]) == str(found[1])
        assert isinstance(found[0][0], DroppedWork) == (number == place)
        assert_equal(ahead, waiting, rtol=1e-5, atol=1e-7)
    assert float(ahead.snapshot().optimizer["step/first.weight"]) == 3.0


@pytest.mark.parametrize("options", [{"clip": 1e-3}, {"rule": Adam()}])
def test_an_update_that_needs_norms_waits_for_them(options):
    ahead, waiting = make_stage(**options), make_stage(**options)
    train(ahead, 0, fields_of(0), RATE)
    train(waiting, 0, fields_of(0), None)
    assert_equal(ahead, waiting)


def test_one_of_several_microbatches_waits_for_the_others():
    ahead, waiting = make_stage(), make_stage()
    for stage, rates in ((ahead, (None, RATE)), (waiting, (None, None))):
        for number, rate in enumerate(rates):
            stage.forward(number, {}, fields_of(number), key=(1, number))
            stage.backward_inputs(number, {})
            assert stage.backward_weights(number, 1.0, 6, rate) is None
        stage.update(RATE)
    assert_equal(ahead, waiting)
