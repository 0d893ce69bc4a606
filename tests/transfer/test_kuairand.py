"""The KuaiRand study: metrics of a file of predictions, and its tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from tests.foundation.data.builders import small_table, write_dataset
from transfer.kuairand import teacher_metrics
from transfer.kuairand_tables import StudentRow, results_page


def test_metrics_of_predictions_equal_scikit_learn(tmp_path: Path) -> None:
    table = small_table([3] * 60, seed=1)
    dataset = write_dataset(tmp_path / "data", {"train/part-00000.parquet": table, "test/part-00000.parquet": table})
    task = dataset.schema.tasks[0]
    rng = np.random.default_rng(0)
    predictions = {t.name: rng.random(table.num_rows) for t in dataset.schema.tasks}
    written = pa.concat_tables(
        [pa.table({"task": [name] * table.num_rows, "prediction": values}) for name, values in predictions.items()]
    )
    pq.write_table(written, tmp_path / "predictions.parquet")
    found = teacher_metrics(dataset, tmp_path / "predictions.parquet")[task.name]["all"]
    labels = np.array(table[task.label].to_pylist(), dtype=float)
    rate = labels.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, predictions[task.name]))
    assert found["ne"] == pytest.approx(log_loss(labels, predictions[task.name]) / entropy)
    assert found["calibration"] == pytest.approx(predictions[task.name].mean() / rate)


def test_predictions_of_other_rows_are_refused(tmp_path: Path) -> None:
    table = small_table([3] * 10)
    dataset = write_dataset(tmp_path / "data", {"train/part-00000.parquet": table, "test/part-00000.parquet": table})
    first = dataset.schema.task_names[0]
    pq.write_table(pa.table({"task": [first], "prediction": [0.5]}), tmp_path / "predictions.parquet")
    with pytest.raises(ValueError, match=r"1 predictions of .* for 30 test rows"):
        teacher_metrics(dataset, tmp_path / "predictions.parquet")


def student_row(ne: float) -> StudentRow:
    return StudentRow(
        ne={"alone": {"click": ne + 0.1, "like": None}, "distilled": {"click": ne, "like": None}},
        auc={"alone": {"click": 0.7}, "distilled": {"click": 0.8}},
        teacher={"click": 0.8, "like": None},
        rows=10,
        auc_torch=0.75,
        auc_onnx=0.75000001,
        pair=0.04,
        served_rows=5,
        served_diff=1e-8,
    )


def test_tables_hold_means_over_seeds_and_leave_out_what_is_not_defined() -> None:
    slice_ = {"auc": 0.7, "gauc": 0.6, "ne": 0.9, "calibration": 1.0}
    other = {**slice_, "auc": 0.8}
    page = results_page(
        {
            "teacher": {0: {"click": {"all": slice_, "1": slice_}}, 1: {"click": {"all": other, "1": other}}},
            "students": {0: {"1": student_row(0.9)}, 1: {"1": student_row(0.8)}},
            "pooled": {0: {"torch": 0.75, "onnx": 0.75}, 1: {"torch": 0.75, "onnx": 0.75000002}},
        }
    )
    assert "| click | 0.7500 ± 0.0707 | 0.6000 ± 0.0000 | 0.9000 ± 0.0000 | 1.0000 ± 0.0000 |" in page
    assert "| 1 | click | 0.9500 ± 0.0707 | 0.8500 ± 0.0707 | 0.1000 ± 0.0000 | 0.8000 ± 0.0000 |" in page
    assert "| 1 | like |" not in page
    assert "| 0 | 1 | 10 | 0.75000000 | 0.75000001 | 1.0e-08 | 4.0e-02 | 5 | 1.0e-08 |" in page
    assert "| 1 | 0.75000000 | 0.75000002 | 2.0e-08 |" in page
