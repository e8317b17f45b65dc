"""The requester's side of a run: it cuts the model and reads the data, as bytes for the hub.

It sends blueprints, weights and the fields that a stage consumes, nothing else. Stages start from the first
weights or from the last checkpoint, both read tensor by tensor. The hub calls it from threads.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ravnest.codec import describe, encode_tensor, narrow_integers
from ravnest.config import WireFormat
from ravnest.disk import release_pages
from ravnest.engine.train_config import TrainConfig, write_train_config
from ravnest.errors import ConfigError, RavnestError, WeightsError
from ravnest.hub.coordinator.leases import LedgerState, find_position, lengthen
from ravnest.hub.coordinator.notices import EpochDone, Evaluated, MicrobatchDropped, Trained
from ravnest.hub.coordinator.progress import DroppedSamples
from ravnest.hub.service.data_service import Fields, Parts, StagePart
from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.blueprint.program import Program
from ravnest.model.blueprint.slicing import slice_blueprint
from ravnest.model.capture.capture import Captured
from ravnest.model.state.safetensors_header import FileTensor, read_tensors
from ravnest.model.state.sketch import sketch_tensors
from ravnest.model.state.state_dict import (
    OPTIMIZER_PREFIX,
    Layout,
    check_snapshot,
    check_type,
    order_entries,
)
from ravnest.model.state.state_source import (
    FileSource,
    LayeredSource,
    MemorySource,
    SourceTensors,
    StateSource,
    is_same,
    write_pieces,
)
from ravnest.model.state.stored_source import StorageError, StoredSource
from ravnest.protocol.placement import SketchRow
from ravnest.protocol.tensors import EMA_SLOT, Buffer, StoredType
from ravnest.requester import checkpoint_store
from ravnest.requester.checkpoint_store import Checkpoint, Checkpoints, Fingerprint
from ravnest.requester.faulty_samples import SampleInspector
from ravnest.requester.first_weights import FittedSource
from ravnest.requester.job import Job
from ravnest.requester.result import Best, Result
from ravnest.requester.users_code import users_code

logger = logging.getLogger(__name__)

Keeper = Checkpoints
_MUCH_DROPPED = 0.1  # of the samples
DeliverResult = Callable[[Result], None]  # puts the weights where they are to go
Recorded = EpochDone | Evaluated | MicrobatchDropped | Trained


class JobOwner:
    """The Owner of a job that was captured; `history` has the numbers of each report in order."""

    def __init__(
        self,
        job: Job,
        captured: Captured,
        training: TrainConfig,
        fingerprint: Fingerprint,
        keeper: Checkpoints | None = None,
        deliver: DeliverResult | None = None,
        first: StateSource | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.job = job
        self.fingerprint = fingerprint
        self.history: list[dict[str, float]] = []
        self.result: Result | None = None  # once it is kept
        self._captured = captured
        self._training = training
        self._keeper, self._deliver = keeper, deliver
        self._writing = threading.Lock()  # an old checkpoint may still be written when a newer one comes
        self._saved_history: list[dict[str, float]] = []  # of the last checkpoint
        self._dropped_for: Counter[str] = Counter()  # microbatches, by the reason
        self._has_loss = False  # of any microbatch
        self._first = MemorySource(captured.state) if first is None else first
        self._source: StateSource = self._first  # the first weights, or what was trained since
        self._stored = StoredSource(self._first, captured.blueprint.state, _tell_errors)
        self._left_out = left_out  # of checkpoints: frozen weights that can be had again
        self._inspector = SampleInspector(captured)

    def record(self, report: Recorded) -> None:
        """Record an epoch or an evaluation; after a restart the same one may be reported again."""
        match report:
            case MicrobatchDropped(reason=reason):
                self._dropped_for[reason] += 1
            case Trained(loss=loss):
                self._has_loss |= loss is not None
        if isinstance(report, EpochDone | Evaluated):
            # An evaluation comes late, when others have told of the next epoch: it takes back only its like.
            again = [each for each in self.history if each["epoch"] >= report.epoch]
            if isinstance(report, Evaluated):
                again = [each for each in again if "num_samples" not in each]
                again = [each for each in again if each.get("step", 0) >= report.num_updates]
            self.history = [each for each in self.history if each not in again] + [_report(report)]

    def retell(self, told: Sequence[EpochDone | Evaluated]) -> None:
        """Record the history of a log, which may be longer than that of a checkpoint."""
        if len(told) > len(self.history):
            self.history = [_report(each) for each in told]

    def make_parts(self, start: int, stop: int) -> Parts:
        """Cut the stage [start, stop) of the line."""
        stage = slice_blueprint(self._captured.blueprint, start, stop)
        trained = frozenset(entry.name for entry in stage.state if entry.is_trainable)
        source, names = LayeredSource(self._stored, self._source), {entry.name for entry in stage.state}
        slots = [name for name in source.types if _slot_of(name) in names]
        return Parts(
            blueprint=write_train_config(self._training, trained) + b"\n" + write_blueprint(stage),
            weights=partial(write_pieces, source, [*(x.name for x in order_entries(stage.state)), *slots]),
            train_fields=_fields(stage.train),
            evaluation_fields=_fields(stage.evaluate),
        )

    def find_fault(self, start: int, stop: int, content: Buffer) -> str:
        """Return why this is not the state of the stage [start, stop), if so."""
        entries = slice_blueprint(self._captured.blueprint, start, stop).state
        found = set()
        try:
            for name in check_snapshot(content, entries):
                found.add(name)
                release_pages(content)
        except WeightsError as error:
            return str(error)
        changing = {entry.name for entry in entries if entry.is_trainable or entry.is_written}
        lacks = changing - found
        return f"it lacks {min(lacks)!r} and {len(lacks) - 1} more of its tensors" if lacks else ""

    def sketch(
        self, content: Buffer, key: bytes, segments: Sequence[tuple[int, int]]
    ) -> tuple[SketchRow, ...]:
        """Return the sketch of each of these intervals of the line, as the state of a stage has it."""
        whole, rows = Layout.of(self._captured.blueprint), []
        tensors = SourceTensors(FileSource(read_tensors(content)))
        for start, stop in segments:
            names = [entry.name for entry in whole.segment(start, stop).entries]
            rows.append((start, stop, sketch_tensors(tensors, names, key)))
            release_pages(content)
        return tuple(rows)

    def keep(self, parts: Sequence[StagePart], books: LedgerState, evaluated: Evaluated | None = None) -> str:
        """Write a checkpoint; from then on stages are made of it."""
        with self._writing:
            if self.result is not None:
                return "the result is kept already"
            return self._write(parts, books, None if evaluated is None else _report(evaluated))

    def keep_result(self, parts: Sequence[StagePart], books: LedgerState) -> None:
        """Write the result: a checkpoint that more epochs can go on from, and the weights."""
        with self._writing:
            self._check_dropped(books.num_counted)
            evaluated = self.history[-1] if self.history and "val_loss" in self.history[-1] else None
            is_lasting = self._keeper is not None and self._keeper.is_lasting
            fault = self._write(parts, books, evaluated) if is_lasting else "it would not last"
            if fault:
                if is_lasting:
                    logger.warning(
                        "the result is kept, but nothing to go on from with more epochs: %s", fault
                    )
                self._adopt(tensor for _, _, content in parts for tensor in read_tensors(content))
            self._finish(evaluated)

    def keep_saved(self) -> Result:
        """Make the last checkpoint the result, and forget what was reported since."""
        with self._writing:
            self.history = [dict(report) for report in self._saved_history]
            return self._finish(None)

    def find_result(self, is_best: bool, dropped: Sequence[DroppedSamples] = ()) -> Result:
        """Return the result that is kept; without one, the best checkpoint is it, or the last one.

        It tells what was `dropped`, and what could not be read.
        """
        found = self.result or (self.keep_best() if is_best else self.keep_saved())
        return replace(found, dropped=(*dropped, *self.unreadable))

    def keep_best(self) -> Result:
        """Make the checkpoint with the lowest validation loss the result; without one, the last one."""
        found = None if self._keeper is None else self._keeper.find_best()
        if found is None:
            return self.keep_saved()
        with self._writing:
            self._adopt(found.read())
            self.history = _read_history(found)
            return self._finish(None)

    def _check_dropped(self, num_counted: int) -> None:
        """Refuse a result that nothing was learned for; warn if much of the data was dropped."""
        has_loss = self._has_loss or any("loss" in report for report in self.history)
        reason = max(self._dropped_for, key=self._dropped_for.__getitem__, default="")
        if reason and not has_loss:
            problem = f"all {num_counted} samples were dropped, so nothing was trained: {reason}"
            raise RavnestError(f"{problem}; look at the data and the loss, or lower the learning rate")
        num_dropped, num_samples = (
            sum(report.get(name, 0.0) for report in self.history) for name in ("num_dropped", "num_samples")
        )
        if num_dropped > _MUCH_DROPPED * num_samples:
            why = f" ({reason})" if reason else ""
            told = (
                "warning: %.0f of %.0f samples were dropped and not trained%s; look at the data and the loss"
            )
            logger.warning(told, num_dropped, num_samples, why)

    def _finish(self, evaluated: Mapping[str, float] | None) -> Result:
        facts = (self.job.model, self._captured.blueprint)
        history, state = tuple(self.history), SourceTensors(self._source)
        best = self._find_best()
        if evaluated is not None and (best is None or evaluated["val_loss"] <= best.loss):
            epoch, loss = int(evaluated["epoch"]), evaluated["val_loss"]
            best = Best(*facts, state, history, epoch=epoch, loss=loss)
        result = Result(*facts, state, history, best=best, ema=self._find_ema(history))
        if self._deliver is not None:
            self._deliver(result)
        self.result = result
        return result

    def _find_ema(self, history: Sequence[Mapping[str, float]]) -> Result | None:
        """Return the model with the means of its weights over time, if they were kept."""
        entries = {f"{OPTIMIZER_PREFIX}{EMA_SLOT}/{x.name}": x for x in self._captured.blueprint.state}
        slots = {entry.name: slot for slot, entry in entries.items() if slot in self._source.types}
        if not slots:
            return None
        types = {name: StoredType(entries[slot].dtype, entries[slot].shape) for name, slot in slots.items()}
        means = FittedSource(self._source, slots, types)
        state = SourceTensors(LayeredSource(means, self._source))
        return Result(self.job.model, self._captured.blueprint, state, history)

    def _find_best(self) -> Best | None:
        """Return what the checkpoint with the lowest validation loss holds, if there is one."""
        found = None if self._keeper is None else self._keeper.find_best()
        if found is None or found.score is None or found.books.job.state != self.fingerprint.state:
            return None
        history = _read_history(found)
        # Later epochs may have been evaluated before the checkpoint was written.
        own = [place for place, each in enumerate(history) if each.get("val_loss") == found.score]
        history = history[: own[0] + 1] if own else history
        epoch = history[-1]["epoch"] if own else 0.0
        state = SourceTensors(self._complete(found.read()))
        facts = (self.job.model, self._captured.blueprint, state, tuple(history))
        return Best(*facts, epoch=int(epoch), loss=found.score)

    def _write(
        self, parts: Sequence[StagePart], books: LedgerState, evaluated: dict[str, float] | None
    ) -> str:
        if self._keeper is None:
            return "there is no folder for checkpoints"
        history = [dict(report) for report in self.history]
        if evaluated is not None and evaluated not in history:  # it waits for an earlier epoch to be told
            history.append(evaluated)
        try:
            number = self._keeper.next_number
            saved = checkpoint_store.SavedLedger(
                number=number,
                job=self.fingerprint,
                num_counted=books.num_counted,
                num_reported=books.num_reported,
                num_updates=books.num_updates,
                num_evaluated=books.num_evaluated,
                leases=books.leases,
                history=[{**report} for report in history],
                written_at=time.time(),  # noqa: TID251 - for people; nothing is decided by it
            )
            score = evaluated["val_loss"] if evaluated else None
            added = [self._find_added(*part) for part in parts]
            self._keeper.write(number, parts, saved, score, self._left_out, added)
            self._adopt(self._keeper.open(number).read())
            if window := self.fingerprint.window:  # training can go back to here, and no further
                self.job.samples.forget(find_position(books.leases) // window * window)
            self._saved_history = [dict(report) for report in self.history]
        except RavnestError as error:
            return str(error)
        return ""

    def _find_added(self, start: int, stop: int, content: Buffer) -> list[FileTensor]:
        """Return the frozen weights of a stage that only this program has: at the end no peer sends them."""
        entries = slice_blueprint(self._captured.blueprint, start, stop).state
        names = {x.name for x in entries if x.is_frozen} - self._left_out
        names -= {tensor.name for tensor in read_tensors(content)} if names else set()
        kinds = {name: self._first.types[name] for name in sorted(names)}
        return [
            FileTensor(name, kind.dtype, kind.shape, memoryview(self._first.read(name)))
            for name, kind in kinds.items()
        ]

    def go_on_from(self, start: Checkpoint) -> LedgerState:
        """Make stages of a checkpoint's state; return what was trained then."""
        self._take_base(start.read())
        self._adopt(start.read())
        saved = start.books
        self.history = _read_history(start)
        self._saved_history = [dict(report) for report in self.history]
        counts = (saved.num_counted, saved.num_reported, saved.num_updates, saved.num_evaluated)
        leases = saved.leases.copy()
        leases["num_epochs"] = self.fingerprint.epochs  # it may be another number than before
        if window := self.fingerprint.window:
            leases = lengthen(leases, self.fingerprint.num_samples)
            self.job.samples.skip_to(find_position(leases) // window * window)
        return LedgerState(*counts, leases)

    def _take_base(self, tensors: Iterable[FileTensor]) -> None:
        """Go on with the frozen weights of a checkpoint where they are others: some may have been trained."""
        frozen = {x.name: x for x in self._captured.blueprint.state if x.is_frozen}
        kinds = {name: StoredType(x.dtype, x.shape) for name, x in frozen.items()}
        own = [x for x in tensors if kinds.get(x.name) == x.type and not is_same(self._first, x)]
        if stored := sorted(x.name for x in own if x.name in self._stored.types):
            problem = f"the checkpoint has its own {stored[0]!r}, frozen now and stored in fewer bits"
            fix = "set frozen=fp32, or begin a new run with weights= the result of the old one"
            raise ConfigError(f"{problem}; {fix}")
        self._first = LayeredSource(FileSource(own), self._first)
        self._left_out -= {x.name for x in own}

    def _adopt(self, tensors: Iterable[FileTensor]) -> None:
        """Make stages of these tensors from now on; of tied weights the first stage's count."""
        self._source = self._complete(tensors)

    def _complete(self, tensors: Iterable[FileTensor]) -> StateSource:
        """Return what the model has of them, with the rest, which no stage need have saved, as it was given.

        Frozen weights are always those that were given: peers may hold them in fewer bits.
        """
        entries = {entry.name: entry for entry in self._captured.blueprint.state}
        changing = {name for name, entry in entries.items() if not entry.is_frozen}
        known = (tensor for tensor in tensors if (_slot_of(tensor.name) or tensor.name) in changing)
        found = LayeredSource(FileSource(known), self._first)
        for name, entry in entries.items():
            check_type(entry, found.types.get(name))
        return found

    def find_faulty(self, is_evaluation: bool, samples: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Return which of these samples fail alone, each with the reason, as far as it can be known."""
        found = self._inspector.inspect(next(self._read(is_evaluation, [samples])))
        return tuple((samples[row], reason) for row, reason in found.items())

    @property
    def unreadable(self) -> tuple[DroppedSamples, ...]:
        """The samples that others were read for, and why."""
        kinds = ((False, self.job.samples), (True, self.job.val_samples))
        return tuple(
            DroppedSamples((number,), reason, is_evaluation)
            for is_evaluation, samples in kinds
            for number, reason in ({} if samples is None else samples.unreadable).items()
        )

    def _read(
        self, is_evaluation: bool, microbatches: Sequence[Sequence[int]]
    ) -> Iterator[dict[str, Tensor]]:
        data = self.job.val_samples if is_evaluation else self.job.samples
        assert data is not None, "without validation data nothing is evaluated"
        batches = data.batches(microbatches, replaces=True)
        for _ in microbatches:
            with users_code("the data"):
                batch = next(batches)
            yield batch

    def read_fields(
        self, is_evaluation: bool, microbatches: Sequence[Sequence[int]], names: Sequence[str]
    ) -> Iterator[Fields]:
        """Yield these fields of each microbatch as they travel: exactly, with whole numbers in few bytes."""
        for read in self._read(is_evaluation, microbatches):
            batch = {name: narrow_integers(read[name]) for name in names}
            specs = tuple((name, describe(batch[name], WireFormat.FP32)) for name in names)
            yield specs, tuple(encode_tensor(batch[name], WireFormat.FP32) for name in names)


def _tell_errors(errors: Iterable[StorageError]) -> None:
    for error in errors:
        logger.warning("note: %s", error)


def _fields(program: Program) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for _, name in program.fields))


def _slot_of(name: str) -> str | None:
    """Return the parameter that an optimizer's tensor is of."""
    is_slot = name.startswith(OPTIMIZER_PREFIX)
    return name.removeprefix(OPTIMIZER_PREFIX).partition("/")[2] if is_slot else None


def _read_history(saved: Checkpoint) -> list[dict[str, float]]:
    return [
        {name: float(value) for name, value in report.items() if value is not None}
        for report in saved.books.history
    ]


def _report(entry: EpochDone | Evaluated) -> dict[str, float]:
    if isinstance(entry, EpochDone):
        numbers = {"num_samples": entry.num_samples, "num_dropped": entry.num_dropped, "loss": entry.loss}
    else:
        found = {"loss": entry.loss, **dict(entry.metrics)}
        step = {"step": entry.num_updates} if entry.num_updates else {}
        numbers = {**step, **{f"val_{name}": value for name, value in found.items()}}
    given = {name: float(value) for name, value in numbers.items() if value is not None}
    return {"epoch": float(entry.epoch), **given}
