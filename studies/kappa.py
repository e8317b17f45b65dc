"""How seldom clusters may average: kappa, the updates between two rounds, from 1 to 200."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cluster_loops import Way, train_shares
from benchmarks.measure import say, spread, table
from benchmarks.quality_jobs import TASKS
from benchmarks.quality_loops import RECIPE, count_updates, train_loop
from studies.study import Study, draw, show_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KAPPAS = (1, 5, 20, 50, 200)
CLUSTERS = {"readme-mlp": (2, 4, 8)}
NUM_UPDATES = {"readme-mlp": 168}
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the updates: the curve of one process
SEEDS = (0, 1, 2)
PAUSES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of a round, in times of an update
FACTORS = (0.5, 1, 2, 4, 8, 16, 32)  # of a pause: kappas that a rule might choose
QUESTION = "How many updates should clusters make between two rounds?"

Losses = dict[str, dict[int, dict[int, list[float]]]]  # by job, clusters, kappa
Curve = Mapping[float, float]  # loss of one process by share of the updates


def run(quick: bool, folder: Path) -> Study:
    torch.set_num_threads(1)
    if quick:
        return _check()
    losses: Losses = {}
    curves: dict[str, dict[float, float]] = {}
    for job, counts in CLUSTERS.items():
        curves[job] = {share: median(_alone(job, seed, share) for seed in SEEDS) for share in SHARES}
        say(f"{job}, one process: {curves[job]}")
        losses[job] = {count: {kappa: _clusters(job, count, kappa) for kappa in KAPPAS} for count in counts}
    return conclude(losses, curves, folder)


def _alone(job: str, seed: int, share: float) -> float:
    task = TASKS[job]
    if share == 1.0:
        return train_shares(job, seed, Way()).scores["loss"]
    return train_loop(task, task.make(seed), RECIPE, seed, share).scores["loss"]


def _train(job: str, count: int, kappa: int, seed: int) -> float:
    return train_shares(job, seed, Way(count, seldom=kappa)).scores["loss"]


def _clusters(job: str, count: int, kappa: int) -> list[float]:
    found = [_train(job, count, kappa, seed) for seed in SEEDS]
    say(f"{job}, {count} clusters, kappa {kappa}: {spread(found)}")
    return found


def _check() -> Study:
    """Two clusters learn at every kappa, and rounds are as many as kappa says."""
    task = TASKS["readme-mlp"]
    num_updates = count_updates(task, task.make(0))
    assert num_updates == NUM_UPDATES[task.name]
    found = {kappa: train_shares(task.name, 0, Way(2, seldom=kappa)) for kappa in (20, 200)}
    for kappa, shared in found.items():
        assert shared.num_rounds == count_rounds(num_updates, kappa), (kappa, shared.num_rounds)
        assert shared.scores["accuracy"] > 0.8, shared.scores
    return Study(QUESTION, "", "", "", {str(k): each.scores["loss"] for k, each in found.items()}, "")


def count_rounds(num_updates: int, kappa: int) -> int:
    """Return the rounds of a job, with one at its end."""
    return -(-num_updates // kappa)


def updates_worth(curve: Curve, loss: float) -> float:
    """Return with which share of the updates one process has this loss: one at most.

    Between shares that were measured, and below them, the loss is a line in the logarithm of the share.
    """
    points = sorted((math.log(share), value) for share, value in curve.items())
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    return min(1.0, math.exp(x0 + (loss - y0) * (x1 - x0) / (y1 - y0)))


def find_worth(worth: Mapping[int, float], kappa: float) -> float:
    """Return what updates are worth at a kappa between those measured, or at the nearest one."""
    points = sorted((math.log(each), value) for each, value in worth.items())
    at = min(max(math.log(kappa), points[0][0]), points[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if at <= pair[1][0])
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)


def pace(worth: Mapping[int, float], kappa: float, pause: float) -> float:
    """Return the training effect for each time of an update, if each round takes `pause` such times."""
    return find_worth(worth, kappa) / (1 + pause / kappa)


def best_pace(worth: Mapping[int, float], pause: float) -> float:
    """Return the best that any kappa gives."""
    return max(pace(worth, kappa, pause) for kappa in range(1, max(worth) + 1))


def rule(factor: float) -> Callable[[float], int]:
    """Return the rule by which kappa is so many times the pause: 4 lets a fifth of the time be pauses."""
    return lambda pause: min(max(KAPPAS), max(1, math.ceil(factor * pause)))


def worst_share(worths: Sequence[Mapping[int, float]], choose: Callable[[float], int]) -> float:
    """Return the least share of the best pace that a rule reaches, over all cases and pauses."""
    return min(
        pace(worth, choose(pause), pause) / best_pace(worth, pause) for worth in worths for pause in PAUSES
    )


def conclude(losses: Losses, curves: Mapping[str, Curve], folder: Path) -> Study:
    """Find the rule, and write it all down."""
    worths = {
        (job, count): {kappa: updates_worth(curves[job], median(found)) for kappa, found in each.items()}
        for job, by_count in losses.items()
        for count, each in by_count.items()
    }
    rules = {factor: worst_share(list(worths.values()), rule(factor)) for factor in FACTORS}
    chosen = max(rules, key=lambda factor: rules[factor])
    draw(folder / "kappa.svg", lambda axes: _plot(axes, worths))
    over = {
        case: {kappa: median(losses[case[0]][case[1]][kappa]) / curves[case[0]][1.0] - 1 for kappa in KAPPAS}
        for case in worths
    }
    most = {kappa: max(each[kappa] for each in over.values()) for kappa in KAPPAS}
    answer = (
        f"As many as fit into the time of {chosen:g} rounds: for an MLP in 2, 4 and 8 clusters this rule "
        f"reaches {rules[chosen]:.0%} or more of the best pace for rounds as long as {PAUSES[0]:g} to "
        f"{PAUSES[-1]:g} updates, while the loss is up to {most[1]:.1%} over one process at kappa 1, "
        f"{most[20]:.1%} at 20 and {most[200]:.1%} at 200, and bytes fall as 1 / kappa."
    )
    rows = [_row(losses, worths, over, case, kappa) for case in worths for kappa in KAPPAS]
    head = ["job", "clusters", "kappa", "rounds", "sent by a cluster, in sizes of the model", "loss, median"]
    head += ["smallest", "largest", "over one process", "worth"]
    head += [f"time, rounds of {pause:g}" for pause in (1.0, 10.0)]
    ruled = [[f"{factor:g}", f"{share:.1%}"] for factor, share in rules.items()]
    read_off = "; ".join(
        f"{job} {', '.join(f'{value:.4f}' for value in curve.values())}" for job, curve in curves.items()
    )
    shares = ", ".join(f"{share:g}" for share in SHARES)
    body = f"""\
![What an update is worth against kappa](kappa.svg)

{table(head, rows)}

*Worth*: with this share of its updates one process has the same loss, read off its curve (losses at
{shares} of the updates: {read_off}). *Time*: of the whole job in times of
its updates, if clusters stand still for a round that takes as long as so many updates.

Rules of the form *kappa = factor x pause*, and the least share of the best pace that each reaches over all
cases and pauses of {", ".join(f"{pause:g}" for pause in PAUSES)} updates:

{table(["factor", "least share of the best pace"], ruled)}"""
    figures: dict[str, object] = {
        "losses": {
            f"{job}, {count} clusters": {kappa: spread(found) for kappa, found in losses[job][count].items()}
            for job, count in worths
        },
        "one_process": {job: dict(curve) for job, curve in curves.items()},
        "worth": {
            f"{job}, {count} clusters": {k: round(v, 3) for k, v in worth.items()}
            for (job, count), worth in worths.items()
        },
        "rules": {f"{factor:g}": round(share, 3) for factor, share in rules.items()},
        "factor": chosen,
    }
    return Study(QUESTION, answer, METHOD, body, figures, NOT_SHOWN)


def _row(losses: Losses, worths: Any, over: Any, case: tuple[str, int], kappa: int) -> list[object]:
    job, count = case
    found = losses[job][count][kappa]
    num_updates = NUM_UPDATES[job]
    num_rounds = count_rounds(num_updates, kappa)
    return [
        job,
        count,
        kappa,
        num_rounds,
        f"{num_rounds * 2 * (count - 1) / count:.3g}",
        *show_spread(found, ".4f"),
        f"{over[case][kappa]:+.1%}",
        f"{worths[case][kappa]:.2f}",
        *(f"{1 + num_rounds * pause / num_updates:.2f}" for pause in (1.0, 10.0)),
    ]


def _plot(axes: "Axes", worths: Mapping[tuple[str, int], Mapping[int, float]]) -> None:
    for (job, count), worth in worths.items():
        axes.plot(list(worth), list(worth.values()), marker="o", label=f"{job}, {count} clusters")
    axes.set_xscale("log")
    axes.set_xlabel("kappa: updates between two rounds")
    axes.set_ylabel("worth of an update")
    axes.legend(fontsize=8)


METHOD = f"""\
The MLP of the README as the [quality benchmark](../../benchmarks/reports/quality.md) has it (168 updates of
64 samples), trained by clusters of one stage that share each batch, exactly and in one process: nothing is
late, nothing fails, and a round is the blocking mean of all weights after every kappa updates and at the
end; at 200 that is the only one. The recipe is the default one at its own rate. Losses are on the
validation data, medians over seeds {", ".join(map(str, SEEDS))}. How long a round takes is no measurement
here but a number that is put in: what it is on real links is in [the allreduce
benchmark](../../benchmarks/reports/allreduce.md). A rule is judged by its pace: what updates are worth,
over the time that they take with their share of the pauses."""
NOT_SHOWN = """\
One small job, which bears rounds that come seldom: a byte-level GPT in four clusters lost 2.4 % with a
round every five updates ([the averaging benchmark](../../benchmarks/reports/averaging.md)). The rule looks
at time: where the loss counts for more, [the planner](../quality.md) takes exact mode or fewer clusters.
Its factor is chosen on the cases it is judged on. Rounds here block; nothing is sent in few bits, and each
cluster has the same share and speed. Seeds differ by as much as neighbouring kappas do."""
