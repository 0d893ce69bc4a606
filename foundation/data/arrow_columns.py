"""Arrow arrays, whatever their type, as the plain numpy columns that the encoder takes.

Files written by Spark, pandas, Polars, DuckDB and others store the same column in many ways. This module knows
them: every integer and float width, booleans, decimals, dates and timestamps, strings (also large, view and
dictionary-encoded), lists (also large and fixed-size, nullable or not), and columns without any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.data.encoding import Column
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError

# The numpy types of Arrow's integers and floats.
_PLAIN = {
    kind.id: np.dtype(name)
    for kind, name in (
        *((getattr(pa, name)(), name) for name in ("int8", "int16", "int32", "int64")),
        *((getattr(pa, name)(), name) for name in ("uint8", "uint16", "uint32", "uint64")),
        *((getattr(pa, name)(), name) for name in ("float16", "float32", "float64")),
    )
}

Content = Literal["id", "number", "time", "integer"]


@dataclass(frozen=True, slots=True)
class Role:
    """What the schema expects of a column: ids, numbers or times, one per row or a list of them."""

    content: Content
    is_list: bool = False

    def describe(self) -> str:
        """The expectation in words, for error messages."""
        words = {"id": "integers or strings", "number": "numbers", "time": "times", "integer": "integers"}
        return f"lists of {words[self.content]}" if self.is_list else words[self.content]


def column_roles(schema: Schema) -> dict[str, Role]:
    """The role of every column the schema names. A column with two uses keeps the first of them."""
    roles: dict[str, Role] = {}

    def add(name: str | None, content: Content, is_list: bool = False) -> None:
        if name is not None:
            roles.setdefault(name, Role(content, is_list))

    add(schema.timestamp.column, "time")
    add(schema.impression_id, "integer")
    add(schema.user, "id")
    add(schema.request_id, "id")
    add(schema.surface.column, "id")
    for name in (schema.weight, schema.sampling_rate, *(t.label for t in schema.tasks)):
        add(name, "number")
    for feature in schema.features:
        content: Content = "id" if feature.kind in ("categorical", "multi") else "number"
        add(feature.column, content, feature.kind in ("multi", "embedding"))
        add(feature.weights, "number", True)
    for sequence in schema.sequences:
        for attribute in sequence.attributes:
            add(attribute.column, "id", True)
        add(sequence.timestamp, "time", True)
    return roles


def check_schema(fields: pa.Schema, roles: Mapping[str, Role], file: str) -> None:
    """Checks that a file has every column in a form that can be read.

    Raises:
        DatasetError: naming the file and the column: it is absent, or of a type that does not fit its role.
    """
    names = set(fields.names)
    absent = [name for name in roles if name not in names]
    if absent:
        raise DatasetError(
            f"{file}: column {absent[0]!r} is missing"
            + (f" (and {len(absent) - 1} more: {', '.join(absent[1:])})" if absent[1:] else "")
            + f"; the file has: {', '.join(fields.names)}"
        )
    for name, role in roles.items():
        if len(fields.get_all_field_indices(name)) > 1:
            raise DatasetError(f"{file}: column {name!r} is there more than once; rename or drop one")
        kind = fields.field(name).type
        if not _fits(kind, role):
            raise DatasetError(
                f"{file}: column {name!r} has the type {kind}, expected {role.describe()}; cast it when writing"
            )


def to_column(array: pa.Array, role: Role) -> Column:
    """An Arrow array as a Column: int64 or float values, strings as positions in a dictionary, times in ms.

    A null list is an empty list. A ``time`` of an Arrow date or timestamp type comes in ms since 1970; of an
    integer type as it is. The array's type must have passed :func:`check_schema`.

    Raises:
        pa.ArrowException: a value that does not fit, such as a decimal beyond 64 bits.
    """
    array = _storage(array)
    if not role.is_list:
        return _flat(array)
    if pa.types.is_null(array.type):
        return Column(np.zeros(0, np.int64), offsets=np.zeros(len(array) + 1, np.int64))
    if array.null_count or pa.types.is_fixed_size_list(array.type):
        # flatten() skips null lists, which may lie over values of their own.
        lengths = _values(pc.list_value_length(array))
        valid = _valid(array)
        lengths = lengths if valid is None else lengths * valid
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        values = _flat(_storage(array.flatten()))
    else:
        offsets = _values(array.offsets).astype(np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        offsets = offsets - first if len(offsets) else np.zeros(1, np.int64)
        values = _flat(_storage(array.values.slice(first, last - first)))
    return Column(values.values, values.valid, offsets, values.dictionary)


def surface_codes(array: pa.Array, schema: Schema) -> np.ndarray:
    """The index of each row's surface in ``schema.surface_names``, int64; null and other values are "other"."""
    names = _string_array(schema.surface.values)
    array = _plain(_storage(array))
    if pa.types.is_null(array.type):
        return np.full(len(array), len(names), dtype=np.int64)
    if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
        array = pc.cast(array, pa.int64(), safe=False)
    if not _is_string(array.type):
        array = pc.cast(array, pa.string())
    codes = pc.index_in(pc.cast(array, pa.string()), value_set=names)
    valid = _valid(codes)
    found = _values(codes).astype(np.int64)
    return found if valid is None else np.where(valid, found, len(names))


def string_leaves(fields: pa.Schema, roles: Mapping[str, Role], leaves: list[str]) -> list[str]:
    """The Parquet leaf columns that hold string ids, to be read as dictionaries.

    Args:
        leaves: paths of all leaf columns, such as ``tags.list.element``.
    """
    wanted = set()
    for name, role in roles.items():
        kind = fields.field(name).type
        leaf = kind.value_type if _is_list(kind) else kind
        if role.content == "id" and (pa.types.is_string(leaf) or pa.types.is_large_string(leaf)):
            wanted.add(name)
    return [leaf for leaf in leaves if leaf.split(".", 1)[0] in wanted]


def _fits(kind: pa.DataType, role: Role) -> bool:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_null(kind):
        return True
    if role.is_list:
        return _is_list(kind) and _fits(kind.value_type, Role(role.content))
    if pa.types.is_dictionary(kind):
        return _fits(kind.value_type, role)
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    temporal = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    if role.content == "id":
        return numeric or temporal or pa.types.is_boolean(kind) or _is_string(kind)
    if role.content == "number":
        return numeric or pa.types.is_boolean(kind)
    if role.content == "time":
        return numeric or temporal
    return numeric


def bools(array: pa.Array) -> np.ndarray:
    """An Arrow array of booleans as numpy bools, true where null."""
    values = _bits(array.buffers()[1], array.offset, len(array))
    valid = _valid(array)
    return values if valid is None else values | ~valid


def _values(array: pa.Array) -> np.ndarray:
    """Integers or floats, anything where null. Made without to_numpy(), which imports pandas: slow, in every worker."""
    dtype = _PLAIN[array.type.id]
    if not len(array):
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _valid(array: pa.Array) -> np.ndarray | None:
    """Which values are not null; ``None`` if none is."""
    return _bits(array.buffers()[0], array.offset, len(array)) if array.null_count else None


def _bits(buffer: pa.Buffer, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype=bool)
    packed = np.frombuffer(buffer, dtype=np.uint8)[offset // 8 : -(-(offset + count) // 8)]
    return np.unpackbits(packed, count=offset % 8 + count, bitorder="little")[offset % 8 :].view(bool)


def int_array(values: np.ndarray) -> pa.Array:
    """An Arrow array of int64 values, made without pa.array() for the reason above."""
    values = np.ascontiguousarray(values, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def _string_array(values: tuple[str, ...]) -> pa.Array:
    """An Arrow array of strings, made without pa.array() for the reason above."""
    data = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(data), pa.py_buffer(offsets), pa.py_buffer(b"".join(data)))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _storage(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _plain(array: pa.Array) -> pa.Array:
    """Dictionary-encoded values written out."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _flat(array: pa.Array) -> Column:
    """An array of single values."""
    kind = array.type
    if kind.id in _PLAIN:
        return _numbers(array, _valid(array))
    if pa.types.is_null(kind):
        return Column(np.zeros(len(array), np.int64), np.zeros(len(array), bool))
    if pa.types.is_dictionary(kind) and not _is_string(kind.value_type):
        array = _plain(array)
        kind = array.type
    if pa.types.is_dictionary(kind) or _is_string(kind):
        return _strings(array)
    valid = _valid(array)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        array = pc.cast(array, pa.timestamp("ms", tz=getattr(kind, "tz", None)), safe=False).cast(pa.int64())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.int64() if kind.scale == 0 else pa.float64())
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    return _numbers(array, valid)


def _numbers(array: pa.Array, valid: np.ndarray | None) -> Column:
    values = _values(array)
    if valid is not None and values.dtype.kind != "i":
        # Under a null there may be a float that is no id.
        values = np.where(valid, values, values.dtype.type(0))
    return Column(values, valid)


def _strings(array: pa.Array) -> Column:
    """Strings as positions in a dictionary that holds only strings in use."""
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = _plain(array)
    if not pa.types.is_dictionary(array.type):
        array = (array.cast(pa.string()) if pa.types.is_string_view(array.type) else array).dictionary_encode()
    valid = _valid(array)
    codes = _values(array.indices).astype(np.int64)
    if valid is not None:
        codes *= valid
    dictionary = array.dictionary
    if not len(dictionary):
        return Column(np.zeros(len(array), np.int64), np.zeros(len(array), bool))
    if len(dictionary) > len(codes):
        # The dictionary of a row group can be much larger than this slice of it.
        used, codes = np.unique(codes, return_inverse=True)
        dictionary = dictionary.take(int_array(used))
    return Column(codes, valid, dictionary=np.array(dictionary.to_pylist(), dtype=object))
