"""Short samples for the self-test: as short as the model allows, where whole ones would take minutes.

A model whose samples are rows of whole numbers (tokens, labels, masks) is exported with the length of a row
as a symbol. Then the very program that providers run can also be written for a shorter row. What a model
fixes or bounds shows in the symbol: it is tested with rows that it allows, at worst with whole ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

_MOST_WORK = 5e8  # parameters times numbers of a row: passes over a few whole samples take about a second
SHORT = 8
_NUM_SEARCHED = 4  # samples: as many as the self-test takes

Lengths = Mapping[sympy.Symbol, sympy.Integer]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The fields that are rows of one length."""

    names: frozenset[str]
    length: int

    def take(self, fields: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        """Return the fields with so many columns: the smallest and largest numbers, and some evenly spread.

        Then a number that is out of range still is, and the share of padding stays.
        """
        first = [fields[name][:_NUM_SEARCHED].long() for name in sorted(self.names)]
        extreme = {int(find(each)) % self.length for each in first for find in (torch.argmin, torch.argmax)}
        spread = torch.linspace(0, self.length - 1, length).round().long().tolist()
        columns = list(dict.fromkeys([*sorted(extreme), *spread, *range(self.length)]))[:length]
        chosen = torch.tensor(sorted(columns))
        return {
            name: field[:, chosen.to(field.device)] if name in self.names else field
            for name, field in fields.items()
        }


def count_work(num_parameters: int, fields: Mapping[str, Tensor]) -> int:
    """Return about how much work a sample is: parameters, times tokens where it has any."""
    tokens = max((each[0].numel() for each in fields.values() if not each.is_floating_point()), default=1)
    return max(num_parameters, 1) * max(tokens, 1)


def is_costly(num_parameters: int, fields: Mapping[str, Tensor]) -> bool:
    """Return whether a pass over a few whole samples takes more than a moment."""
    return count_work(num_parameters, fields) > _MOST_WORK


def find_rows(fields: Mapping[str, Tensor]) -> TokenRows | None:
    """Return the fields that can be shortened together, if any."""
    found = {name: each for name, each in fields.items() if each.ndim == 2 and not each.is_floating_point()}
    lengths = {each.shape[1] for each in found.values()}
    if len(lengths) != 1 or min(lengths) <= SHORT:
        return None
    return TokenRows(frozenset(found), lengths.pop())


def find_symbols(
    exported: torch.export.ExportedProgram, fields: Sequence[str], rows: TokenRows
) -> tuple[frozenset[sympy.Symbol], int]:
    """Return the symbols that stand for the length of a row, and the shortest length that is allowed."""
    names = exported.graph_signature.user_inputs
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    found, shortest = set(), SHORT
    for field, name in zip(fields, names, strict=True):
        if field not in rows.names:
            continue
        size = nodes[str(name)].meta["val"].shape[1]
        if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
            shortest = rows.length  # the model fixes it
            continue
        found.add(size.node.expr)
        bounds = exported.range_constraints.get(size.node.expr)
        if bounds is not None:
            shortest = max(shortest, int(bounds.lower))
    return frozenset(found), shortest
