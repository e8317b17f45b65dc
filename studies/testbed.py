"""Many unequal devices that come and go train a job to its end: real peers, and more of them simulated."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import say, spread, table
from ravnest.config import Favour, PlanConfig
from ravnest.plan.populations import population
from ravnest.plan.profiles import builtin_profile
from ravnest.sim.churn import AnyChange, Change, ChangeKind, read_trace
from ravnest.sim.run import PARTS, SimulationSettings, make_job, run_simulation
from ravnest.sim.world import World
from studies.real_swarm import LINKS, Run, make_swarm, make_trace, train_really
from studies.study import Study, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REAL_PEERS, REAL_EVERY, REAL_SECONDS = 8, 12.0, 600.0
BATCH, WIDTH, EPOCHS, RATE = 96, 128, 12, 1e-3
CLUSTERS = {"as many clusters as there can be": 99, "as many clusters as pay, the default": 0}
NUM_TRAINED = 1440  # of the digits; the others are for validation
NUM_LOOPS = 5


@dataclass(frozen=True, slots=True)
class Simulated:
    """A swarm of the simulator and its job."""

    nodes: str = "home:60"
    model: str = "gpt2-xl"
    num_updates: int = 30
    most_hours: float = 4.0
    every: float = 90.0  # seconds between departures
    num_seeds: int = 3


SMALL = Simulated("lan:8", "gpt2", 400, 0.5, 60.0, 1)


def run(quick: bool, folder: Path) -> Study:
    scale = SMALL
    found = [
        [simulate(scale, seed, every) for every in (0.0, scale.every)] for seed in range(scale.num_seeds)
    ]
    assert all(each["trained"] == 1.0 for pair in found for each in pair), found
    if quick:
        return Study(_QUESTION, "", "", "", {"simulated": found}, _LIMITS)
    loops = [train_alone(seed) for seed in range(NUM_LOOPS)]
    say(f"one process: {loops}")
    real = {what: train_swarm(REAL_PEERS, clusters) for what, clusters in CLUSTERS.items()}
    scores = {what: score for what, (_, score) in real.items()}
    runs = {what: seen.summarise() for what, (seen, _) in real.items()}
    draw(folder / "testbed.svg", partial(_plot, loops, scores))
    figures: dict[str, object] = {"one process": loops, "real": scores, "runs": runs, "simulated": found}
    return Study(
        _QUESTION, _answer(loops, scores), describe(), make_body(loops, scores, runs), figures, _LIMITS
    )


# Real peers.

Scores = dict[str, float]
Trained = tuple[Run, Scores]


def make_digits() -> tuple[Any, Any, Any, Any]:
    """Return inputs and classes to train on, and others for validation."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    classes = torch.tensor(digits.target)[order]
    return inputs[:NUM_TRAINED], classes[:NUM_TRAINED], inputs[NUM_TRAINED:], classes[NUM_TRAINED:]


def make_model(seed: int) -> Any:
    """Return an untrained network of eight layers."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    inner = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), *inner, nn.Linear(WIDTH, 10))


def train_alone(seed: int) -> Scores:
    """Train in one process, without Ravnest; return loss and accuracy on the validation data."""
    import torch
    import torch.nn.functional as F

    inputs, classes, *_ = make_digits()
    model, order = make_model(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(NUM_TRAINED, generator=order).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), classes[batch]).backward()
            optimizer.step()
    return judge(model)


def judge(model: Any) -> Scores:
    """Return loss and accuracy on the validation data."""
    import torch
    import torch.nn.functional as F

    *_, inputs, classes = make_digits()
    with torch.no_grad():
        found = model(inputs)
    accuracy = (found.argmax(-1) == classes).float().mean().item()
    return {"loss": _short(F.cross_entropy(found, classes).item()), "accuracy": _short(accuracy)}


def train_swarm(num_peers: int, clusters: int) -> Trained:
    """Train the same with real peers that come and go, in so many clusters at most; 0: as many as pay."""
    import torch
    import torch.nn.functional as F

    import ravnest as rv

    inputs, classes, *_ = make_digits()
    model = make_model(0)
    job = rv.Job(
        model,
        {"x": inputs, "y": classes},
        batch_size=BATCH,
        epochs=EPOCHS,
        loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        inputs=["x"],
        checkpoint_every="20 s",
    )
    swarm = make_swarm(num_peers)
    names = [node.name for node in swarm.nodes]
    seen = train_really(job, swarm, make_trace(names, REAL_SECONDS, REAL_EVERY, seed=0), clusters)
    trained = make_model(1)
    seen.result.load_into(trained)
    return seen, judge(trained)


# Simulated ones.


def simulate(scale: Simulated, seed: int, every: float) -> Scores:
    """Let a swarm train a job to its end while nodes go so often; 0: never."""
    swarm = population(scale.nodes, seed)
    names, most = [node.name for node in swarm.nodes], 3600.0 * scale.most_hours
    trace = make_trace(names, most if every else 0.0, every, seed)
    changes = read_trace(trace, "the trace", swarm)
    config = PlanConfig(hub_bytes_per_second=1e9, favour=Favour.SPEED)
    wanted = SimulationSettings(scale.most_hours, seed, num_updates=scale.num_updates)
    job = make_job(builtin_profile(scale.model), config, wanted)
    ended: list[float] = []

    def watch(world: World) -> None:
        if world.finish is not None and not ended:
            ended.append(world.timeline.now)

    world = run_simulation(job, swarm, changes, wanted, PARTS, watch)
    seen = world.recorder
    return {
        "trained": seen.num_samples / job.settings.num_samples,
        "minutes": (ended[0] if ended else most) / 60.0,
        "departures": float(count_departures(changes, ended[0] if ended else most)),
        "recoveries": float(len(seen.recoveries)),
        "recovery_seconds": _short(median([each.seconds for each in seen.recoveries]))
        if seen.recoveries
        else 0.0,
        "trained_again": float(seen.given_back),
        "lost": float(seen.lost),
    }


def count_departures(changes: Sequence[AnyChange], until: float) -> int:
    """Return how many nodes had gone by then, each time counted."""
    return sum(
        isinstance(x, Change) and x.kind is not ChangeKind.JOIN and x.seconds <= until for x in changes
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _answer(loops: Sequence[Scores], real: Mapping[str, Scores]) -> str:
    alone = spread([each["loss"] for each in loops])
    losses = " and ".join(f"{scores['loss']:g} ({what})" for what, scores in real.items())
    return (
        f"{REAL_PEERS} real peers of three speeds behind three kinds of link, one of whom went every "
        f"{REAL_EVERY:g} s, came to the end with a loss of {losses} where one process has "
        f"{alone['median']:g} ({alone['min']:g}-{alone['max']:g}, {len(loops)} seeds); fifty were not run."
    )


def make_body(
    loops: Sequence[Scores], real: Mapping[str, Scores], runs: Mapping[str, Mapping[str, object]]
) -> str:
    """Return what was found, as Markdown."""
    rows = [[f"one process, seed {seed}", *each.values()] for seed, each in enumerate(loops)]
    rows += [[f"{REAL_PEERS} peers, {what}", *scores.values()] for what, scores in real.items()]
    names = next(iter(runs.values()))
    return "\n\n".join(
        (
            table(["validation", "loss", "accuracy"], rows),
            table(["", *runs], [[name, *(each[name] for each in runs.values())] for name in names]),
            "![Loss of one process and of swarms](testbed.svg)",
        )
    )


def _plot(loops: Sequence[Scores], real: Mapping[str, Scores], axes: "Axes") -> None:
    axes.bar(["one process"] * len(loops), [each["loss"] for each in loops], 0.5, alpha=0.3)
    for what, scores in real.items():
        axes.bar([what.partition(",")[0]], [scores["loss"]], 0.5)
    axes.set_ylabel("validation loss")


def describe() -> str:
    """Return the method."""
    links = "; ".join(f"{8e-6 * x.bytes_per_second:g} Mbit/s and {1e3 * x.delay_seconds:g} ms" for x in LINKS)
    facts = {"peers": REAL_PEERS, "links": links, "every": REAL_EVERY, "batch": BATCH, "epochs": EPOCHS}
    return _METHOD.format(**facts)


_QUESTION = "Do many unequal devices that come and go train a job to its end, as well as one process?"
_METHOD = """\
{peers} `ravnest join` programs on this PC emulate devices of three speeds and three sizes of memory. A
peer's connections pass a program that delays them and limits their rate, one of three kinds: {links}.
Stages are cut so that a cluster needs several peers. Every {every:g} s of training one peer leaves politely
or is killed, as a trace says, and joins again 15 s later. The job is the digits of scikit-learn, eight
layers, batches of {batch}, {epochs} epochs, AdamW of one's own; one process trains the same in a plain
loop, each seed with weights and order of its own. Seed 0 begins with the weights of the swarm.

The quick form lets eight simulated PCs train a job to its end, with and without departures from such a
trace.

Two commands do the same with more, and were not run for this page. `python -m studies.testbed --peers 50`
trains with so many real peers. It needs sixteen cores: on two, fifty pairs of processes wait for a core,
not for their links. `python -m studies.testbed --nodes home:60` plays a simulated swarm with and without
departures."""
_LIMITS = """\
Fifty peers, real or simulated. There is one real run of each kind, of a tiny model, on one PC of two cores
that other programs kept busy: its seconds say nothing. Links are limited per connection, not per PC.
Devices wait in place of slow arithmetic, so nothing overheats and nobody else uses them."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.testbed", description="More peers than the page has.")
    parser.add_argument("--peers", type=int, default=REAL_PEERS, metavar="N", help="real ones")
    parser.add_argument("--nodes", metavar="KIND:COUNT", help="simulate a population in place of real peers")
    wanted = parser.parse_args()
    found: dict[str, object]
    if wanted.nodes:
        scale = Simulated(wanted.nodes)
        found = {
            what: simulate(scale, 0, every)
            for what, every in (("nobody goes", 0.0), ("some go", scale.every))
        }
    else:
        seen, scores = train_swarm(wanted.peers, CLUSTERS[next(iter(CLUSTERS))])
        alone = [train_alone(seed) for seed in range(NUM_LOOPS)]
        found = {"swarm": scores, "one process": alone, "run": seen.summarise()}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
