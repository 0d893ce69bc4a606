"""Row conditions written as text, for example ``click == 1 and surface in ['feed', 'reels']``.

The text uses Python's syntax for comparisons, ``and``/``or``/``not``, ``in`` and arithmetic over column names.
It becomes an Ibis expression, so the same condition runs on every backend, and nothing of it is executed as
Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import ibis
import ibis.expr.types as ir

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def condition(table: ir.Table, text: str, key: str) -> ir.BooleanValue:
    """The rows of ``table`` for which ``text`` holds, as a boolean Ibis expression that is never null.

    ``key`` is the name of the setting the text comes from. Raises ValueError naming it, the text and the part
    that cannot be used. A comparison with a missing value does not hold; test for it with ``x is None``.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{key}: {text!r} is not a condition: {error.msg}") from None
    value = _Translator(table, text, key).visit(tree.body)
    if isinstance(value, bool):
        value = ibis.literal(value)
    if not isinstance(value, ir.BooleanValue):
        raise ValueError(f"{key}: {text!r} is not a condition; write a comparison such as 'click == 1'")
    return value.fill_null(False)


def names_in(text: str) -> frozenset[str]:
    """The column names that a condition mentions; none where it is not a condition at all."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return frozenset()
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


class _Translator(ast.NodeVisitor):
    def __init__(self, table: ir.Table, text: str, key: str) -> None:
        self.table, self.text, self.key = table, text, key

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{self.key}: {self.text!r}: {problem}")

    def generic_visit(self, node: ast.AST) -> Any:
        raise self.fail(f"{ast.unparse(node)!r} cannot be used in a condition")

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self.table.columns:
            own = [c for c in self.table.columns if not c.startswith("_")]
            raise self.fail(f"no column {node.id!r}; columns are {', '.join(own)}")
        return self.table[node.id]

    def visit_Constant(self, node: ast.Constant) -> Any:
        if not isinstance(node.value, int | float | str):
            raise self.fail(f"{ast.unparse(node)!r} cannot be used as a value")
        return node.value

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ~self._boolean(value).fill_null(False)
        if isinstance(node.op, ast.USub):
            return -value
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _BINARY:
            return self.generic_visit(node)
        return self._apply(_BINARY[type(node.op)], self.visit(node.left), self.visit(node.right))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        parts = [self._boolean(self.visit(v)).fill_null(False) for v in node.values]
        result = parts[0]
        for part in parts[1:]:
            result = result & part if isinstance(node.op, ast.And) else result | part
        return result

    def visit_Compare(self, node: ast.Compare) -> Any:
        result: Any = None
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            part = self._compare(left, op, right)
            result = part if result is None else result & part
            left = right
        return result

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self.fail("'is' is only for 'is None' and 'is not None'")
            value = self.visit(left)
            return value.isnull() if isinstance(op, ast.Is) else value.notnull()
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self.fail("'in' needs a list of values")
            values = [self.visit(v) for v in right.elts]
            inside = self.visit(left).isin(values)
            return inside if isinstance(op, ast.In) else ~inside
        return self._apply(_COMPARE[type(op)], self.visit(left), self.visit(right))

    def _apply(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        try:
            return function(left, right)
        except Exception as error:  # Ibis raises several kinds for types that do not fit
            raise self.fail(f"values that cannot be combined: {error}") from None

    def _boolean(self, value: Any) -> ir.BooleanValue:
        if isinstance(value, bool):
            return ibis.literal(value)
        if not isinstance(value, ir.BooleanValue):
            raise self.fail("'and', 'or' and 'not' need comparisons on each side")
        return value
