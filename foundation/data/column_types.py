"""Brings columns of a raw log to the few types of a dataset: int64 or string ids, float64 numbers, int64 times."""

from __future__ import annotations

from collections.abc import Sequence

import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from foundation.data.arrow_columns import Role, column_roles
from foundation.data.schema import Schema
from foundation.data.sources import PrepareError


def normalized(table: ir.Table, schema: Schema, names: Sequence[str]) -> ir.Table:
    """``table`` with the named columns cast to what their role in the schema needs; others stay.

    Whole floats become integer ids; text with commas becomes a list where the schema wants one.

    Raises:
        PrepareError: naming a column whose type does not fit its role.
    """
    roles = column_roles(schema)
    labels = {t.label for t in schema.tasks}
    changed = {}
    for name in names:
        value = table[name]
        if name in labels:
            changed[name] = value.cast("int64")
        elif name in roles:
            changed[name] = _cast(value, value.type(), roles[name], name)
    return table.mutate(**changed)


def _cast(value: ir.Value, kind: dt.DataType, role: Role, name: str) -> ir.Value:
    if not role.is_list:
        return _cast_one(value, kind, role, name)
    if kind.is_string():
        value = value.split(",")
        kind = value.type()
    if not kind.is_array():
        raise PrepareError(f"column {name!r} is {kind}, expected {role.describe()}")
    inner = kind.value_type
    target = _target(inner, Role(role.content), name)
    return value if inner == target else value.cast(dt.Array(target))


def _cast_one(value: ir.Value, kind: dt.DataType, role: Role, name: str) -> ir.Value:
    target = _target(kind, role, name)
    return value if kind == target else value.cast(target)


def _target(kind: dt.DataType, role: Role, name: str) -> dt.DataType:
    """The type a value of ``kind`` gets in the dataset."""
    if role.content in ("id", "integer", "time"):
        if kind.is_string() and role.content == "id":
            return dt.string
        if kind.is_integer() or kind.is_boolean() or kind.is_floating() or kind.is_decimal() or kind.is_null():
            return dt.int64
    elif kind.is_numeric() or kind.is_boolean() or kind.is_null() or kind.is_string():
        return dt.float64
    hint = "; cast it in the log, for example to a whole number or a string" if role.content == "id" else ""
    raise PrepareError(f"column {name!r} is {kind}, expected {role.describe()}{hint}")


def fractional(table: ir.Table, schema: Schema, names: Sequence[str]) -> dict[str, int]:
    """Number of values with a fraction in each float column that holds ids (columns without any left out)."""
    roles = column_roles(schema)
    tests = {}
    for name in names:
        role = roles.get(name)
        if role is not None and role.content != "number" and not role.is_list:
            value = table[name]
            if value.type().is_floating():
                tests[name] = (value != value.floor()).fill_null(False).sum()
    if not tests:
        return {}
    found = table.aggregate(**tests).to_pyarrow().to_pylist()[0]
    return {name: int(count) for name, count in found.items() if count}
