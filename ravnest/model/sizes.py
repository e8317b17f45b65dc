"""Sizes as torch.export writes them, as numbers that grow with the batch."""

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy import functions as size_functions

from ravnest.model.blueprint import Ratio, Size


def symbols_of(size: object) -> set[object]:
    """Return the symbols a size consists of; none if it is a plain number."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt | torch.SymFloat) else set()


def number_of(size: object) -> int | float | Size | Ratio | None:
    """Return a size as a number that may grow with the batch, or nothing if it does so in another way."""
    if isinstance(size, int | float):
        return size
    assert isinstance(size, torch.SymInt | torch.SymFloat)
    expression = size.node.expr
    if isinstance(expression, size_functions.FloatTrueDiv | size_functions.IntTrueDiv):
        over, under = (_size(part) for part in expression.args)
        return Ratio(over, under) if over and under else None
    found = _size(expression)
    if found is None:
        return None
    if isinstance(size, torch.SymFloat):
        return Ratio(found, Size(0, 1))
    return found if found.per_sample else found.fixed


def _size(expression: sympy.Expr) -> Size | None:
    """Return a x batch + b, if that is what the expression says."""
    if isinstance(expression, size_functions.ToFloat):
        (expression,) = expression.args
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) > 1 or not all(expression.is_polynomial(symbol) for symbol in symbols):
        return None
    slope = sympy.diff(expression, symbols[0]) if symbols else sympy.Integer(0)
    rest = expression - slope * symbols[0] if symbols else expression
    slope, rest = sympy.expand(slope), sympy.expand(rest)
    if not (slope.is_number and rest.is_number and slope == int(slope) and rest == int(rest)):
        return None
    return Size(int(slope), int(rest))
