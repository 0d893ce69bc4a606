"""Configs print, save and load back; presets are found by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foundation.data.options import parse_config
from foundation.data.settings import PRESETS, preset, quiet, save, show, to_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """Inner."""

    width: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Outer."""

    out: Path
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner = field(default_factory=Inner)
    weights: dict[str, float] = field(default_factory=dict)


CONFIG = Config(out=Path("a/b"), inner=Inner(width=7), weights={"click": 0.5})


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    save(CONFIG, tmp_path / "config.yaml")
    arguments = ["--config", str(tmp_path / "config.yaml")]
    assert parse_config(Config, arguments, name="test") == CONFIG


def test_show_prints_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    show(CONFIG, "stage")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("stage:\n")
    assert all(line.strip() in printed.err for line in to_yaml(CONFIG).splitlines())


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        show(CONFIG, "stage")
    assert capsys.readouterr().err == ""
    show(CONFIG, "stage")
    assert "stage" in capsys.readouterr().err


def test_presets_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = PRESETS / "datasets" / "synthetic-small.yaml"
    assert preset("configs/datasets/synthetic-small.yaml") == expected
    assert preset("datasets/synthetic-small") == expected
    with pytest.raises(FileNotFoundError, match=r"presets are: .*synthetic-small"):
        preset("datasets/nope")
    with pytest.raises(FileNotFoundError, match=r"^topology: nope does not exist; presets are: topology/512"):
        preset("nope", "topology", "topology")
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(IsADirectoryError, match=r"config: run is a folder, not a YAML file$"):
        preset("run")
    (run / "config.yaml").write_text("{}")
    with pytest.raises(IsADirectoryError, match=r"run is a folder, not a YAML file; there is run/config.yaml"):
        preset("run")
    mine = tmp_path / "mine.yaml"
    mine.write_text("{}")
    assert preset(mine) == mine
