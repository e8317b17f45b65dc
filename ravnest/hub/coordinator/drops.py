"""Drops: which samples were dropped, and why.

A stage drops a whole microbatch. The requester's side is asked which of its samples is at fault, and that one
is named. From then on another sample of its microbatch takes its place, so it costs one microbatch, not one
in each epoch. Training does not wait for the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ravnest.hub.coordinator.events import Action, InspectSamples, Notify, SamplesInspected, SendFields
from ravnest.hub.coordinator.notices import MicrobatchDropped, SamplesDropped

_MOST_KEPT = 100  # of what is told at the end
_MOST_INSPECTED = 32  # microbatches: where all of them fail, it is not for their samples


@dataclass(frozen=True, slots=True)
class DroppedSamples:
    """Samples of the train data, or of the validation data, that were dropped together."""

    samples: tuple[int, ...]
    reason: str
    is_evaluation: bool = False


class Drops:
    """Takes every microbatch that is dropped; `found` says what is known of their samples, in order."""

    def __init__(self) -> None:
        self._found: dict[tuple[bool, tuple[int, ...]], str] = {}
        self._faulty: set[tuple[bool, int]] = set()
        self._under_way: dict[tuple[bool, tuple[int, ...]], None] = {}
        self._num_inspected = 0
        self._replaced: set[int] = set()  # of the train data

    @property
    def found(self) -> tuple[DroppedSamples, ...]:
        """Samples and reasons, each once: those at fault alone, else all of their microbatch."""
        return tuple(DroppedSamples(key[1], reason, key[0]) for key, reason in self._found.items())

    def record(self, told: MicrobatchDropped) -> list[Action]:
        """Tell of a microbatch; have its samples inspected if none of them is known to be at fault."""
        faulty = tuple(sample for sample in told.samples if (told.is_evaluation, sample) in self._faulty)
        told = replace(told, faulty=faulty)
        key, actions = (told.is_evaluation, told.samples), [Notify(told)]
        if faulty:
            return [*actions]
        if len(told.samples) == 1:
            return [*actions, *self._name(told.is_evaluation, told.samples, told.reason)]
        self._keep(*key, told.reason)
        if key in self._under_way or self._num_inspected == _MOST_INSPECTED:
            return [*actions]
        self._num_inspected += 1
        self._under_way[key] = None
        return [*actions, InspectSamples(*key)]

    def conclude(self, inspected: SamplesInspected) -> list[Action] | str:
        """Name the samples that were found to be at fault."""
        key = (inspected.is_evaluation, inspected.samples)
        if key not in self._under_way:
            return "nobody asked about these samples"
        del self._under_way[key]
        by_reason: dict[str, list[int]] = {}
        for sample, reason in inspected.faulty:
            if sample in inspected.samples:
                by_reason.setdefault(reason, []).append(sample)
        if by_reason:
            self._found.pop(key, None)
        actions: list[Action] = []
        for reason, samples in by_reason.items():
            actions += self._name(inspected.is_evaluation, samples, reason)
            self._replaced |= set() if inspected.is_evaluation else set(samples)
        return actions

    def replace_faulty(self, order: SendFields) -> SendFields:
        """Put other samples of a microbatch in the places of those that the requester's side found at fault.

        An evaluation goes without the microbatch: no sample of it counts twice.
        """
        if order.is_evaluation or self._replaced.isdisjoint(x for batch in order.samples for x in batch):
            return order
        return replace(order, samples=tuple(map(self._replace, order.samples)))

    def _replace(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        good = [sample for sample in samples if sample not in self._replaced] or samples
        return tuple(
            good[index % len(good)] if sample in self._replaced else sample
            for index, sample in enumerate(samples)
        )

    def _name(self, is_evaluation: bool, samples: Sequence[int], reason: str) -> list[Action]:
        new = tuple(sample for sample in samples if (is_evaluation, sample) not in self._faulty)
        self._faulty |= {(is_evaluation, sample) for sample in new}
        if not new:
            return []
        self._keep(is_evaluation, new, reason)
        return [Notify(SamplesDropped(new, reason, is_evaluation))]

    def _keep(self, is_evaluation: bool, samples: tuple[int, ...], reason: str) -> None:
        if len(self._found) < _MOST_KEPT:
            self._found.setdefault((is_evaluation, samples), reason)
