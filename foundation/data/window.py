"""One window of a split in memory, from which batches are taken in shuffled order.

Ids wait as int32 where the tables allow it, which halves the memory of a window; batches have int64. Keys whose ids
lie alike, such as the attributes of a sequence, are kept side by side: taking a row then touches one place in memory
instead of one per key, and that is what taking costs. A window's memory is used again for the next one, because
fresh memory is slow: the system clears every page of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from foundation.data.encoding import EncodedBatch, EncodedRows
from foundation.data.jagged import jagged_index
from foundation.data.schema import Feature, Schema, Sequence

REQUEST_FIELDS = ("request_time", "user_id", "surface")
ITEM_FIELDS = ("labels", "label_valid", "weight", "sampling_rate", "impression_id")
"""The fields of a batch that are plain arrays with one row per request and one per impression."""


class WindowStore:
    """The encoded rows of a window in file order; portions are added as they are read.

    Args:
        table_rows: rows of each table of the schema.
    """

    def __init__(self, schema: Schema, table_rows: Mapping[str, int]) -> None:
        small = max(table_rows.values(), default=0) <= np.iinfo(np.int32).max
        dtype = np.dtype(np.int32 if small else np.int64)
        self.request = _RowStore(schema.request_features, schema.sequences, dtype)
        self.item = _RowStore(schema.item_features, (), dtype)
        self._fields: dict[str, _Growing] = {}

    def clear(self) -> None:
        """Forgets all rows and keeps the memory."""
        self.request.clear()
        self.item.clear()
        for field in self._fields.values():
            field.clear()

    def add(self, request: EncodedRows, item: EncodedRows, fields: Mapping[str, np.ndarray]) -> None:
        """Adds rows that were read together; a request's last items may come with the next ones."""
        self.request.add(request)
        self.item.add(item)
        for name, values in fields.items():
            self._fields.setdefault(name, _Growing()).add(values)

    def field(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows of a plain field."""
        return self._fields[name].values().take(rows, axis=0)


class Window:
    """The rows of a unit, handed out batch by batch in the order of use.

    Args:
        store: all rows; it must not change while the window is in use.
        sizes: rows of each request in file order, int64 ``[r]``.
        order: the requests in the order of use, int64 ``[r]``.
        cuts: row positions between batches in the order of use, int64 ``[batches + 1]``.
    """

    def __init__(self, store: WindowStore, sizes: np.ndarray, order: np.ndarray, cuts: np.ndarray) -> None:
        self._store = store
        self._order = order
        self._cuts = cuts
        used = sizes[order]
        one_each = int(sizes.sum()) == len(sizes)
        # The rows, and the number of each row's request, in the order of use.
        self._rows = order if one_each else jagged_index((np.cumsum(sizes) - sizes)[order], used)
        self._request_of = np.arange(len(sizes)) if one_each else np.repeat(np.arange(len(sizes)), used)
        assert store.request.rows == len(sizes) and store.item.rows == len(self._rows)

    def batch(self, number: int) -> EncodedBatch:
        """Batch ``number``, R requests with N impressions, in memory of its own."""
        start, stop = int(self._cuts[number]), int(self._cuts[number + 1])
        request_of = self._request_of[start:stop]
        first, last = (int(request_of[0]), int(request_of[-1]) + 1) if stop > start else (0, 0)
        requests, rows = self._order[first:last], self._rows[start:stop]
        return EncodedBatch(
            request=self._store.request.take(requests),
            item=self._store.item.take(rows),
            request_index=request_of - first,
            **{name: self._store.field(name, requests) for name in REQUEST_FIELDS},
            **{name: self._store.field(name, rows) for name in ITEM_FIELDS},
        )


class _Growing:
    """An array that grows at its end and keeps its memory when cleared."""

    __slots__ = ("_array", "_length")

    def __init__(self) -> None:
        self._array: np.ndarray | None = None
        self._length = 0

    def clear(self) -> None:
        self._length = 0

    def add(self, values: np.ndarray) -> None:
        self.extend(len(values), values.shape[1:], values.dtype)[...] = values

    def extend(self, count: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Room for ``count`` more rows of this shape, to be filled."""
        end = self._length + count
        if self._array is None or end > len(self._array):
            larger = np.empty((max(end, self._length * 3 // 2), *shape), dtype=dtype)
            if self._array is not None:
                larger[: self._length] = self._array[: self._length]
            self._array = larger
        room = self._array[self._length : end]
        self._length = end
        return room

    def values(self) -> np.ndarray:
        assert self._array is not None
        return self._array[: self._length]


class _RowStore:
    """Encoded rows of one side, from which any can be taken at the cost of their size.

    Keys that lie alike are one group and have their ids side by side: a sequence is a group, a multi-valued feature
    is one, and so are all categorical features together (named ``""``).
    """

    def __init__(self, features: Iterable[Feature], sequences: Iterable[Sequence], dtype: np.dtype) -> None:
        features = list(features)
        groups = {"": [f.name for f in features if f.kind == "categorical"]}
        groups |= {f.name: [f.name] for f in features if f.kind == "multi"}
        groups |= {s.name: [s.key(a.name) for a in s.attributes] for s in sequences}
        self.rows = 0
        self._groups = {name: keys for name, keys in groups.items() if keys}
        self._dtype = dtype
        self._parts: dict[tuple[str, str], _Growing] = {}
        self._starts: dict[str, np.ndarray] = {}

    def clear(self) -> None:
        self.rows = 0
        self._starts.clear()
        for part in self._parts.values():
            part.clear()

    def add(self, rows: EncodedRows) -> None:
        self.rows += rows.rows
        self._part("dense").add(rows.dense)
        for group, keys in self._groups.items():
            count = len(rows.ids[keys[0]])
            together = self._part("ids", group).extend(count, (len(keys),), self._dtype)
            for number, key in enumerate(keys):
                together[:, number] = rows.ids[key]
            if group:
                self._part("lengths", group).add(rows.lengths[keys[0]])
        for name, values in rows.weights.items():
            self._part("weights", name).add(values)
        for name, values in rows.times.items():
            self._part("times", name).add(values)

    def take(self, rows: np.ndarray) -> EncodedRows:
        """The rows with these numbers (int64 ``[n]``) in this order, with int64 ids."""
        found = EncodedRows(len(rows), {}, {}, {}, self._part("dense").values().take(rows, axis=0), {})
        for group, keys in self._groups.items():
            if group:
                lengths = self._part("lengths", group).values()
                if group not in self._starts:
                    self._starts[group] = np.cumsum(lengths) - lengths
                count = lengths.take(rows)
                index = jagged_index(self._starts[group].take(rows), count)
            else:
                index, count = rows, np.ones(len(rows), dtype=np.int64)
            values = self._part("ids", group).values().take(index, axis=0)
            for number, key in enumerate(keys):
                found.ids[key] = values[:, number].astype(np.int64)
                found.lengths[key] = count
            if ("weights", group) in self._parts:
                found.weights[group] = self._part("weights", group).values().take(index)
            if ("times", group) in self._parts:
                found.times[group] = self._part("times", group).values().take(index)
        return found

    def _part(self, what: str, group: str = "") -> _Growing:
        return self._parts.setdefault((what, group), _Growing())
