from __future__ import annotations

import json
from pathlib import Path

import pytest

from transfer.ratio import RatioConfig, ratio
from value_models.student import StudentError


def student(folder: Path, ne: float, teacher: float | None = None, rows: int = 100, surface: str = "feed") -> Path:
    def entry(value: float) -> dict[str, object]:
        return {"click": {surface: {"ne": value, "rows": rows}, "all": {"ne": value, "rows": rows}}}

    metrics = {"test": entry(ne), "uncalibrated": {"validation": entry(ne)}}
    if teacher is not None:
        metrics["teacher"] = {"test": entry(teacher)}
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"surface": surface}))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_ratio_of_means_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [student(tmp_path / f"a{i}", ne) for i, ne in enumerate([0.90, 0.92])]
    taught = [student(tmp_path / f"d{i}", ne, 0.81) for i, ne in enumerate([0.88, 0.88])]
    result = ratio(RatioConfig(alone=alone, distilled=taught, out=tmp_path / "ratio.json"))
    (entry,) = result.ratios
    assert (entry.surface, entry.task, entry.rows) == ("feed", "click", 100)
    assert entry.gain == pytest.approx(0.03) and entry.ratio == pytest.approx(0.3)
    assert entry.gain_error == pytest.approx(0.01)
    assert "| feed | click | 100 | 0.9100 | 0.8800 | 0.8100 | +0.0300 ±0.0100 | 0.30 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "ratio.json").read_text())[0]["ratio"] == pytest.approx(0.3)


def test_no_ratio_without_an_advantage(tmp_path: Path) -> None:
    alone, taught = [student(tmp_path / "a", 0.9)], [student(tmp_path / "d", 0.89, 0.91)]
    (entry,) = ratio(RatioConfig(alone=alone, distilled=taught)).ratios
    assert entry.ratio is None and entry.gain_error is None


def test_refusals(tmp_path: Path) -> None:
    alone = student(tmp_path / "a", 0.9)
    with pytest.raises(StudentError, match="needs a label store"):
        ratio(RatioConfig(alone=[alone], distilled=[student(tmp_path / "b", 0.8)]))
    with pytest.raises(ValueError, match=r"over \[99, 100\] rows"):
        ratio(RatioConfig(alone=[alone], distilled=[student(tmp_path / "c", 0.8, 0.7, rows=99)]))
    with pytest.raises(ValueError, match="surfaces"):
        ratio(RatioConfig(alone=[alone], distilled=[student(tmp_path / "d", 0.8, 0.7, surface="reels")]))
    with pytest.raises(StudentError, match="not a student"):
        ratio(RatioConfig(alone=[tmp_path / "none"], distilled=[alone]))
    with pytest.raises(ValueError, match="at least one"):
        RatioConfig(alone=[], distilled=[alone])
