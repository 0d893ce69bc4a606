from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.parallel.parallelize import SparseConfig, parallelize
from foundation.parallel.pieces import local_shards
from foundation.parallel.tables import dense_parameters
from foundation.training import checkpoint_files as files
from foundation.training.ema import EMAConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.state import TrainState
from tests.foundation.parallel import small_model
from tests.foundation.parallel.ranks import on_ranks, one_rank

CPU = torch.device("cpu")


def new_state(seed: int = 0, row_wise_from: int = 20) -> TrainState:
    model = parallelize(small_model.build(seed), SparseConfig(lr=0.1, row_wise_from=row_wise_from), CPU)
    return TrainState.of(model, DenseConfig(), EMAConfig(decay=0.9))


def train(state: TrainState, steps: range, rank: int = 0, world: int = 1) -> None:
    for n in steps:
        batch = small_model.batch(n).part(rank, world)
        state.dense.zero_grad()
        small_model.loss_of(state.model(batch), batch.label).backward()
        state.dense.step()
        assert state.ema is not None
        state.ema.update(n + 1)


def local(state: TrainState) -> dict[str, list[torch.Tensor]]:
    return {k: [s.detach().clone() for _, s in local_shards(v)] for k, v in state.tensors().items()}


def assert_equal(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    for key, shards in one.items():
        assert all(torch.equal(a, b) for a, b in zip(shards, other[key], strict=True)), key


def save(state: TrainState, folder: Path, step: int) -> Path:
    return files.write_checkpoint(folder, step, state.tensors(), {"rank": 0}, {"note": "test"})


def test_training_on_from_a_checkpoint_equals_training_on(tmp_path: Path) -> None:
    with one_rank():
        state = new_state()
        train(state, range(3))
        path = save(state, tmp_path, 3)
        train(state, range(3, 6))
        other = new_state(seed=1)
        files.read_tensors(path, other.tensors())
        train(other, range(3, 6))
        assert_equal(local(state), local(other))
    assert path == tmp_path / "step-00000003" == files.find_checkpoint(tmp_path)
    manifest = files.read_manifest(path)
    assert manifest["step"] == 3 and manifest["note"] == "test"
    assert files.read_rank_state(path, 0) == {"rank": 0}
    files.verify_files(path, manifest)
    prefixes = {key.split(".")[0] for key in files.saved_keys(path)}
    assert prefixes == {"model", "momentum", "optimizer", "ema"}


def save_on_ranks(folder: str) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = new_state()
    train(state, range(3), rank, world)
    files.write_checkpoint(Path(folder), 3, state.tensors(), {"rank": rank}, {})
    again = new_state(seed=5)
    files.verify_files(Path(folder) / "step-00000003", files.read_manifest(Path(folder) / "step-00000003"))
    files.read_tensors(Path(folder) / "step-00000003", again.tensors())
    assert_equal(local(state), local(again))
    # A rank that cannot write takes the other one with it instead of leaving it waiting.
    failed = ""
    try:
        tensors = state.tensors()
        files.write_checkpoint(Path(folder), 4, tensors, {"rank": object() if rank else 0}, {})
    except files.CheckpointError as error:
        failed = str(error)
    return {k: [(p, s.clone()) for p, s in local_shards(v)] for k, v in state.tensors().items()} | {"failed": failed}


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    answers = on_ranks(save_on_ranks, 2, tmp_path / "ranks", str(tmp_path / "run"))
    assert all("not JSON serializable" in answer.pop("failed") for answer in answers)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000003"]
    path = files.find_checkpoint(tmp_path / "run")
    assert files.read_rank_state(path, 1) == {"rank": 1}
    with one_rank():
        state = new_state(seed=7)
        files.read_tensors(path, state.tensors())
        loaded = local(state)
    assert set().union(*(answer.keys() for answer in answers)) == loaded.keys()
    for answer in answers:
        for key, shards in answer.items():
            for place, shard in shards:
                assert torch.equal(loaded[key][0][place], shard), key


def in_child(function: Callable[[], None]) -> int:
    """Runs a function in a forked process; the answer is the signal that ended it, 0 for none."""
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] & 0x7F


@pytest.mark.parametrize("moment", ["tensors", "manifest", "rename", "pointer"])
def test_a_kill_while_writing_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def kill(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_for(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *rest: object) -> None:
            if Path(path).name == name:
                kill()
            function(path, *rest)

        return call

    plain = small_model.build()
    tensors = {f"model.{name}": value.clone() for name, value in plain.state_dict().items()}
    files.write_checkpoint(tmp_path, 3, tensors, {}, {})
    for value in tensors.values():
        value.add_(1)

    def second_save() -> None:
        if moment == "tensors":
            monkeypatch.setattr(files.dcp.FileSystemWriter, "finish", kill)
        elif moment == "rename":
            monkeypatch.setattr(files.os, "rename", kill)
        else:
            name = {"manifest": "manifest.json", "pointer": "latest"}[moment]
            monkeypatch.setattr(files, "atomic_write", kill_for(name, files.atomic_write))
        files.write_checkpoint(tmp_path, 4, tensors, {}, {})

    assert in_child(second_save) == signal.SIGKILL
    path = files.find_checkpoint(tmp_path)
    assert path.name == "step-00000003"
    files.verify_files(path, files.read_manifest(path))
    files.read_tensors(path, tensors)
    assert all(torch.equal(tensors[f"model.{name}"], value) for name, value in plain.state_dict().items())
    files.write_checkpoint(tmp_path, 4, tensors, {}, {})
    assert files.find_checkpoint(tmp_path).name == "step-00000004"
    files.prune(tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000004"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return files.write_checkpoint(tmp_path, 7, {"model.a": torch.arange(6.0), "ema.a": torch.ones(2)}, {}, {})


def test_keys_that_do_not_match_are_listed(written: Path) -> None:
    target = {"model.a": torch.zeros(6), "model.b": torch.zeros(1)}
    with pytest.raises(files.CheckpointError, match=r"1 keys are missing in it: model\.b"):
        files.read_tensors(written, target, among=["model.a", "model.b"])
    with pytest.raises(files.CheckpointError, match=r"1 keys in it are not expected: ema\.a"):
        files.read_tensors(written, {"model.a": torch.zeros(6)})
    with pytest.raises(files.CheckpointError, match=r"another shape: model\.a \(6,\) instead of \(5,\)"):
        files.read_tensors(written, {"model.a": torch.zeros(5)}, among=["model.a"])
    files.read_tensors(written, target := {"model.a": torch.zeros(6)}, among={"model.a"})
    assert torch.equal(target["model.a"], torch.arange(6.0))


def data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: data_file(path).unlink(), "is missing"),
        (lambda path: data_file(path).write_bytes(data_file(path).read_bytes()[:-9]), "bytes instead of"),
        (
            lambda path: data_file(path).write_bytes(
                data_file(path).read_bytes()[:-9] + b"123456789",
            ),
            "SHA-256 differs",
        ),
        (lambda path: (path / "manifest.json").write_text("{"), "damaged, not JSON"),
        (lambda path: (path / "manifest.json").write_text(json.dumps({"format": 99})), "format 99 is not"),
        (lambda path: (path / "manifest.json").write_text("[]"), "format None is not"),
        (
            lambda path: (path / "manifest.json").write_text(
                json.dumps(json.loads((path / "manifest.json").read_text()) | {"files": {"x": {"bytes": "1"}}})
            ),
            r"manifest\.json: damaged; manifest\.files\.x\.bytes: expected int, got str",
        ),
        (lambda path: (path / "manifest.json").unlink(), "not a whole checkpoint"),
    ],
)
def test_damage_is_found_and_named(written: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(written)
    with pytest.raises(files.CheckpointError, match=message) as error:
        files.verify_files(written, files.read_manifest(written))
    assert str(written) in str(error.value)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model.a": torch.zeros(3)}
    files.write_checkpoint(tmp_path, 1, tensors, {}, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(files.CheckpointError, match=r"step-00000002.*No space left on device"):
        files.write_checkpoint(tmp_path, 2, tensors, {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_find_and_prune(tmp_path: Path) -> None:
    with pytest.raises(files.CheckpointError, match="no checkpoint is called latest; it has none"):
        files.find_checkpoint(tmp_path)
    for step in (1, 2, 3, 4):
        path = files.write_checkpoint(tmp_path, step, {"model.a": torch.zeros(3)}, {}, {})
        if step == 1:
            files.point(tmp_path, "best", path)
    assert files.find_checkpoint(tmp_path, "best").name == files.find_checkpoint(tmp_path, 1).name == "step-00000001"
    assert files.find_checkpoint(tmp_path, "3").name == "step-00000003"
    files.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003", "step-00000004"]
    with pytest.raises(files.CheckpointError, match="there is no checkpoint step-00000002; it has step-00000001"):
        files.find_checkpoint(tmp_path, 2)
    for content in (b"", b"step-0", b"\xff\xfe", b"../elsewhere"):
        (tmp_path / "best").write_bytes(content)
        with pytest.raises(files.CheckpointError, match=r"best: damaged, it should name a checkpoint; it has step-0"):
            files.find_checkpoint(tmp_path, "best")
    with pytest.raises(files.CheckpointError, match="is latest, best or a step, got 'newest'"):
        files.find_checkpoint(tmp_path, "newest")


def test_dense_names_are_in_the_optimizer_state() -> None:
    with one_rank():
        state = new_state()
        keys = {key.removeprefix("optimizer.").rsplit(".", 1)[0] for key in state.tensors() if key.startswith("optim")}
        assert keys == dense_parameters(state.model).keys()
