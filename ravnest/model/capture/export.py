"""The two programs of a model, by way of torch.export: as in training, and as in evaluation.

Evaluation is exported by itself only where it differs by more than dropout (`same_calls`). Of a model with
long rows both programs are also written for short ones (`sample_length`), for the self-test.
"""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TextIO

import torch
from sympy import Integer, Symbol  # type: ignore[import-untyped]

from ravnest.errors import CaptureError
from ravnest.model.blueprint.program import CONSTANT
from ravnest.model.capture.capture_errors import refuse_error
from ravnest.model.capture.export_hazards import closed_attention, complex_as_pairs, replaced, traps
from ravnest.model.capture.huggingface import PLAIN_FUNCTIONS
from ravnest.model.capture.model_with_loss import LOGITS, ModelWithLoss
from ravnest.model.capture.same_calls import Dropout, fake_parameters, find_dropout, without_dropout
from ravnest.model.capture.sample_length import Lengths, TokenRows, find_symbols
from ravnest.model.capture.trace import Traced, trace
from ravnest.model.capture.verify import as_it_was

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShortPrograms:
    """The two programs for shorter rows."""

    rows: TokenRows
    length: int
    train: Traced
    evaluate: Traced


@dataclass(frozen=True, slots=True)
class Programs:
    """The two programs of a model; `short` if the self-test takes shorter rows."""

    train: Traced
    evaluate: Traced
    short: ShortPrograms | None = None


def export_programs(
    whole: ModelWithLoss, fields: Mapping[str, torch.Tensor], is_empty: bool, rows: TokenRows | None
) -> Programs:
    """Export the model as in training and as in evaluation, with the length of rows as a symbol if given.

    Where evaluation is training without dropout, one export serves both.
    """
    with _quiet():
        dropout = find_dropout(whole, fields)
    if rows is not None:
        try:
            return _export_modes(whole, fields, is_empty, dropout, rows)
        except CaptureError as error:  # or it cannot be captured at all, as is seen now
            logger.info("the model is exported again, for whole samples: %s", error)
    return _export_modes(whole, fields, is_empty, dropout, None)


def _export_modes(
    whole: ModelWithLoss,
    fields: Mapping[str, torch.Tensor],
    is_empty: bool,
    dropout: tuple[Dropout, ...] | None,
    rows: TokenRows | None,
) -> Programs:
    train = _export(whole, fields, is_empty, rows, training=True, shows_logits=dropout is not None)
    programs = None
    if dropout is not None:
        programs = _trace_modes(whole, fields, {True: train}, dropout, rows)
    if programs is None:
        evaluate = _export(whole, fields, is_empty, rows, training=False, shows_logits=True)
        programs = _trace_modes(whole, fields, {True: train, False: evaluate}, (), rows)
    assert programs is not None
    return programs


def _trace_modes(
    whole: ModelWithLoss,
    fields: Mapping[str, torch.Tensor],
    exported: Mapping[bool, torch.export.ExportedProgram],
    dropout: tuple[Dropout, ...],
    rows: TokenRows | None,
) -> Programs | None:
    """Return the programs; None if that of evaluation is not exported, nor the other one without dropout."""
    symbols, shortest = {mode: frozenset[Symbol]() for mode in exported}, 0
    if rows is not None:
        for mode, each in exported.items():
            symbols[mode], length = find_symbols(each, tuple(fields), rows)
            shortest = max(shortest, length)
    found = []
    for length in (rows.length, shortest) if rows is not None else (0,):
        lengths = {mode: dict.fromkeys(names, Integer(length)) for mode, names in symbols.items()}
        both = False not in exported
        train, *same = _trace(
            whole, fields, exported[True], "train", lengths[True], (False, True)[: 1 + both]
        )
        if not both:
            (evaluate,) = _trace(whole, fields, exported[False], "evaluate", lengths[False], (True,))
        else:
            derived = without_dropout(same[0], dropout)
            if derived is None:
                return None
            evaluate = derived
        found.append((train, _share_constants(train, evaluate)))
    names = [[op.name for traced in pair for op in traced.program.ops] for pair in found]
    if rows is None or shortest >= rows.length or names[0] != names[1]:
        return Programs(*found[0])
    return Programs(*found[0], ShortPrograms(rows, shortest, *found[1]))


def _trace(
    whole: ModelWithLoss,
    fields: Mapping[str, torch.Tensor],
    exported: torch.export.ExportedProgram,
    mode: str,
    lengths: Lengths,
    shows_logits: tuple[bool, ...],
) -> list[Traced]:
    """Return programs with logits or without; these are no result that people see."""
    has_logits = len(exported.graph_signature.user_outputs) > len(whole.results)
    extra = [((LOGITS if shows else None),) if has_logits else () for shows in shows_logits]
    wanted: list[tuple[str | None, ...]] = [(*whole.results, *each) for each in extra]
    found = trace(exported, tuple(fields), wanted, whole.state_name, mode, lengths)
    return [
        _mark_logits(traced) if has_logits and shows else traced
        for traced, shows in zip(found, shows_logits, strict=True)
    ]


def _mark_logits(traced: Traced) -> Traced:
    *kept, (_, logits) = traced.program.results
    return replace(traced, program=replace(traced.program, results=tuple(kept), logits=logits))


def _export(
    whole: ModelWithLoss,
    fields: Mapping[str, torch.Tensor],
    is_empty: bool,
    rows: TokenRows | None = None,
    *,
    training: bool,
    shows_logits: bool,
) -> torch.export.ExportedProgram:
    """Export the model as in training or as in evaluation."""
    given = {name: _own_field(field) for name, field in fields.items()}
    fakes = fake_parameters(whole) if is_empty else contextlib.nullcontext()
    with as_it_was(whole), fakes as mode, traps(PLAIN_FUNCTIONS), complex_as_pairs():
        whole.train(training)
        whole.shows_logits = shows_logits
        if mode is not None:
            given = {name: mode.from_tensor(field) for name, field in given.items()}
        batch = torch.export.Dim("batch")
        lengths = {name: {1: torch.export.Dim.AUTO} for name in (rows.names if rows else ())}
        shapes = tuple({0: batch, **lengths.get(name, {})} for name in given)
        try:
            with _quiet(), closed_attention():
                return _export_any_size(whole, tuple(given.values()), shapes)
        except CaptureError:
            raise
        except Exception as error:  # whatever the user's code or torch raises, said in the user's terms
            raise refuse_error(error, None if is_empty else _try_other_size(whole, fields)) from error
        finally:
            whole.shows_logits = False


def _export_any_size(
    whole: ModelWithLoss, given: tuple[torch.Tensor, ...], shapes: tuple[dict[int, object], ...]
) -> torch.export.ExportedProgram:
    """Export a model for every batch size.

    Torch asks for conditions on the size that it cannot prove. They then stand in the program, and are
    checked for many sizes when it is traced.
    """
    try:
        return torch.export.export(whole, given, dynamic_shapes=(shapes,))
    except Exception as error:
        if "generated guard" not in str(error):
            raise
    return torch.export.export(
        whole, given, dynamic_shapes=(shapes,), prefer_deferred_runtime_asserts_over_guards=True
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own account of an export from the user: what matters of it is in our sentence.

    Other threads are heard meanwhile: a hub may answer its peers.
    """
    thread, handle = threading.get_ident(), logging.Logger.handle

    def handle_others(asked: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread:
            handle(asked, record)

    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(_OtherThreads(sys.stderr, thread)),
        replaced(logging.Logger, "handle", handle_others),
    ):
        warnings.simplefilter("ignore")
        yield


class _OtherThreads(io.TextIOBase):
    """Drops what one thread writes, and passes on the rest."""

    def __init__(self, to: TextIO, dropped: int) -> None:
        self._to, self._dropped = to, dropped

    def write(self, text: str) -> int:
        """Write for another thread."""
        return len(text) if threading.get_ident() == self._dropped else self._to.write(text)

    def flush(self) -> None:
        """Write what waits."""
        self._to.flush()


def _try_other_size(whole: ModelWithLoss, fields: Mapping[str, torch.Tensor]) -> Exception | None:
    """Return what the module says to a batch of another size: its traceback names the line at fault."""
    other = {name: torch.cat([field, field[:1]]) for name, field in fields.items()}
    try:
        with torch.no_grad(), as_it_was(whole):
            whole(*other.values())
    except Exception as error:
        return error
    return None


def _own_field(field: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own (one that two fields share would become one), of two samples or more.

    Export takes a batch of one to mean that it is always one.
    """
    return field.clone() if field.shape[0] > 1 else torch.cat([field, field])


def _share_constants(train: Traced, evaluate: Traced) -> Traced:
    """Let evaluation use the constants of training where they are equal."""
    new_names = {}
    for name, (kind, tensor) in evaluate.state.items():
        twin = train.state.get("train." + name.removeprefix("evaluate."))
        if kind != CONSTANT or twin is None:
            continue
        if tensor.dtype == twin[1].dtype and torch.equal(tensor, twin[1]):
            new_names[name] = "train." + name.removeprefix("evaluate.")
    state = tuple((value, new_names.get(name, name)) for value, name in evaluate.program.state)
    tensors = {new_names.get(name, name): entry for name, entry in evaluate.state.items()}
    return replace(evaluate, program=replace(evaluate.program, state=state), state=tensors)
