"""Every way to repair a plan, on swarms small enough to reckon by hand.

A position of the even model has 10 MB of parameters and 3 GFLOP; a batch has 10 samples. A node of 100
GFLOP/s with two positions therefore makes 10 / 0.06 s = 167 samples/s.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.plan_world import MB, SIMPLE, check_laws, even_model, node, swarm_of

from ravnest.config import Averaging, Recompute
from ravnest.plan.assembly import assemble_plan, build_clusters
from ravnest.plan.cost import NodeTable
from ravnest.plan.forecast import forecast
from ravnest.plan.line import LineCost
from ravnest.plan.repair import Repair, moved_bytes, node_joined, node_left, node_slowed
from ravnest.plan.types import Backup

MODEL = even_model(6)


def plan_of(swarm, *layouts, config=SIMPLE, model=MODEL):
    """Return the plan of clusters written as ("ana", "bob", ...) with positions shared out evenly,
    or as {"ana": 4, "bob": 2}."""
    line = LineCost(model, config, is_averaged=len(layouts) > 1)
    table, place = NodeTable.of(swarm, config), {each.name: k for k, each in enumerate(swarm.nodes)}
    clusters = []
    for layout in layouts:
        sizes = layout if isinstance(layout, dict) else dict.fromkeys(layout, 6 // len(layout))
        cuts = np.cumsum([0, *sizes.values()])[::-1]
        clusters += build_clusters(line, table, swarm, [[place[n] for n in sizes][::-1]], cuts[None])
    plan = assemble_plan(tuple(clusters), model, swarm, config, seed=7, plan_id=4)
    check_laws(plan, model, swarm, config)
    return plan


def without(swarm, name):
    return replace(swarm, nodes=tuple(each for each in swarm.nodes if each.name != name))


def changed(swarm, name, **facts):
    return replace(swarm, nodes=tuple(replace(n, **facts) if n.name == name else n for n in swarm.nodes))


def leave(swarm, plan, name, config=SIMPLE, model=MODEL) -> Repair:
    now = without(swarm, name)
    repair = node_left(plan, name, model, now, config, before=swarm)
    check_laws(repair.plan, model, now, config)
    assert repair.moved_bytes == moved_bytes(plan, repair.plan, model)
    return repair


def slow(swarm, plan, name, config=SIMPLE, model=MODEL, **facts) -> Repair:
    now = changed(swarm, name, **facts)
    repair = node_slowed(plan, name, model, now, config, before=swarm)
    check_laws(repair.plan, model, now, config)
    return repair


def layout(plan, number=0):
    return {stage.node: (stage.start, stage.stop) for stage in plan.clusters[number].stages}


def test_a_spare_that_leaves_hands_its_backup_on():
    swarm = swarm_of(node("ana", uptime_seconds=1e5), node("big", 900), node("small", 500))
    plan = plan_of(swarm, ("ana",))
    assert plan.backups == (Backup("small", "ana"),)
    repair = leave(swarm, plan, "small")
    assert repair.reason == (
        "small left: it was a spare, big backs up ana now; nothing moves, still 55.5 samples/s"
    )
    assert repair.plan == replace(plan, plan_id=5, spares=("big",), backups=(Backup("big", "ana"),))
    last = leave(without(swarm, "small"), repair.plan, "big")
    assert "nobody can back up ana now" in last.reason
    assert last.moved_bytes == 0


def test_a_stranger_that_leaves_changes_nothing():
    swarm = swarm_of(node("ana"))
    plan = plan_of(swarm, ("ana",))
    repair = node_left(plan, "nobody", MODEL, swarm, SIMPLE)
    assert repair.plan is plan
    assert repair.reason == "nobody left: it was not in the plan; nothing moves, 55.6 samples/s"


def test_the_backup_takes_over_and_nothing_moves():
    swarm = swarm_of(node("ana"), node("carl-pc", uptime_seconds=1e5), node("eva"), node("lab-7", gflops=95))
    plan = plan_of(swarm, ("ana", "carl-pc", "eva"))
    assert plan.backups == (Backup("lab-7", "carl-pc"),)
    repair = leave(swarm, plan, "carl-pc")
    assert repair.reason == (
        "carl-pc left: its backup lab-7 takes over stage 2 of cluster A; nothing moves, 167 -> 158 samples/s"
    )
    assert layout(repair.plan) == {"ana": (0, 2), "lab-7": (2, 4), "eva": (4, 6)}
    assert (repair.plan.plan_id, repair.plan.seed, repair.moved_bytes) == (5, 7, 0)


def test_the_backup_is_preferred_to_a_spare_that_is_hardly_faster():
    swarm = swarm_of(node("ana"), node("bob", uptime_seconds=1e5), node("near", gflops=95), node("far", 1500))
    plan = plan_of(swarm, ("ana", "bob"))
    assert "bob left: its backup near takes over" in leave(swarm, plan, "bob").reason
    assert "bob left: spare far takes over" in leave(swarm, replace(plan, backups=()), "bob").reason


def test_spares_without_room_do_not_crowd_out_one_that_fits():
    tiny = [node(f"tiny{k:02}", memory_mb=10, gflops=900) for k in range(20)]
    swarm = swarm_of(node("ana", 300), *tiny, node("wide", gflops=30))
    repair = leave(swarm, replace(plan_of(swarm, ("ana",)), backups=()), "ana")
    assert "spare wide takes over stage 1 of cluster A" in repair.reason


def test_a_fast_spare_takes_over_where_the_backup_is_much_slower():
    swarm = swarm_of(
        node("ana"), node("bob", uptime_seconds=1e5), node("slug", gflops=20), node("hare", 1500)
    )
    plan = plan_of(swarm, ("ana", "bob"))
    assert Backup("slug", "bob") in plan.backups
    repair = leave(swarm, plan, "bob")
    assert "spare hare takes over stage 2 of cluster A; 30 MB move" in repair.reason
    assert repair.moved_bytes == 30 * MB
    assert "slug" in repair.plan.spares


def test_neighbours_share_a_lost_stage_and_only_their_cut_moves():
    swarm = swarm_of(node("ana"), node("bob"), node("carl", gflops=300), node("dora", gflops=60))
    plan = plan_of(swarm, {"ana": 1, "bob": 2, "carl": 2, "dora": 1})
    repair = leave(swarm, plan, "bob")
    assert repair.reason.startswith("bob left: carl takes over stage 2 of cluster A; 20 MB move")
    assert layout(repair.plan) == {"ana": (0, 1), "carl": (1, 5), "dora": (5, 6)}
    repair = leave(swarm, plan, "carl")
    assert repair.reason.startswith("carl left: bob and dora share stage 3 of cluster A; 20 MB move")
    assert layout(repair.plan) == {"ana": (0, 1), "bob": (1, 4), "dora": (4, 6)}
    assert repair.moved_bytes == 20 * MB


@pytest.mark.parametrize(
    ("gone", "stage", "heir", "rest"), [("ana", 1, "bob", (0, 4)), ("carl", 3, "bob", (2, 6))]
)
def test_the_neighbour_takes_over_an_end_of_the_line(gone, stage, heir, rest):
    swarm = swarm_of(node("ana"), node("bob", gflops=200), node("carl"))
    plan = plan_of(swarm, ("ana", "bob", "carl"))
    repair = leave(swarm, plan, gone)
    assert f"{heir} takes over stage {stage} of cluster A; 20 MB move" in repair.reason
    assert layout(repair.plan)[heir] == rest


def test_the_rest_is_cut_anew_when_the_neighbour_cannot_hold_it():
    # bob has room for two positions only, so the whole line shifts towards carl.
    swarm = swarm_of(node("ana"), node("bob", 90), node("carl", 400))
    plan = plan_of(swarm, ("ana", "bob", "carl"))
    repair = leave(swarm, plan, "ana")
    assert "ana left: cluster A is cut anew over bob and carl; 40 MB move" in repair.reason
    assert layout(repair.plan) == {"bob": (0, 2), "carl": (2, 6)}


def test_a_cluster_without_hope_is_dissolved_and_the_other_stays():
    swarm = swarm_of(node("ana"), node("bob"), node("carl", 150), node("dora", 300))
    plan = plan_of(swarm, ("ana",), {"carl": 2, "dora": 4})
    repair = leave(swarm, plan, "dora")
    expected = "bob takes over stage 2 of cluster B"
    assert expected in repair.reason
    swarm = without(swarm, "bob")
    repair = leave(swarm, replace(plan, spares=(), backups=()), "dora")
    assert repair.reason.startswith("dora left: cluster B is dissolved, carl becomes a spare; nothing moves")
    assert repair.plan.clusters == plan.clusters[:1]
    assert repair.plan.rings == ()
    assert repair.plan.spares == ("carl",)


def test_a_cluster_that_costs_more_than_it_brings_is_not_mended():
    # Rounds that block nine tenths of the time: one cluster alone is five times as fast as two.
    config = replace(SIMPLE, averaging=Averaging.BLOCKING, averaging_share=0.9)
    swarm = swarm_of(node("ana"), node("bob"), node("spare"))
    repair = leave(swarm, plan_of(swarm, ("ana",), ("bob",), config=config), "bob", config=config)
    assert repair.reason == "bob left: cluster B is dissolved; nothing moves, 11.1 -> 55.6 samples/s"


def test_spares_and_the_dissolved_nodes_form_a_new_cluster():
    # Neither the spares nor bob alone can hold carl's four positions, but all three can hold the model.
    swarm = swarm_of(node("ana"), node("bob", 160), node("carl", 400), node("s1", 160), node("s2", 160))
    plan = plan_of(swarm, ("ana",), {"bob": 2, "carl": 4})
    repair = leave(swarm, plan, "carl")
    assert "cluster B is dissolved, " in repair.reason
    assert " form a new one; " in repair.reason
    assert repair.plan.clusters[0] == plan.clusters[0]
    assert set(layout(repair.plan, 1)) == {"bob", "s1", "s2"}


def test_the_last_cluster_starts_over_with_what_is_there():
    swarm = swarm_of(node("bob", 100), node("carl", 400), node("s1", 100), node("s2", 100))
    plan = plan_of(swarm, {"carl": 4, "bob": 2})
    repair = leave(swarm, plan, "carl")
    assert repair.reason.startswith("carl left: cluster A is dissolved, ")
    assert " form a new one; " in repair.reason
    assert len(repair.plan.clusters[0].stages) == 3


def test_nothing_left_says_what_is_short():
    swarm = swarm_of(node("ana", 100), node("bob", 150))
    plan = plan_of(swarm, {"ana": 2, "bob": 4})
    repair = leave(swarm, plan, "bob")
    assert repair.plan.clusters == ()
    assert repair.plan.spares == ("ana",)
    assert repair.plan.plan_id == 5
    assert "bob left: cluster A is dissolved, no cluster is possible; even needs " in repair.reason
    assert "1 node offers 100 MB; add 1 node with >= " in repair.reason
    empty = leave(without(swarm, "bob"), repair.plan, "ana")
    assert empty.plan.spares == ()


def test_a_cluster_counts_as_much_in_a_large_swarm():
    # Giving up one of twenty clusters costs 5 % and moves nothing; it must not win for that.
    hosts = [node(f"h{k:02}") for k in range(20)]
    swarm = swarm_of(*hosts, node("spare", gflops=50))
    plan = plan_of(swarm, *[(each.name,) for each in hosts])
    repair = leave(swarm, replace(plan, backups=()), "h03")
    assert "spare spare takes over stage 1 of cluster D; 60 MB move" in repair.reason
    assert len(repair.plan.clusters) == 20


def test_a_joined_node_becomes_a_spare_with_a_duty():
    swarm = swarm_of(node("ana", 200), node("bob", 200))
    plan = plan_of(swarm, ("ana", "bob"))
    now = swarm_of(*swarm.nodes, node("carl", 150, gflops=5))
    repair = node_joined(plan, "carl", MODEL, now, SIMPLE)
    assert repair.reason == (
        "carl joined: it is a spare and backs up ana; nothing moves, still 111 samples/s"
    )
    assert repair.plan.clusters == plan.clusters
    again = node_joined(repair.plan, "carl", MODEL, now, SIMPLE)
    assert again.plan is repair.plan
    host = node_joined(repair.plan, "ana", MODEL, now, SIMPLE)
    assert host.plan is repair.plan
    assert "it hosts a stage already" in host.reason


def test_a_snapshot_stays_with_the_spare_that_keeps_it():
    swarm = swarm_of(node("ana", 130), node("spare", 200))
    plan = plan_of(swarm, ("ana",))
    repair = node_joined(plan, "snug", MODEL, swarm_of(*swarm.nodes, node("snug", 150, gflops=5)), SIMPLE)
    assert repair.plan.backups == (Backup("spare", "ana"),)
    assert repair.reason.startswith("snug joined: it is a spare; nothing moves")


def test_spares_form_a_cluster_once_they_can():
    swarm = swarm_of(node("ana"), node("bob", 200))
    plan = plan_of(swarm, ("ana",))
    now = swarm_of(*swarm.nodes, node("carl", 250))
    repair = node_joined(plan, "carl", MODEL, now, SIMPLE)
    check_laws(repair.plan, MODEL, now, SIMPLE)
    assert repair.plan.clusters[0] == plan.clusters[0]
    assert set(layout(repair.plan, 1)) == {"bob", "carl"}
    assert " form cluster B; 60 MB move, 55.6 -> " in repair.reason
    assert [ring.owners[0] for ring in repair.plan.rings] == ["ana", "ana"]


def test_a_lone_cluster_without_room_for_averaging_stays_alone():
    swarm = swarm_of(node("ana", 150))
    plan = plan_of(swarm, ("ana",))
    now = swarm_of(*swarm.nodes, node("bob", 1000, gflops=5))
    repair = node_joined(plan, "bob", MODEL, now, SIMPLE)
    assert repair.reason.startswith("bob joined: it is a spare and backs up ana")
    assert len(repair.plan.clusters) == 1


def test_a_joined_node_takes_a_place_where_that_is_worth_it():
    swarm = swarm_of(node("ana", 200), node("bob", 200))
    plan = plan_of(swarm, ("ana", "bob"))
    now = swarm_of(*swarm.nodes, node("carl", 150))
    root = plan.clusters[0].stages[0].node
    assert node_joined(plan, "carl", MODEL, now, SIMPLE, building=(root,)).plan.clusters == plan.clusters
    repair = node_joined(plan, "carl", MODEL, now, SIMPLE)
    check_laws(repair.plan, MODEL, now, SIMPLE)
    assert repair.reason == (
        "carl joined: it takes a place in cluster A, which is cut anew; 30 MB move, 111 -> 167 samples/s"
    )
    assert set(layout(repair.plan)) == {"ana", "bob", "carl"}


def test_a_cluster_of_as_many_stages_as_there_may_be_is_left_alone():
    swarm = swarm_of(node("ana", 200), node("bob", 200))
    plan = plan_of(swarm, ("ana", "bob"))
    now = swarm_of(*swarm.nodes, node("carl", 150))
    repair = node_joined(plan, "carl", MODEL, now, replace(SIMPLE, max_stages=2))
    assert repair.plan.clusters == plan.clusters


def test_the_slowest_cluster_is_enlarged_and_no_other_is_touched():
    names = ("ana", "bob", "cleo", "dora", "eli")
    swarm = swarm_of(*(node(name, 300) for name in names))
    plan = plan_of(swarm, names[:3], names[3:])
    now = swarm_of(*swarm.nodes, node("fay", 120))
    repair = node_joined(plan, "fay", MODEL, now, SIMPLE)
    assert repair.plan.clusters[0] == plan.clusters[0]
    assert set(layout(repair.plan, 1)) == {"dora", "eli", "fay"}


def test_a_cluster_that_would_hold_the_others_back_is_not_formed():
    swarm = swarm_of(node("ana"))
    plan = plan_of(swarm, ("ana",))
    now = swarm_of(*swarm.nodes, node("slug", gflops=10))
    assert len(node_joined(plan, "slug", MODEL, now, SIMPLE).plan.clusters) == 1
    now = swarm_of(*swarm.nodes, node("snail", gflops=30))
    assert len(node_joined(plan, "snail", MODEL, now, SIMPLE).plan.clusters) == 2


def test_one_cluster_more_is_worth_it_in_a_large_swarm():
    hosts = [node(f"h{k:03}") for k in range(150)]
    swarm = swarm_of(*hosts)
    plan = plan_of(swarm, *[(each.name,) for each in hosts])
    now = swarm_of(*hosts, node("late"))
    repair = node_joined(plan, "late", MODEL, now, SIMPLE)
    assert "late forms cluster EU; 60 MB move" in repair.reason


def test_the_first_cluster_is_formed_as_soon_as_it_can_be():
    swarm = swarm_of(node("ana", 100))
    plan = assemble_plan((), MODEL, swarm, SIMPLE, seed=7, plan_id=4)
    same = node_joined(plan, "ana", MODEL, swarm, SIMPLE)
    assert same.plan is plan
    assert same.reason.startswith("ana joined: no cluster is possible; even needs ")
    now = swarm_of(node("ana", 100), node("bob", 300))
    repair = node_joined(plan, "bob", MODEL, now, SIMPLE)
    check_laws(repair.plan, MODEL, now, SIMPLE)
    assert (repair.plan.plan_id, repair.plan.seed) == (5, 7)
    assert "the first cluster; 60 MB move, 0 -> " in repair.reason


def test_a_node_that_is_hardly_slower_keeps_its_stage():
    swarm = swarm_of(node("ana"), node("bob"))
    plan = plan_of(swarm, ("ana", "bob"))
    swarm = changed(swarm, "ana", flops_per_second=110e9)
    repair = slow(swarm, plan, "bob", flops_per_second=97e9)
    assert repair.plan is plan
    assert repair.reason == (
        "bob slowed down: it keeps stage 2 of cluster A, no change would gain anything; "
        "nothing moves, 111 -> 108 samples/s"
    )


def test_a_small_gain_is_named_and_not_taken():
    long = even_model(24, parameter_mb=1.0)
    swarm = swarm_of(node("ana"), node("bob"))
    plan = plan_of(swarm, {"ana": 12, "bob": 12}, model=long)
    repair = slow(swarm, plan, "bob", model=long, flops_per_second=90e9)
    assert repair.plan is plan
    assert "it keeps stage 2 of cluster A, re-cutting would gain 3 %" in repair.reason


def test_a_large_gain_is_taken():
    swarm = swarm_of(node("ana"), node("bob"))
    plan = plan_of(swarm, ("ana", "bob"))
    repair = slow(swarm, plan, "bob", flops_per_second=50e9)
    assert repair.reason == (
        "bob slowed down: cluster A is cut anew over ana and bob; 10 MB move, 111 -> 83.3 samples/s"
    )
    assert layout(repair.plan) == {"ana": (0, 4), "bob": (4, 6)}


def test_a_spare_replaces_a_node_that_crawls():
    swarm = swarm_of(node("ana"), node("bob"), node("carl", uptime_seconds=1e5), node("spare"))
    plan = plan_of(swarm, ("ana", "bob", "carl"))
    repair = slow(swarm, plan, "carl", flops_per_second=1e9)
    assert (
        "carl slowed down: its backup spare takes over stage 3 of cluster A; nothing moves" in repair.reason
    )
    assert "carl" in repair.plan.spares


def test_a_node_that_crawls_is_dropped():
    swarm = swarm_of(node("ana"), node("bob"), node("carl"))
    plan = plan_of(swarm, ("ana", "bob", "carl"))
    repair = slow(swarm, plan, "bob", flops_per_second=0.5e9)
    assert "bob slowed down: ana and carl share stage 2 of cluster A; 20 MB move" in repair.reason
    assert repair.plan.spares == ("bob",)


def test_a_node_that_lost_memory_recomputes():
    config, model = replace(SIMPLE, recompute=Recompute.AUTO), even_model(6, saved_mb=20, crossing_mb=0.001)
    swarm = swarm_of(node("ana", 900), node("bob", 900))
    plan = plan_of(swarm, ("ana", "bob"), config=config, model=model)
    assert not plan.clusters[0].stages[0].recompute
    repair = slow(swarm, plan, "ana", config=config, model=model, memory_bytes=190 * MB)
    assert "ana slowed down: it keeps stage 1 of cluster A with other windows or recomputing" in repair.reason
    assert repair.plan.clusters[0].stages[0].recompute
    assert repair.moved_bytes == 0


def test_a_node_that_lost_its_memory_cannot_stay():
    swarm = swarm_of(node("ana"), node("bob"))
    plan = plan_of(swarm, ("ana", "bob"))
    repair = slow(swarm, plan, "bob", memory_bytes=5 * MB)
    assert "bob slowed down: ana takes over stage 2 of cluster A; 30 MB move, 111 -> 55.6" in repair.reason


def test_a_link_too_slow_for_a_round_cannot_stay():
    swarm = swarm_of(node("ana"), node("bob"), node("carl"))
    plan = plan_of(swarm, ("ana",), ("bob", "carl"))
    repair = slow(swarm, plan, "carl", upload_bytes_per_second=2e4)
    assert "carl slowed down: bob takes over stage 2 of cluster B" in repair.reason


def test_a_slow_spare_keeps_its_duty_while_it_fits():
    swarm = swarm_of(node("ana", 300), node("bob", 200))
    plan = plan_of(swarm, ("ana",))
    assert slow(swarm, plan, "bob", flops_per_second=1e9).plan is plan
    repair = slow(swarm, plan, "bob", memory_bytes=10 * MB)
    assert repair.reason.startswith("bob slowed down: it is a spare and too small to back up ana; nothing")
    assert repair.plan.backups == ()


def test_moved_bytes_counts_what_a_node_did_not_have():
    swarm = swarm_of(node("ana"), node("bob"), node("carl"), node("dora"))
    before = replace(plan_of(swarm, ("ana", "bob")), backups=(Backup("carl", "bob"),))
    assert moved_bytes(before, before, MODEL) == 0
    assert moved_bytes(before, plan_of(swarm, {"ana": 4, "bob": 2}), MODEL) == 10 * MB
    assert moved_bytes(before, plan_of(swarm, ("ana", "carl")), MODEL) == 0
    assert moved_bytes(before, plan_of(swarm, ("ana", "dora")), MODEL) == 30 * MB
    # bob is still there, so what carl keeps of him is not what a second cluster needs
    assert moved_bytes(before, plan_of(swarm, ("ana", "bob"), ("dora", "carl")), MODEL) == 60 * MB


def test_the_reason_tells_the_forecast():
    swarm = swarm_of(node("ana"), node("bob"), node("carl"))
    plan = plan_of(swarm, ("ana", "bob", "carl"))
    repair = node_left(plan, "bob", MODEL, without(swarm, "bob"), SIMPLE)
    rate = forecast(repair.plan, MODEL, without(swarm, "bob"), SIMPLE).samples_per_second
    assert repair.reason.endswith(f"20 MB move, {rate:.3g} samples/s")
