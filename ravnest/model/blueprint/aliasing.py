"""Which values share memory and which operations write to it, read from the operators' schemas.

A program may be cut only where no write would be torn from the tensor it writes to: between a tensor's
creation and its last in-place change, and between the users of a buffer that training changes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ravnest.model.blueprint.operators import draws, operators
from ravnest.model.blueprint.program import Op, Program, ValueId, refs_of

# In evaluation these leave their running statistics alone, although the schema cannot say so.
_WRITES_ONLY_IF = {"aten.batch_norm.default": "training", "aten.instance_norm.default": "use_input_stats"}


def writes(op: Op) -> Iterator[ValueId]:
    """Yield the values an operation changes in place."""
    given = dict(op.arguments)
    if given.get(_WRITES_ONLY_IF.get(op.name, ""), True) is False:
        return
    for parameter in operators()[op.name].parameters:
        if parameter.is_written:
            yield from refs_of(given.get(parameter.name))


def has_effect(op: Op) -> bool:
    """Return whether it matters though its results are not read: it writes, or moves a generator."""
    return any(True for _ in writes(op)) or draws(op.name, dict(op.arguments))


def shares(op: Op) -> Iterator[tuple[ValueId, ValueId]]:
    """Yield (out, argument) pairs that may be the same memory."""
    operator = operators()[op.name]
    given = dict(op.arguments)
    for index, out in enumerate(op.outs):
        alias = operator.return_aliases[0 if operator.num_returns is None else index]
        if out is None or not alias:
            continue
        for parameter in operator.parameters:
            if parameter.alias and (parameter.alias == alias or "*" in (alias, parameter.alias)):
                for argument in refs_of(given.get(parameter.name)):
                    yield out, argument


class Storages:
    """The values of a program grouped by the memory they may share."""

    def __init__(self, program: Program) -> None:
        self._parent: dict[ValueId, ValueId] = {}
        self._program = program
        for op in program.ops:
            for out, argument in shares(op):
                self._parent[self.root(out)] = self.root(argument)
        self._written = {self.root(value) for op in program.ops for value in writes(op)}

    def root(self, value: ValueId) -> ValueId:
        """Return the value that stands for all that may share its memory."""
        parent = self._parent
        while (above := parent.get(value, value)) != value:
            parent[value] = parent.get(above, above)  # halve the way: a chain of views may be long
            value = parent[value]
        return value

    def is_written(self, value: ValueId) -> bool:
        """Return whether some operation changes the memory of this value."""
        return self.root(value) in self._written

    def uncuttable(self) -> set[int]:
        """Return the operation indices before which the program must not be cut."""
        state = {self.root(value) for value, _ in self._program.state}
        touched: dict[ValueId, list[int]] = defaultdict(list)
        last_write: dict[ValueId, int] = {}
        for index, op in enumerate(self._program.ops):
            for value in (*op.refs(), *(out for out in op.outs if out is not None)):
                touched[self.root(value)].append(index)
            for value in writes(op):
                last_write[self.root(value)] = index
        forbidden: set[int] = set()
        for root, last in last_write.items():
            end = max(touched[root]) if root in state else last
            forbidden.update(range(min(touched[root]) + 1, end + 1))
        return forbidden


def find_origins(program: Program, values: Sequence[ValueId]) -> set[int]:
    """Return the places of the operations that these values come from, or that write to them."""
    storages, needed = Storages(program), set[int]()
    roots = {storages.root(value) for value in values}
    for place in reversed(range(len(program.ops))):
        op = program.ops[place]
        made = [out for out in op.outs if out is not None]
        if any(storages.root(value) in roots for value in (*made, *writes(op))):
            needed.add(place)
            roots |= {storages.root(value) for value in op.refs()}
    return needed
