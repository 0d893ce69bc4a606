"""Training on a CUDA device: the Triton kernels in bf16, and a step for which the host never waits."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.model.match import MatchConfig
from foundation.parallel import draw
from foundation.training.efficiency import read_efficiency
from foundation.training.loop import Loop
from foundation.training.phases import COMPILE, COMPUTE, DATA, OPTIMIZER
from foundation.training.train import train
from tests.foundation.training import small_run
from tests.foundation.training.test_train import break_loss

pytestmark = pytest.mark.gpu


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in small_run.lines(run, "train")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path)
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_trains_as_the_cpu_does(data: Path, tmp_path: Path, precision: str) -> None:
    model = replace(small_run.MODEL, heads=replace(small_run.MODEL.heads, dropout=0.0))
    model = replace(
        model, embeddings=replace(model.embeddings, id_dropout={}), match=MatchConfig(sequences=("watched",))
    )
    train(small_run.config(data, tmp_path / "cpu", model=model))
    train(small_run.config(data, tmp_path / "cuda", model=model, device="cuda", precision=precision))
    assert losses(tmp_path / "cuda") == pytest.approx(
        losses(tmp_path / "cpu"), rel=1e-3 if precision == "fp32" else 0.03
    )
    assert {value.dtype for value in small_run.tensors(tmp_path / "cuda").values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_step_waits_for_the_device(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    original, strict = Loop._step, []

    def step(self: Loop, delivered: Any) -> None:
        if self.state.progress.step < 3:  # kernels are compiled and buffers made
            original(self, delivered)
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(self, delivered)
            self._settle(self._run_ahead)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        strict.append(self.state.progress.step)

    monkeypatch.setattr(Loop, "_step", step)
    model = replace(small_run.MODEL, match=MatchConfig(sequences=("watched",)))
    train(small_run.config(data, tmp_path / "run", model=model, device="cuda", precision=precision, log_every=5))
    assert len(strict) > 4


@pytest.mark.parametrize("gradients_only", [False, True])
def test_the_device_leaves_out_a_step_that_is_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradients_only: bool
) -> None:
    break_loss(monkeypatch, {3, 4}, gradients_only)
    result = train(small_run.config(data, tmp_path / "run", max_steps=6, max_skipped=3, device="cuda"))
    assert result.skipped == 2 and result.steps == 6
    assert [line["step"] for line in small_run.lines(tmp_path / "run", "skipped")] == [3, 4]
    assert all(torch.isfinite(value).all() for value in small_run.tensors(tmp_path / "run").values())


@pytest.mark.parametrize("what", ["parts", "layers", "dense"])
def test_compiled_layers_train_like_plain_ones(data: Path, tmp_path: Path, what: Any) -> None:
    train(small_run.config(data, tmp_path / "plain", max_steps=4, device="cuda", epochs=1))
    train(small_run.config(data, tmp_path / "compiled", max_steps=4, device="cuda", compile=what))
    train(small_run.config(data, tmp_path / "again", max_steps=4, device="cuda", activation_memory_gb=1e-6))
    plain = losses(tmp_path / "plain")
    assert losses(tmp_path / "again") == pytest.approx(plain, rel=1e-4)
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "compiled"))
    assert losses(tmp_path / "compiled") == pytest.approx(plain, rel=0.05)  # dropout draws in another order


def test_the_ledger_splits_steps_by_what_the_device_did(data: Path, tmp_path: Path) -> None:
    model = replace(small_run.MODEL, match=MatchConfig(sequences=("watched",)))
    out = tmp_path / "run"
    train(small_run.config(data, out, model=model, device="cuda", log_every=5))
    found = read_efficiency(out)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall, rel=0.01)
    assert min(found.seconds[phase] for phase in (COMPILE, COMPUTE, OPTIMIZER, DATA)) > 0
    assert found.device == torch.cuda.get_device_name()
    assert found.joules is None or found.joules > 0
    assert (found.joules is None) == ("joules" in found.unknown)


@pytest.mark.parametrize("what", ["none", "dense"])
def test_a_run_leaves_nothing_on_the_device(data: Path, tmp_path: Path, what: Any) -> None:
    held = []
    for number in range(3):
        train(small_run.config(data, tmp_path / str(number), max_steps=2, device="cuda", compile=what))
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[1], held


def test_large_tables_are_drawn_on_the_device(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "MOST_ON_HOST", 0)
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        train(small_run.config(data, run, device="cuda", epochs=2, reset_tables=True))
    assert all(math.isfinite(loss) for loss in losses(runs[0]))
    assert losses(runs[0])[0] == pytest.approx(losses(runs[1])[0], rel=1e-4)
