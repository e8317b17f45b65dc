"""What the quality benchmark concludes from its records."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.quality_report import make_report
from benchmarks.quality_runs import Run, read_records


def loop(task: str, name: str, loss: float, accuracy: float, seed: int = 0, share: float = 1.0):
    scores = {"loss": loss, "accuracy": accuracy}
    run = asdict(Run(task, seed, name, share))
    return {"run": run, "machine": "2 cores", "loop": name, "scores": scores, "updates": 8, "seconds": 1.0}


def swarm(task: str, loss: float, accuracy: float, nodes: int = 2, efficiency: float | None = None, **asked):
    return {
        "run": asdict(Run(task, 0, nodes=nodes, **asked)),
        "machine": "2 cores",
        "scores": {"loss": loss, "accuracy": accuracy},
        "updates": 8,
        "seconds": 2.0,
        "clusters": nodes,
        "stages": [1] * nodes,
        "mode": None,
        "efficiency": efficiency,
        "rounds": 3,
        "lost_rounds": 0,
    }


def test_a_swarm_is_judged_against_the_tuned_loop_and_the_plain_one():
    loops = [loop("vit", "plain", 0.4, 0.90), loop("vit", "plain", 0.4, 0.91, seed=1)]
    loops += [loop("vit", "tuned", 0.3, 0.95), loop("vit", "own", 0.2, 0.96)]
    _, text, missed = make_report([*loops, swarm("vit", 0.3, 0.945)])
    assert missed == []
    assert "-0.5 points" in text
    assert make_report([*loops, swarm("vit", 0.3, 0.93)])[2] == [
        "vit, 2 nodes: -2.0 points against the tuned loop"
    ]
    assert len(make_report([*loops, swarm("vit", 0.3, 0.88)])[2]) == 2
    # What was asked for is shown and not judged.
    assert make_report([*loops, swarm("vit", 0.3, 0.88, clusters=2)])[2] == []
    alone = {**swarm("vit", 0.3, 0.945), "clusters": 1}
    (missed,) = make_report([*loops, alone])[2]
    assert "no swarm had more than one cluster" in missed
    losses = [loop("gpt-200", "tuned", 2.0, 0.0), swarm("gpt-200", 2.05, 0.0)]
    assert make_report(losses)[2] == ["gpt-200, 2 nodes: +2.5 % loss against the tuned loop"]


def test_efficiency_is_the_share_with_which_one_process_has_the_same_loss():
    curve = {0.125: 3.0, 0.25: 2.0, 0.5: 1.0, 0.75: 1.1, 1.0: 0.9}
    loops = [loop("gpt-200", "own", loss, 0.0, share=share) for share, loss in curve.items()]

    def measured(loss: float) -> float:
        figures = make_report([*loops, swarm("gpt-200", loss, 0.0)])[0]
        return float(figures["gpt-200"]["swarms"]["2 nodes"]["measured"])

    assert measured(0.8) == measured(0.9) == 1.0
    assert measured(1.5) == pytest.approx(0.25 * 2**0.5)
    assert measured(1.0) == pytest.approx(0.5)
    assert measured(5.0) == 0.125
    assert make_report([*loops, swarm("gpt-200", 1.0, 0.0, efficiency=0.9)])[2] == [
        "gpt-200, 2 nodes: there is no tuned loop to compare with",
        "predicted e is 0.40 off measured e (median), not 0.1 at most",
        "e of the rounds and the noise as they were is 0.50 off, not 0.1 at most",
    ]


def test_a_run_that_failed_is_missed_and_files_are_put_together(tmp_path: Path):
    failed = {"run": asdict(Run("vit", 0, nodes=2)), "machine": "2 cores", "error": "PlanError: too few"}
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(failed) + "\n")
    second.write_text("".join(json.dumps(each) + "\n" for each in (failed, loop("vit", "tuned", 0.3, 0.95))))
    records = read_records([first, second, tmp_path / "none.jsonl"])
    assert len(records) == 2
    assert make_report(records)[2] == ["vit: a run failed (PlanError: too few)"]
    second.write_text(json.dumps(swarm("vit", 0.3, 0.95)) + "\n")  # it was made again
    assert [record.get("error") for record in read_records([first, second])] == [None]


def test_the_planners_choice_is_compared_with_other_numbers_of_clusters_by_time_to_quality():
    loops = [loop("gpt-200", "own", loss, 0.0, share=share) for share, loss in ((0.5, 3.0), (1.0, 2.0))]
    loops.append(loop("gpt-200", "tuned", 2.0, 0.0))
    chosen = swarm("gpt-200", 2.0, 0.0, nodes=4, emulated=1e9)
    slow = {**swarm("gpt-200", 2.0, 0.0, nodes=4, emulated=1e9, clusters=1), "clusters": 1, "seconds": 9.0}
    fast = {**swarm("gpt-200", 2.0, 0.0, nodes=4, emulated=1e9, clusters=2), "clusters": 2, "seconds": 1.9}
    # Faster, but its model is that of half the updates.
    worse = {**swarm("gpt-200", 3.0, 0.0, nodes=4, emulated=1e9, clusters=4), "seconds": 1.2}
    assert make_report([*loops, chosen, slow, fast, worse])[2] == []
    (missed,) = make_report([*loops, chosen, slow, {**fast, "seconds": 1.0}, worse])[2]
    assert "the plan takes 2.00 times as long to the same quality as 2 clusters" in missed
    # Others than the planner's choice are not judged, nor nodes of another speed.
    assert make_report([*loops, chosen, {**swarm("gpt-200", 2.0, 0.0, nodes=4), "seconds": 0.1}])[2] == []


def test_e_is_also_that_of_the_noise_and_the_rounds_that_there_were():
    loops = [loop("gpt-200", "own", loss, 0.0, share=share) for share, loss in ((0.5, 3.0), (1.0, 2.0))]
    shared = swarm("gpt-200", 2.0, 0.0, nodes=4, clusters=4, averaging="blocking", efficiency=0.5)
    shared |= {"mode": "blocking, shares", "updates": 800, "rounds": 40}

    def as_it_went(**facts: object) -> float:
        figures = make_report([*loops, {**shared, **facts}])[0]
        (cell,) = figures["gpt-200"]["swarms"].values()
        return float(cell["as_it_went"])

    assert as_it_went(noise=[1e9] * 4) == pytest.approx(1.0)
    assert as_it_went(rounds=1) < as_it_went() < 1.0
    assert as_it_went(noise=[8.0, 8.0, 1e9, 1e9]) == pytest.approx(
        (as_it_went(noise=[8.0] * 4) + 1) / 2, rel=1e-6
    )
