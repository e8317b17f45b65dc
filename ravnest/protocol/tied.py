"""Messages between the stages of a cluster that hold one weight together, so that their copies stay equal.

The first of them in the line is the weight's home. It decides every change, and the order of changes.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TiedHolder:
    """A stage that holds tied weights is ready; other holders that were ready before answer."""

    build_id: int
    start: int
    stop: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class TiedCall:
    """A home asks for the gradients of these weights since it called last.

    With `is_closing` it closes an update that no microbatch completed. The receiver does the same.
    """

    build_id: int
    number: int
    names: tuple[str, ...]
    is_closing: bool


@dataclass(frozen=True, slots=True)
class TiedGradient(Generic[Value]):
    """The answer: means over the updates since then; a weight without a gradient is not in it."""

    build_id: int
    number: int
    values: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class TiedStep(Generic[Value]):
    """What a home did next to its weights: an update with these sums; without a rate, a round's change."""

    build_id: int
    number: int
    rate: float | None
    values: tuple[tuple[str, Value], ...]


TiedMessage = TiedHolder | TiedCall | TiedGradient[Value] | TiedStep[Value]
