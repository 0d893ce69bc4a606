from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.model.gem import GEM
from foundation.training.checkpoint import load_model
from foundation.training.checkpoint_files import CheckpointError, find_checkpoint
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import evaluate
from foundation.training.launch import quiet_torchrec
from foundation.training.metrics import sigmoid
from foundation.training.nonfinite import culprits
from foundation.training.predict import PredictConfig, default_keys, predict
from foundation.training.train import train
from tests.foundation.data.builders import small_table, write_dataset
from tests.foundation.training import small_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path)
    return path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(small_run.config(data, out, max_steps=5))
    return out


def test_the_loaded_model_scores_as_the_trained_one_did(data: Path, run: Path) -> None:
    loaded = load_model(run)
    assert isinstance(loaded.model, GEM) and not loaded.model.training
    assert loaded.manifest["step"] == 5 and loaded.checkpoint.name == "step-00000005"
    assert loaded.version == load_model(run, "latest").version and len(loaded.version) == 64
    dataset = Dataset.open(data)
    assert (loaded.schema.hash, loaded.encoder.hash) == (dataset.schema.hash, dataset.encoder.hash)
    reader = LogReader(dataset, "validation", ReaderConfig(batch_size=50, shuffle_window=0, workers=0))
    mine = evaluate(loaded.model, reader, CPU)
    theirs = small_run.lines(run, "validation")[-1]["metrics"]
    for task, surfaces in theirs.items():
        for name in ("auc", "gauc", "ne", "calibration"):
            assert mine[task]["all"][name] == pytest.approx(surfaces["all"][name], rel=1e-4)


def test_averaged_weights_are_loaded_where_there_are_any(data: Path, run: Path, tmp_path: Path) -> None:
    saved = small_run.tensors(run)
    for name, value in load_model(run).model.state_dict().items():
        assert torch.equal(value, saved[f"ema.{name}"])
        assert not torch.equal(value, saved[f"model.{name}"]) or not value.any()
    dense_only = EMAConfig(decay=0.9, tables=False)
    for number, ema in enumerate((dense_only, EMAConfig())):
        out = tmp_path / str(number)
        train(small_run.config(data, out, max_steps=2, ema=ema))
        saved, state = small_run.tensors(out), load_model(out).model.state_dict()
        table = next(name for name in state if name.startswith("embeddings."))
        other = next(name for name in state if name.startswith("heads."))
        assert torch.equal(state[table], saved[f"model.{table}"])
        assert torch.equal(state[other], saved[f"ema.{other}" if number == 0 else f"model.{other}"])


def test_what_cannot_be_loaded_is_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        load_model(tmp_path / "nothing")
    out = tmp_path / "run"
    train(small_run.config(data, out, max_steps=2))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint step-00000009; it has step-00000002"):
        load_model(out, 9)
    manifest = find_checkpoint(out / "checkpoints") / "manifest.json"
    whole = json.loads(manifest.read_text())
    wider = json.loads(json.dumps(whole))
    wider["config"]["model"]["width"] = 16
    manifest.write_text(json.dumps(wider))
    with pytest.raises(CheckpointError, match=r"does not fit the model; .* keys have another shape"):
        load_model(out)
    deeper = json.loads(json.dumps(whole))
    deeper["config"]["model"]["layers"] = 2
    manifest.write_text(json.dumps(deeper))
    with pytest.raises(CheckpointError, match=r"keys are missing in it: .*layers\.1"):
        load_model(out)
    for key, value, message in (
        ("layers", "x", r"manifest\.json: damaged; config\.model: .*layers"),
        ("heads", 7, r"manifest\.json: damaged; config\.model: heads: expected a mapping of options, got 7"),
        ("members", None, r"manifest\.json: damaged; config\.model: members: expected a value, got null"),
    ):
        broken = json.loads(json.dumps(whole))
        broken["config"]["model"][key] = value
        manifest.write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=message):
            load_model(out)
    for key in ("schema_hash", "config", "files", "step"):
        manifest.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(CheckpointError, match=rf"manifest\.json: damaged; manifest\.{key}: is missing"):
            load_model(out)
    manifest.write_text(json.dumps({**whole, "schema_hash": "0123456789abcdef"}))
    with pytest.raises(CheckpointError, match="trained with schema 0123456789abcdef"):
        load_model(out)
    manifest.write_text(json.dumps(whole))
    part = next(manifest.parent.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it is damaged"):
        load_model(out)


def test_without_an_evaluation_there_is_no_best(data: Path, tmp_path: Path) -> None:
    tables = {
        "train/part-00000.parquet": small_table([2] * 20),
        "validation/part-00000.parquet": small_table([], first_id=100),
    }
    write_dataset(tmp_path / "data", tables)
    result = train(small_run.config(tmp_path / "data", tmp_path / "run", max_steps=1))
    assert result.best is None and result.metrics == {} and result.checkpoint.name == "step-00000001"
    with pytest.raises(CheckpointError, match=r"no checkpoint is called best; no evaluation has chosen one"):
        load_model(tmp_path / "run")
    assert load_model(tmp_path / "run", "latest").manifest["step"] == 1


def test_predictions_are_the_models_in_the_order_of_the_rows(data: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.parquet"
    result = predict(PredictConfig(run=run, dataset=str(data), out=out, batch_size=7, device="cpu"))
    rows = pq.read_table(data / "test" / "part-00000.parquet")
    table = pq.read_table(out)
    assert table.column_names == ["user_id", "item_id", "time_ms", "task", "prediction"]
    assert result.impressions == len(rows) and len(table) == 3 * len(rows)
    assert table.column("task").to_pylist() == ["click", "like", "conversion"] * len(rows)
    for name in ("user_id", "item_id", "time_ms"):
        assert table.column(name).to_pylist()[::3] == rows.column(name).to_pylist()
    loaded = load_model(run)
    assert result.version == loaded.version
    reader = LogReader(Dataset.open(data), "test", ReaderConfig(batch_size=1000, shuffle_window=0, workers=0))
    (encoded,) = list(reader)
    with torch.no_grad():
        logits = loaded.model(Batch.from_encoded(encoded, loaded.schema)).logits.numpy()
    assert np.array_equal(encoded.impression_id, rows.column("impression_id").to_numpy())
    np.testing.assert_allclose(table.column("prediction").to_numpy(), sigmoid(logits).reshape(-1), atol=1e-6)
    with pytest.raises(FileExistsError):
        predict(PredictConfig(run=run, dataset=str(data), out=out))
    chosen = PredictConfig(
        run=run, dataset=str(data), out=out, split="validation", which="latest", keys=["impression_id"], overwrite=True
    )
    predict(chosen)
    assert pq.read_table(out).column_names == ["impression_id", "task", "prediction"]


def test_predictions_read_ids_with_the_vocabulary_of_the_run(data: Path, run: Path, tmp_path: Path) -> None:
    # The same test rows in a dataset whose vocabularies come from other training rows.
    original = pq.read_table(data / "test" / "part-00000.parquet")
    tables = {"train/part-00000.parquet": small_table([1] * 9, seed=99), "test/part-00000.parquet": original}
    other = write_dataset(tmp_path / "other", tables)
    assert other.encoder.hash != Dataset.open(data).encoder.hash
    for name, path in (("one", data), ("other", tmp_path / "other")):
        predict(PredictConfig(run=run, dataset=str(path), out=tmp_path / f"{name}.parquet"))
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "other.parquet"))


def test_predict_refuses_another_schema_and_unknown_columns(data: Path, run: Path, tmp_path: Path) -> None:
    schema = Dataset.open(data).schema
    renamed = type(schema).from_dict({**schema.to_dict(), "name": "renamed"})
    write_dataset(tmp_path / "renamed", {"train/part-00000.parquet": small_table([2] * 9)}, schema=renamed)
    out = tmp_path / "p.parquet"
    with pytest.raises(ValueError, match="was trained with schema"):
        predict(PredictConfig(run=run, dataset=str(tmp_path / "renamed"), split="train", out=out))
    with pytest.raises(ValueError, match="has no column 'nothing'"):
        predict(PredictConfig(run=run, dataset=str(data), out=out, keys=["nothing"]))
    assert not list(tmp_path.glob("p.parquet*"))


def test_default_keys_are_user_item_and_time(data: Path) -> None:
    assert default_keys(Dataset.open(data).schema) == ["user_id", "item_id", "time_ms"]


def test_culprits_are_named_by_column_or_weight(data: Path) -> None:
    dataset = Dataset.open(data)
    encoded = next(iter(LogReader(dataset, "train", ReaderConfig(batch_size=32, workers=0))))
    batch = Batch.from_encoded(encoded, dataset.schema)
    model = GEM(small_run.MODEL, dataset.schema, dataset.encoder.table_rows)
    assert culprits(batch, dataset.schema, model) == "nothing in the batch or the weights"
    image = batch.item_dense.clone()
    image[0, 2] = float("inf")  # price, then the three numbers of image
    labels = batch.labels.clone()
    labels[batch.label_valid[:, 1].nonzero()[0], 1] = float("nan")
    assert culprits(replace(batch, item_dense=image), dataset.schema, model) == "column image"
    assert culprits(replace(batch, item_dense=image, labels=labels), dataset.schema, model) == "column image, like"
    broken = batch.request_dense.clone()
    broken[0, 0] = float("nan")
    assert culprits(replace(batch, request_dense=broken), dataset.schema, model) == "column age"
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.startswith("heads."))[0] = float("nan")
    assert culprits(batch, dataset.schema, model).startswith("weight heads.")


def test_prediction_columns_have_compact_types(data: Path, run: Path, tmp_path: Path) -> None:
    predict(PredictConfig(run=run, dataset=str(data), out=tmp_path / "p.parquet"))
    schema = pq.read_schema(tmp_path / "p.parquet")
    assert pa.types.is_dictionary(schema.field("task").type)
    assert schema.field("prediction").type == pa.float64()


def test_what_torchrec_is_told_by_others_is_not_passed_on() -> None:
    """Its use of what is deprecated is its own; that of anybody else is said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_torchrec()
        for module in ("torchrec.distributed.model_parallel", "foundation.training.train"):
            warnings.warn_explicit("old", FutureWarning, "file", 1, module)
        warnings.warn_explicit("wrong", UserWarning, "file", 1, "torchrec.distributed.model_parallel")
    assert [str(warning.message) for warning in told] == ["old", "wrong"]
