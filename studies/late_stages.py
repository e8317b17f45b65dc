"""A line of real stages on a virtual clock: what lag does to training, and what a schedule leaves idle.

Engine, schedule and optimizers are those of a peer, and devices are equal. Forward, gradient of the inputs
and gradient of the weights take a tick each, links none unless it is said.
"""

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from ravnest.cli.demo_jobs import Gpt
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.stage import DroppedWork, PassedOn, StageEngine
from ravnest.engine.staleness import gradient_weight
from ravnest.engine.weight_versions import Snapshot
from ravnest.ids import MicrobatchId
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured, capture
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.peer.stage_builder import find_roles
from ravnest.sim.timeline import Timeline

LENGTH, WIDTH, NUM_BLOCKS = 32, 32, 2
_NUM_VALIDATION = 512
Fields = Mapping[str, Tensor]
Rates = Callable[[int], float]  # the learning rate of an update


@dataclass(frozen=True, slots=True)
class Rules:
    """How stages work; with `flushes` no microbatch sees weights that its update does not change."""

    windows: tuple[int, ...]
    accumulate: int = 1
    flushes: bool = False
    holds: bool = False  # the leaf goes back only when a whole update went forward, as in GPipe
    splits: bool = True  # the gradient of the inputs leaves before that of the weights is made
    bound: int | None = None  # of lag: what comes later than twice as late weighs less
    link_ticks: float = 0.0  # that a link between two stages takes


@dataclass(slots=True)
class Seen:
    """What was seen of each stage; the losses are the leaf's, in the order of forwards."""

    losses: list[float] = field(default_factory=list)
    lags: list[list[int]] = field(default_factory=list)
    busy_ticks: list[float] = field(default_factory=list)
    most_in_flight: list[int] = field(default_factory=list)
    most_versions: list[int] = field(default_factory=list)
    ticks: float = 0.0

    @property
    def root_lag(self) -> float:
        """Mean lag of the first stage, which has the most, once the line is full."""
        late = self.lags[0][len(self.lags[0]) // 5 :]
        return fmean(late) if late else 0.0

    @property
    def idle_share(self) -> float:
        """The share of time in which the busiest stage had nothing to do."""
        return 1.0 - max(self.busy_ticks) / self.ticks


class LateStages:
    """Train it with `train`; it may be called again."""

    def __init__(self, stages: Sequence[StageEngine], rules: Rules) -> None:
        assert len(stages) == len(rules.windows), "each stage has a window"
        self.stages, self.rules = list(stages), rules
        self.schedules = [StageSchedule(each, rules.accumulate, rules.flushes) for each in rules.windows]
        count = len(stages)
        self.seen = Seen([], [[] for _ in stages], [0.0] * count, [0] * count, [0] * count)
        self._timeline, self._is_busy = Timeline(), [False] * count
        self._inboxes: list[dict[MicrobatchId, dict[int, Tensor]]] = [{} for _ in stages]
        self._fields: dict[MicrobatchId, Fields] = {}
        self._held: list[MicrobatchId] = []
        self._num_granted = 0

    def train(self, microbatches: Sequence[Fields], rates: Rates) -> Seen:
        """Train these until nothing is in flight."""
        self._rates = rates
        for number, fields in enumerate(microbatches, self._num_granted):
            self._fields[MicrobatchId(number)] = fields
            self._inboxes[0][MicrobatchId(number)] = {}
            assert self.schedules[0].offer_input(MicrobatchId(number)) is None
        self._num_granted += len(microbatches)
        self._start(0)
        while (at := self._timeline.next_at) is not None:
            self._timeline.advance(at)
        self.seen.ticks = self._timeline.now
        return self.seen

    def evaluate(self, fields: Fields) -> float:
        """Return the loss with the weights as they are."""
        values: dict[int, Tensor] = {}
        for stage in self.stages:
            passed = stage.evaluate(MicrobatchId(0), values, fields)
            assert isinstance(passed, PassedOn), passed
            values = passed.outputs
        return passed.results["loss"].item()

    def _start(self, place: int) -> None:
        if self._is_busy[place] or (task := self.schedules[place].next()) is None:
            return
        self._is_busy[place] = True
        values = self._inboxes[place].pop(task.microbatch)
        seconds = 1.0 if task.work is Work.FORWARD else 2.0
        if task.work is Work.FORWARD:
            self._go_forward(place, task, values)
        else:
            self._go_back(place, task, values)
        self.seen.busy_ticks[place] += seconds
        self._timeline.after(seconds, self._end, place)

    def _end(self, place: int) -> None:
        self._is_busy[place] = False
        self._start(place)

    def _go_forward(self, place: int, task: Task, values: dict[int, Tensor]) -> None:
        stage, number = self.stages[place], task.microbatch
        passed = stage.forward(number, values, self._fields[number])
        assert isinstance(passed, PassedOn), passed
        seen = self.seen
        seen.most_in_flight[place] = max(seen.most_in_flight[place], self.schedules[place].num_in_flight)
        seen.most_versions[place] = max(seen.most_versions[place], stage.num_live_versions)
        if place + 1 < len(self.stages):
            ticks = 1.0 + self.rules.link_ticks
            self._timeline.after(ticks, self._take_input, place + 1, number, passed.outputs)
            return
        seen.losses.append(passed.results["loss"].item())
        self._timeline.after(1.0, self._turn_round, number)

    def _turn_round(self, number: MicrobatchId) -> None:
        self._held.append(number)
        if not self.rules.holds or len(self._held) == self.rules.accumulate:
            held, self._held = self._held, []
            for each in held:
                self._take_gradient(len(self.stages) - 1, each, {})

    def _take_input(self, place: int, number: MicrobatchId, values: dict[int, Tensor]) -> None:
        self._inboxes[place][number] = values
        assert self.schedules[place].offer_input(number) is None
        self._start(place)

    def _take_gradient(self, place: int, number: MicrobatchId, values: dict[int, Tensor]) -> None:
        self._inboxes[place][number] = values
        assert self.schedules[place].offer_gradient(number) is None
        self._start(place)

    def _go_back(self, place: int, task: Task, values: dict[int, Tensor]) -> None:
        stage, number = self.stages[place], task.microbatch
        self.seen.lags[place].append(task.lag)
        found = stage.backward_inputs(number, values)
        assert not isinstance(found, DroppedWork), found
        if place:
            ticks = self.rules.link_ticks + (1.0 if self.rules.splits else 2.0)
            self._timeline.after(ticks, self._take_gradient, place - 1, number, found)
        bound = self.rules.bound
        fault = stage.backward_weights(number, 1.0 if bound is None else gradient_weight(task.lag, bound))
        assert fault is None, fault
        if task.is_update:
            assert stage.update(self._rates(stage.version)).refusal is None
        if not place:
            del self._fields[number]


def windows_of(num_stages: int, lag: int) -> tuple[int, ...]:
    """Return windows that let the first stage be so many updates late, the last one none, others between."""
    last = max(1, num_stages - 1)
    return tuple(1 + round(lag * (last - place) / last) for place in range(num_stages))


def link_ticks_for(num_stages: int, lag: int) -> float:
    """Return how long links must take for such a lag.

    Gradients come first, so with free links a line holds no more than about two microbatches for each stage.
    """
    return lag / 2 if lag > 2 * num_stages else 0.0


@cache
def captured_gpt() -> Captured:
    """Return the small GPT as a blueprint; its weights are given later."""
    torch.manual_seed(0)
    batch = draw_batches(1, 4, seed=0)[0]
    return capture(Gpt(WIDTH, 4, NUM_BLOCKS), batch, text_loss, inputs=["x"], name="gpt")


def text_loss(out: Tensor, batch: Fields) -> Tensor:
    """Return the mean loss of the next byte."""
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def draw_batches(count: int, size: int, seed: int, *, is_held_out: bool = False) -> list[dict[str, Tensor]]:
    """Return batches from the sources of Python's standard library; every tenth file is held out."""
    corpus = _corpus(is_held_out)
    generator = torch.Generator().manual_seed(1_000 * seed + is_held_out)
    starts = torch.randint(len(corpus) - LENGTH, (count, size, 1), generator=generator)
    pieces = corpus[starts + torch.arange(LENGTH + 1)].long()
    return [{"x": piece[:, :-1].contiguous(), "y": piece[:, 1:].contiguous()} for piece in pieces]


def validation_batch() -> dict[str, Tensor]:
    """Return what every run is evaluated on."""
    return draw_batches(1, _NUM_VALIDATION, seed=0, is_held_out=True)[0]


@cache
def _corpus(is_held_out: bool) -> Tensor:
    files = enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    text = b"".join(file.read_bytes() for index, file in files if (index % 10 == 0) == is_held_out)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_stages(seed: int, num_stages: int, settings: OptimizerSettings) -> list[StageEngine]:
    """Return the small GPT with weights of a seed, cut in equal stages: at most one for each half block."""
    whole = captured_gpt().blueprint
    torch.manual_seed(seed)
    weights = Gpt(WIDTH, 4, NUM_BLOCKS).state_dict()
    stages = []
    for start, stop in pairwise([0, *_find_cuts(num_stages), whole.num_positions]):
        blueprint = slice_blueprint(whole, start, stop)
        state = {entry.name: weights[entry.name].clone() for entry in blueprint.state}
        program = build_stage_program(blueprint)
        # One run of autograd makes both gradients: the clock counts them apart all the same.
        engine = StageEngine(program, Snapshot(0, state, {}), find_roles(blueprint), settings, is_split=False)
        stages.append(engine)
    return stages


@cache
def _find_cuts(num_stages: int) -> tuple[int, ...]:
    whole = captured_gpt().blueprint
    names = [
        {entry.name for entry in slice_blueprint(whole, position, position + 1).state}
        for position in range(whole.num_positions)
    ]
    halves = [f"blocks.{half // 2}.norm{half % 2 + 1}.weight" for half in range(2 * NUM_BLOCKS)]
    wanted = [halves[len(halves) * place // num_stages] for place in range(1, num_stages)]
    return tuple(next(at for at, found in enumerate(names) if name in found) for name in wanted)
