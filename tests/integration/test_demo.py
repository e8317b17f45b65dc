"""`ravnest demo`: five made-up PCs form clusters of three and two, and learn what one process learns."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ravnest.cli import demo_jobs
from ravnest.hub.coordinator.events import MakePlan
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.ids import NodeId
from ravnest.plan.types import Node
from ravnest.requester.prepare import prepare
from ravnest.requester.session import LOCAL_PLAN

pytestmark = pytest.mark.timeout(900)  # only a run that hangs needs so long


@pytest.mark.parametrize("make", [demo_jobs.digits, demo_jobs.text])
def test_every_plan_of_a_demo_has_a_cluster_of_three_and_one_of_two(make) -> None:
    demo = make()
    given = prepare(demo.job, replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=2), 5, 1.0)
    nodes = tuple(
        Node(NodeId(f"node{index}"), each.memory_bytes, each.emulated_flops_per_second, 1e9, 1e9, 1e-4)
        for index, each in enumerate(demo.nodes)
    )
    for order in (nodes, nodes[::-1], nodes[2:] + nodes[:2]):  # they join in any order
        made = SearchPlanner().make_plan(given.job, MakePlan(1, order), 0.0)
        assert sorted(len(cluster.stages) for cluster in made.plan.clusters) == [2, 3]


def test_the_demo_learns_what_one_process_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ravnest", "demo", "--json", "--folder", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["nodes"]) == ("ravnest.demo/1", 5)
    assert (found["clusters"], found["stages"]) == (2, [3, 2])
    # One process has 0.990 to 1.0 of 297 digits right, by the order of its data alone: mean 0.994, deviation
    # 0.004. A swarm that learned as much is not six deviations below; a cluster that was lost would be.
    assert len(found["single_process_accuracies"]) == 3
    assert min(found["val_accuracy"], *found["single_process_accuracies"]) >= 0.97
    assert found["rounds_committed"] >= 1
    assert found["killed"] in [f"node{number}" for number in range(1, 6)]
    assert found["largest_node_share"] < 0.8
    assert min(found["samples_per_second"], found["single_process_samples_per_second"]) > 0
    assert load_file(tmp_path / found["model_path"])
    opened = done.stderr.index("watch it at http://127.0.0.1:")
    assert opened < done.stderr.index(" joined"), "the page is there before anything happens"
    assert "?token=" not in (tmp_path / "demo" / "hub.log").read_text()
