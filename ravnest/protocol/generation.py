"""Messages about generation: the hub asks a cluster for the next token of some rows, the leaf answers.

A generation is a number that the hub never uses again; each step of it asks for one more token. Nothing of
it is in the books: no lease, no sample, no microbatch.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ravnest.protocol.tensors import TensorSpec

MOST_ROWS = 8  # texts that one generation goes on with
MOST_CHOICES = 256  # words that an answer names for a row, the likeliest
MOST_PLACES = 2**20  # of a row
MOST_STEPS = 2**20

_Place = Annotated[int, Meta(ge=0, le=MOST_PLACES)]
_Step = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
_Word = Annotated[int, Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """The rows of a step, for one stage: its fields, and how many places of each row are text.

    Values cross stages from place `first` on: those before are as in the step before. All rows have `length`
    places. The leaf names so many words.
    """

    build_id: int
    generation: int
    step: _Step
    length: _Place
    first: _Place
    ends: Annotated[tuple[_Place, ...], Meta(min_length=1, max_length=MOST_ROWS)]
    num_choices: Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
    fields: tuple[tuple[str, TensorSpec], ...]


@dataclass(frozen=True, slots=True)
class GenerationValues:
    """The values of a step that cross from a stage to the next, from its first new place on."""

    build_id: int
    generation: int
    step: _Step
    values: tuple[tuple[int, TensorSpec], ...]


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """The likeliest next words of one row, the likeliest first."""

    words: Annotated[tuple[_Word, ...], Meta(min_length=1, max_length=MOST_CHOICES)]
    logits: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MOST_CHOICES)]


@dataclass(frozen=True, slots=True)
class GenerationAnswer:
    """What the leaf says of the next word of each row."""

    build_id: int
    generation: int
    step: _Step
    rows: Annotated[tuple[TokenChoices, ...], Meta(min_length=1, max_length=MOST_ROWS)]


@dataclass(frozen=True, slots=True)
class GenerationFault:
    """A stage could not do its part of a step."""

    build_id: int
    generation: int
    step: _Step
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """A generation is over: stages forget it."""

    build_id: int
    generation: int


GenerationMessage = GenerationStep | GenerationValues | GenerationAnswer | GenerationFault | GenerationEnd
