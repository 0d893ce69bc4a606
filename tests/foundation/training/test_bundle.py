from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.batch_file import load_batch, save_batch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.model.gem import GEM
from foundation.training import loop as loop_module
from foundation.training.bundle import batch_file, weights_hash
from foundation.training.loop import TrainingError
from foundation.training.pipeline import Delivered, device_batches
from foundation.training.reproduce import ReproduceConfig, main, reproduce
from foundation.training.train import train
from tests.foundation.training import small_run

CONSTANT = small_run.ScheduleConfig(decay="constant")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path)
    return path


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name == "sparse":
            assert mine.keys() == theirs.keys() and mine.stride() == theirs.stride()
            assert torch.equal(mine.values(), theirs.values()) and torch.equal(mine.lengths(), theirs.lengths())
            assert mine.length_per_key() == theirs.length_per_key()
            continue
        parts = (mine, theirs) if isinstance(mine, dict) else ({"": mine}, {"": theirs})
        assert parts[0].keys() == parts[1].keys()
        for key, value in parts[0].items():
            same = torch.equal(value, parts[1][key]) if isinstance(value, torch.Tensor) else value == parts[1][key]
            assert same, (field.name, key)


def test_a_batch_comes_back_from_its_file(data: Path, tmp_path: Path) -> None:
    dataset = small_run.Dataset.open(data)
    encoded = list(LogReader(dataset, "train", ReaderConfig(batch_size=40, workers=0)))
    for number, batch in enumerate(Batch.from_encoded(one, dataset.schema) for one in (encoded[0], encoded[-1])):
        path = tmp_path / f"{number}.safetensors"
        save_batch(path, batch)
        assert_same(load_batch(path), batch)
    whole = path.read_bytes()
    for damage in (
        whole[: len(whole) // 2],
        whole.replace(b"stride", b"strode"),
        whole.replace(b"surface", b"surfice"),
    ):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"1\.safetensors: cannot be read as a batch"):
            load_batch(path)
    with pytest.raises(ValueError, match="none"):
        load_batch(tmp_path / "none.safetensors")


def poison(monkeypatch: pytest.MonkeyPatch, first: int) -> list[Batch]:
    """From this batch on the first number of every request is NaN; returns the batches as they are delivered."""
    seen: list[Batch] = []

    def poisoned(*args: Any, **options: Any) -> Iterator[Delivered]:
        for delivered in device_batches(*args, **options):
            seen.append(delivered.batch)
            if len(seen) >= first:
                delivered.batch.request_dense[:, 0] = math.nan
            yield delivered

    monkeypatch.setattr(loop_module, "device_batches", poisoned)
    return seen


def test_a_run_that_ends_with_broken_steps_leaves_what_repeats_the_last(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        seen = poison(patch, first=3)
        with pytest.raises(
            TrainingError, match=r"step 4: 2 steps in a row .* column age.*reproduce --bundle (\S+)"
        ) as error:
            train(small_run.config(data, out, max_skipped=2, schedule=CONSTANT))
    bundle = Path(str(error.value).split("--bundle ")[1])
    assert bundle == out / "failures" / "step-00000004"
    assert_same_but_nan(load_batch(batch_file(bundle, 0)), seen[3])
    about = json.loads((bundle / "bundle.json").read_text())
    assert about["step"] == 4 and about["later_steps"] == 0 and about["found"] == "column age"
    found = reproduce(ReproduceConfig(bundle=bundle))
    assert math.isnan(found.loss) and math.isnan(found.recorded) and found.same_weights is True
    assert found.found == "column age" and found.module is not None and found.module.startswith("tokens.")
    capsys.readouterr()
    main(["--bundle", str(bundle)])
    assert "not finite: column age" in capsys.readouterr().out
    # The weights in it are those of two good steps.
    train(small_run.config(data, tmp_path / "two", max_steps=2, schedule=CONSTANT))
    two = small_run.tensors(tmp_path / "two")
    small_run.assert_same_tensors(
        small_run.tensors(bundle), {key: value for key, value in two.items() if key.startswith("model.")}
    )


def assert_same_but_nan(one: Batch, other: Batch) -> None:
    assert torch.equal(one.impression_id, other.impression_id)
    assert torch.isnan(one.request_dense[:, 0]).all() and torch.equal(
        one.request_dense[:, 1:], other.request_dense[:, 1:]
    )


def test_the_step_draws_what_it_drew(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite loss with dropout comes back only from the same weights and random generators."""
    original, calls = GEM.loss, iter(range(1, 1000))

    def loss(self: GEM, *args: Any) -> Any:
        losses = original(self, *args)
        if not self.training or next(calls) < 3:
            return losses
        weight = next(p for name, p in self.named_parameters() if name.startswith("heads"))
        return losses._replace(total=losses.total + (weight * 0).abs().sum().sqrt())  # an infinite slope at 0

    with monkeypatch.context() as patch:
        patch.setattr(GEM, "loss", loss)
        # Tables are updated in the backward pass, also of a step whose gradients turn out not to be finite.
        config = small_run.config(data, tmp_path / "run", max_skipped=2, sparse=small_run.SparseConfig(lr=1e-12))
        with pytest.raises(TrainingError, match="gradient"):
            train(config)
    bundle = tmp_path / "run" / "failures" / "step-00000004"
    found = reproduce(ReproduceConfig(bundle=bundle))
    assert found.loss == pytest.approx(found.recorded, rel=1e-6) and found.same_weights is True
    assert found.module is None and found.gradients == [] and found.found.startswith("nothing")
    state = bundle / "checkpoints" / "step-00000004" / "rank-00000.json"
    own = json.loads(state.read_text())
    monkeypatch.setattr(
        "foundation.training.reproduce.read_rank_state", lambda *_: {**own, "rng": other_draws(own["rng"])}
    )
    assert abs(reproduce(ReproduceConfig(bundle=bundle)).loss - found.recorded) > 1e-4
    with pytest.raises(ValueError, match=r"rank: must be in 0 \.\. 0, got 1"):
        reproduce(ReproduceConfig(bundle=bundle, rank=1))
    with pytest.raises(ValueError, match="not a whole bundle"):
        reproduce(ReproduceConfig(bundle=tmp_path / "run"))


def other_draws(state: dict[str, Any]) -> dict[str, Any]:
    from foundation.training.rng import rng_state

    torch.manual_seed(12345)
    return {**state, "torch": rng_state(torch.device("cpu"))["torch"]}


def test_what_cannot_be_kept_does_not_hide_why_the_run_ended(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, first=1)
    out = tmp_path / "run"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("foundation.training.bundle.save_batch", full)
    with pytest.raises(TrainingError, match=r"step 1: 1 steps in a row .* could not be kept: .*No space left"):
        train(small_run.config(data, out, max_skipped=1))


def test_the_hash_of_weights_sees_every_bit() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.zeros(3, dtype=torch.bfloat16)}
    known = weights_hash(weights)
    assert known == weights_hash(dict(reversed(weights.items())))
    for name, value in weights.items():
        changed = value.clone().reshape(-1)
        changed[0] += 1
        assert weights_hash({**weights, name: changed.reshape(value.shape)}) != known
        assert weights_hash({**weights, name: value[None]}) != known
