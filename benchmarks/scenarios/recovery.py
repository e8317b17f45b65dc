"""A peer is killed: how soon that is seen and training resumes, how fast it then is, what is done again."""

import argparse
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from benchmarks.measure import say, spread, table
from benchmarks.models import build, find_cuts, make_job
from benchmarks.swarm import LinkSpeed, Record, Setting, train
from ravnest.hub.coordinator.coordinator import Coordinator
from ravnest.hub.coordinator.events import Action, Event, JobGiven, MakePlan, PlanMade
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import (
    Checkpointed,
    ClusterBroken,
    ClusterDissolved,
    ClusterStarted,
    Left,
    Missing,
    Recovered,
    Trained,
)
from ravnest.hub.service.status import StatusTracker
from ravnest.plan.forecast import forecast
from ravnest.plan.types import Swarm

Figures = dict[str, Any]

DETECTED_SECONDS, RESUMED_SECONDS, RATE_SHARE = 2.0, 10.0, 0.95
TURNS = 3
NUM_STAGES = 3
ROLES = {"root": 0, "middle": 1, "leaf": -1}
SHAPES = {"two clusters and a spare": (2, 1), "one cluster alone": (1, 0)}
_MODEL = "thin-128x3-b256"  # 128 KB cross a cut
_MICROBATCH_SECONDS = 0.12
_NUM_MICROBATCHES = 12  # in a batch: a lag of one update then keeps three stages busy
_NUM_UPDATES = 39  # more than are seen, and so few that at most the first one is synchronous
WARM_UP_SECONDS = 2.0
_STATE_COPIES = 3  # of the weights in a snapshot: their own, and two of AdamW
_LARGE_WIDTH, _LARGE_SAMPLES, _LARGE_SECONDS, _LARGE_RATE = 2048, 8, 0.5, 12.5e6
BEFORE_SECONDS, _SETTLE_SECONDS, _MEASURED_SECONDS = 6.0, 2.0, 8.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-mb",
        type=float,
        help="a peer with so much state dies, behind a link of 100 Mbit/s; no report",
    )


def run(quick: bool, options: argparse.Namespace | None = None) -> tuple[Figures, str, list[str]]:
    if options is not None and options.state_mb is not None:
        return _kill_large(1e6 * options.state_mb)
    shapes = {"one cluster alone": (1, 0)} if quick else SHAPES
    roles = {"leaf": -1} if quick else ROLES
    found: dict[str, list[Figures]] = {}
    for shape, (num_clusters, num_spares) in shapes.items():
        for role, place in roles.items():
            turns = [_kill_one(num_clusters, num_spares, place) for _ in range(1 if quick else TURNS)]
            found[f"{shape}, {role}"] = turns
            say(f"{shape}, {role}: {turns}")
    if quick:
        (turn,) = found["one cluster alone, leaf"]
        assert 0 < turn["detected_seconds"] < turn["resumed_seconds"], turn
        assert 0 < turn["again"] <= turn["in_flight"], turn
        return found, "", []
    return found, _report(found), _missed(found)


def _kill_large(state_bytes: float) -> tuple[Figures, str, list[str]]:
    """Kill one of two that hold the whole model; a spare fetches what the other has, over a slow link."""
    from ravnest.model.stage.profile import count_flops

    num_blocks = max(1, round(state_bytes / (_STATE_COPIES * 4 * _LARGE_WIDTH**2)))
    name = f"thin-{_LARGE_WIDTH}x{num_blocks}-b{_LARGE_SAMPLES}"
    made = build(name)
    job = replace(make_job(name, 2, 10_000, num_batches_kept=2), checkpoint_every="10 min")
    speed = sum(count_flops(job.capture().blueprint, made.microbatch_size)) / _LARGE_SECONDS
    link = LinkSpeed(_LARGE_RATE, 0.005)
    setting = Setting([speed] * 3, [], is_emulated=True, link=link, memory_bytes=2e10, num_clusters=2)
    death = Death(0, needs_checkpoint=False, signs=(ClusterStarted,))
    record = train(job, setting, watch=death.watch, on_event=death.note, look=death.look)
    missing = _STATE_COPIES * sum(tensor.nbytes for tensor in made.blocks.parameters())
    after = [
        show_notice(news)
        for at, news in record.news
        if at > death.killed_at and not isinstance(news, Trained)
    ]
    say("\n".join(after[:12]))
    found = {
        "state_bytes": missing,
        "transfer_seconds": _short(missing / _LARGE_RATE),
        "resumed_seconds": _short(death.resumed_at - death.killed_at),
        "progress": death.progress,
    }
    missed = []
    if found["resumed_seconds"] > found["transfer_seconds"] + RESUMED_SECONDS:
        missed.append(f"resumed after {found['resumed_seconds']} s")
    if missing > 10 * _LARGE_RATE and not death.progress:
        missed.append("no progress was shown")
    return {"large": found}, "", missed


@dataclass
class Death:
    """Kills one peer after a while, notes what follows, and ends the job when enough was seen."""

    place: int
    hub: Coordinator | None = None
    job: JobGiven | None = None
    asked: MakePlan | None = None  # of the last plan
    killed_at: float = 0.0
    victim: str = ""
    in_flight: int = 0
    predicted: float = 0.0
    resumed_at: float = 0.0
    ended_at: float = 0.0
    needs_checkpoint: bool = True
    signs: tuple[type, ...] = (Recovered, ClusterDissolved)  # that training has resumed
    progress: list[str] = field(default_factory=list)  # as the live view shows it, after the death
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, tracker: StatusTracker) -> None:
        """Know the hub."""
        self.hub = tracker.hub
        if self.killed_at and not self.resumed_at:
            told = [member.fetching for member in tracker.status().members if member.fetching]
            self.progress += [each for each in told if each not in self.progress]

    def note(self, event: Event, orders: tuple[Action, ...]) -> None:
        """Forecast the rate of each plan, as the hub does, until training has resumed."""
        self.job = event if isinstance(event, JobGiven) else self.job
        for order in orders:
            self.asked = order if isinstance(order, MakePlan) else self.asked
        if isinstance(event, PlanMade) and event.plan is not None and not self.resumed_at:
            assert self.job is not None
            assert self.asked is not None
            profile = self.job.profile_microbatch(event.microbatches, event.sharing)
            config = self.job.configure_microbatch(event.microbatches, event.sharing)
            self.predicted = forecast(event.plan, profile, Swarm(self.asked.nodes), config).samples_per_second

    def watch(self, processes: dict[Any, int], record: Record) -> None:
        """Do what is due; called now and then, and with all news."""
        with self.lock:
            now = time.perf_counter()
            if not self.killed_at:
                self._kill(processes, record, now)
            elif not self.resumed_at:
                self._note_resumed(record)
            elif not self.ended_at and now > self.resumed_at + _SETTLE_SECONDS + _MEASURED_SECONDS:
                self.ended_at = now
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: what was trained is kept

    def _kill(self, processes: dict[Any, int], record: Record, now: float) -> None:
        times = record.leaf_times
        is_kept = any(isinstance(news, Checkpointed) and news.num_samples for _, news in record.news)
        if not self.needs_checkpoint and self.hub is not None:  # then another cluster must have the state
            is_kept = bool(times) and all(each.is_running for each in self.hub.clusters)
        if self.hub is None or not is_kept or now < times[0][0] + BEFORE_SECONDS:
            return
        cluster, books = self.hub.clusters[0], self.hub.ledger
        assert books is not None
        self.victim = cluster.nodes[self.place]
        leases = [lease for lease in books.open_leases if lease.cluster_id == cluster.cluster_id]
        self.in_flight = sum(sum(lease.num_samples) for lease in leases)
        os.kill(processes[self.victim], signal.SIGKILL)
        self.killed_at = time.perf_counter()

    def _note_resumed(self, record: Record) -> None:
        for at, news in record.news:
            if at > self.killed_at and isinstance(news, self.signs):
                self.resumed_at = at


def _kill_one(num_clusters: int, num_spares: int, place: int) -> Figures:
    death = Death(place)
    job, setting = emulate(num_clusters, num_spares)
    record = train(job, setting, watch=death.watch, on_event=death.note, look=death.look)
    return _read(death, record)


def emulate(num_clusters: int, num_spares: int) -> tuple[Any, Setting]:
    """Return a job that is longer than what is measured, and devices that take as long for a stage each."""
    from ravnest.model.blueprint.slicing import slice_blueprint
    from ravnest.model.stage.profile import count_flops, measure

    made, job = build(_MODEL), make_job(_MODEL, _NUM_MICROBATCHES, _NUM_UPDATES)
    blueprint = job.capture().blueprint
    cuts = find_cuts(made, measure(blueprint, made.microbatch_size), range(1, NUM_STAGES))
    edges = pairwise([0, *cuts, blueprint.num_positions])
    work = [sum(count_flops(slice_blueprint(blueprint, *edge), made.microbatch_size)) for edge in edges]
    speeds = [flops / _MICROBATCH_SECONDS for flops in work]
    speeds = [*speeds * num_clusters, *[max(speeds)] * num_spares]
    job = replace(job, checkpoint_every="2 s")  # who is alone has nobody else to get a stage from
    return job, Setting(speeds, cuts, is_emulated=True, num_clusters=num_clusters)


def _read(death: Death, record: Record) -> Figures:
    after = [(at, news) for at, news in record.news if at > death.killed_at]
    noticed = min(at for at, news in after if isinstance(news, Missing | Left) and news.node == death.victim)
    broken = [news for _, news in after if isinstance(news, ClusterBroken)]
    since, until = death.resumed_at + _SETTLE_SECONDS, death.ended_at
    before = (record.leaf_times[0][0] + WARM_UP_SECONDS, death.killed_at)
    return {
        "detected_seconds": _short(noticed - death.killed_at),
        "resumed_seconds": _short(death.resumed_at - death.killed_at),
        "before_share": _short(measure_rate(record, *before) / record.formed.samples_per_second),
        "rate_share": _short(measure_rate(record, since, until) / death.predicted),
        "again": sum(news.num_given_back for news in broken if death.victim in news.reason),
        "in_flight": death.in_flight,
    }


def measure_rate(record: Record, since: float, until: float) -> float:
    return sum(size for at, size in record.leaf_times if since < at <= until) / (until - since)


def _missed(found: dict[str, list[Figures]]) -> list[str]:
    missed = []
    for name, turns in found.items():
        worst = {key: max(turn[key] for turn in turns) for key in ("detected_seconds", "resumed_seconds")}
        slowest = min(turn["rate_share"] for turn in turns)
        if worst["detected_seconds"] > DETECTED_SECONDS:
            missed.append(f"{name}: seen after {worst['detected_seconds']} s, not {DETECTED_SECONDS:g}")
        if worst["resumed_seconds"] > RESUMED_SECONDS:
            missed.append(f"{name}: resumed after {worst['resumed_seconds']} s, not {RESUMED_SECONDS:g}")
        if slowest < RATE_SHARE:
            missed.append(f"{name}: {slowest:.1%} of the new plan's rate, not {RATE_SHARE:.0%}")
        if any(turn["again"] > turn["in_flight"] for turn in turns):
            missed.append(f"{name}: more samples were trained again than were in flight")
    return missed


def _report(found: dict[str, list[Figures]]) -> str:
    head = [
        "killed",
        "seen after s",
        "resumed after s",
        "rate before",
        "rate after",
        "samples again / in flight",
    ]
    rows = []
    for name, turns in found.items():
        ranges = [_range([turn[key] for turn in turns]) for key in _MEASURED]
        rows.append([name, *ranges, ", ".join(f"{turn['again']} / {turn['in_flight']}" for turn in turns)])
    return _METHOD.format(
        microbatch=1000 * _MICROBATCH_SECONDS,
        before=BEFORE_SECONDS,
        warm_up=WARM_UP_SECONDS,
        measured=_MEASURED_SECONDS,
        settle=_SETTLE_SECONDS,
        turns=TURNS,
        rows=table(head, rows),
    )


def _range(values: list[float]) -> str:
    found = spread(values)
    return f"{found['median']} ({found['min']}-{found['max']})"


def _short(value: float) -> float:
    return float(f"{value:.4g}")


_MEASURED = ("detected_seconds", "resumed_seconds", "before_share", "rate_share")
_METHOD = """\
Stages on emulated devices (compute is a timed wait of {microbatch:g} ms per microbatch of 256 samples, 12 of
them in a batch), each in a real `ravnest join`; three stages in a cluster. {before:g} s after training began
one peer of the first cluster gets kill -9. Seen: the hub says that it is missing. Resumed: the cluster trains
again; the grace the hub gives to who may come back is in it. The rate before is that of all clusters from
{warm_up:g} s on, as a share of what the first plan promises; the rate after is over {measured:g} s, from
{settle:g} s after training resumed, as a share of what the repaired plan promises. In flight are the samples
leased to the cluster when the peer was killed. Median and range of {turns} turns.

{rows}
"""
