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

    Whole floats become integer ids; text with commas becomes a list where the schema wants one (spaces around its
    values do not count).

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
        value = value.strip().re_replace(r"\s*,\s*", ",").split(",")
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


def refuse_values(table: ir.Table, schema: Schema, names: Sequence[str], where: str = "") -> None:
    """Refuses values that :func:`normalized` could not cast: their number and one of them are in the message.

    Of lists only those written as text are looked at; the values of others are seen when they are cast.

    Args:
        where: what comes before the column's name, such as `log: `.

    Raises:
        PrepareError: ids with a fraction or beyond 64 bits, numbers that are words, lists in brackets.
    """
    roles = column_roles(schema)
    tests: dict[str, tuple[str, ir.BooleanValue, str]] = {}
    for name in names:
        role = roles.get(name)
        if role is None:
            continue
        value, kind = table[name], table[name].type()
        if role.is_list:
            if kind.is_string():
                wrong = value.strip().re_search(r"^[\[{(]")
                tests[f"{len(tests)} brackets"] = (
                    name, wrong, "lists in brackets; write a list as its values with commas between them"
                )  # fmt: skip
            continue
        if role.content == "number":
            if kind.is_string():
                wrong = value.notnull() & value.try_cast("float64").isnull()
                tests[f"{len(tests)} words"] = (
                    name, wrong, "values that are no numbers; write them as numbers, or list them under `missing`"
                )  # fmt: skip
            continue
        if kind.is_floating() or kind.is_decimal():
            broken = value % 1 != 0
            tests[f"{len(tests)} fraction"] = (name, broken, "ids with a fraction; ids are whole numbers or strings")
        if kind.is_floating() or kind.is_decimal() or kind == dt.uint64:
            beyond = value.try_cast("int64").isnull() & value.notnull()
            tests[f"{len(tests)} beyond"] = (name, beyond, "ids beyond 64 bits with a sign; store them as strings")
    if not tests:
        return
    asked: dict[str, ir.Value] = {}
    for key, (name, test, _) in tests.items():
        asked[f"{key} rows"] = test.fill_null(False).sum()
        asked[f"{key} value"] = table[name].cast("string").max(where=test)
    found = table.aggregate(**asked).to_pyarrow().to_pylist()[0]
    for key, (name, _, problem) in tests.items():
        if found[f"{key} rows"]:
            raise PrepareError(
                f"{where}column {name!r} has {found[f'{key} rows']} {problem} (such as {found[f'{key} value']!r})"
            )
