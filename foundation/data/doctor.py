"""`opengem doctor`: every fault of a dataset in one report, before a cluster is taken; or of the installation.

Reads the dataset once, a batch of rows at a time. Ends with exit status 1 when there is an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from foundation.data.dataset import SPLITS
from foundation.data.doctor_files import Opened, check_files
from foundation.data.doctor_findings import SEVERITIES, Finding, Findings
from foundation.data.doctor_rows import check_rows, request_runs
from foundation.data.files import atomic_write
from foundation.data.installation import installation_report
from foundation.data.progress import progress
from foundation.data.sources import duckdb_errors

_COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}
_FAULTY = 1
_FILE_WIDTH = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What to check.

    Args:
        dataset: the dataset's folder; the installation is checked when it is not given.
        schema: schema to check the files against, instead of the dataset's own.
        json: print JSON instead of a table.
        out: also write the JSON report to this file.
        infos: show what is worth knowing, too, not only errors and warnings.
        checksums: read all bytes of all files and compare their checksums.
        memory_gb: memory for finding repeated ids; what does not fit goes to a temporary folder.
    """

    dataset: Path | None = None
    schema: Path | None = None
    json: bool = False
    out: Path | None = None
    infos: bool = True
    checksums: bool = True
    memory_gb: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """The findings, the worst first. ``subject`` is the folder, or ``installation``."""

    subject: str
    findings: tuple[Finding, ...]
    rows: int = 0

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return _FAULTY if any(f.severity == "error" for f in self.findings) else 0

    def counts(self) -> dict[str, int]:
        """Number of findings of each severity."""
        return {s: sum(f.severity == s for f in self.findings) for s in SEVERITIES}

    def to_json(self) -> str:
        """The report as JSON text."""
        found = [asdict(f) for f in self.findings]
        data = {"subject": self.subject, "rows": self.rows, "counts": self.counts(), "findings": found}
        return json.dumps(data, indent=1) + "\n"


def doctor(config: DoctorConfig) -> DoctorReport:
    """Checks a dataset, or the installation, and prints the report.

    Raises:
        ValueError: `schema` is given without a dataset, or the dataset is no folder.
    """
    if config.dataset is None:
        if config.schema is not None:
            raise ValueError("schema: goes with dataset, which is not given")
        report = _installation()
    else:
        report = examine(config.dataset, schema=config.schema, checksums=config.checksums, memory_gb=config.memory_gb)
    if config.out is not None:
        atomic_write(config.out, report.to_json())
    if config.json:
        print(report.to_json(), end="")
    else:
        _print(report, infos=config.infos)
    return report


def examine(
    dataset: Path, *, schema: Path | None = None, checksums: bool = True, memory_gb: float = 1.0
) -> DoctorReport:
    """Checks a dataset and prints nothing.

    Args:
        schema: a schema to use instead of the dataset's own.
        checksums: compare the checksums in ``dataset.json``.
        memory_gb: memory for finding repeated ids.

    Raises:
        ValueError: there is no such folder.
    """
    if not dataset.is_dir():
        raise ValueError(f"dataset: {dataset}: no such folder")
    findings = Findings()
    opened = check_files(dataset, schema, findings, checksums=checksums)
    if not any(opened.files.values()) and not findings.has("error"):
        findings.add("empty_dataset", "error", "there is no file with rows in train, validation or test")
    if opened.schema is not None and any(opened.files.values()):
        check_rows(opened, findings)
        _check_unique(opened, findings, memory_gb)
    rows = sum(pq.read_metadata(dataset / name).num_rows for names in opened.files.values() for name in names)
    return DoctorReport(subject=str(dataset), findings=findings.sorted(), rows=rows)


def _check_unique(opened: Opened, findings: Findings, memory_gb: float) -> None:
    """Impression ids differ, and a request's rows lie together. DuckDB counts, on disk where it must."""
    schema = opened.schema
    assert schema is not None
    files = [opened.folder / name for split in SPLITS for name in opened.files[split]]
    with tempfile.TemporaryDirectory() as spill, duckdb_errors():
        connection = duckdb.connect(
            ":memory:", config={"memory_limit": f"{memory_gb}GB", "temp_directory": spill, "threads": 2}
        )
        with connection, progress("looking for repeated ids", None):
            for name, check, what in (
                (schema.impression_id, "repeated_impression", "ids are there more than once; an id names one row"),
                (schema.request_id, "scattered_request", "requests come in several places; put their rows together"),
            ):
                if name is None:
                    continue
                runs = name == schema.request_id
                ids = pa.RecordBatchReader.from_batches(
                    pa.schema([("id", pa.int64())]), request_runs(files, name, runs=runs)
                )
                connection.register("ids", ids)
                repeated = connection.execute(
                    "SELECT count(*) FROM (SELECT id FROM ids GROUP BY id HAVING count(*) > 1)"
                ).fetchall()
                connection.unregister("ids")
                findings.add(check, "error", what, column=name, rows=int(repeated[0][0]))


def _installation() -> DoctorReport:
    report = installation_report()
    findings = [Finding(check="installation", severity="error", message=problem) for problem in report.problems]
    for name, version in report.versions.items():
        text = version or "not installed"
        findings.append(Finding(check="version", severity="info", message=f"{name} {text}"))
    return DoctorReport(subject="installation", findings=tuple(findings))


def _print(report: DoctorReport, *, infos: bool) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    shown = [f for f in report.findings if infos or f.severity != "info"]
    if shown:
        console.print(_table(shown))
    counts = report.counts()
    rows = f", {report.rows:,} rows" if report.rows else ""
    words = f"{counts['error']} errors, {counts['warning']} warnings"
    console.print(f"{report.subject}{rows}: {words}", highlight=False, markup=False, soft_wrap=True)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("severity", "check", "file", "column"):
        table.add_column(name, no_wrap=name == "severity", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_column("what", overflow="fold", ratio=1)
    for f in findings:
        color = _COLORS[f.severity]
        rows = "" if f.rows is None else f"{f.rows:,}"
        cells = [
            f"[{color}]{f.severity}[/]",
            f.check,
            *(_plain(v) for v in (f.file, f.column)),
            rows,
            _plain(f.message),
        ]
        table.add_row(*cells)
    return table


def _plain(text: str | None) -> str:
    """Text in which rich sees no markup."""
    return "" if text is None else text.replace("[", "\\[")
