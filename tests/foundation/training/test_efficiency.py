from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import opengem
from foundation.training.efficiency import LedgerError, read_baseline, read_efficiency
from foundation.training.ledger import whole_lines
from foundation.training.ledger_report import ADVICE, ReportConfig, bound, figures, largest_loss, report
from foundation.training.phases import (
    AWAY,
    CHECKPOINT,
    CLOCKED,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    DATA,
    DOWN,
    EVALUATION,
    IMPORTS,
    OPTIMIZER,
    OTHER,
    PROCESS_GROUP,
    REPEATED,
)
from foundation.training.waterfall import duration, waterfall

START = {
    "kind": "start", "format": 1, "restarts": 0, "world": 2, "step": 0, "samples": 0, "device": "NVIDIA H200",
    "peak": 1e12, "precision": "bf16", "metric": "mean/all/ne", "energy_unknown": "",
}  # fmt: skip
INTERVAL = {
    "kind": "interval", "repeated": 0, "padding": 0.5, "slow": None, "joules": 500.0, "token_imbalance": 1.25,
    "time_imbalance": 1.1, "own": [0.1, 0.1],
}  # fmt: skip


def run_folder(folder: Path, lines: Sequence[dict[str, Any]], cut: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return folder


def example() -> list[dict[str, Any]]:
    """Two starts with 5 s between them. The first run was killed after step 30, its checkpoint was of step 20."""
    slow = {"rank": 1, "own": 0.3, "others": 0.1, "data": 0.2}
    first = {DATA: 1.0, COMPUTE: 6.0, COMMUNICATION: 2.0, OPTIMIZER: 1.0, COMPILE: 4.0}
    second = {DATA: 1.0, COMPUTE: 6.0, COMMUNICATION: 2.0, OPTIMIZER: 1.0, CHECKPOINT: 2.0}
    return [
        {**START, "started": 1000.0, "at": 1003.0, "seconds": {IMPORTS: 3.0}},
        {**INTERVAL, "step": 11, "steps": 11, "samples": 1100, "tokens": 5500.0, "flops": 11e12, "at": 1017.0,
         "seconds": first},
        {"kind": "evaluation", "step": 11, "split": "test", "ne": 0.9, "chosen": 0.9, "at": 1017.0, "seconds": {}},
        {**INTERVAL, "step": 20, "steps": 10, "samples": 2100, "tokens": 5000.0, "flops": 10e12, "slow": slow,
         "at": 1029.0, "seconds": second},
        {"kind": "interval", "step": 30, "steps": 10, "repeated": 0, "at": 1037.0, "seconds": {COMPUTE: 8.0}},
        {**START, "started": 1042.0, "restarts": 1, "step": 20, "samples": 2100, "at": 1044.0,
         "seconds": {IMPORTS: 2.0}},
        {**INTERVAL, "step": 30, "steps": 10, "repeated": 10, "samples": 3100, "tokens": 5000.0, "flops": 10e12,
         "at": 1054.0, "seconds": {COMPILE: 2.0, REPEATED: 8.0}},
        {**INTERVAL, "step": 40, "steps": 10, "samples": 4100, "tokens": 5000.0, "flops": 10e12, "slow": slow,
         "at": 1064.0, "seconds": {COMPUTE: 10.0}},
        {"kind": "evaluation", "step": 40, "split": "test", "ne": 0.8, "chosen": 0.8, "at": 1066.0, "seconds": {}},
        {"kind": "end", "ended": "finished", "at": 1066.0, "seconds": {EVALUATION: 2.0}},
    ]  # fmt: skip


def test_figures_are_what_their_definitions_say(tmp_path: Path) -> None:
    found = read_efficiency(run_folder(tmp_path / "run", example()))
    assert sum(found.seconds.values()) == found.wall == 66.0
    assert found.seconds[DOWN] == 5.0 and found.seconds[AWAY] == 0.0 and found.allocated == 66.0
    assert found.accelerator_hours == pytest.approx(66.0 * 2 / 3600)
    assert (found.starts, found.steps, found.repeated_steps, found.samples) == (2, 40, 10, 4100)
    # Whole intervals, without the first step of a process and without what was done again: 10 + 10 + 10 steps in 30 s.
    assert found.samples_per_second == pytest.approx(3000 / 30)
    assert found.tokens_per_second == pytest.approx(15000 / 30)
    assert found.goodput == pytest.approx((6 + 6 + 8 + 10 + 2 + 2 + 1 + 1) / 66)
    assert found.e2e_mfu == pytest.approx(30e12 / 30 / 2e12)
    assert found.compute_mfu == pytest.approx(30e12 / 22 / 2e12)
    assert found.run_mfu == pytest.approx(30e12 / 66 / 2e12)
    assert found.joules == 2000.0 and found.joules_per_million == pytest.approx(2000.0 / 4100 * 1e6)
    assert found.ne_per_hour == pytest.approx(0.1 / (49.0 * 2 / 3600))
    assert (found.slow_rank, found.slow_share, found.slow_lag) == (1, 0.5, pytest.approx(0.2))
    assert found.token_imbalance == pytest.approx(1.25) and found.padding == pytest.approx(0.5)
    assert found.scaling_ratio is None and "baseline" in found.unknown["scaling_ratio"]


def test_local_mfu_times_scaling_ratio_is_e2e_mfu(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", example())
    layers = {"gdpa": {"seconds": 3.0, "useful_gflop": 1.5e3, "mfu": 0.5}, "heads": {"seconds": 1.0, "mfu": 0.9}}
    bench = tmp_path / "step.json"
    bench.write_text(json.dumps({"local": layers, "samples_per_second": 70.0}))
    found = read_efficiency(run, read_baseline(bench))
    assert found.local_mfu == pytest.approx((1.5 + 0.9) / 4)
    assert found.e2e_mfu is not None and found.local_mfu is not None and found.scaling_ratio is not None
    assert found.e2e_mfu == pytest.approx(found.local_mfu * found.scaling_ratio)
    assert found.local_layers == {"gdpa": 0.5, "heads": 0.9} and found.scaling_of == "MFU"
    # Where no peak is known, the ratio is that of samples per second and rank.
    lines = [{**line, "peak": None} if line["kind"] == "start" else line for line in example()]
    plain = read_efficiency(run_folder(tmp_path / "cpu", lines), read_baseline(bench))
    assert plain.scaling_ratio == pytest.approx(100 / 2 / 70) and plain.scaling_of == "samples/s of a rank"
    assert plain.e2e_mfu is None and "peak" in plain.unknown["e2e_mfu"]
    alone = [{**line, "world": 1} if line["kind"] == "start" else line for line in example()]
    one = read_baseline(run_folder(tmp_path / "alone", alone))
    assert one.mfu == pytest.approx(30e12 / 22 / 1e12) and one.samples_per_second == pytest.approx(100)


def test_a_start_by_hand_is_away_and_a_lost_reading_is_not_zero(tmp_path: Path) -> None:
    lines = example()
    lines[5] |= {"restarts": 0}
    lines[6] |= {"joules": None}
    found = read_efficiency(run_folder(tmp_path / "run", lines))
    assert found.seconds[AWAY] == 5.0 and found.seconds[DOWN] == 0.0 and found.allocated == 61.0
    assert found.joules is None and "not every interval" in found.unknown["joules"]
    assert dict(figures(found))["energy"].startswith("unknown: ")


def test_a_run_that_still_runs_or_was_killed_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", example()[:5], cut='{"kind": "interval", "st')
    found = read_efficiency(run)
    assert found.ended.startswith("not yet") and found.steps == 30
    assert sum(found.seconds.values()) == found.wall == 37.0
    report(ReportConfig(run=run))
    assert json.loads((run / "ledger.json").read_text())["largest_loss"]["phase"] == COMPILE


def test_what_bounds_the_steps(tmp_path: Path) -> None:
    lines = [example()[0], {**example()[1], "seconds": {DATA: 6.0, COMPUTE: 3.0, OPTIMIZER: 1.0}}]
    found = read_efficiency(run_folder(tmp_path / "run", lines))
    assert bound(found) == ("data", pytest.approx(0.6))
    assert dict(figures(found))["steps are bound by"] == "data (60% of their time)"
    first = [example()[0], {**example()[1], "seconds": {COMPILE: 6.0, OTHER: 0.1}}]
    found = read_efficiency(run_folder(tmp_path / "one-step", first))
    assert dict(figures(found))["steps are bound by"] == "unknown: there was none after the first"


def test_the_largest_loss_has_advice(tmp_path: Path) -> None:
    assert set(ADVICE) == {*CLOCKED, DOWN} - {COMPUTE, OPTIMIZER}
    found = read_efficiency(run_folder(tmp_path / "run", example()))
    assert largest_loss(found) == (REPEATED, 8.0, ADVICE[REPEATED])
    lines = example()
    lines[7]["seconds"] = {COMPUTE: 1.0, COMMUNICATION: 9.0}
    lines[1]["slow"] = lines[3]["slow"]
    phase, seconds, advice = largest_loss(read_efficiency(run_folder(tmp_path / "slow", lines)))
    assert (phase, seconds) == (COMMUNICATION, 13.0) and advice.startswith("rank 1 is slow")
    for line in lines:
        line |= {"slow": None} if "slow" in line else {}
    uneven = largest_loss(read_efficiency(run_folder(tmp_path / "uneven", lines)))
    assert uneven[2] == "reader.balance: ranks wait for the one with most events, 1.25 times the mean"
    for world, words in ((1, "a process alone"), (2, "look at the rendezvous")):
        start = {**START, "world": world, "started": 1000.0, "at": 1099.0, "seconds": {PROCESS_GROUP: 99.0}}
        found = read_efficiency(run_folder(tmp_path / f"world-{world}", [start, *example()[1:3]]))
        assert largest_loss(found)[0] == PROCESS_GROUP and words in largest_loss(found)[2]


class Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.bars += tag == "rect"

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_two_runs_on_one_page_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run_folder(tmp_path / "one", example()), run_folder(tmp_path / "other", example()[:5])
    assert opengem.main(["report", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    assert "largest loss: repeated work, 8 s" in out and "E2E MFU: 50.0%" in out
    page = Texts()
    page.feed((one / "ledger-and-other.html").read_text())
    count = [sum(1 for seconds in read_efficiency(run).seconds.values() if seconds) for run in (one, other)]
    assert page.bars == sum(count) + 2  # one per phase, and one for all
    assert {"one", "other", "points", "Local MFU by layer"} - set(page.texts) == {"Local MFU by layer"}
    assert opengem.main(["report", str(one), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file() and not (other / "ledger.html").exists()


def test_what_cannot_be_reported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    run = run_folder(tmp_path / "run", example())
    damaged = run_folder(tmp_path / "damaged", [example()[0], {"no": "kind"}, example()[1]])
    new = run_folder(tmp_path / "new", [])
    other = run_folder(tmp_path / "other", [{**example()[0], "format": 2}])
    for arguments, message in (
        (["report", str(tmp_path / "none")], "none: there is no such run folder"),
        (["report", str(tmp_path / "empty")], "has no ledger.jsonl"),
        (["report", str(damaged)], "ledger.jsonl: line 2 is damaged (line.kind: is missing); remove it"),
        (["report", str(run), str(run / ".." / "run")], "is the same run as"),
        (["report", str(run), "--baseline", str(tmp_path / "none.json")], "none.json: there is no such run or file"),
        (["report", str(new)], "is empty"),
        (["report", str(other)], "not a ledger of format 1"),
        (["report"], "run"),
        (["report", str(run), str(run), "third"], "third"),
        (["report", str(run), "--baseline", str(run)], "a baseline is a run of one rank, this one has 2"),
        (["report", str(run), "--baseline", str(run / "ledger.jsonl")], "neither a run nor the JSON"),
    ):
        assert opengem.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err, arguments
    assert whole_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("start", {"world": "x"}, "start.world: expected int, got str"),
        ("start", {"device": None}, "start.device: expected str, got NoneType"),
        ("interval", {"steps": None}, "interval.steps: expected int, got NoneType"),
        ("interval", {"samples": "many"}, "interval.samples: expected int, got str"),
        ("interval", {"at": "noon"}, "line.at: expected int | float, got str"),
        ("interval", {"seconds": 5}, "line.seconds: expected dict, got int"),
        ("interval", {"seconds": {"lunch": 5.0}}, "seconds: no phase is called lunch"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, kind: str, change: dict[str, Any], message: str) -> None:
    lines = example()
    number = next(place for place, line in enumerate(lines) if line["kind"] == kind)
    lines[number] = {**lines[number], **change}
    run = run_folder(tmp_path / "run", lines)
    with pytest.raises(LedgerError, match=rf"line {number + 1} is damaged \({re.escape(message)}\); remove it"):
        read_efficiency(run)


def test_durations_and_bars() -> None:
    assert [duration(s) for s in (0.0, 0.0851, 3.424, 245.2, 7620.0, 59.97 * 60)] == [
        "0 s", "85.1 ms", "3.42 s", "4 min 05 s", "2 h 07 min", "59 min 58 s",
    ]  # fmt: skip
    empty = waterfall({COMPUTE: 0.0}, "nothing <yet>")
    assert "nothing &lt;yet&gt;" in empty and empty.count("<rect") == 1


def test_a_run_that_can_only_be_read_is_shown_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    run = run_folder(tmp_path / "run", example())
    monkeypatch.setattr("foundation.training.ledger_report._write", refused)
    with pytest.raises(PermissionError):
        report(ReportConfig(run=run))
    assert "Where the time went" in capsys.readouterr().out
