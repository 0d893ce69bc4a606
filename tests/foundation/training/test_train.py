from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.options import parse_config
from foundation.model.gem import GEM
from foundation.parallel.parallelize import SparseConfig
from foundation.training import loop as loop_module
from foundation.training.checkpoint_files import CheckpointError
from foundation.training.efficiency import read_efficiency
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.loop import CheckpointConfig, Loop, TrainingError
from foundation.training.optimizer import DenseConfig, DenseOptimizer
from foundation.training.resume import ended_early
from foundation.training.schedule import ScheduleConfig, rate_factor
from foundation.training.sole_writer import sole_writer
from foundation.training.state import Progress
from foundation.training.train import TrainConfig, _prepare_folder, steps_of, train
from tests.foundation.training import small_run


class Crash(Exception):
    """What the tests end a run with."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path, train_requests=60)
    return path


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of six steps, never interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small_run.config(data, out, epochs=2, checkpoint=CheckpointConfig(every=4)))
    return out


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Loop._step

    def crash(self: Loop, batch: Any) -> None:
        if self.state.progress.step == step:
            raise Crash
        original(self, batch)

    monkeypatch.setattr(Loop, "_step", crash)


def test_a_run_leaves_what_its_folder_should_hold(data: Path, whole_run: Path) -> None:
    names = {path.name for path in whole_run.iterdir()}
    assert names == {
        "config.yaml", "schema.yaml", "encoder.npz", "metrics.jsonl", "tensorboard", "manifest.json", "checkpoints",
        "ledger.jsonl", "ledger.json", "ledger.html",
    }  # fmt: skip
    manifest = json.loads((whole_run / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    steps = manifest["steps"]
    assert manifest["ended"] == "finished" and manifest["skipped"] == 0
    assert manifest["samples"] == 2 * small_run.Dataset.open(data).split("train").rows
    train_lines = small_run.lines(whole_run, "train")
    assert [line["step"] for line in train_lines] == list(range(1, steps + 1))
    assert all(math.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in train_lines)
    assert train_lines[0]["rate_factor"] == pytest.approx(1 / 3)
    last = rate_factor(ScheduleConfig(warmup_steps=3), steps - 1, steps)
    assert train_lines[-1]["rate_factor"] == pytest.approx(last)
    validation = small_run.lines(whole_run, "validation")
    assert [line["step"] for line in validation] == [steps // 2, steps]
    assert set(validation[0]["metrics"]) == {"click", "like", "conversion"}
    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, steps + 1))
    assert len(events.Scalars("validation/click/all/ne")) == 2
    again = parse_config(TrainConfig, ["--config", str(whole_run / "config.yaml")], name="train")
    assert again == small_run.config(data, whole_run, epochs=2, checkpoint=CheckpointConfig(every=4))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_was_interrupted_and_resumed_equals_one_that_was_not(
    data: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    config = small_run.config(data, tmp_path / "run", epochs=2, checkpoint=CheckpointConfig(every=4))
    config = replace(config, reader=replace(config.reader, workers=workers))
    with monkeypatch.context() as patch:
        crash_at(patch, 5)
        with pytest.raises(Crash):
            train(config)
    assert not (config.out / "manifest.json").exists()
    assert small_run.lines(config.out)[-1]["step"] == 5
    result = train(replace(config, resume=True))
    assert small_run.lines(config.out) == small_run.lines(whole_run)
    small_run.assert_same_tensors(small_run.tensors(config.out), small_run.tensors(whole_run))
    small_run.assert_same_tensors(small_run.tensors(config.out, "best"), small_run.tensors(whole_run, "best"))
    assert result.steps == len(small_run.lines(whole_run, "train"))
    # A finished run that is resumed again stays as it is.
    assert str(train(replace(config, resume=True))) == str(result)  # text, because NaN is not equal to NaN
    small_run.assert_same_tensors(small_run.tensors(config.out), small_run.tensors(whole_run))


def test_resume_at_the_end_of_an_epoch(
    data: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = len(small_run.lines(whole_run, "train")) // 2
    config = small_run.config(data, tmp_path / "run", epochs=2, checkpoint=CheckpointConfig(every=epoch))
    with monkeypatch.context() as patch:
        crash_at(patch, epoch)
        with pytest.raises(Crash):
            train(config)
    train(replace(config, resume=True))
    assert small_run.lines(config.out) == small_run.lines(whole_run)
    small_run.assert_same_tensors(small_run.tensors(config.out), small_run.tensors(whole_run))


def test_how_often_a_run_evaluates_does_not_change_it(data: Path, whole_run: Path, tmp_path: Path) -> None:
    config = small_run.config(data, tmp_path / "run", epochs=2, evaluation=EvaluationConfig(every=3, batch_size=64))
    train(config)
    small_run.assert_same_tensors(small_run.tensors(config.out), small_run.tensors(whole_run))


def test_layers_measured_alone_change_nothing_and_are_in_every_line(
    data: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.training.train.device_peak", lambda *_: 1e12)
    config = small_run.config(data, tmp_path / "run", epochs=2)
    train(config)
    entries = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    found = [entry["local_mfu"] for entry in entries if entry["kind"] == "train"]
    assert len(found) == len(small_run.lines(whole_run, "train"))
    assert all(0 < own["cross"] < 1 and own.keys() >= {"attention", "gdpa", "heads", "interaction"} for own in found)
    small_run.assert_same_tensors(small_run.tensors(config.out), small_run.tensors(whole_run))


def test_another_seed_gives_another_run(data: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(small_run.config(data, tmp_path / str(seed), max_steps=2, seed=seed))
    one, other = (small_run.tensors(tmp_path / str(seed)) for seed in (0, 1))
    assert not torch.equal(one[_any_weight(one)], other[_any_weight(one)])


def _any_weight(tensors: dict[str, torch.Tensor]) -> str:
    return next(key for key, value in tensors.items() if key.startswith("model.") and value.ndim == 2)


def test_an_output_that_exists_is_refused_kept_or_replaced(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run.config(data, tmp_path / "run", max_steps=2)
    (tmp_path / "elsewhere").mkdir()
    config.out.symlink_to("elsewhere")  # a folder on another disk
    (config.out / "note.txt").write_text("mine")
    for refused in (config, replace(config, resume=True)):
        with pytest.raises(FileExistsError, match="overwrite"):
            train(refused)
    assert (config.out / "note.txt").read_text() == "mine"
    train(replace(config, overwrite=True))
    assert not (config.out / "note.txt").exists()
    assert config.out.is_symlink() and (tmp_path / "elsewhere" / "manifest.json").is_file()
    with pytest.raises(FileExistsError, match="to go on with the run that is there, set resume to true"):
        train(config)
    monkeypatch.setattr("foundation.training.sole_writer.WAIT_SECONDS", 0.0)
    with sole_writer(config.out), pytest.raises(ValueError, match="another process is training there"):
        train(replace(config, overwrite=True))
    assert (config.out / "manifest.json").is_file()
    # Without a checkpoint to go on from, resume starts.
    assert train(small_run.config(data, tmp_path / "new", max_steps=2, resume=True)).steps == 2


def test_a_run_that_was_killed_while_its_folder_was_made_starts_over(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    config = small_run.config(data, tmp_path / "run", resume=True)
    for step in ("schema.Schema.save", "encoding.Encoder.save"):
        monkeypatch.setattr(f"foundation.data.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            _prepare_folder(config, Dataset.open(str(data)), True)
        monkeypatch.undo()
        assert ended_early(config.out)


def test_resume_refuses_another_config_schema_or_vocabulary(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small_run.config(data, out, max_steps=2))
    with pytest.raises(CheckpointError, match=r"sparse\.lr was 0\.05 and is 0\.5"):
        train(small_run.config(data, out, max_steps=4, resume=True, sparse=SparseConfig(lr=0.5)))
    small_run.dataset(tmp_path / "other", seed=50)
    with pytest.raises(CheckpointError, match="trained with encoder"):
        train(small_run.config(tmp_path / "other", out, max_steps=4, resume=True))
    manifest = out / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(small_run.Dataset.open(data).schema.hash, "0123456789abcdef"))
    with pytest.raises(CheckpointError, match="trained with schema 0123456789abcdef, but here the schema is"):
        train(small_run.config(data, out, max_steps=4, resume=True))


def test_how_long_and_how_a_run_computes_may_change_on_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("foundation.training.train.compile_regions", lambda model, what: asked.append(what))
    config = small_run.config(data, tmp_path / "run", max_steps=2)
    train(config)
    assert train(replace(config, max_steps=4, resume=True, compile="parts", activation_memory_gb=1e-6)).steps == 4
    assert asked == ["none", "parts"]
    assert [line["step"] for line in small_run.lines(config.out, "train")] == [1, 2, 3, 4]


def break_loss(monkeypatch: pytest.MonkeyPatch, steps: set[int], gradients_only: bool = False) -> None:
    original, calls = GEM.loss, [0]

    def loss(self: GEM, output: Any, batch: Any) -> Any:
        calls[0] += 1
        losses = original(self, output, batch)
        if calls[0] not in steps:
            return losses
        if not gradients_only:
            return losses._replace(total=losses.total * math.nan)
        # sqrt has an infinite slope at 0: a finite loss with gradients that are not.
        weight = next(p for name, p in self.named_parameters() if name.startswith("heads"))
        return losses._replace(total=losses.total + (weight * 0).abs().sum().sqrt())

    monkeypatch.setattr(GEM, "loss", loss)


@pytest.mark.parametrize("gradients_only", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradients_only: bool
) -> None:
    break_loss(monkeypatch, {3, 4}, gradients_only)
    result = train(small_run.config(data, tmp_path / "run", max_steps=6, max_skipped=3))
    assert result.skipped == 2 and result.steps == 6
    skipped = small_run.lines(tmp_path / "run", "skipped")
    assert [line["step"] for line in skipped] == [3, 4]
    assert ("gradients are not finite" if gradients_only else "loss is not finite") in skipped[0]["note"]
    assert all(torch.isfinite(value).all() for value in small_run.tensors(tmp_path / "run").values())


def test_a_skipped_step_leaves_the_weights(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(small_run.config(data, tmp_path / "two", max_steps=2, schedule=ScheduleConfig(decay="constant")))
    break_loss(monkeypatch, {3})
    train(small_run.config(data, tmp_path / "three", max_steps=3, schedule=ScheduleConfig(decay="constant")))
    small_run.assert_same_tensors(small_run.tensors(tmp_path / "two"), small_run.tensors(tmp_path / "three"))


def test_too_many_broken_steps_in_a_row_stop_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_loss(monkeypatch, {2, 4, 5, 6})
    with pytest.raises(TrainingError, match=r"step 6: 3 steps in a row .* nothing in the batch .* a value overflowed"):
        train(small_run.config(data, tmp_path / "run", epochs=2, max_skipped=3, log_every=4))
    found = read_efficiency(tmp_path / "run")
    assert found.ended == "failed: TrainingError" and found.steps >= 5  # those after the last whole interval too
    assert sum(found.seconds.values()) == pytest.approx(found.wall, rel=0.01)


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Evaluations that answer with these normalised entropies."""
    answers = iter(values)

    def answer(*_: Any, **__: Any) -> Any:
        slice_ = {"auc": 0.5, "gauc": 0.5, "ne": next(answers), "calibration": 1.0, "rows": 1, "positives": 0}
        return {"click": {"all": slice_}}

    monkeypatch.setattr(loop_module, "evaluate", answer)


def test_early_stop_keeps_the_best_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.9, 0.8, math.nan, 0.85, 0.7])
    evaluation = EvaluationConfig(every=2, metric="click/all/ne", patience=2)
    result = train(small_run.config(data, tmp_path / "run", epochs=2, evaluation=evaluation))
    assert result.ended == "stopped early" and result.steps == 8
    stopped = small_run.config(data, tmp_path / "run", epochs=2, evaluation=evaluation, resume=True)
    assert str(train(stopped)) == str(result)
    assert result.best == 0.8 and result.best_step == 4 and result.checkpoint.name == "step-00000004"
    assert result.metrics["click"]["all"]["ne"] == 0.8
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000008"]
    assert [line["improved"] for line in small_run.lines(tmp_path / "run", "validation")] == [True, True, False, False]


def test_larger_is_better_for_auc(data: Path, tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every=2, metric="click/all/auc")
    result = train(small_run.config(data, tmp_path / "run", epochs=2, max_steps=8, evaluation=evaluation))
    chosen = [line["chosen"] for line in small_run.lines(tmp_path / "run", "validation")]
    assert result.best == max(chosen) and result.best_step == 2 * (1 + chosen.index(max(chosen)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation": EvaluationConfig(metric="share/all/ne")}, "TASK one of mean, click, like, conversion"),
        ({"sparse": SparseConfig(table_lr={"nothing": 0.1})}, r"sparse\.table_lr\.nothing: no such table"),
        ({"evaluation": EvaluationConfig(split="holdout")}, "no split 'holdout'"),
        ({"device": "cuda"}, "torch finds no CUDA device"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=message):
        train(small_run.config(data, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_bf16_is_near_fp32_and_keeps_float32_weights(data: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        train(small_run.config(data, tmp_path / precision, max_steps=4, precision=precision))
    fp32, bf16 = ([line["loss"] for line in small_run.lines(tmp_path / name, "train")] for name in ("fp32", "bf16"))
    assert fp32 != bf16 and bf16 == pytest.approx(fp32, rel=0.02)
    assert {str(value.dtype) for value in small_run.tensors(tmp_path / "bf16").values()} == {"torch.float32"}


def test_reset_tables_draws_them_anew_and_keeps_the_rest(data: Path, tmp_path: Path) -> None:
    # With rates of 0 after the first epoch the tables stay as they were drawn.
    still = {"sparse": SparseConfig(lr=0.0), "epochs": 2, "ema": EMAConfig()}
    train(small_run.config(data, tmp_path / "plain", **still))
    train(small_run.config(data, tmp_path / "reset", reset_tables=True, **still))
    plain, reset = small_run.tensors(tmp_path / "plain"), small_run.tensors(tmp_path / "reset")
    tables = [key for key in plain if key.startswith("model.embeddings")]
    assert tables and all(not torch.equal(plain[key], reset[key]) for key in tables)
    for key in tables:
        assert reset[key].std().item() == pytest.approx(plain[key].std().item(), rel=0.5)


def test_gradients_of_several_batches_are_averaged_where_tables_stand_still(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[torch.Tensor] = []  # of the batches since the last step
    groups: list[int] = []
    original = DenseOptimizer.clip

    def clip(self: DenseOptimizer, batches: int = 1) -> torch.Tensor:
        weight = next(iter(self.parameters.values()))
        norm = original(self, batches)
        if groups:  # the hook is there from the second group on
            assert batches == len(own)
            torch.testing.assert_close(weight.grad, torch.stack(own).mean(0))
        else:
            weight.register_hook(lambda gradient: own.append(gradient.clone()))
        own.clear()
        groups.append(batches)
        return norm

    monkeypatch.setattr(DenseOptimizer, "clip", clip)
    settings = {"sparse": SparseConfig(lr=0.0), "dense": DenseConfig(lr=0.01, clip_norm=0.0), "accumulate": 3}
    settings |= {"max_steps": 8, "reader": ReaderConfig(batch_size=16, shuffle_window=100, workers=0)}
    config = small_run.config(data, tmp_path / "run", checkpoint=CheckpointConfig(every=5), **settings)
    result = train(config)
    assert result.steps == 8 and groups == [3, 2, 3]  # one ends before the checkpoint
    first, last = (small_run.tensors(config.out, which) for which in (5, "latest"))
    tables = [key for key in last if key.startswith("model.embeddings.")]
    assert tables and all(torch.equal(first[key], last[key]) for key in tables)
    assert not torch.equal(first[_any_weight(first)], last[_any_weight(last)])


def test_steps_of_epochs(data: Path) -> None:
    reader = LogReader(small_run.Dataset.open(data), "train", ReaderConfig(batch_size=32, workers=0))
    one = len(reader)
    assert steps_of(reader, 1.0, Progress()) == one
    assert steps_of(reader, 0.5, Progress()) == math.floor(one / 2 + 0.5)
    assert steps_of(reader, 0.001, Progress()) == 1
    assert reader.epoch == 0
    for _ in zip(range(3), reader, strict=False):
        pass
    position = reader.state_dict()
    done = Progress(step=3, epoch_step=3)
    assert [steps_of(reader, epochs, done) for epochs in (1.0, 2.5)] == [
        steps_of(reader, epochs, Progress()) for epochs in (1.0, 2.5)
    ]
    assert reader.state_dict() == position
    # Read on by twice as many ranks, the rest of the epoch takes about half as many steps.
    two = LogReader(reader.dataset, "train", reader.config, rank=0, world_size=2)
    two.load_state_dict(position)
    assert steps_of(two, 1.0, done) == len(two) < one


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"epochs": 0.0}, "epochs"),
        ({"max_steps": -1}, "max_steps"),
        ({"log_every": 0}, "log_every"),
        ({"resume": True, "overwrite": True}, "resume"),
        ({"accumulate": 0}, "accumulate: must be at least 1"),
        ({"accumulate": 2}, "accumulate: tables are updated inside every backward pass"),
    ],
)
def test_config_names_the_wrong_key(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        TrainConfig(dataset="d", out=tmp_path, **settings)
