"""Rows ``start .. stop`` of a Parquet file as record batches, without ever holding a row group in memory.

Parquet can only be entered at the start of a row group. A reader that has stopped inside one keeps its place, so
windows of a large row group that are read in order cost one pass over it; going back costs a new start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import Role, string_leaves
from foundation.data.storage import DatasetError, open_parquet

_BATCH_ROWS = 8192
_BATCH_BYTES = 32 << 20
# Places kept inside row groups, and files kept open.
_CURSORS = 4
_FILES = 16


@dataclass(slots=True)
class _File:
    parquet: pq.ParquetFile
    bounds: np.ndarray


@dataclass(slots=True)
class _Cursor:
    """A place in a row group: ``row`` is the next row (of the row group), ``rest`` holds it if not ``None``."""

    batches: Iterator[pa.RecordBatch]
    row: int = 0
    rest: pa.RecordBatch | None = None


class RowReader:
    """Streams rows of a split's files. Not for use by several threads at once.

    Args:
        files: paths or URLs.
        roles: the columns to read.

    Attributes:
        ahead: decode the next record batch in a thread while the last one is in use.
    """

    def __init__(self, files: Sequence[str], roles: Mapping[str, Role]) -> None:
        self.files = files
        self.roles = roles
        self.ahead = False
        self._thread: ThreadPoolExecutor | None = None
        self._open: OrderedDict[int, _File] = OrderedDict()
        self._cursors: OrderedDict[tuple[int, int], _Cursor] = OrderedDict()

    def read(self, file: int, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields (row of the file, record batch) for rows ``start .. stop - 1`` in order.

        Raises:
            DatasetError: the file cannot be read.
        """
        try:
            bounds = self._file(file).bounds
            group = int(np.searchsorted(bounds, start, side="right")) - 1
            while start < stop:
                first, last = int(bounds[group]), min(stop, int(bounds[group + 1]))
                for row, batch in self._read_group(file, group, start - first, last - first):
                    yield first + row, batch
                start = max(start, last)
                group += 1
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{self.files[file]}: cannot be read; the file may be damaged ({error})") from error

    def close(self) -> None:
        """Closes all files."""
        self._cursors.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        while self._open:
            self._open.popitem()[1].parquet.close()

    def _read_group(self, file: int, group: int, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        bounds = self._file(file).bounds
        rows = int(bounds[group + 1] - bounds[group])
        batch_rows = self._batch_rows(file, group)
        # The end of a request that began in the row group before: a few rows, then never again.
        tail = start == 0 and stop < min(rows, batch_rows // 4)
        cursor = None if tail else self._cursors.pop((file, group), None)
        if cursor is None or cursor.row > start:
            batches = self._batches(file, group, stop if tail else batch_rows)
            cursor = _Cursor(self._read_ahead(batches) if self.ahead and not tail else batches)
        while cursor.row < stop:
            batch = cursor.rest if cursor.rest is not None else next(cursor.batches)
            first, last = max(start - cursor.row, 0), min(stop - cursor.row, len(batch))
            if first < last:
                yield cursor.row + first, batch.slice(first, last - first)
            if last < len(batch) and first < len(batch):
                cursor.rest = batch.slice(last)
                cursor.row += last
            else:
                cursor.rest = None
                cursor.row += len(batch)
        if not tail and cursor.row < rows:
            self._cursors[file, group] = cursor
            if len(self._cursors) > _CURSORS:
                self._cursors.popitem(last=False)

    def _batches(self, file: int, group: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        return iter(
            self._file(file).parquet.iter_batches(
                batch_rows, row_groups=[group], columns=list(self.roles), use_threads=False
            )
        )

    def _read_ahead(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        pending = self._thread.submit(next, batches, None)
        while (batch := pending.result()) is not None:
            pending = self._thread.submit(next, batches, None)
            yield batch

    def _batch_rows(self, file: int, group: int) -> int:
        """Fewer rows at a time where lists are long."""
        metadata = self._file(file).parquet.metadata.row_group(group)
        values = sum(
            metadata.column(i).num_values
            for i in range(metadata.num_columns)
            if metadata.column(i).path_in_schema.split(".", 1)[0] in self.roles
        )
        per_row = 8 * values / max(metadata.num_rows, 1)
        return int(min(max(_BATCH_BYTES / max(per_row, 1), 1), _BATCH_ROWS))

    def _file(self, number: int) -> _File:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self.files[number]
        parquet = open_parquet(path)
        fields = parquet.schema_arrow
        leaves = string_leaves(fields, self.roles, [parquet.schema.column(i).path for i in range(len(parquet.schema))])
        if leaves:
            parquet.close()
            parquet = open_parquet(path, leaves)
        metadata = parquet.metadata
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self._open[number] = _File(parquet, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
        if len(self._open) > _FILES:
            oldest, file = self._open.popitem(last=False)
            file.parquet.close()
            for key in [key for key in self._cursors if key[0] == oldest]:
                del self._cursors[key]
        return self._open[number]
