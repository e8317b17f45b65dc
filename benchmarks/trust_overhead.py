"""What it costs that nobody is believed: each safeguard alone and all together, in turns of real programs.

Four clusters of one emulated device each train, stand still for rounds and go on; compute is a process behind
fences or a thread of the agent, losses are found again by others or not, means are robust or plain. A device
waits for most of the time that a microbatch takes, so programs that share a PC do not wait for each other.
The pipeline of two stages shows the fences without rounds; the bytes of robust rounds are counted.
"""

from dataclasses import replace
from typing import Any

from benchmarks.emulation import MICROBATCH_SECONDS
from benchmarks.measure import say, spread, table
from benchmarks.models import build, make_job
from benchmarks.robust_bytes import compare_bytes
from benchmarks.shapes import make_shape
from benchmarks.swarm import Record, Setting, train
from ravnest.config import TIMEOUTS, Averaging, Mean, WireFormat
from ravnest.hub.coordinator.events import Action, Event, Send
from ravnest.protocol.training import LeaseGrant

Figures = dict[str, Any]

TOGETHER_LIMIT, FENCES_LIMIT = 0.05, 0.02
# Whether compute is fenced in, losses are checked and means are robust.
CASES = {
    "none": (False, False, False),
    "fences": (True, False, False),
    "spot checks": (False, True, False),
    "robust means": (False, False, True),
    "all": (True, True, True),
}
_CLUSTERS, _MODEL = 4, "mlp-256x2-b64"  # a million numbers
_MICROBATCHES, _UPDATES_BETWEEN = 2, 16
_CUTS = ((50,), (40, 70), (25, 75), (55,))  # by cluster, in percent, where bytes are counted


def try_overhead() -> dict[str, int]:
    """Train with all safeguards for a round or two; return how many losses were found again."""
    return {"losses_found_again": _train(*CASES["all"], num_rounds=2)[1]}


def measure_clusters(num_turns: int) -> Figures:
    """Return the share of samples per second that each case costs, within each turn; and what was done."""
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    num_checks: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(num_turns):
        for name, case in CASES.items():
            rate, count = _train(*case, num_rounds=6)
            rates[name].append(rate)
            num_checks[name].append(count)
        say(f"turn {turn + 1}: { {name: round(found[-1]) for name, found in rates.items()} }")
    shape = make_shape(_CUTS, 8_000_000)
    return {
        "cost": {
            name: spread([1 - rate / bare for rate, bare in zip(rates[name], rates["none"], strict=True)])
            for name in CASES
            if name != "none"
        },
        "losses_found_again": {name: spread(counts) for name, counts in num_checks.items()},
        "robust_bytes": compare_bytes(shape, WireFormat.INT4, 6e6)["times"],
    }


def measure_pipeline(num_turns: int) -> Figures:
    """Return the share of the rate of a pipeline of two stages that fences cost, within each turn."""
    from benchmarks.scenarios.pipeline import compare_process

    over_thread = compare_process(num_turns, num_updates=20)["over_thread"]
    return {"pipeline_fences": {key: round(1 - each, 4) for key, each in over_thread.items()}}


def _train(is_fenced: bool, is_checked: bool, is_robust: bool, *, num_rounds: int) -> tuple[float, int]:
    """Return samples per second of four clusters, and how many losses were found again."""
    made, num_updates = build(_MODEL), _CLUSTERS * _UPDATES_BETWEEN * num_rounds
    mean = Mean.ROBUST if is_robust else Mean.PLAIN
    job = make_job(_MODEL, _MICROBATCHES, num_updates, num_batches_kept=64)
    job = replace(job, average_every=_UPDATES_BETWEEN, mean=mean.value)
    flops = _count_flops(job, made.microbatch_size)
    timeouts = TIMEOUTS
    if not is_checked:
        timeouts = replace(TIMEOUTS, hub=replace(TIMEOUTS.hub, check_seconds=0.0))
    speeds = [flops / MICROBATCH_SECONDS] * _CLUSTERS
    setting = Setting(
        speeds,
        [],
        is_emulated=True,
        num_clusters=_CLUSTERS,
        averaging=Averaging.BLOCKING,
        is_fenced=is_fenced,
        timeouts=timeouts,
    )
    num_checks = 0

    def count(_: Event, orders: tuple[Action, ...]) -> None:
        nonlocal num_checks
        grants = (each.message for each in orders if isinstance(each, Send))
        num_checks += sum(isinstance(each, LeaseGrant) and each.recheck is not None for each in grants)

    record: Record = train(job, setting, on_event=count)
    assert is_checked == (num_checks > 0), f"{num_checks} losses were found again"
    return record.samples_per_second(0.3), num_checks


def _count_flops(job: Any, num_samples: int) -> float:
    from ravnest.model.stage.profile import count_flops

    return float(sum(count_flops(job.capture().blueprint, num_samples)))


def find_missed(figures: Figures) -> list[str]:
    """Return the targets that are not reached, of what was measured."""
    cost = figures["cost"]["all"]["median"] if "cost" in figures else 0.0
    fences = figures["pipeline_fences"]["median"] if "pipeline_fences" in figures else 0.0
    missed = [f"all safeguards together cost {cost:.1%} of the rate"] * (cost > TOGETHER_LIMIT)
    return missed + [f"fences cost {fences:.1%} of the pipeline"] * (fences > FENCES_LIMIT)


def report_overhead(figures: Figures, num_turns: int) -> str:
    """Return the overhead as a page."""
    rows = [(name, *_percents(each)) for name, each in figures["cost"].items()]
    rows.append(("fences, in a pipeline of two stages", *_percents(figures["pipeline_fences"])))
    again = figures["losses_found_again"]["all"]["median"]
    milliseconds = MICROBATCH_SECONDS * 1e3
    head = f"""{_CLUSTERS} clusters of one emulated device each ({_MODEL}, {milliseconds:.0f} ms for a
microbatch), a blocking round after {_UPDATES_BETWEEN} updates; {num_turns} turns, in each every case
once, against the case without any. Of the rate, smallest, median and largest; below zero it was faster.
{again:.0f} losses were found again in a run. A robust round has {figures["robust_bytes"]:.2f} times the
bytes of a ring (int4)."""
    return f"{head}\n\n{table(('safeguard', 'least', 'median', 'most'), rows)}"


def _percents(found: dict[str, float]) -> list[str]:
    low, high = sorted((found["min"], found["max"]))
    return [f"{100 * each:.1f} %" for each in (low, found["median"], high)]
