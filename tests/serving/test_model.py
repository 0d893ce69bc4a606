"""A folder serves only when everything about it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from serving.errors import Reason, ServingError
from serving.manifest import ModelError
from serving.model import ModelLimits, ServedModel
from tests.serving.model_folder import (
    build_graph,
    direct_scores,
    encoder,
    random_inputs,
    read_manifest,
    write_manifest,
    write_model,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(good: Path) -> ServedModel:
    return ServedModel.load(good, ModelLimits(max_candidates=64, max_requests=4))


@pytest.mark.parametrize(("requests", "rows"), [(1, 0), (1, 1), (1, 40), (3, 17), (4, 64)])
def test_scores_equal_onnxruntime(model: ServedModel, good: Path, requests: int, rows: int) -> None:
    inputs = random_inputs(requests, rows, seed=rows)
    assert model.check(inputs) == rows
    for task, expected in direct_scores(good, inputs).items():
        np.testing.assert_array_equal(model.run(inputs)[task], expected)


def _set(name: str, make: Callable[[np.ndarray], Any]) -> Callable[[dict[str, np.ndarray]], None]:
    def change(inputs: dict[str, np.ndarray]) -> None:
        inputs[name] = make(inputs[name])

    return change


def _put(name: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(inputs: dict[str, np.ndarray]) -> None:
        inputs[name] = inputs[name].copy()
        inputs[name][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("dense.item"), "dense.item: this input is missing"),
        (lambda i: i.update(extra=np.zeros(3)), "extra: is not an input of feed; inputs: user_id"),
        (_set("video_id", lambda a: a.astype(np.int32)), "video_id: expected datatype INT64, got INT32"),
        (_set("video_id", lambda a: a[:, None]), "video_id: expected 1 dims"),
        (_set("video_id", lambda a: a[:-1]), "because video_id has N = 4"),
        (_set("topics", lambda a: a[:, :2]), r"topics: expected dims \['N', 3\], got shape \[5, 2\]"),
        (_set("user_id", lambda a: a[:0]), "because user_id has R = 0"),
        (_put("video_id", (3,), 52), r"video_id\[3\]: 52 is outside 0 .. 51"),
        (_put("video_id", (3,), -1), r"video_id\[3\]: -1 is outside"),
        (_put("topics.length", (0,), 4), r"topics.length\[0\]: 4 is outside 0 .. 3"),
        (_put("request_index", (4,), 2), r"request_index\[4\]: 2 is outside 0 .. 1"),
        (_put("dense.item", (2, 1), np.nan), r"dense.item\[2, 1\]: nan is not a finite number"),
        (_put("watched.age", (0, 0), np.inf), r"watched.age\[0, 0\]: inf is not a finite number"),
    ],
)
def test_inputs_are_checked(model: ServedModel, change: Callable[[dict[str, np.ndarray]], None], message: str) -> None:
    inputs = random_inputs(2, 5)
    change(inputs)
    with pytest.raises(ServingError, match=message) as caught:
        model.check(inputs)
    assert caught.value.reason is Reason.INVALID


@pytest.mark.parametrize(("requests", "rows"), [(1, 65), (5, 5)])
def test_limits(model: ServedModel, requests: int, rows: int) -> None:
    with pytest.raises(ServingError, match="in one call, at most") as caught:
        model.check(random_inputs(requests, rows))
    assert caught.value.reason is Reason.TOO_LARGE


def _edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = read_manifest(folder)
        target = manifest
        *path, last = key.split(".")
        for step in path:
            target = target[step]
        if value is None:
            del target[last]
        else:
            target[last] = value
        write_manifest(folder, manifest)

    return change


def _unlisted(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = read_manifest(folder)
        del manifest["files"][name]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def _cut(name: str, keep: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:keep])

    return change


def _cut_and_sign(name: str, keep: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _cut(name, keep)(folder)
        write_manifest(folder, read_manifest(folder))

    return change


def _other_weights(folder: Path) -> None:
    onnx.save(build_graph(seed=99), folder / "model.onnx")
    write_manifest(folder, read_manifest(folder))


def _renamed_input(folder: Path) -> None:
    graph = onnx.load(folder / "model.onnx")
    text = graph.SerializeToString().replace(b"video_id", b"videoxid")
    (folder / "model.onnx").write_bytes(text)
    write_manifest(folder, read_manifest(folder))


def _other_vocabulary(folder: Path) -> None:
    other = encoder()
    other.vocabularies["video"] = other.vocabularies["video"] + 1
    other.save(folder / "encoder.npz")
    write_manifest(folder, read_manifest(folder))


def _golden(task: str, add: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = read_manifest(folder)
        manifest["golden"]["outputs"][task][2] += add
        write_manifest(folder, manifest)

    return change


def _no_golden_rows(folder: Path) -> None:
    manifest = read_manifest(folder)
    empty = random_inputs(1, 0)
    manifest["golden"]["inputs"] = {name: array.tolist() for name, array in empty.items()}
    manifest["golden"]["outputs"] = {"click": [], "like": []}
    write_manifest(folder, manifest)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "manifest.json").unlink(), "manifest.json: is missing"),
    (_cut("manifest.json", 300), "manifest.json: not JSON, or cut off"),
    (lambda f: (f / "manifest.json").write_text("[]"), "manifest: expected an object"),
    (_edit("format", 2), "format: this server reads format 1, got 2"),
    (_edit("tasks", None), "tasks: is missing"),
    (_edit("tasks", []), "tasks: expected a list of names"),
    (_edit("version", "1"), "version: expected int, got str"),
    (_edit("version", 2), "is for feed/2, but lies in feed/1"),
    (_edit("name", "reels"), "is for reels/1, but lies in feed/1"),
    (_edit("schema_hash", "0" * 16), "schema_hash: is 0000000000000000, the file beside it has"),
    (_edit("encoder_hash", "0" * 16), "encoder_hash: is 0000000000000000"),
    (_edit("value", "click; like"), "value: 'click; like' is not an arithmetic"),
    (_edit("value", "__import__('os')"), "is not allowed in a value expression"),
    (_edit("signature.inputs", []), "signature.inputs: differs from what schema.yaml makes"),
    (_edit("signature.outputs", []), "signature.outputs: must be one per task"),
    (_edit("golden.inputs.video_id", None), "golden.inputs.video_id: is missing"),
    (_edit("golden.inputs.video_id", ["x"]), "golden.inputs.video_id: not an array of int64"),
    (_edit("golden.inputs.topics", [[1], [1, 2]]), "golden.inputs.topics: not an array of int64"),
    (_edit("golden.inputs.video_id", [1]), "golden rows: video_id|golden rows: topics"),
    (_edit("golden.inputs.video_id", [999] * 6), r"golden rows: video_id\[0\]: 999 is outside"),
    (_edit("golden.outputs.click", [0.5]), r"golden rows: click has shape \[6\], expected \[1\]"),
    (_unlisted("model.onnx"), "files.model.onnx: is missing"),
    (lambda f: (f / "model.onnx").unlink(), "model.onnx: is listed in manifest.json but cannot be read"),
    (_cut("model.onnx", 5000), "model.onnx: sha256 is .*, manifest.json says"),
    (_cut("encoder.npz", 500), "encoder.npz: sha256 is"),
    (_cut("schema.yaml", 500), "schema.yaml: sha256 is"),
    (_cut_and_sign("model.onnx", 5000), "model.onnx: onnxruntime cannot load it"),
    (_cut_and_sign("model.onnx", 0), "model.onnx: onnxruntime cannot load it|has no input"),
    (_cut_and_sign("encoder.npz", 500), "encoder.npz: not an encoder file, or a damaged one"),
    (_cut_and_sign("schema.yaml", 500), "schema.yaml: "),
    (lambda f: (f / "model.onnx.data").write_bytes(b"x"), "model.onnx.data: is not listed in manifest.json"),
    (_renamed_input, "has no input 'video_id', which the manifest declares"),
    (_other_vocabulary, "encoder_hash: is"),
    (_other_weights, "golden rows: click differs by .* from the stored scores"),
    (_golden("like", 1e-4), "golden rows: like differs by 1.00e-04"),
    (_golden("like", float("nan")), "golden rows: like differs by nan"),
    (_no_golden_rows, "golden rows: there are none"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[message[:60] for _, message in BROKEN])
def test_a_broken_folder_is_refused_with_the_reason(
    good: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "feed" / "1"))
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        ServedModel.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["../../secret", "a/b", "..", "/etc/passwd"])
def test_listed_files_stay_inside_the_folder(good: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "feed" / "1"))
    manifest = read_manifest(folder)
    manifest["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="must be a plain file name"):
        ServedModel.load(folder)


def test_a_golden_difference_within_the_bound_is_fine(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "feed" / "1"))
    _golden("like", 5e-6)(folder)
    assert ServedModel.load(folder).version == "1"


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"limits.max_candidates: must be at least 1"):
        ModelLimits(max_candidates=0)
    with pytest.raises(ValueError, match=r"limits.providers: 'Magic' is not one of"):
        ModelLimits(providers=("Magic",))
