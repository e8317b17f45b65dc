"""The stages of a model in one process, which go on with texts and hold what crosses, as peers do."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ravnest.model.blueprint.place_axes import find_axis
from ravnest.model.blueprint.program import Blueprint, ValueId
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.model.stage.stage_texts import NewPlaces, StageTexts, TextCache


class TextLine:
    """Runs steps of one text through all stages."""

    def __init__(self, stages: Sequence[Blueprint], state: Mapping[str, Tensor], length: int) -> None:
        self._stages, self._length = stages, length
        self._state = {name: tensor.detach() for name, tensor in state.items()}
        self.texts = [StageTexts(build_stage_program(stage), length) for stage in stages]
        self.caches = [TextCache() for _ in stages]
        self._held: list[dict[ValueId, Tensor]] = [{} for _ in stages]

    @property
    def reasons(self) -> list[str]:
        """Why stages have no caches."""
        return [text.reason for text in self.texts if text.reason]

    def run(self, fields: Mapping[str, Tensor], places: NewPlaces) -> Tensor:
        """Return the logits of the new places."""
        for number, (stage, text) in enumerate(zip(self._stages, self.texts, strict=True)):
            with torch.no_grad():
                passed = text.run(self._state, self._held[number], fields, places, self.caches[number])
            for value, part in passed.outputs.items():
                kind = stage.evaluate.values[value]
                axis, held = find_axis(kind, self._length), self._held[number + 1]
                if axis is None:
                    held[value] = part
                    continue
                assert part.shape == places.shape(kind, axis)
                if value not in held:
                    held[value] = torch.zeros(kind.shape_at(places.num_rows), dtype=part.dtype)
                places.take(held[value], axis).copy_(part)
        return passed.results["logits"]
