"""Links that set the pace get narrow formats, others wide ones; memory that is free is given back."""

from dataclasses import replace

import pytest
from support.plan_world import SIMPLE, even_model, node, swarm_of

from ravnest.config import AUTO_ACTIVATIONS, AUTO_GRADIENTS, OptimizerKind, PlanConfig, WireChoice, WireFormat
from ravnest.errors import ConfigError
from ravnest.plan.formation import cut_clusters

AUTO = replace(SIMPLE, activations=WireChoice.AUTO, gradients=WireChoice.AUTO)
MODEL = even_model(num_positions=9, parameter_mb=20, crossing_mb=10)


def cluster_of(*nodes, config=AUTO, model=MODEL):
    """Return the cluster of nodes given in pipeline order."""
    swarm = swarm_of(*nodes)
    (made,) = cut_clusters(model, swarm, config, (tuple(reversed(range(len(nodes)))),), is_averaged=False)
    return made


def test_only_links_that_set_the_pace_are_narrow():
    lame = node("b", upload_bytes_per_second=1e7)  # 2.5 MB forward and 1.4 MB back take 0.4 s, compute 0.09 s
    stages = cluster_of(node("a"), lame, node("c"), node("d")).stages
    assert [stage.activations for stage in stages[:3]] == ["bf16", "int8", "bf16"]
    assert [stage.gradients for stage in stages[1:]] == ["int4-stochastic", "bf16", "bf16"]


def test_fast_links_carry_the_widest_format():
    stages = cluster_of(node("a"), node("b"), node("c")).stages
    assert {stage.activations for stage in stages} == {AUTO_ACTIVATIONS[0]} == {WireFormat.BF16}
    assert {stage.gradients for stage in stages} == {AUTO_GRADIENTS[0]} == {WireFormat.BF16}


def test_a_format_that_is_asked_for_is_used_on_all_links():
    config = replace(SIMPLE, activations=WireChoice.INT4, gradients=WireChoice.INT4)
    stages = cluster_of(node("a"), node("b"), config=config).stages
    assert [(stage.activations, stage.gradients) for stage in stages] == [
        (WireFormat.INT4_CHANNELS, WireFormat.INT4_STOCHASTIC)
    ] * 2


@pytest.mark.parametrize("wrong", [WireFormat.INT4_STOCHASTIC, WireFormat.INT4_CHANNELS])
def test_formats_of_the_other_direction_are_refused(wrong):
    key = "activations" if wrong is WireFormat.INT4_STOCHASTIC else "gradients"
    with pytest.raises(ConfigError, match=key):
        PlanConfig(**{key: wrong})


def test_stages_predict_and_lag_where_memory_allows():
    config = replace(AUTO, optimizer=OptimizerKind.MUON, predict_weights=True, saves_memory=True, max_lag=2)
    model = even_model(num_positions=9, parameter_mb=20)
    # Three positions: 60 MB each of weights, gradient, an old version, two of the optimizer, and prediction.
    tight, roomy = (
        cluster_of(*(node(name, memory) for name in "abc"), config=config, model=model)
        for memory in (330, 1000)
    )
    assert [stage.predicts for stage in roomy.stages] == [True] * 3
    assert [stage.predicts for stage in tight.stages[:2]] == [False] * 2
    lags = [-(-(made.stages[0].window - 1) // made.accumulate) for made in (tight, roomy)]
    assert lags == [1, 2]
