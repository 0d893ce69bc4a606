"""The doctor's look at files: manifest, schema, encoder, checksums, and every Parquet footer. Reads no rows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import Role, check_schema, column_roles
from foundation.data.dataset import MANIFEST, SPLITS, Manifest
from foundation.data.doctor_findings import Findings
from foundation.data.encoding import Encoder, EncodingError
from foundation.data.files import sha256_file
from foundation.data.schema import Schema, SchemaError
from foundation.data.storage import DatasetError, list_parquet, open_parquet

# A reader holds pieces of a row group; writers and other tools hold all of it.
LARGE_GROUP_ROWS = 1 << 20
LARGE_GROUP_BYTES = 1 << 30


@dataclass
class Opened:
    """What could be opened: ``files`` per split are relative paths that rows can be read from."""

    folder: Path
    schema: Schema | None = None
    encoder: Encoder | None = None
    files: dict[str, list[str]] = field(default_factory=lambda: {split: [] for split in SPLITS})


def check_files(folder: Path, schema_path: Path | None, findings: Findings, *, checksums: bool = True) -> Opened:
    """Checks everything that can be known without reading rows.

    Args:
        schema_path: a schema to use instead of the dataset's own.
        checksums: also read all bytes and compare them with the sums in ``dataset.json``.
    """
    opened = Opened(folder)
    manifest, entries = _manifest(folder, findings)
    opened.schema = _schema(schema_path or folder / "schema.yaml", findings)
    if opened.schema is not None and manifest is not None and schema_path is None:
        _same_hash("schema.yaml", opened.schema.hash, manifest.schema_hash, findings)
    opened.encoder = _encoder(folder, opened.schema, manifest, findings)
    present = {split: [f"{split}/{name}" for name in list_parquet(folder / split)] for split in SPLITS}
    listed = {str(e["path"]) for e in entries}
    for split, names in present.items():
        for name in names:
            if manifest is not None and name not in listed:
                findings.add(
                    "stray_file", "warning", f"not listed in {MANIFEST}, so it is not read; remove it", file=name
                )
        wanted = [n for n in names if n in listed or manifest is None]
        opened.files[split] = [n for n in wanted if _footer(folder, n, opened.schema, findings)]
    for entry in entries:
        _check_entry(folder, entry, findings, checksums)
    if opened.schema is not None:
        _compare_footers(opened, opened.schema, findings)
    return opened


def _manifest(folder: Path, findings: Findings) -> tuple[Manifest | None, list[dict[str, Any]]]:
    path = folder / MANIFEST
    if not path.is_file():
        findings.add(
            "manifest", "error", "is missing; the dataset was not written to its end, prepare it again", file=MANIFEST
        )
        return None, []
    try:
        text = path.read_bytes()
        manifest = Manifest.from_json(text, MANIFEST)
        data = json.loads(text)
    except (DatasetError, OSError) as error:
        findings.add("manifest", "error", str(error), file=MANIFEST)
        return None, []
    entries = [entry for split in data["splits"].values() for entry in split["files"]]
    return manifest, entries


def _schema(path: Path, findings: Findings) -> Schema | None:
    try:
        return Schema.load(path)
    except SchemaError as error:
        findings.add("schema", "error", str(error), file=path.name)
        return None


def _encoder(folder: Path, schema: Schema | None, manifest: Manifest | None, findings: Findings) -> Encoder | None:
    if schema is None:
        return None
    try:
        encoder = Encoder.load(folder / "encoder.npz", schema)
    except EncodingError as error:
        findings.add("encoder", "error", str(error), file="encoder.npz")
        return None
    if manifest is not None:
        _same_hash("encoder.npz", encoder.hash, manifest.encoder_hash, findings)
    return encoder


def _same_hash(name: str, have: str, want: str, findings: Findings) -> None:
    if have != want:
        message = f"hash is {have}, but {MANIFEST} says {want}: changed after the dataset was made; prepare it again"
        findings.add("hash", "error", message, file=name)


def _check_entry(folder: Path, entry: Mapping[str, Any], findings: Findings, checksums: bool) -> None:
    """A file against what the manifest says of it."""
    name = str(entry["path"])
    path = folder / name
    if not path.is_file():
        findings.add("missing_file", "error", f"listed in {MANIFEST}, but not there; copy it again", file=name)
        return
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError):
        return  # reported with the footer
    if metadata.num_rows != entry["rows"]:
        message = f"has {metadata.num_rows} rows, but {MANIFEST} says {entry['rows']}; copy it again"
        findings.add("row_count", "error", message, file=name)
    elif checksums and "sha256" in entry and sha256_file(path) != entry["sha256"]:
        findings.add("checksum", "error", f"its bytes are not those {MANIFEST} was made for; copy it again", file=name)


def _footer(folder: Path, name: str, schema: Schema | None, findings: Findings) -> bool:
    """Whether rows can be read from a file."""
    try:
        file = open_parquet(folder / name)
    except DatasetError as error:
        message = str(error).removeprefix(f"{folder / name}: ")
        findings.add("unreadable_file", "error", message, file=name)
        return False
    with file:
        metadata, fields = file.metadata, file.schema_arrow
        if not metadata.num_rows:
            findings.add("empty_file", "warning", "has no rows; remove it", file=name)
        _check_row_groups(metadata, name, findings)
        if schema is None:
            return False
        return _check_columns(fields, column_roles(schema), name, findings)


def _check_columns(fields: pa.Schema, roles: Mapping[str, Role], name: str, findings: Findings) -> bool:
    """Every column for itself, so that all faults are reported, not the first one."""
    good = True
    for column, role in roles.items():
        try:
            check_schema(fields, {column: role}, name)
        except DatasetError as error:
            good = False
            check = "missing_column" if column not in fields.names else "column_type"
            findings.add(check, "error", str(error).removeprefix(f"{name}: "), file=name, column=column)
            continue
        _describe_type(fields.field(column), role, name, findings)
    return good


def _describe_type(column: pa.Field, role: Role, file: str, findings: Findings) -> None:
    kind = column.type
    if pa.types.is_null(kind):
        findings.add(
            "null_type", "warning", "has no value at all, and no type; cast it when writing", file=file,
            column=column.name,
        )  # fmt: skip
        return
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    if pa.types.is_floating(inner) and role.content in ("id", "integer"):
        findings.add(
            "float_ids", "warning", f"ids are stored as {kind}, which is exact only up to 2^53; store int64",
            file=file, column=column.name,
        )  # fmt: skip
    if role.content == "time" and pa.types.is_floating(inner):
        exact = pa.types.is_float64(inner)
        findings.add(
            "float_time", "warning" if exact else "error",
            f"times are stored as {inner}, which " + ("is exact only up to 2^53" if exact else "loses their order")
            + "; store int64",
            file=file, column=column.name,
        )  # fmt: skip
    plain = (pa.int64(), pa.int32(), pa.float64(), pa.float32(), pa.string())
    strict = kind != inner and not kind.value_field.nullable
    if inner not in plain or pa.types.is_large_list(kind) or strict:
        shown = f"{kind}" + (" with elements that are not nullable" if strict else "")
        findings.add("type_note", "info", f"is {shown}; it is read as {role.describe()}", file=file, column=column.name)


def _check_row_groups(metadata: pq.FileMetaData, name: str, findings: Findings) -> None:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows > LARGE_GROUP_ROWS or group.total_byte_size > LARGE_GROUP_BYTES:
            findings.add(
                "large_row_group", "warning",
                f"row group {number} has {group.num_rows} rows and {group.total_byte_size >> 20} MiB;"
                " write groups of at most 65,536 rows, so that readers need little memory and can share the file",
                file=name,
            )  # fmt: skip


def _compare_footers(opened: Opened, schema: Schema, findings: Findings) -> None:
    """Types of one column across files, and of columns that share a table."""
    roles = column_roles(schema)
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    kinds: dict[str, str] = {}
    for name in (n for names in opened.files.values() for n in names):
        fields = pq.read_schema(opened.folder / name)
        for column in roles:
            kind = fields.field(column).type
            if not pa.types.is_null(kind):
                seen[column].setdefault(str(kind), name)
                kinds.setdefault(column, _family(kind))
                if kinds[column] != _family(kind):
                    findings.add(
                        "mixed_types", "error", f"is {kind} here and {kinds[column]} in other files; use one type",
                        file=name, column=column,
                    )  # fmt: skip
    for column, types in seen.items():
        if len(types) > 1 and not any(f.column == column and f.check == "mixed_types" for f in findings.sorted()):
            listed = ", ".join(f"{kind} in {file}" for kind, file in types.items())
            findings.add("mixed_widths", "warning", f"has different types: {listed}; use one", column=column)
    for table, columns in _table_columns(schema).items():
        families = {kinds[c]: c for c in columns if c in kinds}
        if len(families) > 1:
            listed = ", ".join(f"{column} ({kind})" for kind, column in families.items())
            findings.add(
                "mixed_ids", "error",
                f"table {table} gets ids of two types: {listed}; the same id would count as two",
                column=next(iter(families.values())),
            )  # fmt: skip


def _family(kind: pa.DataType) -> str:
    while pa.types.is_dictionary(kind) or hasattr(kind, "value_type"):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return "string" if text else "number"


def _table_columns(schema: Schema) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = defaultdict(list)
    for feature in schema.features:
        if feature.table is not None:
            columns[feature.table].append(feature.column)
    for sequence in schema.sequences:
        for attribute in sequence.attributes:
            columns[attribute.table].append(attribute.column)
    return columns
