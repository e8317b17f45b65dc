"""Texts in a stage: each step runs new places only, with keys and values of those before from a cache.

Where the stage cannot be written for new places (`blueprint.cached_program`), whole rows are run for each
token. What is written is tried before it is used: on a row made of the first text it must give what whole
rows give. Either way new places come out. A cache is of the weights that its places were run with.
"""

import torch
from torch import Tensor

from ravnest.model.blueprint.cached_program import CachedProgram, make_cached_program
from ravnest.model.blueprint.place_axes import PlaceAxis, find_axis
from ravnest.model.blueprint.program import PARAMETER, Blueprint, ValueId
from ravnest.model.stage.cached_text import CachedText, NewPlaces, PlacedValues, TextCache
from ravnest.model.stage.stage_program import StageOutputs, StageProgram, State
from ravnest.model.stage.text_model import find_token_fields, make_generation_program

_DIFFERENCE = 1e-3  # of two ways to the same numbers, by their size
_NARROW_DIFFERENCE = 5e-2  # in mixed precision
_TINY = 1e-30
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


def write_for_new_places(blueprint: Blueprint, length: int) -> CachedProgram | str:
    """Return what a stage does for new places of rows of this length, or why it takes whole rows."""
    program = make_generation_program(blueprint.evaluate)
    constants = [x.name for x in blueprint.state if x.kind != PARAMETER and not x.is_written]
    return make_cached_program(program, length, find_token_fields(program), constants)


class StageTexts:
    """Runs texts of one stage, whose rows have `length` places."""

    def __init__(self, stage: StageProgram, length: int) -> None:
        self._stage, self._length = stage, length
        self._program = make_generation_program(stage.blueprint.evaluate)
        found = write_for_new_places(stage.blueprint, length)
        self.reason = found if isinstance(found, str) else ""  # why there are no caches
        self._cached: CachedText | None = None
        self.is_tried = False  # whether caches were compared with whole rows
        if not isinstance(found, str):
            self._cached = CachedText(stage.blueprint, found, length, stage.setting)

    def cache_bytes(self, num_rows: int) -> int:
        """Return what the cache of a text takes when its rows are full; 0: it has none."""
        return 0 if self._cached is None else self._cached.cached.cache_bytes(num_rows)

    def run(
        self,
        state: State,
        inputs: PlacedValues,
        fields: State,
        places: NewPlaces,
        cache: TextCache | None = None,
    ) -> StageOutputs:
        """Return new places of what crosses, or of the logits. What comes is whole rows."""
        if cache is not None and self._cached is not None and not self.is_tried:
            self.is_tried = True
            self._try(self._cached, state, inputs, fields, places)
        if cache is not None and self._cached is not None:
            return self._cached.run(state, inputs, fields, places, cache)
        passed = self._stage.forward_text(state, inputs, fields)
        outputs = {}
        for value, tensor in passed.outputs.items():
            axis = find_axis(self._program.values[value], self._length)
            outputs[value] = tensor if axis is None else places.take(tensor, axis)
        results = {name: places.take(each, PlaceAxis(1)) for name, each in passed.results.items()}
        return StageOutputs(outputs, results)

    def _try(
        self, cached: CachedText, state: State, inputs: PlacedValues, fields: State, places: NewPlaces
    ) -> None:
        """Compare both ways on one row; there are no caches from now on if they differ."""
        try:
            told = self._find_difference(cached, state, *self._make_row(inputs, fields, places))
        except _FAILURES as error:
            told = f"new places alone cannot be run ({error})"
        if told:
            self._cached, self.reason = None, told

    def _make_row(
        self, inputs: PlacedValues, fields: State, places: NewPlaces
    ) -> tuple[dict[ValueId, Tensor], dict[str, Tensor]]:
        """Return a full row made of the places of a text, in any order; what crosses gets noise too."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randint(places.end, (self._length,), generator=generator)
        tokens, known = find_token_fields(self._program), NewPlaces(places.num_rows, 0, places.end)
        row = {
            name: field[:1].index_select(1, order.to(field.device)) if name in tokens else field[:1]
            for name, field in fields.items()
        }
        crossed = {}
        for value, tensor in inputs.items():
            axis = find_axis(self._program.values[value], self._length)
            if axis is None:
                crossed[value] = tensor[: tensor.shape[0] // places.num_rows]
                continue
            one = known.take(tensor, axis)[:1].index_select(axis.own_dim, order.to(tensor.device))
            if one.is_floating_point():
                noise = torch.randn(one.shape, generator=generator).to(one)
                one = one + noise * one.float().square().mean().sqrt().to(one)
            crossed[value] = one.flatten(0, 1) if axis.is_merged else one
        return crossed, row

    def _find_difference(self, cached: CachedText, state: State, inputs: PlacedValues, fields: State) -> str:
        """Run a row in three pieces; return what is not as in the whole row."""
        limit = _DIFFERENCE if self._stage.setting.autocast is None else _NARROW_DIFFERENCE
        half, cache, first = self._length // 2, TextCache(), 0
        for end in sorted({half, half + 1, min(half + 3, self._length)}):
            places = NewPlaces(1, first, end)
            found = cached.run(state, inputs, fields, places, cache)
            wanted = self.run(state, inputs, fields, places)
            pairs = [(each, wanted.outputs[value]) for value, each in found.outputs.items()]
            pairs += [(each, wanted.results[name]) for name, each in found.results.items()]
            for one, other in pairs:
                difference = float((one.double() - other.double()).norm()) / max(
                    float(other.double().norm()), _TINY
                )
                if one.shape != other.shape or not difference <= limit:
                    return f"new places alone give other numbers than whole rows (by {difference:.2g})"
            first = end
        return ""
