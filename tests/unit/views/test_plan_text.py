"""The JSON of a plan, and advice that must agree with the forecast it claims to come from."""

import json
import re
from dataclasses import fields, replace

import pytest
from support.sample_plans import sample

from ravnest.config import Averaging, PlanConfig, WireChoice, WireFormat
from ravnest.plan.forecast import forecast
from ravnest.plan.formation import cut_clusters, form_plan
from ravnest.plan.infeasible import LeftOut
from ravnest.plan.types import cluster_name
from ravnest.views.plan_text import (
    AdviceLimits,
    advise,
    describe_bottleneck,
    describe_hub,
    describe_left_out,
    describe_rate,
    describe_round,
    plan_to_dict,
    show_samples,
)

STAGE_KEYS = {
    "node", "start", "stop", "window", "recompute", "memory_bytes", "available_bytes",
    "activations", "gradients", "predicts",
    "compute_seconds", "send_seconds", "receive_seconds", "busy_share", "limited_by",
}  # fmt: skip
TOP_KEYS = {
    "schema", "seed", "plan_id", "model", "config", "clusters", "rings", "predicted", "bottleneck",
    "spares", "backups", "advice", "left_out", "hub",
}  # fmt: skip


def as_dict(one):
    return plan_to_dict(one.plan, one.predicted, one.profile, one.swarm, one.config)


def advice_of(one, **limits):
    limits = AdviceLimits(**{"search_nodes": 0} | limits)
    return advise(one.plan, one.profile, one.swarm, one.config, limits)


def best_rate_of(one, config):
    """What the same nodes make in the same order, with the best cuts."""
    plan = replace(one.plan, clusters=best_clusters(one, config))
    return forecast(plan, one.profile, one.swarm, config).samples_per_second


def best_clusters(one, config=None):
    place = {node.name: k for k, node in enumerate(one.swarm.nodes)}
    orders = tuple(tuple(place[s.node] for s in reversed(c.stages)) for c in one.plan.clusters)
    return cut_clusters(one.profile, one.swarm, config or one.config, orders, is_averaged=len(orders) > 1)


def test_the_rate_of_a_toy_is_a_bound_that_no_faster_node_would_raise():
    """Of the README's model 31,994 samples/s were promised and 10,838 measured, without a word."""
    toy, large = (sample(1, 2, config=PlanConfig(microbatch_seconds=each)) for each in (10.0, 2e-3))
    found = toy.predicted.bottleneck
    assert found.is_least
    assert found.gain_samples_per_second == 0.0
    assert describe_rate(toy.predicted) == (
        f"{show_samples(toy.predicted.samples_per_second)} at most: "
        "with a model this small, the programs themselves set the pace"
    )
    assert describe_bottleneck(toy.predicted).endswith("no faster PC would help")
    assert not large.predicted.bottleneck.is_least
    assert describe_rate(large.predicted) == show_samples(large.predicted.samples_per_second)


def test_json_has_every_promised_key():
    report = as_dict(sample(3, 2, spares=2))
    assert set(report) == TOP_KEYS
    assert report["schema"] == "ravnest.plan/2"
    assert (report["seed"], report["plan_id"]) == (7, 3)
    assert set(report["config"]) == {field.name for field in fields(PlanConfig)}
    cluster = report["clusters"][0]
    assert set(cluster) == {"name", "samples_per_second", "period_seconds", "accumulate", "lag", "stages"}
    assert all(set(stage) == STAGE_KEYS for c in report["clusters"] for stage in c["stages"])
    assert set(report["predicted"]) == {
        "samples_per_second",
        "round_seconds",
        "staleness",
        "lost_share",
    }
    keys = {"cluster", "node", "limited_by", "gain_samples_per_second", "sentence"}
    assert set(report["bottleneck"]) == keys
    assert set(report["model"]) == {"name", "positions", "parameter_bytes", "samples_per_batch"}


def test_json_says_what_the_plan_says():
    one = sample(3, 2, spares=2)
    report = as_dict(one)
    stages = [[(s["node"], s["start"], s["stop"]) for s in c["stages"]] for c in report["clusters"]]
    assert stages == [[(s.node, s.start, s.stop) for s in c.stages] for c in one.plan.clusters]
    assert [(r["segment"], r["owners"]) for r in report["rings"]] == [
        ([ring.start, ring.stop], list(ring.owners)) for ring in one.plan.rings
    ]
    assert report["spares"] == list(one.plan.spares)
    assert report["backups"] == [{"spare": b.spare, "node": b.node} for b in one.plan.backups]
    assert report["predicted"]["samples_per_second"] == sum(
        cluster["samples_per_second"] for cluster in report["clusters"]
    )
    assert report["model"]["parameter_bytes"] == 40 * 2e7


def test_json_is_plain_and_the_same_every_time():
    first, second = (json.dumps(as_dict(sample(3, 2, spares=2)), allow_nan=False) for _ in range(2))
    assert first == second
    assert json.loads(first)["config"]["activations"] == "auto"


def test_empty_plan_is_still_an_answer():
    one = sample(2)
    nobody = replace(one.plan, clusters=(), rings=(), spares=("pc-000",), backups=())
    predicted = forecast(nobody, one.profile, one.swarm, one.config)
    report = plan_to_dict(nobody, predicted, one.profile, one.swarm, one.config)
    assert report["bottleneck"] is None
    assert report["advice"] == []
    assert describe_bottleneck(predicted) == "none: nobody trains"


def test_advice_tells_the_rate_the_forecast_gives():
    one = sample(4, upload=1e6, config=PlanConfig(activations=WireChoice.BF16, gradients=WireChoice.BF16))
    sentence = next(s for s in advice_of(one) if s.startswith("set "))
    assert sentence.startswith("set activations=int8 gradients=int8: ")
    then, now = re.search(r": ([\d.,]+) samples/s instead of ([\d.,]+);", sentence).groups()
    smaller = replace(one.config, activations=WireChoice.INT8, gradients=WireChoice.INT8)
    assert float(then) >= 0.99 * best_rate_of(one, smaller)  # a new search may find still more
    assert float(now) == pytest.approx(best_rate_of(one, one.config), rel=0.01)


def test_advice_comes_from_a_new_search():
    # In one long row they wait for their links.
    one = sample(6, upload=1e6, config=PlanConfig(activations=WireChoice.BF16, gradients=WireChoice.BF16))
    assert not any(s.startswith("plan anew: ") for s in advice_of(one))
    (anew,) = [s for s in advice_of(one, search_nodes=10) if s.startswith("plan anew: ")]
    rate = float(re.search(r"give ([\d.]+) samples/s", anew)[1])
    found = forecast(form_plan(one.profile, one.swarm, one.config, 7), one.profile, one.swarm, one.config)
    assert one.predicted.samples_per_second < rate <= 1.01 * found.samples_per_second


def test_advice_is_silent_without_gain_and_names_the_best_first():
    unlimited = sample(4, upload=1e12, config=PlanConfig(predict_weights=False))
    assert not any(s.startswith("set activations") for s in advice_of(unlimited))
    fp32 = {"activations": WireChoice.FP32, "gradients": WireChoice.FP32}
    slow = PlanConfig(averaging=Averaging.BLOCKING, averaging_share=0.5, speed_ratio=1.0, **fp32)
    one = sample(1, 4, upload=3e6, config=slow)
    said = [s for s in advice_of(one) if s.startswith("set ")]
    assert [s.split("=")[0] for s in said] == ["set activations", "set speed_ratio"]
    assert [s for s in advice_of(one, changes=1) if s.startswith("set ")] == said[:1]


def test_a_badly_cut_plan_is_told_apart_from_a_setting():
    one = sample(4, upload=1e12, config=PlanConfig(predict_weights=False))
    (recut,) = [s for s in advice_of(one) if "samples/s" in s]
    assert recut.startswith("plan anew: ")
    again = replace(one, plan=replace(one.plan, clusters=best_clusters(one)))
    assert not any("samples/s" in s for s in advice_of(again))


def test_advice_prices_a_smaller_share_for_averaging_in_round_time():
    config = PlanConfig(averaging_share=0.6, activations=WireChoice.INT4, gradients=WireChoice.INT4)
    sentence = next(s for s in advice_of(sample(4, 4, upload=1e6, config=config)) if s.startswith("set "))
    assert "averaging_share=0.3" in sentence
    assert re.search(r"a round then takes .+ instead of ", sentence)


def test_relay_is_said_with_what_an_open_port_gives():
    config = PlanConfig(relay_bytes_per_second=1e5)
    one = sample(3, config=config, is_reachable=False)
    sentence = next(s for s in advice_of(one) if "relay" in s)
    assert "2 pairs of neighbours" in sentence
    assert "pc-000 and pc-001" in sentence
    assert "would give" in sentence
    assert not any("relay" in s for s in advice_of(sample(3)))


def test_large_swarms_get_facts_but_no_recut():
    many = sample(*[20] * 16, positions=60, spares=1)
    assert len(advice_of(many)) == 1
    few = sample(4, upload=1e12, config=PlanConfig(predict_weights=False))
    assert any(s.startswith("plan anew: ") for s in advice_of(few, recut_nodes=4))
    assert not any(s.startswith("plan anew: ") for s in advice_of(few, recut_nodes=3))


def test_spares_and_single_clusters_are_explained():
    assert "no spares: " in advice_of(sample(2))[-2]
    assert "nobody to average with" in advice_of(sample(2))[-1]
    assert "nobody to average with" not in " ".join(advice_of(sample(2, 2)))
    alone = advice_of(sample(2, spares=1))[-2]
    assert alone.startswith("1 PC stands by as a backup: ")
    some = advice_of(sample(2, spares=5))[-2]
    assert some.startswith("5 PCs stand by, 2 of them as backups")
    assert "no faster plan" in some
    heavy = replace(sample(2, spares=1).profile, parameter_bytes=(2e8,) * 40)
    one = sample(2, spares=1)
    assert "cannot hold another copy" in advise(one.plan, heavy, one.swarm, one.config)[-2]


def test_bottleneck_sentence_doubles_its_limit():
    one = sample(1)
    found = one.predicted.bottleneck
    assert found.limited_by == "compute"
    assert found.gain_samples_per_second == pytest.approx(one.predicted.samples_per_second, rel=0.01)
    twice = show_samples(one.predicted.samples_per_second + found.gain_samples_per_second)
    sentence = describe_bottleneck(one.predicted)
    assert sentence.startswith("pc-000 in cluster A is held up by its compute speed; twice as much")
    assert twice in sentence


def test_bottleneck_without_gain_says_so():
    one = sample(1)
    level = replace(one.predicted, bottleneck=replace(one.predicted.bottleneck, gain_samples_per_second=0.0))
    assert "no single one stands out" in describe_bottleneck(level)


def test_a_held_back_cluster_is_less_busy_and_in_step():
    """The fast cluster waits: its period, its rate and its devices' share must tell the same story."""
    int4 = {"activations": WireFormat.INT4, "gradients": WireFormat.INT4}
    one = sample(
        1,
        8,
        upload=2e5,
        config=PlanConfig(speed_ratio=1.0, averaging_share=0.001, max_round_seconds=1e9, **int4),
    )
    fast, slow = one.predicted.clusters
    assert fast.period_seconds == pytest.approx(slow.period_seconds)
    assert fast.samples_per_second == pytest.approx(4 / fast.period_seconds)
    stage = fast.stages[0]
    assert stage.busy_share == pytest.approx(stage.compute_seconds / fast.period_seconds)
    assert stage.busy_share < 0.5
    assert any("speed_ratio=2" in s for s in advice_of(one))


def test_names_and_rounds():
    assert [cluster_name(k) for k in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
    assert describe_round(sample(2).predicted).startswith("none")
    assert "average all segments" in describe_round(sample(2, 2).predicted)
    assert show_samples(0.12345) == "0.123 samples/s"
    assert show_samples(12345.6) == "12,346 samples/s"


def test_the_hub_is_described_by_what_its_line_limits():
    wide, narrow = (sample(3, 2, config=PlanConfig(hub_bytes_per_second=rate)) for rate in (1e12, 1e3))
    assert "sets the pace" not in describe_hub(wide.predicted)
    told = describe_hub(narrow.predicted)
    assert told.startswith("of its 8 kbit/s, samples take ")
    faster = narrow.predicted.samples_per_second * narrow.predicted.hub.busy_share
    assert f"would give {show_samples(faster)}." in told
    assert describe_bottleneck(narrow.predicted).startswith("the hub's line")


def test_who_is_left_out_is_told_with_the_reasons():
    assert describe_left_out({}, 7) == ""
    told = describe_left_out({"too little memory": 3, "hub's line is full": 1200}, 2000)
    assert told == (
        "1,203 of 2,000 PCs have no stage: 3 with too little memory for any part of the model;"
        " 1,200 that could train, but the hub's line is full."
    )
    for reason in LeftOut:
        assert describe_left_out({reason.value: 1}, 2).startswith("1 of 2 PCs has no stage: 1 ")
