"""Every way in which a column may be stored in a file becomes the same numpy column, or one clear error."""

from __future__ import annotations

import datetime
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from foundation.data.arrow_columns import Role, check_schema, column_roles, string_leaves, surface_codes, to_column
from foundation.data.encoding import Column
from foundation.data.storage import DatasetError
from tests.foundation.data.builders import fit, small_schema, small_table

ID, NUMBER, TIME = Role("id"), Role("number"), Role("time")
IDS, NUMBERS = Role("id", True), Role("number", True)


def plain(column: Column) -> list[Any]:
    """A column as Python values, None where null."""
    values: list[Any] = column.values.tolist()
    if column.dictionary is not None:
        values = [column.dictionary[i] for i in values]
    if column.valid is not None:
        values = [v if ok else None for v, ok in zip(values, column.valid.tolist(), strict=True)]
    if column.offsets is None:
        return values
    return [values[a:b] for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DAY = datetime.date(2022, 5, 1)
DAY_MS = 1_651_363_200_000


@pytest.mark.parametrize("kind", [*INTEGERS, *FLOATS, pa.decimal128(9, 0), pa.decimal256(40, 0)], ids=str)
@pytest.mark.parametrize("values", [[3, 1, 2], [3, None, 2], [None], []], ids=str)
def test_numbers_of_any_width(kind: pa.DataType, values: list[int | None]) -> None:
    made = [None if v is None else float(v) if kind in FLOATS else v for v in values]
    column = to_column(pa.array(made, kind), ID)
    assert plain(column) == values
    assert column.values.dtype.kind in "iuf"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([True, None, False]), [1, None, 0]),
        (pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)), [1.5, None]),
        (pa.array([DAY, None]), [DAY_MS, None]),
        (pa.array([DAY], pa.date64()), [DAY_MS]),
        (pa.array([DAY_MS], pa.timestamp("ms")), [DAY_MS]),
        (pa.array([DAY_MS // 1000, None], pa.timestamp("s")), [DAY_MS, None]),
        (pa.array([DAY_MS * 1000 + 999], pa.timestamp("us", tz="Asia/Shanghai")), [DAY_MS]),
        (pa.array([DAY_MS * 10**6 + 1], pa.timestamp("ns", tz="UTC")), [DAY_MS]),
        (pa.array([5, 7, 5, None]).dictionary_encode(), [5, 7, 5, None]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda v: str(v.type) if isinstance(v, pa.Array) else "",
)
def test_other_types_of_numbers(array: pa.Array, expected: list[Any]) -> None:
    assert plain(to_column(array, TIME)) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
@pytest.mark.parametrize("encoded", [False, True])
def test_strings(kind: pa.DataType, encoded: bool) -> None:
    array = pa.array(["b", None, "a", "b", ""], kind)
    if encoded and kind != pa.string_view():
        array = array.dictionary_encode()
    column = to_column(array, ID)
    assert plain(column) == ["b", None, "a", "b", ""]
    assert column.dictionary is not None and len(column.dictionary) == 3
    assert plain(to_column(array.slice(2, 2), ID)) == ["a", "b"]
    assert plain(to_column(array.slice(1, 1), ID)) == [None]


def test_a_slice_takes_only_its_part_of_a_dictionary() -> None:
    array = pa.array([f"v{i}" for i in range(1000)]).dictionary_encode().slice(500, 3)
    column = to_column(array, ID)
    assert plain(column) == ["v500", "v501", "v502"]
    assert column.dictionary is not None and len(column.dictionary) == 3


LISTS: list[Any] = [[1, 2], None, [], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.field("element", pa.uint16(), nullable=False)),
        pa.list_(pa.float32()),
    ],
    ids=str,
)
def test_lists(kind: pa.DataType) -> None:
    expected = [v or [] for v in LISTS]
    array = pa.array(LISTS, kind)
    assert plain(to_column(array, IDS)) == expected
    for start, count in ((1, 3), (3, 2), (4, 1), (0, 0), (5, 0)):
        assert plain(to_column(array.slice(start, count), IDS)) == expected[start : start + count]
    no_nulls = pa.array([v or [] for v in LISTS], kind)
    assert plain(to_column(no_nulls, IDS)) == expected
    assert plain(to_column(no_nulls.slice(3, 2), IDS)) == expected[3:]


def test_lists_of_strings_and_with_nulls_inside() -> None:
    values = [["x", None], [], None, ["y", "x"]]
    for kind in (
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ):
        assert plain(to_column(pa.array(values, kind), IDS)) == [v or [] for v in values]
    assert plain(to_column(pa.array([[1, None], [2]]), IDS)) == [[1, None], [2]]


def test_fixed_size_lists() -> None:
    array = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert plain(to_column(array, NUMBERS)) == [[1.0, 2.0], [], [3.0, 4.0]]
    assert plain(to_column(array.slice(1), NUMBERS)) == [[], [3.0, 4.0]]


def test_null_lists_over_values_of_their_own() -> None:
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    assert plain(to_column(hidden, IDS)) == [[1, 2], [], [5]]


def test_list_columns_without_any_value() -> None:
    assert plain(to_column(pa.nulls(3), IDS)) == [[], [], []]
    assert plain(to_column(pa.array([[], []], pa.list_(pa.null())), IDS)) == [[], []]
    assert plain(to_column(pa.array([[None], []], pa.list_(pa.null())), IDS)) == [[None], []]


def test_extension_types_are_seen_through() -> None:
    array = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8()))
    assert plain(to_column(array, NUMBER)) == [1, 0]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["stories", "feed", None, "tv"]), [2, 0, 3, 3]),
        (pa.array(["feed", "tv"], pa.large_string()).dictionary_encode(), [0, 3]),
        (pa.nulls(2), [3, 3]),
    ],
)
def test_surfaces_by_name(array: pa.Array, expected: list[int]) -> None:
    assert surface_codes(array, small_schema()).tolist() == expected


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint16(), pa.float64(), pa.string()], ids=str)
def test_surfaces_by_number(kind: pa.DataType) -> None:
    schema = small_schema(surface={"column": "tab", "values": ["1", "0", "4"]})
    values: list[Any] = [4, 0, 1, 9, None]
    if kind == pa.string():
        values = [None if v is None else str(v) for v in values]
    assert surface_codes(pa.array(values, kind), schema).tolist() == [2, 1, 0, 3, 3]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("user_id", pa.list_(pa.int64()), "integers or strings"),
        ("watched_item", pa.int64(), "lists of integers or strings"),
        ("watched_item", pa.list_(pa.list_(pa.int64())), "lists of integers or strings"),
        ("age", pa.string(), "numbers"),
        ("age", pa.timestamp("ms"), "numbers"),
        ("click", pa.string(), "numbers"),
        ("image", pa.list_(pa.string()), "lists of numbers"),
        ("time_ms", pa.string(), "times"),
        ("impression_id", pa.string(), "integers"),
        ("hour", pa.struct([("a", pa.int64())]), "integers or strings"),
        ("hour", pa.map_(pa.string(), pa.int64()), "integers or strings"),
        ("hour", pa.binary(), "integers or strings"),
    ],
    ids=str,
)
def test_types_that_do_not_fit_name_file_column_and_type(name: str, kind: pa.DataType, expected: str) -> None:
    fields = small_table([1]).schema
    fields = fields.set(fields.get_field_index(name), pa.field(name, kind))
    with pytest.raises(DatasetError) as error:
        check_schema(fields, column_roles(small_schema()), "part-7.parquet")
    assert str(error.value) == (
        f"part-7.parquet: column {name!r} has the type {kind}, expected {expected}; cast it when writing"
    )


def test_missing_and_repeated_columns_are_named() -> None:
    fields = small_table([1]).schema
    roles = column_roles(small_schema())
    without = fields.remove(fields.get_field_index("price")).remove(fields.get_field_index("click") - 1)
    with pytest.raises(DatasetError, match=r"f\.parquet: column .* is missing \(and 1 more: .*; the file has: "):
        check_schema(without, roles, "f.parquet")
    with pytest.raises(DatasetError, match=r"f\.parquet: column 'age' is there more than once"):
        check_schema(fields.append(pa.field("age", pa.int64())), roles, "f.parquet")


def test_string_leaves_are_the_string_ids() -> None:
    fields = small_table([1]).schema
    leaves = ["user_id", "topics.list.element", "topic_weights.list.element", "item_id", "surface"]
    found = string_leaves(fields, column_roles(small_schema()), leaves)
    assert found == ["user_id", "topics.list.element", "surface"]


def test_strings_in_a_dictionary_encode_like_plain_ones() -> None:
    table = small_table([4, 3])
    encoder = fit(small_schema(), table)
    values = ["t1", "never", "t3"]
    coded = to_column(pa.array([*values, None]), ID)
    for table_name in ("topic", "user"):
        known = encoder.encode_ids(table_name, Column(np.array(values, dtype=object)), "key").tolist()
        assert encoder.encode_ids(table_name, coded, "key").tolist() == [*known, 0]


def test_reading_does_not_import_pandas() -> None:
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from foundation.data.arrow_columns import *\n"
        "values = pa.ListArray.from_arrays(int_array(np.array([0, 2])).cast(pa.int32()), int_array(np.arange(2)))\n"
        "to_column(values, Role('id', True))\n"
        "to_column(values.values.cast(pa.string()).dictionary_encode(), Role('id'))\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
