"""The value of a candidate, as an expression.

A model's manifest declares the value as an expression over its task probabilities and numbers that come with
each candidate, for example ``click * bid + 0.2 * like``. The text is parsed with `ast` against a whitelist and
never passed to `eval`. The exporter and the server share this one rule, so what is exported can be served; numpy only.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "sqrt": (1, np.sqrt),
    "log": (1, np.log),
    "log1p": (1, np.log1p),
    "exp": (1, np.exp),
}
_MAX_TEXT = 1000
_MAX_DEPTH = 50


class ValueExpressionError(ValueError):
    """An expression that is not allowed; the message quotes the part at fault."""


@dataclass(frozen=True, slots=True)
class ValueExpression:
    """A parsed expression. Build it with :meth:`parse`."""

    text: str
    tasks: tuple[str, ...]
    """Task names that occur in it."""
    fields: tuple[str, ...]
    """Other names in it: numbers that every candidate must bring."""
    _tree: ast.expr

    @staticmethod
    def parse(text: str, task_names: Sequence[str]) -> ValueExpression:
        """Parses arithmetic (+ - * / **), numbers, names, and min, max, sqrt, log, log1p, exp.

        Raises:
            ValueExpressionError: anything else, or no task in it.
        """
        if len(text) > _MAX_TEXT:
            raise ValueExpressionError(f"value: longer than {_MAX_TEXT} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueExpressionError(f"value: {text!r} is not an arithmetic expression") from None
        names: dict[str, None] = {}
        _check(tree, names, _MAX_DEPTH)
        tasks = tuple(n for n in names if n in task_names)
        if not tasks:
            raise ValueExpressionError(f"value: {text!r} names none of the tasks {', '.join(task_names)}")
        return ValueExpression(
            text=text,
            tasks=tasks,
            fields=tuple(n for n in names if n not in task_names),
            _tree=tree,
        )

    def evaluate(self, numbers: Mapping[str, np.ndarray]) -> np.ndarray:
        """The value of each candidate, float64 ``[N]``; not finite where the arithmetic is not defined.

        Args:
            numbers: one array ``[N]`` for each of `tasks` and `fields`.
        """
        wide = {name: np.asarray(array, np.float64) for name, array in numbers.items()}
        with np.errstate(all="ignore"):
            return np.asarray(_evaluate(self._tree, wide), np.float64)


def _check(node: ast.AST, names: dict[str, None], depth: int) -> None:
    if depth == 0:
        raise ValueExpressionError(f"value: nested more than {_MAX_DEPTH} deep")
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, names, depth - 1)
            _check(right, names, depth - 1)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            _check(operand, names, depth - 1)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if not abs(value) < 1e300:
                raise ValueExpressionError("value: a number in it is too large")
        case ast.Name(id=name):
            names[name] = None
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            if len(arguments) != _FUNCTIONS[name][0]:
                raise ValueExpressionError(f"value: {name} takes {_FUNCTIONS[name][0]} argument(s)")
            for argument in arguments:
                _check(argument, names, depth - 1)
        case _:
            raise ValueExpressionError(f"value: {ast.unparse(node)!r} is not allowed in a value expression")


def _evaluate(node: ast.expr, numbers: Mapping[str, np.ndarray]) -> Any:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, numbers), _evaluate(right, numbers))
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_evaluate(operand, numbers))
        case ast.Constant(value=value):
            return np.float64(str(value))  # never a Python integer: their powers know no bound
        case ast.Name(id=name):
            return numbers[name]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name][1](*(_evaluate(argument, numbers) for argument in arguments))
    raise AssertionError(f"{type(node).__name__} passed the check")
