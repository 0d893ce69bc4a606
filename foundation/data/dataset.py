"""A dataset on disk: its schema, its encoder, and ``dataset.json``, which says what files and rows it has.

    DATASET/ schema.yaml  encoder.npz  dataset.json  train/part-00000.parquet ...  validation/...  test/...

The folder may be local or any URL that fsspec knows. Free of torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from foundation.data.arrow_columns import Role, to_column
from foundation.data.encoding import Encoder
from foundation.data.files import atomic_write
from foundation.data.index import index_files
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError, is_url, join, list_parquet, open_parquet, read_bytes
from foundation.data.yaml_text import load_yaml, yaml_fault

FORMAT = 1
SPLITS = ("train", "validation", "test")
MANIFEST = "dataset.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One Parquet file; ``path`` is relative to the dataset."""

    path: str
    rows: int
    row_groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitEntry:
    """One split; ``time_range`` is the first and the last time in ms, ``None`` without rows."""

    rows: int
    requests: int
    time_range: tuple[int, int] | None
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of ``dataset.json``. ``counts`` says what was dropped or repaired when it was made."""

    name: str
    schema_hash: str
    encoder_hash: str
    rows: int
    splits: Mapping[str, SplitEntry]
    counts: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""

    @staticmethod
    def from_json(text: str | bytes, source: str) -> Manifest:
        """Reads ``dataset.json``. Raises DatasetError naming the file and the key."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DatasetError(f"{source}: not a JSON file: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise DatasetError(f"{source}: format is {found!r}, expected {FORMAT}; prepare the dataset again")
        try:
            splits = {name: _split_entry(entry) for name, entry in data["splits"].items()}
            return Manifest(
                name=str(data["name"]),
                schema_hash=str(data["schema_hash"]),
                encoder_hash=str(data["encoder_hash"]),
                rows=int(data["rows"]),
                splits=splits,
                counts=dict(data.get("counts") or {}),
                created=str(data.get("created", "")),
            )
        except KeyError as error:
            raise DatasetError(f"{source}: key {error} is missing; prepare the dataset again") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise DatasetError(f"{source}: not a dataset manifest: {error}; prepare the dataset again") from None

    def to_json(self) -> str:
        """The text of ``dataset.json``."""
        splits = {
            name: {
                "rows": split.rows,
                "requests": split.requests,
                "time_range": list(split.time_range) if split.time_range else None,
                "files": [{"path": f.path, "rows": f.rows, "row_groups": f.row_groups} for f in split.files],
            }
            for name, split in self.splits.items()
        }
        data = {
            "format": FORMAT,
            "name": self.name,
            "schema_hash": self.schema_hash,
            "encoder_hash": self.encoder_hash,
            "rows": self.rows,
            "splits": splits,
            "counts": dict(self.counts),
            "created": self.created,
        }
        return json.dumps(data, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Dataset:
    """An opened dataset; ``path`` is its folder, a local path or a URL."""

    path: Path | str
    schema: Schema
    encoder: Encoder
    manifest: Manifest

    @staticmethod
    def open(path: str | Path) -> Dataset:
        """Opens a dataset.

        Raises:
            DatasetError: a file is missing or broken, or schema, encoder and manifest do not belong together.
            SchemaError, EncodingError: from reading ``schema.yaml`` and ``encoder.npz``.
        """
        source = join(path, MANIFEST)
        if not is_url(path) and not Path(path).is_dir():
            raise DatasetError(f"{path}: no such dataset folder; make one with `opengem prepare`")
        if not is_url(path) and not Path(source).is_file():
            raise DatasetError(f"{source}: no such file; {path} is not a dataset, make one with `opengem prepare`")
        manifest = Manifest.from_json(read_bytes(source), source)
        schema = _schema(join(path, "schema.yaml"))
        encoder = _encoder(join(path, "encoder.npz"), schema)
        for name, have, want in (
            ("schema.yaml", schema.hash, manifest.schema_hash),
            ("encoder.npz", encoder.hash, manifest.encoder_hash),
        ):
            if have != want:
                raise DatasetError(
                    f"{join(path, name)}: its hash is {have}, but {MANIFEST} says {want}; the file was changed "
                    "after the dataset was made; prepare the dataset again"
                )
        return Dataset(str(path) if is_url(path) else Path(path), schema, encoder, manifest)

    def split(self, name: str) -> SplitEntry:
        """The entry of a split. Raises DatasetError listing the splits that exist."""
        if name not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise DatasetError(f"{self.path}: no split {name!r}; there are: {known}")
        return self.manifest.splits[name]

    def files(self, split: str) -> tuple[str, ...]:
        """Paths or URLs of a split's files, in order."""
        return tuple(join(self.path, entry.path) for entry in self.split(split).files)


def write_manifest(
    folder: str | Path, schema: Schema, encoder: Encoder, counts: Mapping[str, Any] | None = None
) -> Manifest:
    """Makes a dataset of Parquet files that lie in ``folder/train``, ``folder/validation`` and ``folder/test``.

    Checks every file, counts rows and requests, and writes schema, encoder and ``dataset.json`` beside them.
    Files may come from any writer, as long as rows of a request are adjacent.

    Args:
        folder: a local folder.
        counts: what was dropped or repaired, for the record.

    Raises:
        DatasetError: a file cannot be used; the message names it and the column.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    splits = {}
    for name in SPLITS:
        names = [f"{name}/{file}" for file in list_parquet(folder / name)]
        files = [join(folder, file) for file in names]
        index = index_files(files, schema)
        entries = []
        for file, path in zip(names, files, strict=True):
            metadata = open_parquet(path).metadata
            entries.append(FileEntry(path=file, rows=metadata.num_rows, row_groups=metadata.num_row_groups))
        splits[name] = SplitEntry(
            rows=index.rows, requests=index.requests, time_range=_time_range(files, schema), files=tuple(entries)
        )
    schema.save(folder / "schema.yaml")
    encoder.save(folder / "encoder.npz")
    manifest = Manifest(
        name=schema.name,
        schema_hash=schema.hash,
        encoder_hash=encoder.hash,
        rows=sum(split.rows for split in splits.values()),
        splits=splits,
        counts=dict(counts or {}),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    atomic_write(folder / MANIFEST, manifest.to_json())
    return manifest


def _split_entry(data: Mapping[str, Any]) -> SplitEntry:
    times = data["time_range"]
    return SplitEntry(
        rows=int(data["rows"]),
        requests=int(data["requests"]),
        time_range=(int(times[0]), int(times[1])) if times else None,
        files=tuple(
            FileEntry(path=str(f["path"]), rows=int(f["rows"]), row_groups=int(f["row_groups"])) for f in data["files"]
        ),
    )


def _schema(path: str) -> Schema:
    if not is_url(path):
        return Schema.load(path)
    try:
        return Schema.from_dict(load_yaml(read_bytes(path)), source=path)
    except yaml.YAMLError as error:
        raise DatasetError(f"{path}: {yaml_fault(error)}") from None


def _encoder(path: str, schema: Schema) -> Encoder:
    if not is_url(path):
        return Encoder.load(path, schema)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "encoder.npz"
        local.write_bytes(read_bytes(path))
        return Encoder.load(local, schema)


def _time_range(files: list[str], schema: Schema) -> tuple[int, int] | None:
    """First and last time of all rows in ms; null times are left out."""
    name = schema.timestamp.column
    ends: list[tuple[int, int]] = []
    for file in files:
        parquet = open_parquet(file)
        kind = parquet.schema_arrow.field(name).type
        scale = 1000 if schema.timestamp.unit == "s" and not _has_unit(kind) else 1
        for batch in parquet.iter_batches(columns=[name], use_threads=False):
            column = to_column(batch.column(0), Role("time"))
            values = column.values if column.valid is None else column.values[column.valid]
            if len(values):
                ends.append((int(np.min(values)) * scale, int(np.max(values)) * scale))
        parquet.close()
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None


def _has_unit(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)
