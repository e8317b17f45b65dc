"""The line of a model: where it can be cut, what crosses a cut, and the stage between two cuts.

What crosses a cut depends on that cut alone, so clusters may cut the same line differently and a stage may be
cut again. A value used several stages later passes through those between. Values made from the batch and from
constants alone (masks, rotary tables) are computed again where they are needed instead of crossing.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ravnest.model.blueprint.aliasing import Storages, has_effect
from ravnest.model.blueprint.operators import operators
from ravnest.model.blueprint.program import PARAMETER, Blueprint, Program, StateEntry, ValueId

_TYPICAL_BATCH = 8  # for comparing sizes; every machine must come to the same cut
_SMALL_BYTES = 4096  # fields up to this size may be sent to a stage to save it a smaller value
_LARGER = 16  # a truth value made of a 64-bit mask is an eighth of it, and the way to a mask of many times it


class Wiring:
    """What a program needs where: which values cross a cut, and which are made again instead."""

    def __init__(self, program: Program, constants: Collection[str]) -> None:
        self.program = program
        self.made: dict[ValueId, int] = dict.fromkeys(program.inputs, -1)
        self.last_use: dict[ValueId, int] = {}
        for index, op in enumerate(program.ops):
            self.made.update((out, index) for out in op.outs if out is not None)
            self.last_use.update(dict.fromkeys(op.refs(), index))
        self.last_use.update(dict.fromkeys(program.ends, len(program.ops)))
        self._remade = self._find_remade(constants)

    def crossing(self, cut: int) -> tuple[ValueId, ...]:
        """Return the values that must be sent across a cut before operation `cut`."""
        return tuple(sorted(value for value in self.made if self._crosses(value, cut)))

    def crossing_bytes(self) -> list[int]:
        """Return the bytes that cross a cut before each operation, for a typical batch."""
        change = [0] * (len(self.program.ops) + 2)
        for value, made in self.made.items():
            if value not in self._remade and self.last_use.get(value, -1) > made:
                size = self.program.values[value].bytes_at(_TYPICAL_BATCH)
                change[made + 1] += size
                change[self.last_use[value] + 1] -= size
        totals, total = [], 0
        for step in change[:-1]:
            total += step
            totals.append(total)
        return totals

    def remade(
        self, start: int, stop: int, ends: Collection[ValueId], inputs: Collection[ValueId]
    ) -> list[int]:
        """Return the earlier operations a stage repeats for itself instead of receiving their values."""
        wanted = [*ends, *(value for op in self.program.ops[start:stop] for value in op.refs())]
        found: set[int] = set()
        while wanted:
            value = wanted.pop()
            index = self.made.get(value, -1)
            if 0 <= index < start and index not in found and value not in inputs:
                found.add(index)
                wanted.extend(self.program.ops[index].refs())
        return sorted(found)

    def uncuttable(self) -> set[int]:
        """Return the cuts that tear a write, or leave a first stage nothing to know the batch size from."""
        torn, is_sized = Storages(self.program).uncuttable(), False
        grown = set[ValueId]()  # with the batch, though made of no part of it
        for index, op in enumerate(self.program.ops):
            outs = [out for out in op.outs if out is not None]
            is_remade = bool(outs) and all(out in self._remade for out in outs)
            if not is_remade and any(self._remade.get(value) for value in op.refs()):
                return {*torn, *range(1, index + 1)} if is_sized else torn
            if op.needs_batch_size or not grown.isdisjoint(op.refs()):
                grown.update(outs)
                is_sized = is_sized or not is_remade
        return torn

    def _crosses(self, value: ValueId, cut: int) -> bool:
        return self.made[value] < cut <= self.last_use.get(value, -1) and value not in self._remade

    def _find_remade(self, constants: Collection[str]) -> dict[ValueId, frozenset[ValueId]]:
        """Find values that follow from batch fields and constants, where the fields are not much larger.

        Return the fields of each. All that such a value follows from is made again too; so a stage of a stage
        is cut like the whole.
        """
        storages = Storages(self.program)
        found: dict[ValueId, frozenset[ValueId]] = {
            value: frozenset({value}) for value, _ in self.program.fields
        }
        found |= {value: frozenset() for value, name in self.program.state if name in constants}
        for op in self.program.ops:
            outs = [out for out in op.outs if out is not None]
            if operators()[op.name].is_random or any(storages.is_written(out) for out in outs):
                continue
            if all(value in found for value in op.refs()):
                fields = frozenset[ValueId]().union(*(found[value] for value in op.refs()))
                if all(self._is_worth_it(out, fields) for out in outs):
                    found.update(dict.fromkeys(outs, fields))
        return found

    def _is_worth_it(self, value: ValueId, fields: Collection[ValueId]) -> bool:
        values = self.program.values
        needed = sum(values[field].bytes_at(_TYPICAL_BATCH) for field in fields)
        return needed <= max(_LARGER * values[value].bytes_at(_TYPICAL_BATCH), _SMALL_BYTES)


def crossings(blueprint: Blueprint) -> list[tuple[ValueId, ...]]:
    """Return what crosses in training before each position of the blueprint, and after its last."""
    wiring = Wiring(blueprint.train, _constants(blueprint.state))
    inner = [wiring.crossing(train) for train, _ in blueprint.cuts[1:-1]]
    return [blueprint.train.inputs, *inner, blueprint.train.outputs]


def slice_blueprint(blueprint: Blueprint, start: int, stop: int) -> Blueprint:
    """Return the stage that hosts the positions [start, stop) of the line."""
    assert blueprint.start <= start < stop <= blueprint.stop, (start, stop)
    cuts = blueprint.cuts[start - blueprint.start : stop - blueprint.start + 1]
    ends = (start == blueprint.start, stop == blueprint.stop)
    constants = _constants(blueprint.state)
    train, train_cuts = _slice(Wiring(blueprint.train, constants), [cut[0] for cut in cuts], ends)
    evaluate, evaluate_cuts = _slice(Wiring(blueprint.evaluate, constants), [cut[1] for cut in cuts], ends)
    used = {name for program in (train, evaluate) for _, name in program.state}
    state = tuple(entry for entry in blueprint.state if entry.name in used)
    return replace(
        blueprint,
        start=start,
        stop=stop,
        cuts=tuple(zip(train_cuts, evaluate_cuts, strict=True)),
        state=state,
        aliases=tuple(pair for pair in blueprint.aliases if pair[1] in used),
        train=train,
        evaluate=evaluate,
    )


def _constants(state: Iterable[StateEntry]) -> set[str]:
    return {entry.name for entry in state if entry.kind != PARAMETER and not entry.is_written}


def _slice(wiring: Wiring, cuts: Sequence[int], sides: tuple[bool, bool]) -> tuple[Program, list[int]]:
    """Return the program between the first and the last cut, and its own cuts."""
    whole, (is_head, is_tail) = wiring.program, sides
    inputs = whole.inputs if is_head else wiring.crossing(cuts[0])
    outputs = whole.outputs if is_tail else wiring.crossing(cuts[-1])
    ends = replace(whole, inputs=inputs, outputs=outputs)
    ends = ends if is_tail else replace(ends, results=(), logits=None)
    indices = [*wiring.remade(cuts[0], cuts[-1], ends.ends, set(inputs)), *range(cuts[0], cuts[-1])]
    program, kept = keep_needed(ends, indices)
    return program, [0, *(sum(index < cut for index in kept) for cut in cuts[1:])]


def keep_needed(program: Program, indices: Sequence[int]) -> tuple[Program, list[int]]:
    """Return a program with those of these operations that its ends need, and which they are."""
    needed, kept = set(program.ends), list[int]()
    for index in reversed(indices):
        op = program.ops[index]
        if any(out in needed for out in op.outs) or has_effect(op):
            kept.append(index)
            needed.update(op.refs())
    kept.reverse()
    ops = tuple(program.ops[index] for index in kept)
    ids = {*needed, *program.inputs, *(out for op in ops for out in op.outs if out is not None)}
    found = replace(
        program,
        values={value: program.values[value] for value in sorted(ids)},
        fields=tuple(pair for pair in program.fields if pair[0] in needed),
        state=tuple(pair for pair in program.state if pair[0] in needed),
        ops=ops,
    )
    return found, kept


@dataclass(frozen=True, slots=True)
class Positions:
    """A line ready to be cut: where each position begins, and the state with the positions that use it."""

    cuts: tuple[tuple[int, int], ...]
    state: tuple[StateEntry, ...]


def find_positions(train: Program, evaluate: Program, state: Sequence[StateEntry]) -> Positions:
    """Choose the cuts of a line: between two operations with parameters, where the fewest bytes cross.

    A cut must exist in both programs, with the same state on either side.
    """
    placed = {entry.name for entry in state if entry.kind == PARAMETER or entry.is_written}
    constants = _constants(state)
    train_cuts = _cheapest_cuts(train, placed, constants)
    pairs = _matching_cuts(train, evaluate, train_cuts, placed, constants)
    cuts = ((0, 0), *pairs, (len(train.ops), len(evaluate.ops)))
    positions: dict[str, set[int]] = defaultdict(set)
    for program, starts in ((train, [cut[0] for cut in cuts]), (evaluate, [cut[1] for cut in cuts])):
        for name, places in _places(program, starts[1:-1]).items():
            positions[name] |= places
    entries = (replace(entry, positions=tuple(sorted(positions[entry.name]))) for entry in state)
    return Positions(cuts, tuple(entry for entry in entries if entry.positions))


def _cheapest_cuts(program: Program, placed: Collection[str], constants: Collection[str]) -> list[int]:
    wiring = Wiring(program, constants)
    forbidden, crossing = wiring.uncuttable(), wiring.crossing_bytes()
    names = dict(program.state)
    anchors = [i for i, op in enumerate(program.ops) if any(names.get(v) in placed for v in op.refs())]
    cuts = []
    for before, after in pairwise(anchors):
        choice = [cut for cut in range(before + 1, after + 1) if cut not in forbidden]
        if choice:
            cuts.append(min(choice, key=lambda cut: (crossing[cut], -cut)))
    return cuts


def _matching_cuts(
    train: Program,
    evaluate: Program,
    train_cuts: Sequence[int],
    placed: Collection[str],
    constants: Collection[str],
) -> list[tuple[int, int]]:
    """Return the cuts of training that evaluation can follow, each with its own place there."""
    where = _places(train, train_cuts)
    names = dict(evaluate.state)
    wanted: list[tuple[int, int]] = []  # (operation, position that training gives its state)
    reached = 0
    for index, op in enumerate(evaluate.ops):
        for name in {names[value] for value in op.refs() if value in names} & where.keys() & set(placed):
            later = [place for place in where[name] if place >= reached]
            place = min(later) if later else max(where[name])
            reached = max(reached, place)
            wanted.append((index, place))
    wiring = Wiring(evaluate, constants)
    forbidden, crossing = wiring.uncuttable(), wiring.crossing_bytes()
    pairs: list[tuple[int, int]] = []
    for number, train_cut in enumerate(train_cuts, 1):
        low = max([index + 1 for index, place in wanted if place < number], default=0)
        high = min([index for index, place in wanted if place >= number], default=len(evaluate.ops))
        low = max(low, pairs[-1][1] if pairs else 0)
        choice = [cut for cut in range(low, high + 1) if cut not in forbidden]
        if choice:
            pairs.append((train_cut, min(choice, key=lambda cut: (crossing[cut], -cut))))
    return pairs


def _places(program: Program, cuts: Sequence[int]) -> dict[str, set[int]]:
    """Return the positions in which each name of the state is used."""
    names = dict(program.state)
    places: dict[str, set[int]] = defaultdict(set)
    position = 0
    for index, op in enumerate(program.ops):
        while position < len(cuts) and index >= cuts[position]:
            position += 1
        for value in op.refs():
            if value in names:
                places[names[value]].add(position)
    return places
