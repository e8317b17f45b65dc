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
from ravnest.protocol.messages import Message
from ravnest.protocol.training import StepReport
from ravnest.sim.sim_peer import SimPeer
from ravnest.sim.world import HubSpeeds, World, WorldParts

Figures = dict[str, Any]

RATE_WITHIN, RECOVERY_WITHIN = 0.10, 0.20
TURNS = 3
_LONGEST_SECONDS = 60.0
_KILLED = HubSpeeds(link_lost_seconds=0.1)  # the system closes the links of a program that is killed


@dataclass
class Seen:
    """What the hub of the real run was told and asked for."""

    death: recovery.Death
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
    seen = Seen(recovery.Death(1))
    job, setting = recovery.emulate(num_clusters, num_spares)
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
    since = record.leaf_times[0][0] + recovery.WARM_UP_SECONDS
    rate = recovery.measure_rate(record, since, death.killed_at)
    return round(rate, 3), round(death.resumed_at - death.killed_at, 3)


def simulate_again(seen: Seen, victim: NodeId) -> tuple[float, float]:
    """Return the rate before the death of this node, and the seconds until training resumed."""
    assert seen.job is not None
    assert seen.asked is not None
    assert seen.made is not None
    swarm = Swarm(seen.asked.nodes)
    planner = _SamePlan(seen.made)
    world = _Watched(
        replace(seen.job, now=0.0), swarm, WorldParts(planner, is_measured=False, hub_speeds=_KILLED)
    )
    for node in swarm.nodes:
        world.timeline.at(0.0, world.join, node.name)
    while not world.leaf_times and world.timeline.now < _LONGEST_SECONDS:
        world.run(world.timeline.now + 0.1)
    first = world.leaf_times[0][0]
    since, killed_at = first + recovery.WARM_UP_SECONDS, first + recovery.BEFORE_SECONDS
    world.run(killed_at)
    world.kill(victim)
    world.run(killed_at + _LONGEST_SECONDS)
    num_samples = sum(size for at, size in world.leaf_times if since < at <= killed_at)
    resumed = [each.at for each in world.recorder.recoveries if each.at > killed_at]
    assert resumed, f"the simulated cluster did not train again: {world.recorder.notices}"
    return round(num_samples / (killed_at - since), 3), round(resumed[0] - killed_at, 3)


class _Watched(World):
    """Knows when which microbatch was through the last stage of its cluster."""

    def __init__(self, *facts: Any) -> None:
        self.leaf_times: list[tuple[float, int]] = []
        super().__init__(*facts)

    def say(self, peer: SimPeer, message: Message) -> None:
        if isinstance(message, StepReport) and message.loss is not None:
            self.leaf_times.append((self.timeline.now, message.num_samples))
        super().say(peer, message)


@dataclass
class _SamePlan:
    """Gives the first plan of the real run, and repairs it as a real hub does."""

    made: PlanMade

    def make_plan(self, job: JobGiven, asked: MakePlan, now: float) -> PlanMade:
        if asked.repairs is None and self.made.plan is not None:
            plan: Plan = replace(self.made.plan, plan_id=asked.plan_id)
            return replace(self.made, plan=plan, plan_id=asked.plan_id, now=now)
        return SearchPlanner().make_plan(job, asked, now)
