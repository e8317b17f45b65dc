"""How late gradients may be: windows and lines get longer until training breaks."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.measure import say, spread, table
from studies.late_training import Training, cost_at, penalty, tolerated, train
from studies.study import Study, draw, show_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = {40: (1, 2, 4, 8, 16), 160: (1, 2, 4, 8, 16), 640: (4, 8, 16)}  # updates: lags
STAGES_AT = 160  # updates of the runs with other numbers of stages
STAGES = (2, 4)
LIMITS = (0.01, 0.03)
SEEDS = (0, 1, 2)
QUESTION = "How late may gradients be before training breaks?"


def run(quick: bool, folder: Path) -> Study:
    torch.set_num_threads(1)
    if quick:
        return _check()
    costs: dict[int, dict[int, list[float]]] = {}
    for num_updates, lags in LENGTHS.items():
        costs[num_updates] = {0: [0.0] * len(SEEDS)}
        for lag in lags:
            costs[num_updates][lag] = [penalty(Training(num_updates, lag, seed)) for seed in SEEDS]
            say(f"{num_updates} updates, {lag} late: {spread(costs[num_updates][lag])}")
    lines = {count: _full_line(count) for count in STAGES}
    alone = {num: [train(Training(num, 0, seed, 1)).loss for seed in SEEDS] for num in LENGTHS}
    draw(folder / "staleness.svg", lambda axes: _plot(axes, costs))
    return _conclude(costs, lines, alone)


def _full_line(num_stages: int) -> dict[str, float]:
    """Return what a line costs whose windows are just wide enough to keep its stages busy."""
    made = [Training(STAGES_AT, num_stages - 1, seed, num_stages) for seed in SEEDS]
    found = {
        "lag": train(made[0]).root_lag,
        "idle": train(made[0]).idle_share,
        **spread([penalty(each) for each in made]),
    }
    say(f"{num_stages} stages: {found}")
    return found


def _check() -> Study:
    """Without lag, cut or not, the weights are the same to the bit; with lag it is as late as was asked."""
    whole, cut = train(Training(12, num_stages=1)), train(Training(12, num_stages=4))
    assert whole.loss == cut.loss, (whole.loss, cut.loss)
    assert cut.root_lag == 0
    late = train(Training(24, lag=3))
    assert late.root_lag == 3, late.root_lag
    assert late.idle_share < cut.idle_share
    assert math.isfinite(late.loss)
    figures: dict[str, object] = {"loss": whole.loss, "late": late.loss}
    return Study(QUESTION, "", "", "", figures, "")


def _points(costs: dict[int, list[float]]) -> list[tuple[float, float]]:
    return [(lag, median(found)) for lag, found in costs.items()]


def find_broken(losses: Sequence[tuple[int, float]], quarter: float) -> int | None:
    """Return the first lag whose loss is no better than that of a quarter of the updates without lag."""
    return next((lag for lag, loss in sorted(losses) if loss >= quarter), None)


def _conclude(
    costs: dict[int, dict[int, list[float]]],
    lines: dict[int, dict[str, float]],
    alone: dict[int, list[float]],
) -> Study:
    bounds = {
        num: {limit: tolerated(_points(found), limit) for limit in LIMITS} for num, found in costs.items()
    }
    broken = {
        num: find_broken(
            [(lag, median(alone[num]) * (1 + median(found))) for lag, found in costs[num].items()],
            median(alone[num // 4]),
        )
        for num in costs
        if num // 4 in alone
    }
    at_bound = {num: cost_at(_points(found), num**0.25) for num, found in costs.items()}
    last = {num: max(found) for num, found in costs.items()}
    at_last = [f"{median(costs[num][lag]):.1%}" for num, lag in last.items()]
    answer = (
        f"If gradients are K^(1/4) updates late, the loss of a GPT of 44 thousand weights is "
        f"{_list(f'{cost:.1%}' for cost in at_bound.values())} higher in runs of {_list(map(str, costs))} "
        f"updates, and at a lag of {_list(map(str, dict.fromkeys(last.values())))} it is {_list(at_last)} "
        f"higher, {_tell_broken(broken)} no better than a quarter of the updates without lag."
    )
    rows = [
        [num, lag, f"{num**0.25:.1f}", *show_spread(found, "+.1%")]
        for num, by_lag in costs.items()
        for lag, found in by_lag.items()
        if lag
    ]
    limits = [
        [
            num,
            f"{median(alone[num]):.3f}",
            f"{num**0.25:.1f}",
            f"{at_bound[num]:+.1%}",
            *(_show_bound(bounds[num][limit], costs[num]) for limit in LIMITS),
            broken.get(num) or (f"not up to {max(costs[num])}" if num in broken else "-"),
        ]
        for num in costs
    ]
    full = [
        [count, found["lag"], f"{found['idle']:.0%}"]
        + [f"{found[name]:+.1%}" for name in ("median", "min", "max")]
        for count, found in lines.items()
    ]
    over = ["loss over no lag, median", "smallest", "largest"]
    allowed = [f"lag that costs {each:.0%}" for each in LIMITS]
    lengths = ", ".join(map(str, costs))
    body = f"""\
![Loss over that without lag against the lag, for runs of {lengths} updates](staleness.svg)

{table(["updates K", "loss without lag", "K^(1/4)", "loss there", *allowed, "broken at lag"], limits)}

Lags between those measured are interpolated. *Broken*: the loss is no better than that of a run without lag
of a quarter of the updates.

{table(["updates K", "lag", "K^(1/4)", *over], rows)}

Lines of several lengths, {STAGES_AT} updates, windows just wide enough that the slowest stage is busy:

{table(["stages", "mean lag of the first", "idle", *over], full)}"""
    figures: dict[str, object] = {
        "penalty": {num: {lag: spread(found) for lag, found in each.items()} for num, each in costs.items()},
        "at_bound": {num: round(cost, 4) for num, cost in at_bound.items()},
        "tolerated": bounds,
        "broken": broken,
        "lines": lines,
    }
    return Study(QUESTION, answer, METHOD, body, figures, NOT_SHOWN)


def _show_bound(bound: float, costs: dict[int, list[float]]) -> str:
    return f"{bound:.1f}" if bound < max(costs) else f"over {max(costs)}"


def _tell_broken(broken: dict[int, int | None]) -> str:
    first = {num: lag for num, lag in broken.items() if lag}
    if not first:
        return "which is never so bad that training is broken:"
    return _list(f"broken from {lag} on in runs of {num}" for num, lag in first.items()) + ", which is"


def _list(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _plot(axes: "Axes", costs: dict[int, dict[int, list[float]]]) -> None:
    for num, found in costs.items():
        lags = [lag for lag in found if lag]
        middle = [100 * median(found[lag]) for lag in lags]
        (line,) = axes.plot(lags, middle, marker="o", label=f"{num} updates")
        axes.fill_between(
            lags,
            [100 * min(found[lag]) for lag in lags],
            [100 * max(found[lag]) for lag in lags],
            color=line.get_color(),
            alpha=0.15,
        )
        axes.axvline(num**0.25, color=line.get_color(), linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("lag of the first stage, in updates (dotted: K^(1/4))")
    axes.set_ylabel("loss over no lag, %")
    axes.legend()


METHOD = f"""\
The byte-level GPT of `make demo` with two blocks of width 32 and 32 bytes (44 thousand weights) on the
sources of Python's standard library; every tenth file is held out. It is cut in four stages. Real stage
engines, schedules and optimizers are driven on a virtual clock on which forward, gradient of the inputs and
gradient of the weights take a tick each. Every update is one microbatch of 16 pieces, so lag counts
updates. The windows let the first stage be exactly so late, the last one never, those between in
proportion. Links are free up to a lag of 8; a lag of 16 needs links that take half as many ticks, since
with free ones gradients come back, and go first, before so many microbatches are in flight. The recipe is
the default one (Muon and NAdam, weights predicted, old weights kept for backwards) at the rate that it
chooses by length, without a synchronous start. Seeds {", ".join(map(str, SEEDS))} draw weights and batches.
Each run is compared with the same batches and weights without lag."""
NOT_SHOWN = """\
A small model, short runs, fixed lags. Three short lengths give no law of growth, and say nothing of 100,000
updates; a run of 40 updates learns little, with or without lag. Real links make lag vary. Other optimizers
are in [the study beyond the bound](beyond-bound.md). The training that users get does not have these lags:
the hub cuts a batch into more microbatches and starts synchronously ([decision
4](../decisions/004-windows.md))."""
