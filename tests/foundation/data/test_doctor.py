"""The doctor's report as a whole: a healthy dataset, exit status, JSON, the installation, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import opengem
from foundation.data import doctor as doctor_module
from foundation.data.doctor import DoctorConfig, DoctorReport, doctor, examine
from foundation.data.doctor_findings import Finding, Findings
from foundation.data.installation import InstallationReport
from tests.foundation.data.sick_datasets import TRAIN, change, healthy, put, put_rows


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy(tmp_path_factory.mktemp("sound"))


def test_a_healthy_dataset_has_no_error_and_no_warning(sound: Path) -> None:
    report = examine(sound)
    assert [f for f in report.findings if f.severity != "info"] == []
    assert report.exit_code == 0 and report.rows == 930


def test_command_line_ends_with_the_reports_status(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opengem.main(["doctor", "--dataset", str(sound)]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    sick = change(healthy(tmp_path / "sick"), lambda t: put_rows(t, "click", {3: 2, 5: -1}))
    assert opengem.main(["doctor", "--dataset", str(sick), "--infos", "false"]) == 1
    out = capsys.readouterr().out
    assert "label_value" in out and TRAIN in out and "1 errors" in out and "info" not in out


def test_json_holds_every_finding_with_file_column_rows_and_severity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = change(healthy(tmp_path / "sick"), lambda t: put_rows(t, "click", {3: 2, 5: -1}))
    report = doctor(DoctorConfig(dataset=sick, json=True, out=tmp_path / "report.json"))
    text = capsys.readouterr().out
    assert (tmp_path / "report.json").read_text() == text
    data = json.loads(text)
    (fault,) = [f for f in data["findings"] if f["check"] == "label_value"]
    message = fault.pop("message")
    assert "2" in message
    assert fault == {"check": "label_value", "severity": "error", "file": TRAIN, "column": "click", "rows": 2}
    assert data["counts"]["error"] == report.counts()["error"] == 1


def test_messages_are_shown_as_they_are_though_they_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    found = Finding(check="x", severity="warning", message="list<a>[red]not a colour[/red]", column="[c]")
    doctor_module._print(DoctorReport(subject="d", findings=(found,)), infos=True)
    out = capsys.readouterr().out
    assert "list<a>[red]not a colour[/red]" in out and "[c]" in out


def test_without_a_dataset_the_installation_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = InstallationReport(versions={"torch": "2.13.0", "duckdb": None}, problems=())
    monkeypatch.setattr(doctor_module, "installation_report", lambda: good)
    assert opengem.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch 2.13.0" in out and "duckdb not installed" in out
    bad = InstallationReport(versions={"torch": "2.9"}, problems=("this combination does not work",))
    monkeypatch.setattr(doctor_module, "installation_report", lambda: bad)
    assert opengem.main(["doctor"]) == 1
    assert "this combination does not work" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert opengem.main(["doctor", "--dataset", str(tmp_path / "gone")]) == 2
    assert "dataset:" in capsys.readouterr().err
    assert opengem.main(["doctor", "--schema", "x.yaml"]) == 2
    assert "schema: goes with dataset" in capsys.readouterr().err


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert report.exit_code == 1
    assert {"manifest", "schema"} <= {f.check for f in report.findings}


def test_counts_of_one_fault_add_up_and_no_rows_is_no_finding() -> None:
    findings = Findings()
    findings.add("a", "warning", "first", file="f", rows=2)
    findings.add("a", "warning", "second", file="f", rows=3)
    findings.add("a", "warning", "other", file="f", rows=1, detail="x")
    findings.add("a", "error", "none", rows=0)
    findings.add("b", "error", "whole dataset")
    assert [(f.check, f.message, f.rows) for f in findings.sorted()] == [
        ("b", "whole dataset", None), ("a", "first", 5), ("a", "other", 1),
    ]  # fmt: skip


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most rows in memory at once are those of one batch, whatever the file and its row groups hold."""
    folder = healthy(tmp_path / "large")
    base = pq.read_table(folder / TRAIN)
    table = pa.concat_tables([base] * 40)
    table = put(table, "impression_id", list(range(10**6, 10**6 + table.num_rows)))
    pq.write_table(table, folder / TRAIN, row_group_size=table.num_rows)
    largest = 0
    from foundation.data import doctor_rows

    original = doctor_rows._batch

    def watched(split: str, name: str, record: pa.RecordBatch, *rest: object) -> object:
        nonlocal largest
        largest = max(largest, record.num_rows)
        return original(split, name, record, *rest)

    monkeypatch.setattr(doctor_rows, "_batch", watched)
    report = examine(folder)
    assert report.rows == table.num_rows + 480
    assert 0 < largest <= doctor_rows.BATCH_ROWS < table.num_rows
