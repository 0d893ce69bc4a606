"""Saves in the background: the same files as blocking ones, joined at the end and after a crash, kept by policy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.training import checkpoint_writer as writer_module
from foundation.training.checkpoint_files import (
    CheckpointError,
    find_checkpoint,
    read_manifest,
    read_rank_state,
    read_tensors,
    saved_keys,
    verify_files,
    write_checkpoint,
)
from foundation.training.checkpoint_writer import CheckpointConfig, CheckpointWriter, Staging
from tests.foundation.parallel.ranks import one_rank
from tests.foundation.training.test_checkpoint_files import local, new_state, train


def whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    filled = {key: torch.zeros(shape) for key, shape in saved_keys(checkpoint).items()}
    read_tensors(checkpoint, filled)
    return filled


class Gate:
    """Holds every background save until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.written = threading.Event(), list[int]()
        monkeypatch.setattr(writer_module, "write_checkpoint", self._write)

    def _write(self, folder: Path, step: int, *args: Any, **rest: Any) -> Path:
        assert self.open.wait(60)
        self.written.append(step)
        return write_checkpoint(folder, step, *args, **rest)


def test_background_saves_equal_blocking_ones_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {}
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        config = CheckpointConfig(asynchronous=asynchronous, keep=9)
        with one_rank(), monkeypatch.context() as patch:
            state = new_state()
            with CheckpointWriter(folder, config) as writer:
                writer.reserve(state.tensors())
                for step in (1, 2, 3):
                    train(state, range(step - 1, step))
                    gate = Gate(patch)
                    if not asynchronous:
                        gate.open.set()
                    path = writer.save(step, state.tensors(), {"rank": step}, {"note": step}, best=step == 2)
                    assert path.name == f"step-0000000{step}" and path.is_dir() is not asynchronous
                    train(state, range(3, 4))  # what was staged must not change any more
                    gate.open.set()
            ends[asynchronous] = local(state)
    for step in (1, 2, 3):
        one, other = (find_checkpoint(tmp_path / str(way), step) for way in (False, True))
        mine, theirs = whole(one), whole(other)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert read_rank_state(other, 0) == {"rank": step}
        manifests = [read_manifest(path) for path in (one, other)]
        assert manifests[0]["note"] == manifests[1]["note"] == step
        verify_files(other, manifests[1])
    assert all(torch.equal(a, b) for key in ends[True] for a, b in zip(ends[True][key], ends[False][key], strict=True))
    assert find_checkpoint(tmp_path / "True").name == "step-00000003"
    assert find_checkpoint(tmp_path / "True", "best").name == "step-00000002"


def test_a_save_waits_for_the_one_before_and_buffers_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    weight = torch.ones(3)
    with CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
        writer.save(1, {"model.a": weight}, {}, {})
        first = writer.stall_seconds
        assert gate.written == [] and first == writer.total_stall_seconds > 0
        gate.open.set()
        writer.save(2, {"model.a": weight.fill_(2)}, {}, {})
        assert gate.written[0] == 1
        assert writer.total_stall_seconds == first + writer.stall_seconds
    assert gate.written == [1, 2]
    assert whole(find_checkpoint(tmp_path, 1))["model.a"].tolist() == [1, 1, 1]
    assert whole(find_checkpoint(tmp_path, 2))["model.a"].tolist() == [2, 2, 2]
    staging = Staging()
    staging.reserve({"model.a": weight})
    reserved = staging._buffers["model.a", 0].data_ptr()
    for _ in range(2):
        copy = staging.copy({"model.a": weight})["model.a"]
        assert isinstance(copy, torch.Tensor) and torch.equal(copy, weight)
        assert copy.data_ptr() == reserved != weight.data_ptr()


def test_a_background_save_that_fails_is_reported_at_the_next_one_or_at_the_end(tmp_path: Path) -> None:
    weight = {"model.a": torch.ones(3)}
    message = r"cannot write checkpoint .*step-00000002: .*not JSON serializable"
    with pytest.raises(CheckpointError, match=message), CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
        writer.save(1, weight, {}, {})
        writer.save(2, weight, {"rank": object()}, {})
        writer.save(3, weight, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    with pytest.raises(CheckpointError, match=message), CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
        writer.save(2, weight, {"rank": object()}, {})
    assert find_checkpoint(tmp_path).name == "step-00000001"


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "step-00000001")

    monkeypatch.setattr(writer_module, "prune", refuse)
    message = r"cannot remove old checkpoints of .*Permission denied: 'step-00000001'"
    with pytest.raises(CheckpointError, match=message), CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
        writer.save(2, {"model.a": torch.ones(3)}, {}, {})
    assert find_checkpoint(tmp_path).name == "step-00000002"


def test_a_crash_of_training_waits_for_the_running_save_and_is_not_hidden_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = {"model.a": torch.ones(3)}
    gate = Gate(monkeypatch)
    for step, rank_state in ((1, {}), (2, {"rank": object()})):
        with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
            writer.save(step, weight, rank_state, {})
            gate.open.set()
            raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_the_best_and_every_nth_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    config = CheckpointConfig(every=2, keep=2, keep_every=6, asynchronous=asynchronous)
    with CheckpointWriter(tmp_path, config) as writer:
        for step in range(2, 22, 2):
            writer.save(step, {"model.a": torch.ones(1)}, {}, {}, best=step in (4, 8))
    kept = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert kept == [6, 8, 12, 18, 20]
    assert find_checkpoint(tmp_path, "best").name == "step-00000008"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, r"checkpoint\.every: must not be negative"),
        ({"keep": 0}, r"checkpoint\.keep: must be at least 1"),
        ({"keep_every": -1}, r"checkpoint\.keep_every: must not be negative"),
        ({"keep_every": 5}, r"checkpoint\.keep_every: must be a multiple of checkpoint\.every \(0\), got 5"),
        ({"keep_every": 5, "every": 3}, r"a multiple of checkpoint\.every \(3\), got 5"),
    ],
)
def test_config_names_the_wrong_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**settings)
