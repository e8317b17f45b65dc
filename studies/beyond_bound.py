"""What happens when gradients are later than K^(1/4) updates, and what helps against it."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch

from benchmarks.measure import say, spread, table
from ravnest.config import OptimizerKind
from studies.late_training import Trained, Training, penalty, train
from studies.study import Study, draw, show_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_UPDATES = 160
BOUND = 4  # K^(1/4) is 3.56
LAGS = (4, 8, 16)
SEEDS = (0, 1, 2)
LATEST = 16  # the lag at which what helps is compared
WAYS = {
    "default recipe": Training(NUM_UPDATES),
    "without prediction": Training(NUM_UPDATES, has_prediction=False),
    "AdamW": Training(NUM_UPDATES, recipe=OptimizerKind.ADAMW),
}
HELP = {
    "late gradients weigh less": Training(NUM_UPDATES, bound=BOUND),
    "a batch is cut into 4 microbatches": Training(NUM_UPDATES, accumulate=4),
}
QUESTION = "What happens when gradients are later than K^(1/4) updates?"


def run(quick: bool, folder: Path) -> Study:
    torch.set_num_threads(1)
    if quick:
        return _check()
    costs = {name: {lag: _costs(replace(way, lag=lag), name) for lag in LAGS} for name, way in WAYS.items()}
    helped = {name: _costs(replace(way, lag=LATEST), name) for name, way in HELP.items()}
    draw(folder / "beyond-bound.svg", _plot)
    return _conclude(costs, helped)


def _costs(training: Training, name: str) -> list[float]:
    found = [penalty(replace(training, seed=seed)) for seed in SEEDS]
    say(f"{name}, {training.lag} late: {spread(found)}")
    return found


def _check() -> Study:
    """Weights of late gradients change nothing within twice the bound, and microbatches divide the lag."""
    late = Training(16, lag=3)
    assert train(replace(late, bound=2)).loss == train(late).loss
    cut = train(replace(late, accumulate=2))
    assert cut.root_lag == 1.5, cut.root_lag
    plain = train(replace(late, has_prediction=False))
    assert plain.loss != train(late).loss
    assert train(replace(late, recipe=OptimizerKind.ADAMW)).root_lag == 3
    return Study(QUESTION, "", "", "", {"lag": cut.root_lag}, "")


def smooth(losses: tuple[float, ...], count: int = 20) -> list[float]:
    """Return means over so many losses up to each."""
    return [fmean(losses[max(0, end - count) : end]) for end in range(1, len(losses) + 1)]


def _run_of(name: str, lag: int) -> Trained:
    way = {**WAYS, **HELP}[name]
    return train(replace(way, lag=lag, num_stages=4 if lag else 1))


def _conclude(costs: dict[str, dict[int, list[float]]], helped: dict[str, list[float]]) -> Study:
    middle = {name: {lag: median(found) for lag, found in each.items()} for name, each in costs.items()}
    recipe, plain, adam = (middle[name] for name in WAYS)
    cut = median(helped["a batch is cut into 4 microbatches"])
    idle = {lag: _run_of("default recipe", lag).idle_share for lag in (4, 8)}
    all_fall = all(
        smooth(_run_of(name, lag).losses)[-1] < smooth(_run_of(name, lag).losses)[20]
        for name in WAYS
        for lag in LAGS
    )
    begins = "No run diverges, but each learns" if all_fall else "Some runs diverge; the others learn"
    lost = [", ".join(f"{each[lag]:.0%}" for lag in LAGS) for each in (recipe, plain, adam)]
    answer = (
        f"{begins} less the later its gradients are: at {', '.join(map(str, LAGS))} updates of lag, with "
        f"{BOUND} as the bound, the loss of the default recipe is {lost[0]} higher than without lag, without "
        f"prediction {lost[1]}, with AdamW {lost[2]}; cutting each batch into four microbatches, which "
        f"divides a lag of {LATEST} by four, takes {recipe[LATEST]:.0%} to {cut:.0%}."
    )
    over = ["loss over no lag, median", "smallest", "largest"]
    rows = [
        [name, lag, f"{lag / BOUND:g}", *show_spread(found, "+.1%")]
        for name, each in costs.items()
        for lag, found in each.items()
    ]
    alone = [[name, *show_spread(_alone_losses(way), ".3f")] for name, way in WAYS.items()]
    tried = {"nothing": costs["default recipe"][LATEST], **helped}
    help_rows = [
        [
            name,
            f"{_run_of(name if name in HELP else 'default recipe', LATEST).root_lag:.1f}",
            *show_spread(found, "+.1%"),
        ]
        for name, found in tried.items()
    ]
    body = f"""\
![Training loss of the default recipe and of AdamW with several lags](beyond-bound.svg)

The plot has means over 20 updates, of one seed.

{table(["", "lag of the first stage, updates", "times the bound", *over], rows)}

Without lag:

{table(["", "loss, median", "smallest", "largest"], alone)}

What helps at a window of {LATEST + 1}, with the default recipe:

{table(["", "mean lag, updates", *over], help_rows)}

With free links a wider window buys nothing: the slowest stage was idle {idle[4]:.1%} of the time at a lag of
4 and {idle[8]:.1%} at 8, which is while the line fills and runs dry."""
    figures: dict[str, object] = {
        "over_no_lag": {
            name: {lag: spread(found) for lag, found in each.items()} for name, each in costs.items()
        },
        "helped": {name: spread(found) for name, found in helped.items()},
        "idle": idle,
        "all_fall": all_fall,
    }
    return Study(QUESTION, answer, METHOD, body, figures, NOT_SHOWN)


def _alone_losses(way: Training) -> list[float]:
    return [train(replace(way, lag=0, num_stages=1, seed=seed)).loss for seed in SEEDS]


def _plot(axes: "Axes") -> None:
    for name, color in (("default recipe", "tab:blue"), ("AdamW", "tab:orange")):
        for lag, alpha in ((0, 1.0), (4, 0.75), (8, 0.5), (16, 0.3)):
            losses = smooth(_run_of(name, lag).losses)
            axes.plot(losses, color=color, alpha=alpha, label=f"{name}, {lag} late")
    axes.set_xlabel("microbatches")
    axes.set_ylabel("training loss")
    axes.legend(fontsize=7, ncols=2)


METHOD = f"""\
Model, data, clock and engine are those of [the study of staleness](staleness.md): four stages of a small
GPT, {NUM_UPDATES} updates of 16 pieces, so K^(1/4) is {NUM_UPDATES**0.25:.2f}. The first stage is
{", ".join(map(str, LAGS))} updates late, all others in proportion; at 16 links are slow. The default recipe
is compared with the same without prediction of weights, and with AdamW, which is what the paper describes;
all keep the weights that a forward saw for its backward. Each is compared with itself without lag. At a
window of {LATEST + 1} two corrections are tried: a gradient later than twice the bound weighs bound / lag,
as peers do with stragglers; and each batch is cut into four microbatches, as the hub does, so that as many
in flight are a quarter of the updates late. Seeds {", ".join(map(str, SEEDS))}."""
NOT_SHOWN = """\
A small model and one short length. Each optimizer has one rate, the one that it has by default. AdamW learns
so much less at its rate, without lag too, that what lag costs it says little: a slow learner hides lag.
Every gradient is equally late, while stragglers among punctual ones are what the weight is for: where all
are late, all weigh the same, and a recipe that looks at directions alone hardly sees it. A bound that grows
during the run, and a synchronous start, as users get, are not tried."""
