"""The label store: what the teacher says about every impression, written once, read by any number of students.

    STORE/ store.json  part-00000.parquet ...

Columns of a part: ``impression_id`` int64, ``logit.<task>`` float32, ``embedding`` list of E float16. Rows are in
the order in which they were scored; :class:`LabelStore` looks them up by impression id.

Shapes: n looked-up impressions, K tasks, E width of the teacher's embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.json_shape import Each, require_shape

FORMAT = 1
STORE = "store.json"


class LabelStoreError(ValueError):
    """A label store that cannot be used; the message names the file and the fault."""


_SHAPE = {
    **dict.fromkeys(("teacher", "run", "schema_hash", "encoder_hash", "created"), str),
    **{"tasks": [str], "splits": [str], "files": Each(int), "rows": int, "embedding_dim": int},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """The content of ``store.json``.

    ``teacher`` is the version of the teacher: the sha256 of its checkpoint's manifest. ``files`` maps a part to
    its number of rows.
    """

    teacher: str
    run: str
    schema_hash: str
    encoder_hash: str
    tasks: tuple[str, ...]
    embedding_dim: int
    rows: int
    splits: tuple[str, ...]
    files: dict[str, int]
    created: str

    def to_json(self) -> str:
        """The text of ``store.json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> StoreInfo:
        """Reads ``store.json``. Raises LabelStoreError naming the file and the key."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LabelStoreError(f"{path.parent}: no {STORE}; this is not a label store") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise LabelStoreError(f"{path}: not JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise LabelStoreError(f"{path}: not a label store of format {FORMAT}; score again")
        wanted = set(StoreInfo.__dataclass_fields__)
        if set(data) != wanted:
            raise LabelStoreError(f"{path}: keys {sorted(set(data) ^ wanted)} are missing or not known; score again")
        try:
            require_shape(data, _SHAPE, "store")
        except ValueError as error:
            raise LabelStoreError(f"{path}: {error}; score again") from None
        if sum(data["files"].values()) != data["rows"] or min(data["files"].values(), default=0) < 0:
            raise LabelStoreError(f"{path}: files hold {sum(data['files'].values())} rows, rows is {data['rows']}")
        return StoreInfo(**data | {"tasks": tuple(data["tasks"]), "splits": tuple(data["splits"])})


class PartWriter:
    """Writes a label store's parts into a folder, a new part every ``rows_per_file`` rows; memory stays flat.

    Args:
        folder: an existing folder.
        tasks: K task names.
        embedding_dim: E.
    """

    def __init__(self, folder: Path, tasks: tuple[str, ...], embedding_dim: int, rows_per_file: int) -> None:
        self.files: dict[str, int] = {}
        self._folder, self._tasks, self._dim, self._limit = folder, tasks, embedding_dim, rows_per_file
        self._writer: pq.ParquetWriter | None = None
        self._schema = pa.schema(
            [pa.field("impression_id", pa.int64(), nullable=False)]
            + [pa.field(f"logit.{t}", pa.float32(), nullable=False) for t in tasks]
            + [pa.field("embedding", pa.list_(pa.float16(), embedding_dim), nullable=False)]
        )

    def write(self, impression_id: np.ndarray, logits: np.ndarray, embedding: np.ndarray) -> None:
        """Appends rows: int64 ``[n]``, float32 ``[n, K]``, float ``[n, E]`` (stored as float16)."""
        name = f"part-{len(self.files) - (self._writer is not None):05d}.parquet"
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._folder / name, self._schema, compression="zstd")
            self.files[name] = 0
        flat = pa.array(embedding.astype(np.float16).reshape(-1))
        columns = [pa.array(impression_id), *(pa.array(logits[:, k]) for k in range(len(self._tasks)))]
        columns.append(pa.FixedSizeListArray.from_arrays(flat, self._dim))
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self.files[name] += len(impression_id)
        if self.files[name] >= self._limit:
            self.close()

    def close(self) -> None:
        """Ends the current part."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class LabelStore:
    """An opened label store. Ids and logits are held in memory, ``8 + 4 K`` bytes per row; embeddings on request.

    Args:
        path: the folder.
        info: what ``store.json`` says.
        ids: int64 ``[rows]``, ascending.
        logits: float32 ``[rows, K]``, in the order of ``ids``.
        embedding: float16 ``[rows, E]`` in the same order, or None if not read.
    """

    def __init__(
        self, path: Path, info: StoreInfo, ids: np.ndarray, logits: np.ndarray, embedding: np.ndarray | None
    ) -> None:
        self.path = path
        self.info = info
        self._ids = ids
        self._logits = logits
        self._embedding = embedding

    @staticmethod
    def open(path: str | Path, *, embedding: bool = False) -> LabelStore:
        """Opens a store; reads its embeddings too if asked, ``2 E`` bytes per row more.

        Raises:
            LabelStoreError: the folder, a part or a column is missing or broken, an id occurs twice, or a logit is
                not finite; the message names the file.
        """
        path = Path(path)
        info = StoreInfo.read(path / STORE)
        ids = np.empty(info.rows, np.int64)
        logits = np.empty((info.rows, len(info.tasks)), np.float32)
        vectors = np.empty((info.rows, info.embedding_dim), np.float16) if embedding else None
        at = 0
        for name, rows in info.files.items():
            columns = _read_part(path / name, rows, info, embedding)
            part = slice(at, at + rows)
            ids[part] = columns["impression_id"]
            for k, task in enumerate(info.tasks):
                logits[part, k] = columns[f"logit.{task}"]
            if vectors is not None:
                vectors[part] = columns["embedding"]
            if not np.isfinite(logits[part]).all():
                raise LabelStoreError(f"{path / name}: {int((~np.isfinite(logits[part])).sum())} logits are not finite")
            at += rows
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        if len(twice):
            raise LabelStoreError(f"{path}: impression id {ids[twice[0]]} occurs twice ({len(twice)} such rows)")
        return LabelStore(path, info, ids, logits[order], None if vectors is None else vectors[order])

    def require(self, schema_hash: str, encoder_hash: str, tasks: tuple[str, ...]) -> None:
        """Refuses a store that was scored with another schema, encoder or task list.

        Raises:
            LabelStoreError: names both values.
        """
        for key, want, found in (
            ("schema_hash", schema_hash, self.info.schema_hash),
            ("encoder_hash", encoder_hash, self.info.encoder_hash),
            ("tasks", tasks, self.info.tasks),
        ):
            if want != found:
                raise LabelStoreError(
                    f"{self.path}: {key} of the label store is {found}, the dataset has {want}; "
                    "score this dataset with a teacher trained on it"
                )

    def lookup(self, impression_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """The teacher's answer for impressions int64 ``[n]``.

        Returns:
            logits float32 ``[n, K]``, embedding float16 ``[n, E]`` (None if not opened with it), found bool
            ``[n]``. Rows not found are zeros.
        """
        if not len(self._ids):
            found = np.zeros(len(impression_ids), bool)
            place = np.zeros(len(impression_ids), np.int64)
        else:
            place = np.minimum(np.searchsorted(self._ids, impression_ids), len(self._ids) - 1)
            found = self._ids[place] == impression_ids
        logits = np.zeros((len(impression_ids), self._logits.shape[1]), np.float32)
        logits[found] = self._logits[place[found]]
        if self._embedding is None:
            return logits, None, found
        embedding = np.zeros((len(impression_ids), self._embedding.shape[1]), np.float16)
        embedding[found] = self._embedding[place[found]]
        return logits, embedding, found


def _read_part(path: Path, rows: int, info: StoreInfo, embedding: bool) -> Mapping[str, Any]:
    """The columns of one part as numpy arrays. Raises LabelStoreError naming the file and the column."""
    names = ["impression_id", *(f"logit.{t}" for t in info.tasks), *(["embedding"] if embedding else [])]
    try:
        table = pq.read_table(path, columns=names)
    except FileNotFoundError:
        raise LabelStoreError(f"{path}: is missing; score again") from None
    except (pa.ArrowException, OSError) as error:
        raise LabelStoreError(f"{path}: cannot be read, it is truncated or damaged: {error}") from None
    missing = [name for name in names if name not in table.column_names]
    if missing or table.num_rows != rows:
        raise LabelStoreError(f"{path}: {table.num_rows} rows of {rows}, columns missing: {missing}; score again")
    out = {name: table[name].to_numpy() for name in names if name != "embedding"}
    if embedding:
        flat = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        out["embedding"] = flat.reshape(rows, info.embedding_dim)
    return out
