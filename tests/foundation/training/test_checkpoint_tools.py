"""`opengem checkpoint inspect|reshard|export`, and checkpoints of other versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import opengem
from foundation.data.files import sha256_file
from foundation.model.gem import GEM
from foundation.training import origin
from foundation.training.checkpoint import load_model
from foundation.training.checkpoint_export import WeightsConfig, export_weights
from foundation.training.checkpoint_files import CheckpointError, find_checkpoint, read_manifest, saved_entries
from foundation.training.checkpoint_inspect import InspectConfig, inspect_checkpoint
from foundation.training.checkpoint_reshard import ReshardConfig, reshard
from foundation.training.train import TrainConfig, train
from tests.foundation.training import small_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path)
    return path


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The config of a run of two steps."""
    config = small_run.config(data, tmp_path_factory.mktemp("runs") / "run", max_steps=2)
    train(config)
    return config


@pytest.fixture
def config(made: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run in a folder that a test may change."""
    shutil.copytree(made.out, tmp_path / "run")
    return replace(made, out=tmp_path / "run", resume=True, max_steps=3)


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = opengem.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_inspect_says_what_is_there(made: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "checkpoint", "inspect", "--run", made.out)
    manifest = read_manifest(find_checkpoint(made.out / "checkpoints"))
    assert status == 0
    for text in ("step          2, epoch 0", "1 ranks; opengem ", "the same code", "all compared with SHA-256"):
        assert text in out
    for key in ("schema_hash", "encoder_hash", "config_hash"):
        assert manifest[key] in out
    for key, entry in saved_entries(find_checkpoint(made.out / "checkpoints")).items():
        assert any(line.startswith(f"{key} ") and str(tuple(entry.size)) in line for line in out.splitlines()), key
    assert all(name in out and entry["sha256"] in out for name, entry in manifest["files"].items())
    _, out, _ = command(capsys, "checkpoint", "inspect", "--run", made.out, "--which", "2", "--as_json", "true")
    answer = json.loads(out)
    assert answer["verified"] is True and answer["manifest"] == manifest
    assert answer["tensors"] == inspect_checkpoint(InspectConfig(run=made.out)).tensors


def test_inspect_names_every_damaged_file(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = find_checkpoint(config.out / "checkpoints")
    shard, rank = next(checkpoint.glob("*.distcp")), checkpoint / "rank-00000.json"
    shard.write_bytes(shard.read_bytes()[:-1])
    rank.write_bytes(rank.read_bytes().replace(b"0", b"1"))
    status, out, err = command(capsys, "checkpoint", "inspect", "--run", config.out)
    assert status == 2 and not out and err.count("\n") == 1
    assert f"{shard}: has " in err and f"{rank}: its SHA-256 differs" in err
    assert inspect_checkpoint(InspectConfig(run=config.out, verify=False)).verified is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "--run", "RUN/checkpoints"), "not a run folder"),
        (("inspect", "--run", "RUN", "--which", "7"), "there is no checkpoint step-00000007; it has step-00000002"),
        (("reshard", "--run", "RUN", "--out", "OUT", "--files", "0"), "files: must be at least 1, got 0"),
        (("reshard", "--run", "RUN", "--out", "OUT", "--files", "10000"), "files: 10000 are more than there are"),
        (("reshard", "--run", "RUN", "--out", "RUN", "--files", "2"), "exists; choose another output"),
        (("export", "--run", "RUN", "--out", "RUN"), "exists; choose another output"),
        (("export", "--run", "nowhere", "--out", "OUT"), "nowhere: not a run folder"),
    ],
)
def test_bad_input_gives_one_line(
    made: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    words = [word.replace("RUN", str(made.out)).replace("OUT", str(tmp_path / "out")) for word in arguments]
    status, _, err = command(capsys, "checkpoint", *words)
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_resharded_checkpoints_are_bit_for_bit_the_same(made: TrainConfig, tmp_path: Path) -> None:
    original = small_run.tensors(made.out)
    run = made.out
    for files in (3, 1):  # from the one before: few pieces to many and the other way round
        out = tmp_path / str(files)
        result = reshard(ReshardConfig(run=run, out=out, files=files))
        small_run.assert_same_tensors(small_run.tensors(out), original)
        shards = sorted(result.checkpoint.glob("*.distcp"))
        assert len(shards) == files
        assert max(path.stat().st_size for path in shards) < 2 * min(path.stat().st_size for path in shards)
        mine, theirs = (find_checkpoint(folder / "checkpoints") for folder in (out, made.out))
        assert (mine / "rank-00000.json").read_bytes() == (theirs / "rank-00000.json").read_bytes()
        run = out
    loaded = load_model(tmp_path / "3", "latest")  # which verifies the files
    assert loaded.manifest["resharded_from"] == sha256_file(find_checkpoint(made.out / "checkpoints") / "manifest.json")


@pytest.mark.parametrize(("tables", "averages"), [(False, True), (True, False)])
def test_export_is_the_model(made: TrainConfig, tmp_path: Path, tables: bool, averages: bool) -> None:
    result = export_weights(WeightsConfig(run=made.out, out=tmp_path / "w", tables=tables, averages=averages))
    about = json.loads((tmp_path / "w" / "weights.json").read_text())
    loaded = load_model(made.out)
    files = {path.name: load_file(path) for path in (tmp_path / "w").glob("*.safetensors")}
    weights = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert set(files) == set(about["files"]) and len(files) == 1 + result.tables and bool(result.tables) is tables
    for name, entry in about["tensors"].items():
        tensor = files[entry["file"]][name]
        assert list(tensor.shape) == entry["shape"] and str(tensor.dtype) == f"torch.{entry['dtype']}"
    assert about["version"] == loaded.version and about["schema_hash"] == loaded.schema.hash
    model = GEM(made.model, loaded.schema, loaded.encoder.table_rows)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("embeddings" in name for name in missing) and bool(missing) is not tables
    served = loaded.model.state_dict()
    same = {name: torch.equal(value, served[name]) for name, value in weights.items()}
    assert all(same.values()) is averages


def edit(config: TrainConfig, change: Callable[[dict[str, Any]], Any]) -> None:
    path = find_checkpoint(config.out / "checkpoints") / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_what_an_older_version_wrote_goes_on_and_says_so(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Config fields that were not there yet count as their defaults. It is resharded on the way."""

    def older(manifest: dict[str, Any]) -> None:
        del manifest["config"]["precision"], manifest["config"]["reader"]["drop_last"], manifest["config"]["schedule"]
        del manifest["config"]["model"]["layer"], manifest["config"]["checkpoint"]
        manifest["written_by"] |= {"opengem": "0.0.9", "sources": "0123456789abcdef"}

    default = replace(config, schedule=small_run.ScheduleConfig())
    edit(config, older)
    with pytest.raises(CheckpointError, match=r"precision was 'fp32' and is 'bf16'; reader\.drop_last was .* is "):
        train(replace(default, precision="bf16", reader=replace(config.reader, drop_last=not config.reader.drop_last)))
    mine = origin.written_by()
    load_model(config.out)
    assert f"it was written by opengem 0.0.9 (here {mine['opengem']}); its format is" in capsys.readouterr().err
    reshard(ReshardConfig(run=config.out, out=tmp_path / "again", files=3))
    assert train(replace(default, out=tmp_path / "again")).steps == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "resumed from step 2 of 3; it was written by opengem 0.0.9" in err
    assert f"sources 0123456789abcdef (here {mine['sources']}): it goes on, but need not give bit for bit" in err


def test_a_field_that_is_gone_is_named(config: TrainConfig) -> None:
    edit(config, lambda manifest: manifest["config"]["model"].update(magic=3))
    with pytest.raises(CheckpointError, match=r"another config; model\.magic was 3 and is None\. Use the same"):
        train(config)


def test_what_another_version_wrote_and_does_not_fit_is_listed_with_that_version(config: TrainConfig) -> None:
    edit(config, lambda manifest: manifest.update(written_by={"opengem": "0.0.9"}))
    heads = small_run.HeadsConfig(trunk=(16, 8), tower=5, adapter_rank=2, dropout=0.2)
    other = replace(config, model=replace(config.model, heads=heads))
    with pytest.raises(CheckpointError, match=r"heads\.tower was 4 and is 5\..*; it was written by opengem 0\.0"):
        train(other)
    edit(config, lambda manifest: manifest["config"]["model"]["heads"].update(tower=5))
    with pytest.raises(CheckpointError, match=r"keys have another shape: .*; it was written by opengem 0\.0\.9"):
        train(other)
    edit(config, lambda manifest: manifest.update(format=2))
    with pytest.raises(CheckpointError, match=r"format 2 is not the format 1 of .*; use OpenGEM 0\.0\.9, which wrote"):
        train(config)


def test_a_step_is_asked_for_by_number_or_by_name(made: TrainConfig) -> None:
    for which in ("2", "step-00000002"):
        assert inspect_checkpoint(InspectConfig(run=made.out, which=which)).checkpoint.name == "step-00000002"
    with pytest.raises(CheckpointError, match=r"not a run folder, it has no checkpoints; its run is .*run"):
        inspect_checkpoint(InspectConfig(run=made.out / "checkpoints"))


@pytest.mark.parametrize(("key", "value"), [("progress", 5), ("written_by", []), ("world_size", "two")])
def test_what_inspect_reads_of_a_damaged_manifest_is_named(config: TrainConfig, key: str, value: Any) -> None:
    edit(config, lambda manifest: manifest.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json: damaged; manifest\.{key}: expected"):
        inspect_checkpoint(InspectConfig(run=config.out))


def test_a_run_is_never_replaced_by_what_is_made_of_it(config: TrainConfig) -> None:
    for out in (config.out, config.out.parent):
        with pytest.raises(ValueError, match="which is read; choose another output"):
            reshard(ReshardConfig(run=config.out, out=out, files=1, overwrite=True))
        with pytest.raises(ValueError, match="which is read; choose another output"):
            export_weights(WeightsConfig(run=config.out, out=out, which="latest", overwrite=True))
    assert (config.out / "manifest.json").is_file()


def test_the_best_checkpoint_stays_the_best_in_other_files(made: TrainConfig, tmp_path: Path) -> None:
    reshard(ReshardConfig(run=made.out, out=tmp_path / "out", files=2))
    assert find_checkpoint(tmp_path / "out" / "checkpoints", "best").name == "step-00000002"


def test_checkpoints_without_a_latest_are_not_thrown_away(config: TrainConfig) -> None:
    folder = config.out / "checkpoints"
    for text, why in ((None, r"latest: is missing"), ("step-00000009", r"there is no checkpoint step-00000009, which")):
        (folder / "latest").unlink(missing_ok=True)
        if text is not None:
            (folder / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=rf"{why}.* write its name into .*latest: there is step-00000002"):
            train(config)
    assert find_checkpoint(folder, 2).is_dir()


def test_balanced_training_resumes(config: TrainConfig, tmp_path: Path) -> None:
    reader = replace(config.reader, balance="request", base_batch=4, max_tokens=60)
    even = replace(config, out=tmp_path / "even", reader=reader, max_steps=4)
    assert train(even).best_step == 4
    cut = replace(config, out=tmp_path / "cut", reader=reader, max_steps=2)
    train(cut)
    train(replace(cut, max_steps=4))
    losses = [[line["loss"] for line in small_run.lines(run.out, "train")] for run in (even, cut)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_resume_leaves_a_folder_alone_that_is_no_run(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mine" / "notes").write_text("kept")
    with pytest.raises(FileExistsError, match="mine exists"):
        train(replace(config, out=tmp_path / "mine"))
    assert (tmp_path / "mine" / "notes").is_file()


def test_a_damaged_latest_says_how_to_go_on_from_an_earlier_one(config: TrainConfig) -> None:
    folder = config.out / "checkpoints"
    shutil.copytree(folder / "step-00000002", folder / "step-00000001")
    shard = next(find_checkpoint(folder).glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:50] + b"\0\0\0" + whole[53:])
    with pytest.raises(CheckpointError, match=rf"{shard}: its SHA-256 .*latest: there is step-00000001") as error:
        train(config)
    assert f"write its name into {folder / 'latest'}" in str(error.value)
    (folder / "latest").write_text("step-00000001")
    assert train(config).steps == 3
