"""The log of a run that goes on: later lines go, a damaged file is put aside."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.training.run_log import RunLog

FABRIC: Any = SimpleNamespace(is_global_zero=True)
LINES = "".join(f'{{"kind": "train", "step": {step}}}\n' for step in (1, 2, 3))


def test_lines_of_later_steps_and_a_cut_one_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES + '{"kind": "tr')
    RunLog(path, FABRIC, 2)
    assert path.read_text() == "".join(LINES.splitlines(keepends=True)[:2])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"\xff\x00\n", b'{"kind": "tr\n', b"[]\n", b'{"kind": "train"}\n'])
def test_a_damaged_log_never_keeps_a_run_from_going_on(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.damaged"
    path.write_bytes(LINES.encode() + damage)
    RunLog(path, FABRIC, 2)
    assert path.read_bytes() == b"" and aside.read_bytes() == LINES.encode() + damage
    assert f"{path}: is damaged; it is now metrics.damaged, and a new one begins at step 2" in capsys.readouterr().err
