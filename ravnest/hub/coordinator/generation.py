"""Generations: which running cluster goes on with which texts, and what its leaf's answers must look like.

It reads the placement and changes nothing: no event, no lease, no sample of the books is touched. A
generation stays with its cluster while that runs as it was built. When it breaks, fails or is silent, the
next one goes on with the text from its beginning, under a new number, so late answers are dropped by number.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import NodeId
from ravnest.protocol.generation import (
    MOST_ROWS,
    GenerationAnswer,
    GenerationEnd,
    GenerationFault,
    TokenChoices,
)
from ravnest.protocol.messages import Refusal

MOST_GENERATIONS = 8  # at a time
_MOST_TRIES = 4  # clusters, or builds of them, that one text may fail in


@dataclass(frozen=True, slots=True)
class RowsAsked:
    """The rows of a step: how many places of each are text, and from which place on they are new."""

    ends: tuple[int, ...]
    first: int
    num_words: int  # that the model knows


@dataclass(frozen=True, slots=True)
class StepAsked:
    """A step for a cluster: its nodes from root to leaf, and which of them consume which fields."""

    generation: int
    build_id: int
    step: int
    first: int
    nodes: tuple[NodeId, ...]
    fields: tuple[tuple[NodeId, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A step has no answer, and why. If that `is_final`, no cluster will ever have one."""

    reason: str
    is_final: bool = False


@dataclass(slots=True, eq=False)
class Generation:
    """Some texts that are gone on with."""

    number: int = 0  # of this try
    cluster_id: str = ""
    cluster_name: str = ""
    build_id: int = 0
    nodes: tuple[NodeId, ...] = ()
    step: int = -1  # the last one that was asked for
    asked: RowsAsked | None = None  # while it is not answered
    faults: list[str] = field(default_factory=list)
    failed: set[tuple[str, int]] = field(default_factory=set)  # clusters as they were built


class Generations:
    """All generations under way."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._open: list[Generation] = []
        self._last_number = 0

    def open(self) -> Generation | str:
        """Begin a generation, or say why not."""
        if len(self._open) >= MOST_GENERATIONS:
            return f"{MOST_GENERATIONS} texts are being written already; ask again when one of them is done"
        generation = Generation()
        self._open.append(generation)
        return generation

    def ask(self, generation: Generation, asked: RowsAsked) -> StepAsked | Unanswered:
        """Return the next step for its cluster, or for another one; or why no cluster can have it now."""
        assert 1 <= len(asked.ends) <= MOST_ROWS
        assert generation.asked is None
        cluster = self._find(generation)
        if cluster is None:
            cluster = self._choose(generation)
            is_tired = len(generation.faults) >= _MOST_TRIES
            if cluster is None or is_tired:
                told = "; ".join(generation.faults) or "no cluster is running"
                return Unanswered(told, is_tired or bool(self._placement.running))  # these have failed
            self._move(generation, cluster)
        generation.step += 1
        generation.asked = asked
        first = asked.first if generation.step else 0
        fields = self._placement.fields(cluster, is_evaluation=True)
        return StepAsked(
            generation.number, generation.build_id, generation.step, first, generation.nodes, fields
        )

    def find(self, number: int) -> Generation | None:
        """Return the generation that has this number now."""
        return next((each for each in self._open if each.number == number), None)

    def receive(
        self, sender: NodeId, message: GenerationAnswer | GenerationFault
    ) -> tuple[TokenChoices, ...] | Unanswered | Refusal:
        """Take the answer of a leaf, or the word of a stage that it failed."""
        found = self.find(message.generation)
        if (
            found is None
            or found.asked is None
            or (message.build_id, message.step)
            != (
                found.build_id,
                found.step,
            )
        ):
            return Refusal(f"nobody waits for step {message.step} of generation {message.generation}")
        if isinstance(message, GenerationFault):
            if sender not in found.nodes:
                return Refusal(f"{sender} has no part in generation {message.generation}")
            return self._fail(found, f"{sender}: {message.reason}")
        if sender != found.nodes[-1]:
            return Refusal(f"{sender} is not the leaf of generation {message.generation}")
        if fault := _find_fault(message.rows, found.asked):
            return self._fail(found, f"{sender} gave no answer that can be: {fault}")
        found.asked = None
        return message.rows

    def follow(self) -> list[tuple[Generation, Unanswered]]:
        """Return the generations whose cluster is no longer there as it was built."""
        gone = [each for each in self._open if each.asked is not None and self._find(each) is None]
        return [(each, self._fail(each, f"cluster {each.cluster_name} broke")) for each in gone]

    def expire(self, generation: Generation, seconds: float) -> Unanswered:
        """Wait no longer for an answer."""
        return self._fail(generation, f"cluster {generation.cluster_name} gave no answer in {seconds:.0f} s")

    def close(self, generation: Generation) -> tuple[tuple[NodeId, ...], GenerationEnd] | None:
        """End a generation; return which nodes are to be told what."""
        self._open = [each for each in self._open if each is not generation]
        if self._find(generation) is None:
            return None
        return generation.nodes, GenerationEnd(generation.build_id, generation.number)

    def _fail(self, generation: Generation, reason: str) -> Unanswered:
        generation.failed.add((generation.cluster_id, generation.build_id))
        generation.faults.append(reason)
        generation.asked, generation.cluster_id = None, ""
        return Unanswered(reason)

    def _find(self, generation: Generation) -> ClusterState | None:
        """Return the cluster of a generation, if it still runs as it was built."""
        found = self._placement.find_cluster(generation.cluster_id) if generation.cluster_id else None
        is_same = found is not None and found.is_running and found.build_id == generation.build_id
        return found if is_same else None

    def _choose(self, generation: Generation) -> ClusterState | None:
        """Choose a running cluster that has not failed: the one with the fewest texts, then the fastest."""
        busy = Counter(each.cluster_id for each in self._open)
        running = [
            each
            for each in self._placement.running
            if (each.cluster_id, each.build_id) not in generation.failed
        ]
        order = sorted(running, key=lambda each: (busy[each.cluster_id], -each.samples_per_second, each.name))
        return order[0] if order else None

    def _move(self, generation: Generation, cluster: ClusterState) -> None:
        self._last_number += 1
        generation.number, generation.step = self._last_number, -1
        generation.cluster_id, generation.cluster_name = cluster.cluster_id, cluster.name
        generation.build_id, generation.nodes = cluster.build_id, cluster.nodes


def _find_fault(rows: Sequence[TokenChoices], asked: RowsAsked) -> str:
    """Return why an answer cannot be right, if so: no peer is believed."""
    if len(rows) != len(asked.ends):
        return f"{len(rows)} rows instead of {len(asked.ends)}"
    for row in rows:
        if len(row.words) != len(row.logits) or len(set(row.words)) != len(row.words):
            return "its words and its numbers do not fit"
        if max(row.words) >= asked.num_words:
            return f"word {max(row.words)} of {asked.num_words}"
        if not all(map(math.isfinite, row.logits)):
            return "a number that is not finite"
        if any(one < other for one, other in pairwise(row.logits)):
            return "its numbers are not in order"
    return ""
