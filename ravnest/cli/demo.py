"""`ravnest demo`: train something real with made-up PCs on this one, and compare with a single process."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import choose_view, dashboard_options, find_parts, to_json
from ravnest.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ravnest.cli.demo_jobs import Demo
    from ravnest.hub.coordinator.notices import Notice
    from ravnest.ids import NodeId
    from ravnest.plan.types import Plan
    from ravnest.requester.result import Result

_MOST_NODES = 16
_KILLED_AFTER = 0.4  # of the training
_LEAST_TO_KILL = 3  # nodes: two hold the model
_NUM_ALONE = 3  # runs of one process, each with the data in another order: one says nothing about chance


@dataclass(slots=True)
class _Notes:
    """What the demo keeps of the news."""

    plan: "Plan | None" = None
    rounds_committed: int = 0
    num_samples: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    processes: "Callable[[], Mapping[NodeId, int]] | None" = None  # one of them is killed
    killed: "NodeId | None" = None
    killed_at: float = 0.0
    recovery_seconds: float | None = None
    num_again: int = 0  # samples

    def __call__(self, news: "Notice") -> None:
        from ravnest.hub.coordinator.notices import (
            ClusterBroken,
            ClusterStarted,
            PlanFormed,
            Recovered,
            RoundEnded,
            Trained,
        )

        now = time.perf_counter()  # noqa: TID251 - this is the measurement
        match news:
            case PlanFormed(plan):
                self.plan = self.plan or plan
            case ClusterStarted():
                self.started_at = self.started_at or now
            case Trained():
                self.num_samples, self.ended_at = news.num_samples, now
                if news.num_samples >= _KILLED_AFTER * news.num_total and self.killed is None:
                    self._kill(now)
            case RoundEnded():
                self.rounds_committed += news.is_committed
            case ClusterBroken():
                self.num_again += news.num_given_back
            case Recovered() if self.killed is not None and self.recovery_seconds is None:
                self.recovery_seconds = now - self.killed_at

    def _kill(self, now: float) -> None:
        """Cut the power of one PC, a middle one if there is any."""
        if self.processes is None or self.plan is None:
            return
        largest = max(self.plan.clusters, key=lambda cluster: len(cluster.stages))
        self.killed, self.killed_at = largest.stages[len(largest.stages) // 2].node, now
        click.echo(f"{self.killed} is killed now, on purpose (kill -9)", err=True)
        os.kill(self.processes()[self.killed], signal.SIGKILL)

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / max(self.ended_at - self.started_at, 1e-9)


@click.command()
@click.option("--text", "is_text", is_flag=True, help="A small GPT on the sources of Python itself.")
@click.option("--nodes", type=int, default=5, show_default=True, metavar="N", help="Made-up PCs, 2 to 16.")
@click.option("--kill/--no-kill", default=True, help="Kill a PC on purpose, if there are three or more.")
@click.option("--folder", metavar="DIR", help="For log and weights; runs/demo if left out.")
@dashboard_options(is_usual=True)
@click.option("--quiet", is_flag=True, help="Print the comparison only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.demo/1).")
def demo(
    is_text: bool,
    nodes: int,
    kill: bool,
    folder: str | None,
    dashboard: bool | str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train a model that none of five made-up PCs could hold, and compare with one process.

    The PCs are programs on this one, with unequal emulated speeds. They form two clusters, which average. In
    the middle of it one of them is killed, and the others go on.
    """
    if not 2 <= nodes <= _MOST_NODES:
        raise ConfigError(f"--nodes {nodes}: choose from 2 to {_MOST_NODES}")
    from ravnest.cli import demo_jobs
    from ravnest.cli.demo_jobs import train_plain_loop
    from ravnest.requester.run_folder import MODEL, free_run
    from ravnest.requester.session import LOCAL_PLAN, local

    chosen = demo_jobs.text() if is_text else demo_jobs.digits()
    place = Path(folder) if folder else free_run("demo")
    num_parameters = sum(value.numel() for value in chosen.job.model.parameters())
    click.echo(f"{chosen.what}; a model of {num_parameters:,} parameters", err=True)
    click.echo(f"{nodes} PCs with made-up speeds, none of which could hold it", err=True)
    before = chosen.prompt and demo_jobs.continue_text(chosen.job.model, chosen.prompt)
    notes = _Notes()
    hardware = [chosen.nodes[index % len(chosen.nodes)] for index in range(nodes)]
    # Memory is made up, so that of the programs is left out. Two clusters are to be seen at work.
    plan = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=2)
    parts = find_parts().hub_parts
    with (
        choose_view(quiet) as view,
        local(
            hardware,
            folder=place,
            plan=plan,
            tell=view.tell,
            look=view.look,
            dashboard=dashboard,
            parts=parts,
        ) as swarm,
    ):
        notes.processes = (lambda: swarm.processes) if kill and nodes >= _LEAST_TO_KILL else None
        result = swarm.fit(chosen.job, callbacks=[notes])
    click.echo(f"the same training in one process, {_NUM_ALONE} times, in other orders", err=True)
    orders = (replace(chosen.job, seed=chosen.job.seed + number) for number in range(_NUM_ALONE))
    alone = [train_plain_loop(job, result.blueprint) for job in orders]
    numbers = {
        **_compare(result, notes),
        "single_process_accuracies": sorted(each.metrics["val_accuracy"] for each in alone),
        "single_process_losses": sorted(each.metrics["val_loss"] for each in alone),
        "single_process_samples_per_second": max(each.samples_per_second for each in alone),
        "nodes": nodes,
        "model_path": str(place / MODEL),
    }
    if chosen.prompt is not None:
        result.load_into(chosen.job.model)
        after = demo_jobs.continue_text(chosen.job.model, chosen.prompt)
        numbers |= {"text_before": before, "text_after": after}
    click.echo(to_json({"schema": "ravnest.demo/1", **numbers}) if as_json else _show(numbers, chosen))


def _compare(result: "Result", notes: _Notes) -> dict[str, object]:
    """Return what the swarm did."""
    assert notes.plan is not None
    from math import prod

    from ravnest.model.blueprint.slicing import slice_blueprint

    def size(start: int, stop: int) -> int:
        state = slice_blueprint(result.blueprint, start, stop).state
        return sum(prod(entry.shape) for entry in state if entry.is_trainable)

    stages = [stage for cluster in notes.plan.clusters for stage in cluster.stages]
    whole = size(0, max(stage.stop for stage in stages))
    return {
        "val_accuracy": result.metrics["val_accuracy"],
        "val_loss": result.metrics["val_loss"],
        "samples_per_second": notes.samples_per_second,
        "clusters": len(notes.plan.clusters),
        "stages": sorted((len(cluster.stages) for cluster in notes.plan.clusters), reverse=True),
        "rounds_committed": notes.rounds_committed,
        "killed": notes.killed,
        "recovery_seconds": notes.recovery_seconds,
        "samples_trained_again": notes.num_again,
        "largest_node_share": max(size(stage.start, stage.stop) for stage in stages) / whole,
    }


def _show(numbers: dict[str, object], chosen: "Demo") -> str:
    share = f"largest node held {numbers['largest_node_share']:.0%} of the model"
    stages = " + ".join(map(str, numbers["stages"]))  # type: ignore[call-overload]
    swarm, alone = f"ravnest, {numbers['nodes']} nodes", f"one process, {_NUM_ALONE} runs"
    lines = [
        f"{swarm:22} accuracy {numbers['val_accuracy']:.1%}  loss {numbers['val_loss']:.3f}  "
        f"{numbers['samples_per_second']:7,.0f} samples/s  clusters of {stages} stages; {share}",
        f"{alone:22} accuracy {_range(numbers['single_process_accuracies'], '.1%')}  "
        f"loss {_range(numbers['single_process_losses'], '.3f')}  "
        f"{numbers['single_process_samples_per_second']:7,.0f} samples/s  at this PC's full speed",
        *_show_recovery(numbers),
        f"{numbers['rounds_committed']} rounds of averaging. A model this small needs no swarm,",
        "and the PCs are slow on purpose: compare what was learned, not how fast.",
        f"saved {numbers['model_path']}",
    ]
    if chosen.prompt is not None:
        lines += ["", "before:", str(numbers["text_before"]), "", "after:", str(numbers["text_after"])]
    else:
        lines.append("next: ravnest demo --text, or train your own model: see README.md")
    return "\n".join(lines)


def _range(values: object, how: str) -> str:
    assert isinstance(values, list)
    return f"{values[0]:{how}} to {values[-1]:{how}}"


def _show_recovery(numbers: dict[str, object]) -> list[str]:
    if numbers["killed"] is None:
        return []
    seconds = numbers["recovery_seconds"]
    how = "others trained what was left"
    how = how if seconds is None else f"its cluster trained again {seconds:.1f} s later"
    again = f"{numbers['samples_trained_again']} samples were begun anew"
    return [f"{numbers['killed']} was killed on purpose: {how}, {again}."]
