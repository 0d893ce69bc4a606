"""Stage `predict`: a trained model's probabilities for a split, as Parquet that anyone can score.

One row per impression and task: the key columns as they are in the dataset, `task`, `prediction`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from foundation.data import settings
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_path
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.progress import track
from foundation.data.schema import Schema
from foundation.data.storage import open_parquet
from foundation.training.checkpoint import load_model
from foundation.training.launch import Device, pick_device
from foundation.training.metrics import sigmoid
from foundation.training.pipeline import device_batches

ROW_GROUP = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictConfig:
    """What to predict and where to write it.

    Args:
        run: folder of a training run.
        dataset: folder or URL of a prepared dataset with the run's schema.
        split: split to predict.
        out: Parquet file to write.
        which: checkpoint: best, latest or a step.
        keys: columns to copy; by default the user's, the first categorical item feature's and the timestamp's.
        batch_size: impressions per batch.
        device: auto, cpu or cuda.
        overwrite: replace `out`.
    """

    run: Path
    dataset: str
    out: Path
    split: str = "test"
    which: str = "best"
    keys: list[str] = field(default_factory=list)
    batch_size: int = 4096
    device: Device = "auto"
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictResult:
    """The file that was written, its impressions and the version of the model."""

    out: Path
    impressions: int
    version: str


def predict(config: PredictConfig) -> PredictResult:
    """Writes predictions in the order of the split's rows; memory does not grow with their number.

    Raises:
        ValueError: a run, dataset or column that cannot be used, or a dataset of another schema than the run's.
        FileExistsError: `out` exists and `overwrite` is not set.
    """
    settings.show(config, "predict")
    if config.out.is_dir() or (config.out.exists() and not config.overwrite):
        raise FileExistsError(f"{config.out} exists; choose another file, or set overwrite to true to replace a file")
    device = pick_device(config.device)
    loaded = load_model(config.run, config.which, device)
    dataset = Dataset.open(config.dataset)
    if dataset.schema.hash != loaded.schema.hash:
        raise ValueError(
            f"{config.dataset}: has schema {dataset.schema.hash}, but {config.run} was trained with schema "
            f"{loaded.schema.hash}; prepare the data with {config.run / 'schema.yaml'}"
        )
    # Ids mean rows of the tables only through the vocabularies that the model was trained with.
    dataset = replace(dataset, encoder=loaded.encoder)
    reader = LogReader(dataset, config.split, ReaderConfig(batch_size=config.batch_size, shuffle_window=0, workers=0))
    keys = config.keys or default_keys(loaded.schema)
    rows = _KeyRows(dataset, config.split, keys)
    tasks = np.array(loaded.schema.task_names)
    impressions = 0
    with atomic_path(config.out) as path, _Writer(path) as writer:
        for batch, *_ in track(device_batches(reader, device), "predicting", len(reader)):
            with torch.inference_mode():
                logits = loaded.model(batch).logits.float().cpu().numpy()
            table = rows.take(batch.impression_id.cpu().numpy())
            writer.write(_long(table, tasks, sigmoid(logits)))
            impressions += len(logits)
    print(f"{config.out}: predictions of {impressions:,} impressions for {', '.join(tasks)}")
    return PredictResult(out=config.out, impressions=impressions, version=loaded.version)


def default_keys(schema: Schema) -> list[str]:
    """Columns that say which impression a row is: user, item and time."""
    items = [f.column for f in schema.item_features if f.kind == "categorical"]
    return list(dict.fromkeys([schema.user, *items[:1], schema.timestamp.column]))


def _long(keys: pa.Table, tasks: np.ndarray, probabilities: np.ndarray) -> pa.Table:
    """K rows per impression; probabilities float64 `[N, K]`."""
    index = np.repeat(np.arange(len(keys)), len(tasks))
    table = keys.take(pa.array(index))
    names = pa.DictionaryArray.from_arrays(
        pa.array(np.tile(np.arange(len(tasks), dtype=np.int32), len(keys))), pa.array(tasks.tolist())
    )
    return table.append_column("task", names).append_column("prediction", pa.array(probabilities.reshape(-1)))


class _KeyRows:
    """The key columns of a split in the order of its rows, read along with the batches."""

    def __init__(self, dataset: Dataset, split: str, keys: list[str]) -> None:
        self._files = dataset.files(split)
        self._keys = keys
        self._id = dataset.schema.impression_id
        self._chunks = self._read()
        self._rest: pa.Table | None = None

    def take(self, impression_ids: np.ndarray) -> pa.Table:
        """The next rows, which must be these impressions."""
        parts, wanted = [], len(impression_ids)
        while wanted:
            if self._rest is None or not len(self._rest):
                self._rest = next(self._chunks)
            part = self._rest.slice(0, wanted)
            self._rest = self._rest.slice(len(part))
            parts.append(part)
            wanted -= len(part)
        table = pa.concat_tables(parts) if parts else self._empty()
        ids = table.column("").to_numpy()
        if not np.array_equal(ids, impression_ids):
            raise ValueError(f"{self._files[0]}: rows of a request are not adjacent; prepare the dataset again")
        return table.drop_columns([""])

    def _read(self) -> Iterator[pa.Table]:
        for file in self._files:
            parquet = open_parquet(file)
            have = parquet.schema_arrow.names
            for key in self._keys:
                if key not in have:
                    raise ValueError(f"keys: {file} has no column {key!r}; it has {', '.join(have)}")
            for batch in parquet.iter_batches(columns=list(dict.fromkeys([self._id, *self._keys]))):
                table = pa.Table.from_batches([batch])
                yield table.select(self._keys).append_column("", table.column(self._id).cast(pa.int64()))
            parquet.close()

    def _empty(self) -> pa.Table:
        return next(self._read()).slice(0, 0)


class _Writer:
    """A Parquet file whose row groups are filled before they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._pending:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def write(self, table: pa.Table) -> None:
        """Adds rows."""
        self._pending.append(table)
        if sum(map(len, self._pending)) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        table = pa.concat_tables(self._pending)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=ROW_GROUP)
        self._pending = []
