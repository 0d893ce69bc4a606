"""Writes the files of a dataset: Parquet parts per split, the encoder, the schema and ``dataset.json``.

    DATASET/ schema.yaml  encoder.npz  dataset.json  train/part-00000.parquet ...  validation/...  test/...

The same rows in the same order give the same bytes, but for ``created`` in ``dataset.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foundation.data.dataset import FORMAT, MANIFEST, SPLITS
from foundation.data.encoding import Encoder
from foundation.data.files import atomic_write, sha256_file
from foundation.data.schema import Schema


@dataclass
class _Split:
    """What is written of one split, and the rows that wait for a full row group."""

    name: str
    pending: list[pa.Table] = field(default_factory=list)
    writer: pq.ParquetWriter | None = None
    part_rows: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    requests: int = 0
    time_range: list[int] | None = None


class DatasetWriter:
    """Takes rows in time order, rows of a request adjacent, and writes them as parts of full row groups.

    A row group, and so a part, ends where a request ends.

    Args:
        folder: where to write; it exists.
        schema: the dataset's schema.
        row_group_rows: the most rows of a row group, but for a single request that is larger.
        part_rows: a part takes no further row group once it has this many rows.
    """

    def __init__(self, folder: Path, schema: Schema, *, row_group_rows: int, part_rows: int) -> None:
        self.folder, self.schema = folder, schema
        self.row_group_rows, self.part_rows = row_group_rows, part_rows
        self._splits = {name: _Split(name) for name in SPLITS}

    def write(self, split: str, table: pa.Table) -> None:
        """Appends rows to ``train``, ``validation`` or ``test``."""
        if not table.num_rows:
            return  # an empty slice would keep the memory of the table it was cut from
        state = self._splits[split]
        state.pending.append(table)
        while sum(t.num_rows for t in state.pending) > self.row_group_rows:
            whole = pa.concat_tables(state.pending)
            cut = self._cut(whole)
            state.pending = [whole.slice(cut)]
            if not cut:
                break
            self._write_group(state, whole.slice(0, cut))

    def finish(self, encoder: Encoder, counts: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes what is left, and the files beside the parts. Returns the content of ``dataset.json``.

        Args:
            counts: what was dropped and repaired. facts: further entries of ``dataset.json``.
        """
        for state in self._splits.values():
            rest = pa.concat_tables(state.pending) if state.pending else None
            if rest is not None and rest.num_rows:
                self._write_group(state, rest)
            self._close_part(state)
        self.schema.save(self.folder / "schema.yaml")
        encoder.save(self.folder / "encoder.npz")
        splits = {
            s.name: {"rows": s.rows, "requests": s.requests, "time_range": s.time_range, "files": s.files}
            for s in self._splits.values()
        }
        manifest = {
            "format": FORMAT,
            "name": self.schema.name,
            "schema_hash": self.schema.hash,
            "encoder_hash": encoder.hash,
            "rows": sum(s.rows for s in self._splits.values()),
            "splits": splits,
            "counts": dict(counts),
            **facts,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        atomic_write(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        return manifest

    def abort(self) -> None:
        """Closes open files, whatever is in them."""
        for state in self._splits.values():
            if state.writer is not None:
                state.writer.close()
                state.writer = None

    def _cut(self, table: pa.Table) -> int:
        """Rows of the next row group: up to the last end of a request that fits, else the first end at all."""
        if self.schema.request_id is None:
            return self.row_group_rows
        starts = request_starts(table[self.schema.request_id])[1:]
        fitting = starts[starts <= self.row_group_rows]
        if len(fitting):
            return int(fitting[-1])
        return int(starts[0]) if len(starts) else 0

    def _write_group(self, state: _Split, table: pa.Table) -> None:
        if state.part_rows >= self.part_rows:
            self._close_part(state)
        table = table.combine_chunks()
        if state.writer is None:
            (self.folder / state.name).mkdir(exist_ok=True)
            name = f"{state.name}/part-{len(state.files):05d}.parquet"
            state.files.append({"path": name})
            state.writer = pq.ParquetWriter(self.folder / name, table.schema, compression="zstd")
        state.writer.write_table(table, row_group_size=table.num_rows)
        state.part_rows += table.num_rows
        self._count(state, table)

    def _count(self, state: _Split, table: pa.Table) -> None:
        state.rows += table.num_rows
        one_each = self.schema.request_id is None
        state.requests += table.num_rows if one_each else len(request_starts(table[self.schema.request_id]))
        scale = 1000 if self.schema.timestamp.unit == "s" else 1
        ends = pc.min_max(table[self.schema.timestamp.column]).as_py()
        low, high = ends["min"] * scale, ends["max"] * scale
        before = state.time_range or [low, high]
        state.time_range = [min(low, before[0]), max(high, before[1])]

    def _close_part(self, state: _Split) -> None:
        if state.writer is None:
            return
        state.writer.close()
        state.writer, state.part_rows = None, 0
        entry = state.files[-1]
        path = self.folder / entry["path"]
        metadata = pq.read_metadata(path)
        entry["rows"], entry["row_groups"] = metadata.num_rows, metadata.num_row_groups
        entry["bytes"], entry["sha256"] = path.stat().st_size, sha256_file(path)


def request_starts(ids: pa.ChunkedArray) -> np.ndarray:
    """Positions int64 where a request begins: the first row, and each whose id differs from the one before.

    A null id is a request of its own.
    """
    if len(ids) < 2:
        return np.arange(len(ids), dtype=np.int64)
    same = pc.fill_null(pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1)), False)
    changes = np.flatnonzero(~same.to_numpy())
    return np.concatenate([[0], changes + 1]).astype(np.int64)
