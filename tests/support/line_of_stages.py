"""A line of real stages in one process, driven by real schedules, one task per stage and tick.

What a stage sends arrives with the next tick, so lag grows with the distance from the end of the line.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.schedule import StageSchedule, Task, Work
from ravnest.engine.stage import DroppedWork, PassedOn, Roles, StageEngine
from ravnest.engine.weight_versions import Snapshot
from ravnest.ids import MicrobatchId
from ravnest.model.blueprint.program import Blueprint
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured
from ravnest.model.stage.stage_program import StageProgram, build_stage_program


def roles_of(blueprint: Blueprint) -> Roles:
    values = blueprint.train.values
    return Roles(
        trainable=frozenset(entry.name for entry in blueprint.state if entry.is_trainable),
        written=frozenset(entry.name for entry in blueprint.state if entry.is_written),
        shared=frozenset(blueprint.shared),
        inputs=frozenset(value for value in blueprint.train.inputs if values[value].has_gradient),
    )


def make_stage(
    captured: Captured,
    start: int,
    stop: int,
    settings: OptimizerSettings,
    splits: bool = True,
    recompute: bool = False,
    build: Callable[..., StageProgram] = build_stage_program,
) -> StageEngine:
    blueprint = slice_blueprint(captured.blueprint, start, stop)
    state = {entry.name: captured.state[entry.name].detach().clone() for entry in blueprint.state}
    program = build(blueprint, recompute=recompute)
    return StageEngine(program, Snapshot(0, state, {}), roles_of(blueprint), settings, splits)


class Line:
    """Stages cut before the positions in `cuts`."""

    def __init__(
        self,
        captured: Captured,
        cuts: Sequence[int],
        settings: OptimizerSettings,
        splits: bool = True,
        recompute: bool = False,
        build: Callable[..., StageProgram] = build_stage_program,
    ) -> None:
        bounds = list(pairwise((0, *cuts, captured.blueprint.num_positions)))
        self.stages = [make_stage(captured, *pair, settings, splits, recompute, build) for pair in bounds]
        self.blueprints = [slice_blueprint(captured.blueprint, *pair) for pair in bounds]

    def state(self) -> dict[str, Tensor]:
        """Return the current state of all stages by name."""
        return {k: v for stage in reversed(self.stages) for k, v in stage.snapshot().state.items()}

    # --- one batch after the other

    def step(self, batch: int, fields: Mapping[str, Tensor], learning_rate: float) -> Tensor:
        """Train on one batch with nothing else in flight; holders of tied weights sum their gradients."""
        loss = self.forward(batch, fields)
        self.backward(batch)
        self.share(learning_rate)
        for stage in self.stages:
            assert stage.update(learning_rate).refusal is None
        return loss

    def forward(self, batch: int, fields: Mapping[str, Tensor]) -> Tensor:
        values: dict[int, Tensor] = {}
        for stage in self.stages:
            passed = stage.forward(batch, values, fields)
            assert isinstance(passed, PassedOn)
            values = passed.outputs
        return passed.results["loss"]

    def backward(self, batch: int) -> None:
        gradients: dict[int, Tensor] = {}
        for stage in reversed(self.stages):
            found = stage.backward_inputs(batch, gradients)
            assert isinstance(found, dict)
            assert stage.backward_weights(batch) is None
            gradients = found

    def share(self, learning_rate: float) -> None:
        total: dict[str, Tensor] = {}
        holders = [(stage, stage.take_shared_gradients()) for stage in self.stages]
        for _, taken in reversed(holders):
            for name, gradient in taken.items():
                total[name] = total[name] + gradient if name in total else gradient.clone()
        for stage, taken in holders:
            for name in taken:
                assert stage.step_shared(name, total[name].clone(), learning_rate) is None

    def evaluate(self, fields: Mapping[str, Tensor]) -> Tensor:
        values: dict[int, Tensor] = {}
        for stage in self.stages:
            passed = stage.evaluate(MicrobatchId(0), values, fields)
            values = passed.outputs
        return passed.results["loss"]


class Traffic:
    """Many batches in flight on a line."""

    def __init__(self, line: Line, window: int, accumulate: int = 1) -> None:
        self.line = line
        self.schedules = [StageSchedule(window, accumulate) for _ in line.stages]
        self.losses: dict[int, float] = {}
        self.lags: list[list[int]] = [[] for _ in line.stages]
        self.dropped: list[tuple[int, DroppedWork]] = []
        self.most_versions = [0 for _ in line.stages]
        self.before_forward: Callable[[int, int, StageEngine], None] = lambda *_: None
        self.before_update: Callable[[int, int, StageEngine], None] = lambda *_: None
        self._inboxes: list[dict[int, dict[int, Tensor]]] = [{} for _ in line.stages]
        self._sent: deque[tuple[int, Work, int, dict[int, Tensor]]] = deque()

    def run(self, batches: Mapping[int, Mapping[str, Tensor]], rate: Callable[[int], float]) -> None:
        """Train on all batches until none is in flight; `rate` is the learning rate of an update."""
        for batch in batches:
            self._arrive(0, Work.FORWARD, batch, {})
        while tasks := [(place, task) for place in self._places() if (task := self.schedules[place].next())]:
            for place, task in tasks:
                self._work(place, task, batches[task.microbatch], rate)
            while self._sent:
                self._arrive(*self._sent.popleft())

    def _places(self) -> range:
        return range(len(self.line.stages))

    def _arrive(self, place: int, work: Work, batch: int, values: dict[int, Tensor]) -> None:
        self._inboxes[place][batch] = values
        schedule = self.schedules[place]
        offer = schedule.offer_input if work is Work.FORWARD else schedule.offer_gradient
        assert offer(batch) is None

    def _work(
        self, place: int, task: Task, fields: Mapping[str, Tensor], rate: Callable[[int], float]
    ) -> None:
        stage, batch = self.line.stages[place], task.microbatch
        values = self._inboxes[place].pop(batch)
        if task.work is Work.FORWARD:
            self.before_forward(place, batch, stage)
            self._forward(place, batch, values, fields)
        else:
            self.lags[place].append(task.lag)
            self.go_back(place, batch, values)
            if task.is_update:
                self.before_update(place, batch, stage)
                updated = stage.update(rate(stage.version))
                assert updated.version == self.schedules[place].version == stage.version
        self.most_versions[place] = max(self.most_versions[place], stage.num_live_versions)

    def _forward(
        self, place: int, batch: int, values: dict[int, Tensor], fields: Mapping[str, Tensor]
    ) -> None:
        passed = self.line.stages[place].forward(batch, values, fields)
        if isinstance(passed, DroppedWork):
            self._drop(place, passed)
        elif place + 1 < len(self.line.stages):
            self._sent.append((place + 1, Work.FORWARD, batch, passed.outputs))
        else:
            self.losses[batch] = passed.results["loss"].item()
            self._arrive(place, Work.BACKWARD, batch, {})

    def go_back(self, place: int, batch: int, values: dict[int, Tensor]) -> None:
        stage = self.line.stages[place]
        gradients = stage.backward_inputs(batch, values)
        if isinstance(gradients, dict):
            if place:
                self._sent.append((place - 1, Work.BACKWARD, batch, gradients))
            gradients = stage.backward_weights(batch)
        if isinstance(gradients, DroppedWork):
            self._drop(place, gradients)

    def _drop(self, place: int, dropped: DroppedWork) -> None:
        """Make the stages before this one forget a batch, as the hub would."""
        self.dropped.append((place, dropped))
        for other in range(place + 1):
            self.schedules[other].forget(dropped.microbatch)
            self.line.stages[other].forget(dropped.microbatch)


def mean_loss(traffic: Traffic, last: int) -> float:
    losses = [traffic.losses[batch] for batch in sorted(traffic.losses)]
    return torch.tensor(losses[-last:]).mean().item()
