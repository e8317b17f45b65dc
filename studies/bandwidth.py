"""Rounds of clusters whose links differ more and more: how long they take, and whether the mean is right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.measure import say, spread, table
from benchmarks.multi_ring import MultiRing
from benchmarks.shapes import NUM_POSITIONS, Outgoing, Shape, make_shape
from ravnest.config import Averaging, PlanConfig, WireFormat
from ravnest.ids import NodeId, SegmentId
from ravnest.plan.line import LineCost
from ravnest.plan.types import ModelProfile, Node, Swarm
from ravnest.sim.lines import Lines
from ravnest.sim.sim_rounds import member_seconds, training_left_over
from ravnest.sim.timeline import Timeline
from studies.study import Study, draw, show_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CUTS = ((50,), (40, 70), (25, 75), (55,), (33, 66), (50, 75), (45,), (20, 40, 70))  # in percent
CLUSTERS = (2, 4, 8)
VARIATIONS = (0.0, 0.1, 0.25, 0.5, 1.0)  # of the rates: standard deviation over mean
NUM_DRAWS = 9
MODEL_BYTES = 8_000_000
MEAN_RATE = 6.25e6  # bytes per second each way: 50 Mbit/s
LATENCY = 0.01  # seconds, one way, at each end
QUESTION = "How long does a round take when the links of its clusters differ?"


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round: until the last node has its mean, as foreseen, and how far any mean is off."""

    seconds: float
    foreseen: float
    error: float  # of the largest value


def run(quick: bool, folder: Path) -> Study:
    if quick:
        return _check()
    seen: dict[int, dict[float, list[RoundSeen]]] = {}
    for count in CLUSTERS:
        shape = make_shape(CUTS[:count], MODEL_BYTES)
        seen[count] = {}
        for variation in VARIATIONS:
            draws = range(NUM_DRAWS if variation else 1)
            seen[count][variation] = [
                average(shape, draw_nodes(shape, variation, seed), WireFormat.FP32) for seed in draws
            ]
            say(f"{count} clusters, {variation}: {spread([each.seconds for each in seen[count][variation]])}")
    coarse = make_shape(CUTS[:4], MODEL_BYTES)
    int8 = [average(coarse, draw_nodes(coarse, 1.0, seed), WireFormat.INT8) for seed in range(NUM_DRAWS)]
    draw(folder / "bandwidth.svg", lambda axes: _plot(axes, seen))
    return conclude(seen, max(each.error for each in int8))


def _check() -> Study:
    """The mean is the plain mean whatever the links, and equal links take what was foreseen."""
    shape = make_shape(CUTS[:3], 400_000)
    equal = average(shape, draw_nodes(shape, 0.0, 0), WireFormat.FP32)
    unequal = average(shape, draw_nodes(shape, 1.0, 1), WireFormat.FP32)
    assert max(equal.error, unequal.error) < 1e-6, (equal, unequal)
    assert unequal.seconds > equal.seconds
    assert 0.5 < equal.seconds / equal.foreseen < 2.0, equal
    return Study(QUESTION, "", "", "", {"equal": equal.seconds, "unequal": unequal.seconds}, "")


def draw_nodes(shape: Shape, variation: float, seed: int) -> dict[NodeId, Node]:
    """Return the nodes with links of this mean and spread, log-normal, up and down drawn apart."""
    random = Random(seed)
    sigma = math.sqrt(math.log(1 + variation**2))
    centre = math.log(MEAN_RATE) - sigma**2 / 2

    def rate() -> float:
        return random.lognormvariate(centre, sigma)

    return {name: Node(name, 1e12, 1e12, rate(), rate(), latency_seconds=LATENCY) for name in shape.stages}


def average(shape: Shape, nodes: Mapping[NodeId, Node], wire_format: WireFormat) -> RoundSeen:
    """Let real rings make one average over links on virtual time."""
    timeline = Timeline()
    swarm = Swarm(tuple(nodes.values()))
    config = PlanConfig(deltas=wire_format, averaging=Averaging.BLOCKING)
    lines = Lines(timeline, swarm, config)
    slowest = min(min(each.upload_bytes_per_second, each.download_bytes_per_second) for each in swarm.nodes)
    members = {name: MultiRing(name, shape, shape.vector(name), wire_format, slowest) for name in nodes}
    ended: dict[NodeId, float] = {}

    def send(name: NodeId, messages: Sequence[Outgoing]) -> None:
        for other, header, values in messages:
            # Bytes of its own: what arrives is changed in place, as what comes off a wire may be.
            buffer = memoryview(bytearray(values))
            lines.send(name, other, float(len(header) + values.nbytes), receive, other, header, buffer)
        if members[name].done:
            ended.setdefault(name, timeline.now)

    def receive(name: NodeId, header: bytes, buffer: memoryview) -> None:
        send(name, list(members[name].receive(header, buffer)))

    for name, member in members.items():
        send(name, list(member.start()))
    while (at := timeline.next_at) is not None:
        timeline.advance(at)
    assert len(ended) == len(nodes), "a node did not end its round"
    errors = [shape.fault(name, member.result, tolerance=-1.0) or 0.0 for name, member in members.items()]
    return RoundSeen(max(ended.values()), foresee(shape, lines, config), max(errors))


def foresee(shape: Shape, lines: Lines, config: PlanConfig) -> float:
    """Return the seconds that the planner's model of rounds gives."""
    zeros, size = (0.0,) * NUM_POSITIONS, 4.0 * shape.items_per_position
    profile = ModelProfile(
        "vector", 1, (size,) * NUM_POSITIONS, zeros, (1.0,) * NUM_POSITIONS, zeros, zeros, (*zeros, 0.0)
    )
    line = LineCost(profile, config, is_averaged=True)
    rings = {SegmentId(number): ring for number, ring in enumerate(shape.rings)}
    left_over = training_left_over(lines, {}, overlaps=False)
    found = member_seconds(rings, list(shape.stages), line, lines, left_over, config.deltas.ratio)
    return max(found.values())


def conclude(seen: Mapping[int, Mapping[float, Sequence[RoundSeen]]], int8_error: float) -> Study:
    """Compare with equal links and with what was foreseen."""
    times = {
        count: {
            variation: [each.seconds / by_variation[0.0][0].seconds for each in found]
            for variation, found in by_variation.items()
        }
        for count, by_variation in seen.items()
    }
    every = [each for by_variation in seen.values() for found in by_variation.values() for each in found]
    off = [each.seconds / each.foreseen for each in every]
    error = max(each.error for each in every)
    half, whole = ([median(times[count][variation]) for count in CLUSTERS] for variation in (0.5, 1.0))
    answer = (
        "As long as the slowest owner of a part needs: links whose rates vary by half of their mean make "
        f"rounds of 2, 4 and 8 clusters {_list(half)} times as long as equal links of the same mean, by "
        f"all of it {_list(whole)} times; {len(every)} rounds took {min(off):.2f} to {max(off):.2f} times "
        f"what the planner's model foresaw, and in all of them the mean is the plain mean to {error:.0e} of "
        "its largest value."
    )
    rows = [
        [
            count,
            variation,
            len(found),
            *show_spread([each.seconds for each in found]),
            *show_spread(times[count][variation]),
            *show_spread([each.seconds / each.foreseen for each in found]),
            f"{max(each.error for each in found):.0e}",
        ]
        for count, by_variation in seen.items()
        for variation, found in by_variation.items()
    ]
    head = ["clusters", "variation", "rounds", "seconds, median", "smallest", "largest"]
    head += ["over equal links, median", "smallest", "largest"]
    head += ["over foreseen, median", "smallest", "largest", "mean off by"]
    body = f"""\
![Seconds of a round over those with equal links, against the variation of rates](bandwidth.svg)

{table(head, rows)}

*Variation*: standard deviation of the rates over their mean. *Off*: the largest difference from the plain
weighted mean, computed apart, over the largest value. With int8 on the wire, four clusters and a variation
of 1 the mean was off by {int8_error:.1e} at most."""
    figures: dict[str, object] = {
        "seconds": {
            count: {variation: spread([each.seconds for each in found]) for variation, found in each_.items()}
            for count, each_ in seen.items()
        },
        "over_equal": {
            count: {variation: spread(found) for variation, found in each_.items()}
            for count, each_ in times.items()
        },
        "over_foreseen": spread(off),
        "error": error,
        "int8_error": int8_error,
    }
    return Study(QUESTION, answer, METHOD, body, figures, NOT_SHOWN)


def _list(values: Sequence[float]) -> str:
    *first, last = (f"{value:.1f}" for value in values)
    return f"{', '.join(first)} and {last}"


def _plot(axes: "Axes", seen: Mapping[int, Mapping[float, Sequence[RoundSeen]]]) -> None:
    for count, by_variation in seen.items():
        equal = by_variation[0.0][0].seconds
        found = {key: [each.seconds / equal for each in rounds] for key, rounds in by_variation.items()}
        (line,) = axes.plot(
            list(found), [median(each) for each in found.values()], marker="o", label=f"{count} clusters"
        )
        low, high = [min(each) for each in found.values()], [max(each) for each in found.values()]
        axes.fill_between(list(found), low, high, color=line.get_color(), alpha=0.15)
    axes.set_yscale("log")
    axes.set_xlabel("variation of the links' rates")
    axes.set_ylabel("round over that with equal links")
    axes.legend()


METHOD = f"""\
The ring machines that peers run ([decision 14](../decisions/014-rounds.md)) average {MODEL_BYTES / 1e6:.0f}
MB of float32 over the simulator's links on virtual time: each end sends and receives one thing after the
other at its own rates, {1e3 * 2 * LATENCY:.0f} ms apart. Clusters have two to four stages, cut in different
places, so a round is many rings at once, and clusters have different weights. Upload and download of every
node are drawn apart from a log-normal distribution with a mean of 50 Mbit/s; {NUM_DRAWS} draws for each
variation. Every node's mean is compared with the weighted mean, computed directly. *Foreseen* is the model
of `ravnest simulate` and of the plan, which knows only sizes and links."""
NOT_SHOWN = """\
Links keep their rate during a round, and nothing else uses them: real ones fluctuate, lose packets and have
the training's own traffic on them ([the allreduce benchmark](../../benchmarks/reports/allreduce.md) has
real links). The cuts do not follow the links, while a planner gives slow links less. Rounds are plain ones;
from four clusters on rounds are robust unless asked otherwise, and send straight to owners ([decision
38](../decisions/038-robust-rounds.md)). Bandwidths are drawn once for a round; distributions with a longer
tail have a slower slowest link."""
