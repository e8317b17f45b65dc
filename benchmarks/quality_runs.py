"""Runs of the quality benchmark as records: plain loops and real swarms, one line of JSON for each.

A run that is in the file already is not made again, so that a file can be filled in several calls, on several
machines, and files can be put together.
"""

import json
import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import say

Record = dict[str, Any]
RUN_SECONDS = 300.0
SHARES = (0.125, 0.25, 0.5, 0.75)  # of the job's updates: how a plain loop gets better


@dataclass(frozen=True, slots=True)
class Run:
    """What is run, and its key. A plain loop has a name; a swarm has a number of nodes."""

    task: str
    seed: int
    loop: str = ""  # "plain", "tuned", "own"; or one of the grid by number
    share: float = 1.0
    nodes: int = 0
    clusters: int = 0  # as many as asked for; 0: as the planner likes
    averaging: str = ""  # as asked for
    emulated: float = 0.0  # FLOP/s of every node; 0: as fast as they are
    microbatches: int = 0  # of a batch or a share; 0: as planned. One alone says nothing of noise

    def __str__(self) -> str:
        if not self.nodes:
            return f"{self.task}, seed {self.seed}, loop {self.loop}, share {self.share:g}"
        asked = f", {self.clusters} clusters asked" if self.clusters else ""
        asked += f", {self.averaging}" if self.averaging else ""
        asked += f", {self.microbatches} microbatches" if self.microbatches else ""
        return f"{self.task}, seed {self.seed}, {self.nodes} nodes{asked}"


def plain_runs(tasks: Sequence[str], seeds: int) -> list[Run]:
    """Return what the swarms are compared with."""
    return [
        Run(task, seed, loop, share)
        for task in tasks
        for seed in range(seeds)
        for loop, share in (("plain", 1.0), ("tuned", 1.0), ("own", 1.0), *(("own", x) for x in SHARES))
    ]


def read_records(files: Iterable[Path]) -> list[Record]:
    """Return the records of files that exist; of two with the same key the first that did not fail."""
    found: dict[str, Record] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else ():
            record = json.loads(line)
            record["run"] = asdict(Run(**record["run"]))  # older ones lack what was added since
            key = json.dumps(record["run"], sort_keys=True)
            if "error" in found.setdefault(key, record):
                found[key] = record
    return list(found.values())


def run_all(
    runs: Sequence[Run], num_parallel: int, file: Path | None, max_seconds: float, limit: float = RUN_SECONDS
) -> list[Record]:
    """Make the runs that the file lacks, some side by side, until the time is over; return all records.

    Those that failed are made again. A run may take `limit` seconds.
    """
    records = [record for record in read_records([file] if file else []) if "error" not in record]
    done = {json.dumps(record["run"], sort_keys=True) for record in records}
    left = [run for run in runs if json.dumps(asdict(run), sort_keys=True) not in done]
    say(f"{len(left)} runs to make, {len(records)} are made")
    started, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_parallel, context, _set_up) as pool:
        waiting = {pool.submit(_make, run, started + max_seconds, limit): run for run in left}
        for future in as_completed(waiting):
            record, run = future.result(), waiting[future]
            if record is None:
                continue
            records.append(record)
            say(f"{run}: {record.get('error') or _show(record)}")
            if file is not None:
                with file.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    return records


def _show(record: Record) -> str:
    scores = " ".join(f"{name} {value:.4f}" for name, value in record["scores"].items())
    plan = f", {record['clusters']} clusters" if record["run"]["nodes"] else ""
    return f"{scores}{plan}, {record['updates']} updates, {record['seconds']:.1f} s"


def _set_up() -> None:
    """One thread for each program: the models are small and the programs many."""
    import torch

    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
    torch.set_num_threads(1)


def _make(run: Run, until: float, limit: float) -> Record | None:
    """Return the record of a run, with an error where it failed; None when the time is over."""
    if time.monotonic() > until:
        return None
    head: Record = {"run": asdict(run), "machine": f"{os.cpu_count()} cores"}
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return head | (_swarm(run) if run.nodes else _loop(run))
    except Exception as error:  # one run that fails is a result, too
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return head | {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end(*_: object) -> None:
    raise TimeoutError("it took too long")


def _loop(run: Run) -> Record:
    from benchmarks.quality_jobs import TASKS
    from benchmarks.quality_loops import PLAIN, find_own_loop, grid, train_loop

    task = TASKS[run.task]
    named = {"plain": PLAIN, "tuned": task.tuned, "own": find_own_loop(task)}
    loop = named[run.loop] if run.loop in named else grid()[int(run.loop)]
    trained = train_loop(task, task.make(run.seed), loop, run.seed, run.share)
    return {
        "loop": str(loop),
        "scores": trained.scores,
        "updates": trained.num_updates,
        "seconds": trained.seconds,
    }


def make_job(task_name: str, seed: int, microbatches: int = 0) -> tuple[Any, Any, Any]:
    """Return a task, what was made of it, and its job as a user would write it."""
    import ravnest as rv
    from benchmarks.quality_jobs import TASKS
    from benchmarks.quality_loops import make_optimizer

    task = TASKS[task_name]
    made = task.make(seed)
    job = rv.Job(
        made.model,
        made.train,
        val_data=made.validation,
        batch_size=task.batch_size,
        epochs=task.epochs,
        loss=made.loss,
        metrics=dict(made.metrics),
        optimizer=make_optimizer(task, made),
        inputs=list(made.inputs),
        seed=seed,
        microbatches=microbatches or "auto",
        name=task.name,
    )
    return task, made, job


def _swarm(run: Run) -> Record:
    """Train with real programs; the weights that come back are evaluated as those of a plain loop are."""
    from benchmarks.quality_loops import evaluate
    from ravnest.hub.coordinator.events import Received
    from ravnest.hub.service.server import HUB_PARTS
    from ravnest.protocol.training import StepReport
    from ravnest.requester.local_peers import Hardware, share_memory
    from ravnest.requester.session import local

    task, made, job = make_job(run.task, run.seed, run.microbatches)
    news: list[tuple[float, Any]] = []
    versions: dict[Any, int] = {}
    noises: list[Any] = []
    status: list[Any] = []

    def watch(event: Any, _: Any) -> None:
        if isinstance(event, Received) and isinstance(event.message, StepReport):
            versions[event.sender] = max(versions.get(event.sender, 0), event.message.version)
            noises.extend([event.message.noise] if event.message.noise is not None else [])

    def look(tracker: Any) -> None:
        status[:] = [tracker]

    emulated = run.emulated or None
    hardware = [
        Hardware(each.memory_bytes, emulated_flops_per_second=emulated) for each in share_memory(run.nodes)
    ]
    swarm = local(
        hardware,
        plan=_plan(run),
        tell=lambda told: news.append((time.perf_counter(), told)),
        look=look,
        parts=replace(HUB_PARTS, watch=watch),
    )
    started = time.perf_counter()
    with swarm:
        result = swarm.fit(job)
    fit_seconds = time.perf_counter() - started
    result.load_into(made.model)
    found = _read_news(news)
    return {
        "scores": evaluate(task, made),
        "reported": {
            name.removeprefix("val_"): value
            for name, value in result.metrics.items()
            if name.startswith("val_")
        },
        "updates": status[0].status().num_updates,
        "versions": {str(name): version for name, version in sorted(versions.items())},
        "fit_seconds": fit_seconds,
        "noise": _by_quarters(noises),
        **found,
    }


def _by_quarters(noises: Sequence[Any]) -> list[float]:
    """Return the noise scale in each quarter of a run, in samples; nothing where too little was measured."""
    count = len(noises)
    quarters = [noises[count * k // 4 : count * (k + 1) // 4] for k in range(4)] if count >= 4 else []
    pairs = [(sum(x.variance for x in each), sum(x.signal for x in each)) for each in quarters]
    return [max(variance, 0.0) / max(signal, 1e-30) for variance, signal in pairs]


def _plan(run: Run) -> Any:
    """Return the settings of one PC, with what is asked for."""
    from ravnest.config import Averaging
    from ravnest.requester.session import LOCAL_PLAN

    config = replace(LOCAL_PLAN, overhead_bytes=0.0, clusters=run.clusters)
    return replace(config, averaging=Averaging(run.averaging)) if run.averaging else config


def _read_news(news: list[tuple[float, Any]]) -> Record:
    """Return what people were told: the plan, its rounds, and how long training took."""
    from ravnest.hub.coordinator.notices import (
        ClusterStarted,
        EpochDone,
        PlanFormed,
        RateChanged,
        RoundEnded,
    )

    plans = [told for _, told in news if isinstance(told, PlanFormed)]
    starts = [at for at, told in news if isinstance(told, ClusterStarted)]
    ends = [at for at, told in news if isinstance(told, EpochDone)]
    rounds = [told for _, told in news if isinstance(told, RoundEnded)]
    formed = plans[-1]
    clusters = formed.plan.clusters
    counts = Counter(type(told).__name__ for _, told in news)
    return {
        "clusters": len(clusters),
        "stages": [len(cluster.stages) for cluster in clusters],
        "microbatches": formed.microbatches,
        "mode": _show_mode(formed.sharing),
        "efficiency": formed.sharing.efficiency,
        "rate_times": [told.times for _, told in news if isinstance(told, RateChanged)],
        "reason": formed.reason,
        "foreseen": formed.samples_per_second,
        "rounds": sum(told.is_committed for told in rounds),
        "lost_rounds": sum(not told.is_committed for told in rounds),
        "round_seconds": statistics.median([told.seconds for told in rounds]) if rounds else 0.0,
        "seconds": ends[-1] - starts[0],
        "notices": dict(counts),
    }


def _show_mode(sharing: Any) -> str | None:
    if sharing.num_clusters < 2:
        return None
    return f"{sharing.averaging}, {'shares' if sharing.is_split else 'whole batches'}"
