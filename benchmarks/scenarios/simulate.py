"""Does the simulator do what a real swarm does? The same job, nodes, plans and death, for real and simulated.

The real run is that of the benchmark `recovery`: `ravnest join` processes on emulated devices, two clusters
of three stages and a spare, one of them killed. The simulator gets its job, its nodes and its planner.
"""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measure import say, spread, table
from benchmarks.scenarios import recovery
from benchmarks.swarm import Record, train
from ravnest.hub.coordinator.events import Action, Event, JobGiven, MakePlan, PlanMade
from ravnest.hub.coordinator.planner import SearchPlanner
from ravnest.ids import NodeId
from ravnest.plan.types import Plan, Swarm
from ravnest.sim.world import World, WorldParts

Figures = dict[str, Any]

RATE_WITHIN, RECOVERY_WITHIN = 0.10, 0.20
TURNS = 3
_RUNS_SECONDS, _KILL_SECONDS, _END_SECONDS = 8.0, 60.0, 110.0


@dataclass
class Seen:
    """What the hub of the real run was told and asked for."""

    death: recovery._Death
    job: JobGiven | None = None
    asked: MakePlan | None = None
    made: PlanMade | None = None

    def note(self, event: Event, actions: tuple[Action, ...]) -> None:
        self.death.note(event, actions)
        self.job = event if isinstance(event, JobGiven) else self.job
        if self.asked is None:
            self.asked = next((each for each in actions if isinstance(each, MakePlan)), None)
        if self.made is None and isinstance(event, PlanMade) and event.plan is not None:
            self.made = event


def run(quick: bool) -> tuple[Figures, str, list[str]]:
    shape = (1, 0) if quick else (2, 1)
    turns = [_compare(*shape) for _ in range(1 if quick else TURNS)]
    say(str(turns))
    if quick:
        (turn,) = turns
        assert 0.2 < turn["rate_ratio"] < 5.0, turn  # a busy PC is no measure
        assert turn["simulated_recovery"] > 0, turn
        return {"turns": turns}, "", []
    ratios = {key: spread([turn[key] for turn in turns]) for key in ("rate_ratio", "recovery_ratio")}
    missed = []
    if abs(ratios["rate_ratio"]["median"] - 1) > RATE_WITHIN:
        missed.append(f"the simulated rate is {ratios['rate_ratio']['median']} of the measured one")
    if abs(ratios["recovery_ratio"]["median"] - 1) > RECOVERY_WITHIN:
        missed.append(
            f"the simulated recovery takes {ratios['recovery_ratio']['median']} of the measured time"
        )
    rows = [[*turn.values()] for turn in turns]
    report = f"{__doc__.strip()}\n\n{table([*turns[0]], rows)}\n"
    return {"turns": turns, **ratios}, report, missed


def _compare(num_clusters: int, num_spares: int) -> Figures:
    seen = Seen(recovery._Death(1))
    job, setting = recovery._emulate(num_clusters, num_spares)
    record = train(job, setting, watch=seen.death.watch, on_event=seen.note, look=seen.death.look)
    measured = _read(seen.death, record)
    simulated = simulate_again(seen, NodeId(seen.death.victim))
    return {
        "measured_rate": measured[0],
        "simulated_rate": simulated[0],
        "rate_ratio": round(simulated[0] / measured[0], 4),
        "measured_recovery": measured[1],
        "simulated_recovery": simulated[1],
        "recovery_ratio": round(simulated[1] / measured[1], 4),
    }


def _read(death: Any, record: Record) -> tuple[float, float]:
    since = record.leaf_times[0][0] + recovery._WARM_UP_SECONDS
    rate = recovery._rate(record, since, death.killed_at)
    return round(rate, 3), round(death.resumed_at - death.killed_at, 3)


def simulate_again(seen: Seen, victim: NodeId) -> tuple[float, float]:
    """Return the rate before the death of this node, and the seconds until training resumed."""
    assert seen.job is not None
    assert seen.asked is not None
    assert seen.made is not None
    swarm = Swarm(seen.asked.nodes)
    planner = _SamePlan(seen.made)
    world = World(replace(seen.job, now=0.0), swarm, WorldParts(planner, is_measured=False))
    for node in swarm.nodes:
        world.timeline.at(0.0, world.join, node.name)
    world.run(_KILL_SECONDS)
    before = world.hub.ledger.num_counted
    world.run(_KILL_SECONDS + _RUNS_SECONDS)
    rate = (world.hub.ledger.num_counted - before) / _RUNS_SECONDS
    killed_at = world.timeline.now
    world.kill(victim)
    world.run(_END_SECONDS)
    resumed = [each.at for each in world.recorder.recoveries if each.at > killed_at]
    assert resumed, f"the simulated cluster did not train again: {world.recorder.notices}"
    return round(rate, 3), round(resumed[0] - killed_at, 3)


@dataclass
class _SamePlan:
    """Gives the first plan of the real run, and repairs it as a real hub does."""

    made: PlanMade

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        if asked.repairs is None and self.made.plan is not None:
            plan: Plan = replace(self.made.plan, plan_id=asked.plan_id)
            return replace(self.made, plan=plan, plan_id=asked.plan_id, now=now)
        return SearchPlanner().make_plan(job, asked, now)
