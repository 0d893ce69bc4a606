from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from foundation.data.encoding import model_signature
from tests.value_models import tiny
from value_models import export as export_module
from value_models.export import ExportConfig, ExportResult, Session, export, next_version, torch_scorer
from value_models.manifest import ManifestError, check_name, read_manifest
from value_models.parity import Case, ParityError, check_parity, parity_cases, random_inputs
from value_models.student import Student, StudentError, load_student


def test_exported_scores_equal_the_model(student: Student, exported: ExportResult) -> None:
    session, reference = Session(exported.path / "model.onnx"), torch_scorer(student.calibrated())
    rng = np.random.default_rng(7)
    for requests, impressions in [(1, 0), (1, 1), (1, 700), (9, 40), (30, 2)]:
        inputs = random_inputs(student.schema, student.encoder.table_rows, rng, requests, impressions)
        np.testing.assert_allclose(session(inputs), reference(inputs), rtol=0, atol=1e-5)
    assert exported.max_abs_diff <= 1e-5


def test_the_cases_hold_every_corner(student: Student, exported: ExportResult) -> None:
    cases = parity_cases(student.schema, student.encoder.table_rows, student.sample)
    sizes = {(len(c.inputs["user_id"]), len(c.inputs["request_index"])) for c in cases}
    assert {(1, 0), (1, 1), (1, 300), (5, 37), (4, 0), (6, 20)} <= sizes
    by_name = {c.name: c.inputs for c in cases}
    assert not by_name["empty lists and histories"]["watched.length"].any()
    assert (by_name["full lists and histories"]["watched.length"] == 6).all()
    assert (by_name["unseen ids"]["item_id"] == 1).all()
    assert (by_name["ids past the table"]["item_id"] >= 30).all()
    parity = read_manifest(exported.path)["parity"]
    assert [c["name"] for c in parity["cases"]] == [c.name for c in cases]
    assert parity["max_abs_diff"] == max(c["max_abs_diff"] for c in parity["cases"])


def test_names_types_and_shapes_are_the_signature(exported: ExportResult) -> None:
    session = onnxruntime.InferenceSession(str(exported.path / "model.onnx"))
    kinds = {"tensor(int64)": "int64", "tensor(float)": "float32"}
    found = [(i.name, kinds[i.type], tuple(i.shape)) for i in session.get_inputs()]
    assert found == [(s.name, s.dtype, s.dims) for s in model_signature(tiny.schema())]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [("click", ["N"]), ("conversion", ["N"])]


def test_lookups_are_gathers(exported: ExportResult) -> None:
    graph = onnx.load(exported.path / "model.onnx").graph
    operators = {node.op_type for node in graph.node}
    assert "Gather" in operators
    assert not operators & {"Loop", "If", "Scan", "NonZero", "ScatterElements", "ScatterND"}


def test_manifest_is_whole(student: Student, exported: ExportResult) -> None:
    manifest = read_manifest(exported.path)
    assert (manifest["name"], manifest["version"], manifest["surface"]) == ("feed", 1, "feed")
    assert manifest["schema_hash"] == student.schema.hash and manifest["encoder_hash"] == student.encoder.hash
    assert manifest["value"] == "click * (1 + conversion)" and manifest["tasks"] == ["click", "conversion"]
    assert set(manifest["files"]) == {p.name for p in exported.path.iterdir()} - {"manifest.json"}
    assert manifest["calibration"] == json.loads(json.dumps(student.calibration.to_dict()))


def test_golden_rows_give_their_scores(exported: ExportResult) -> None:
    golden = read_manifest(exported.path)["golden"]
    dtypes = {s.name: s.dtype for s in model_signature(tiny.schema())}
    inputs = {name: np.array(value, dtypes[name]) for name, value in golden["inputs"].items()}
    assert len(inputs["user_id"]) == 2 and len(inputs["request_index"]) == 8
    scores = Session(exported.path / "model.onnx")(inputs)
    for k, name in enumerate(["click", "conversion"]):
        np.testing.assert_array_equal(scores[:, k], np.array(golden["outputs"][name], np.float32))


def test_triton_reads_the_configuration(exported: ExportResult) -> None:
    config = model_config_pb2.ModelConfig()
    text_format.Parse((exported.path.parent / "config.pbtxt").read_text(), config)
    assert (config.name, config.backend, config.max_batch_size) == ("feed", "onnxruntime", 0)
    assert [(i.name, list(i.dims)) for i in config.input] == [
        (s.name, [d if isinstance(d, int) else -1 for d in s.dims]) for s in model_signature(tiny.schema())
    ]
    assert {i.data_type for i in config.input} == {model_config_pb2.TYPE_INT64, model_config_pb2.TYPE_FP32}
    assert [o.name for o in config.output] == ["click", "conversion"]


def tamper(path: Path) -> None:
    """Adds 0.01 to one weight of the graph, the bias of the task heads."""
    model = onnx.load(path)
    weight = next(i for i in model.graph.initializer if "heads.bias" in i.name)
    values = onnx.numpy_helper.to_array(weight) + np.float32(0.01)
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, path)


def test_the_gate_refuses_a_graph_that_differs(
    student_folder: Path, exported: ExportResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(student: Student, path: Path, config: ExportConfig) -> None:
        shutil.copy(exported.path / "model.onnx", path)
        tamper(path)

    monkeypatch.setattr(export_module, "write_onnx", broken)
    with pytest.raises(ParityError, match=r"case 'real rows': scores differ by"):
        export(ExportConfig(student=student_folder, out=tmp_path / "models"))
    assert not (tmp_path / "models").exists()


def test_the_gate_refuses_wrong_shapes_nan_and_crashes() -> None:
    case = [Case(name="one", inputs={"request_index": np.zeros(2, np.int64)})]
    good = np.full((2, 1), 0.5, np.float32)

    def crash(_: object) -> np.ndarray:
        raise RuntimeError("no such operator")

    for exported_scores, message in (
        (lambda _: good[:1], "shape"),
        (lambda _: np.full((2, 1), np.nan, np.float32), "not finite"),
        (crash, "no such operator"),
        (lambda _: good + np.float32(2e-5), "differ by"),
    ):
        with pytest.raises(ParityError, match=f"case 'one'.*{message}"):
            check_parity(lambda _: good, exported_scores, case)
    assert check_parity(lambda _: good, lambda _: good + np.float32(5e-6), case).max_abs_diff > 0


def reuse_graph(monkeypatch: pytest.MonkeyPatch, exported: ExportResult) -> None:
    """Spares the trace where only the folders matter."""
    monkeypatch.setattr(
        export_module, "write_onnx", lambda student, path, config: shutil.copy(exported.path / "model.onnx", path)
    )


def test_versions_count_up(
    student_folder: Path, exported: ExportResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse_graph(monkeypatch, exported)
    (tmp_path / "feed" / "4.tmp-host-1").mkdir(parents=True)
    results = [export(ExportConfig(student=student_folder, out=tmp_path)) for _ in range(2)]
    assert [r.version for r in results] == [1, 2]
    assert export(ExportConfig(student=student_folder, out=tmp_path, version=7)).version == 7
    assert next_version(tmp_path / "feed") == 8
    with pytest.raises(FileExistsError, match="7"):
        export(ExportConfig(student=student_folder, out=tmp_path, version=7))
    assert read_manifest(results[1].path)["version"] == 2


def test_large_weights_go_beside_the_graph(
    student_folder: Path, traced: tuple[ExportResult, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: traced[1])
    result = export(ExportConfig(student=student_folder, out=tmp_path, external_data_bytes=0))
    manifest = read_manifest(result.path)
    assert manifest["files"]["model.onnx.data"]["bytes"] > 1000
    moved = tmp_path / "elsewhere"
    shutil.move(result.path, moved)
    golden = manifest["golden"]
    dtypes = {s.name: s.dtype for s in model_signature(tiny.schema())}
    scores = Session(moved / "model.onnx")({n: np.array(v, dtypes[n]) for n, v in golden["inputs"].items()})
    np.testing.assert_array_equal(scores[:, 0], np.array(golden["outputs"]["click"], np.float32))


@pytest.mark.parametrize("file", ["model.onnx", "schema.yaml", "encoder.npz"])
@pytest.mark.parametrize("fault", ["flip", "cut", "remove"])
def test_changed_files_are_noticed(exported: ExportResult, tmp_path: Path, file: str, fault: str) -> None:
    folder = tmp_path / "1"
    shutil.copytree(exported.path, folder)
    damage(folder / file, fault)
    with pytest.raises(ManifestError, match=file):
        read_manifest(folder)


def damage(path: Path, fault: str) -> None:
    content = bytearray(path.read_bytes())
    if fault == "remove":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2, "signature": {}}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_student_round_trip(student: Student, student_folder: Path) -> None:
    loaded = load_student(student_folder)
    np.testing.assert_array_equal(
        torch_scorer(loaded.calibrated())(loaded.sample), torch_scorer(student.calibrated())(student.sample)
    )
    assert loaded.surface == "feed" and loaded.manifest["seed"] == 0 and loaded.model.config == student.model.config


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "calibration.json", "metrics.json", "schema.yaml", "encoder.npz", "sample.npz"],
)
@pytest.mark.parametrize("fault", ["flip", "cut", "remove"])
def test_a_corrupt_student_is_refused(student_folder: Path, tmp_path: Path, file: str, fault: str) -> None:
    folder = tmp_path / "student"
    shutil.copytree(student_folder, folder)
    damage(folder / file, fault)
    with pytest.raises(StudentError, match=file):
        export(ExportConfig(student=folder, out=tmp_path / "models"))
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (7, r"manifest\.model: expected dict, got int"),
        ({"hidden": 7}, r"model: .*hidden"),
        ({"dropout": None}, r"model: dropout: expected a value, got null"),
        ({"id_dropout": "x"}, r"model: .*id_dropout"),
        ({"init_std": -1.0}, r"model: init_std must not be negative"),
        ({"depth": 2}, r"model: .*depth"),
    ],
)
def test_a_damaged_config_of_a_student_is_named(student_folder: Path, tmp_path: Path, model: Any, message: str) -> None:
    folder = tmp_path / "student"
    shutil.copytree(student_folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = manifest["model"] | model if isinstance(model, dict) else model
    (folder / "manifest.json").write_text(json.dumps(manifest | {"model": changed}))
    with pytest.raises(StudentError, match=rf"manifest\.json: damaged; {message}"):
        load_student(folder)


def test_a_student_of_another_schema_is_refused(student_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "student"
    shutil.copytree(student_folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_hash": "0" * 16}))
    with pytest.raises(StudentError, match="schema_hash"):
        load_student(folder)
    with pytest.raises(StudentError, match="not a student folder"):
        load_student(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "a" * 201])
def test_names_that_are_no_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        check_name(name)


@pytest.mark.parametrize("value", ["abs(click)", "click * conversion +", "bid", "click if bid else 0"])
def test_a_value_that_the_server_would_refuse_is_not_exported(tmp_path: Path, student_folder: Path, value: str) -> None:
    with pytest.raises(ValueError, match=r"^value: "):
        export(ExportConfig(student=student_folder, out=tmp_path / "models", value=value))
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"version": 0}, "version"),
        ({"opset": 11}, "opset"),
        ({"golden_requests": 0}, "golden"),
        ({"tolerance": 0}, "tol"),
    ],
)
def test_config_errors_name_the_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ExportConfig(student=Path("s"), out=Path("o"), **values)  # type: ignore[arg-type]
