"""What the hub asks of the requester's side, where model and data are; requester.owner answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.notices import Evaluated
from ravnest.protocol.tensors import Buffer, TensorSpec

StagePart = tuple[int, int, Buffer]  # a stage's interval [start, stop), and its state
Fields = tuple[tuple[tuple[str, TensorSpec], ...], tuple[memoryview, ...]]


@dataclass(frozen=True, slots=True)
class Parts:
    """A stage as bytes: how it is trained and its blueprint, its weights, the fields it consumes.

    Weights are made piece by piece, because a stage may be larger than this PC's memory.
    """

    blueprint: bytes
    weights: Callable[[], Iterable[Buffer]]
    train_fields: tuple[str, ...]
    evaluation_fields: tuple[str, ...]


class Owner(Protocol):
    """The requester's side."""

    def make_parts(self, start: int, stop: int) -> Parts:
        """Cut the stage [start, stop) of the line."""

    def find_fault(self, start: int, stop: int, content: Buffer) -> str:
        """Return why this is not the state of the stage [start, stop), if so."""

    def keep(self, parts: Sequence[StagePart], books: LedgerState, evaluated: Evaluated | None) -> str:
        """Write a checkpoint, the state of each interval of the line; return why not, if it cannot be."""

    def find_faulty(self, is_evaluation: bool, samples: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Return which of these samples fail alone, each with the reason, as far as it can be known."""

    def keep_result(self, parts: Sequence[StagePart], books: LedgerState) -> None:
        """Write the result, or raise RavnestError: the job has failed then."""

    def read_fields(self, is_evaluation: bool, samples: Sequence[int], names: Sequence[str]) -> Fields:
        """Return these fields of a microbatch as they travel."""
