"""Writes small, complete model folders with onnx.helper: every feature kind, no training, no torch.

`python -m tests.serving.model_folder DIR` writes one for trying the server by hand.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from foundation.data.encoding import Encoder, TensorSpec, model_signature
from foundation.data.schema import Schema

TASKS = ("click", "like")
DIM = 4
SCHEMA: dict[str, Any] = {
    "name": "tiny",
    "user": "user_id",
    "impression_id": "impression_id",
    "request_id": "request_id",
    "timestamp": {"column": "time_ms"},
    "surface": {"column": "tab", "values": ["feed", "reels"]},
    "tables": {
        "user": {"kind": "hash", "rows": 1000, "dim": DIM},
        "video": {"kind": "vocabulary", "dim": DIM},
        "topic": {"kind": "vocabulary", "dim": DIM},
        "action": {"kind": "range", "rows": 6, "dim": DIM},
        "tab": {"kind": "vocabulary", "dim": DIM},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "age": {"side": "user", "kind": "dense", "transform": "standardize"},
        "tab": {"side": "context", "kind": "categorical", "table": "tab"},
        "video_id": {"side": "item", "kind": "categorical", "table": "video", "nullable": False},
        "topics": {
            "side": "item",
            "kind": "multi",
            "table": "topic",
            "max_length": 3,
            "weights": "topic_weights",
        },
        "price": {"side": "item", "kind": "dense", "transform": "log1p"},
        "image": {"side": "item", "kind": "embedding", "dim": 2},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time",
            "max_length": 5,
            "attributes": {
                "item": {"column": "watched_item", "table": "video"},
                "action": {"column": "watched_action", "table": "action"},
            },
        }
    },
    "tasks": {"click": {"label": "click"}, "like": {"label": "like"}},
}


def schema() -> Schema:
    """The schema of all folders written here."""
    return Schema.from_dict(SCHEMA, "tests")


def encoder() -> Encoder:
    """Videos 100..149, topics a..h, the two surfaces."""
    vocabularies = {
        "video": np.arange(100, 150, dtype=np.int64),
        "topic": np.array(list("abcdefgh")),
        "tab": np.array(["feed", "reels"]),
    }
    return Encoder(schema(), vocabularies, {"age": (40.0, 10.0)}, {"user": "integer"})


def random_inputs(requests: int, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Valid model inputs for R requests and N candidates."""
    random = np.random.default_rng(seed)
    table_rows = encoder().table_rows
    tables = {f.name: f.table for f in schema().features if f.table}
    tables |= {s.key(a.name): a.table for s in schema().sequences for a in s.attributes}
    inputs = {}
    for spec in model_signature(schema()):
        shape = [{"R": requests, "N": rows}.get(dim, dim) for dim in spec.dims]  # type: ignore[call-overload]
        if spec.name == "request_index":
            inputs[spec.name] = np.sort(random.integers(0, requests, rows))
        elif spec.name.endswith(".length"):
            inputs[spec.name] = random.integers(0, 4, shape)
        elif spec.dtype == "int64":
            inputs[spec.name] = random.integers(0, table_rows[str(tables[spec.name])], shape)
        else:
            inputs[spec.name] = random.random(shape, dtype=np.float32)
    return inputs


def write_model(
    root: Path,
    name: str = "feed",
    version: int = 1,
    *,
    seed: int = 0,
    value: str = "click + 0.5 * like",
    repeat: int = 1,
    surface: str | None = None,
) -> Path:
    """Writes `root/name/version`, whole and valid; another seed gives other scores.

    Args:
        repeat: useless matrix products behind the scores, to make the model slow.
    """
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    onnx.save(build_graph(seed, repeat), folder / "model.onnx")
    schema().save(folder / "schema.yaml")
    encoder().save(folder / "encoder.npz")
    golden = random_inputs(2, 6, seed=1)
    scores = direct_scores(folder, golden)
    signature = model_signature(schema())
    manifest = {
        "format": 1,
        "name": name,
        "version": version,
        "schema_hash": schema().hash,
        "encoder_hash": encoder().hash,
        "tasks": list(TASKS),
        "surface": surface or name,
        "value": value,
        "signature": {
            "inputs": [_spec(spec) for spec in signature],
            "outputs": [{"name": task, "dtype": "float32", "dims": ["N"]} for task in TASKS],
        },
        "golden": {
            "inputs": {key: array.tolist() for key, array in golden.items()},
            "outputs": {key: array.tolist() for key, array in scores.items()},
        },
    }
    write_manifest(folder, manifest)
    return folder


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest.json` with the sha256 of the files that are there now."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json":
            content = path.read_bytes()
            files[path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as plain values."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def direct_scores(folder: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What onnxruntime itself says, without the server."""
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return dict(zip(TASKS, session.run(list(TASKS), inputs), strict=True))


def raw_request(rows: int, seed: int = 0) -> dict[str, Any]:
    """A valid `/rank` body, without the model's name."""
    random = np.random.default_rng(seed)
    return {
        "surface": "feed",
        "time_ms": 1_700_000_000_000,
        "user": {"user_id": 7, "age": 33},
        "history": {
            "watched": [{"item": 100 + i, "action": i % 4, "time_ms": 1_699_999_000_000 + 1000 * i} for i in range(3)]
        },
        "candidates": [
            {
                "id": f"c{i}",
                "video_id": int(random.integers(100, 150)),
                "topics": ["a", "b"],
                "topic_weights": [0.5, 1.0],
                "price": float(random.random() * 9),
                "image": [0.1, float(random.random())],
            }
            for i in range(rows)
        ],
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "dims": list(spec.dims)}


class _Graph:
    """Collects nodes and initialisers."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def constant(self, array: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def random_weight(self, *shape: int) -> str:
        return self.constant(self.random.normal(0, 0.5, shape).astype(np.float32))

    def masked_sum(self, embedded: str, lengths: str, width: int, weights: str | None = None) -> str:
        """Sum over the first `length` of `width` positions: `[rows, width, D]` -> `[rows, D]`."""
        positions = self.constant(np.arange(width, dtype=np.int64)[None])
        column = self.add("Unsqueeze", lengths, self.constant(np.array([1])))
        mask = self.add("Cast", self.add("Less", positions, column), to=TensorProto.FLOAT)
        if weights is not None:
            mask = self.add("Mul", mask, weights)
        wide = self.add("Unsqueeze", mask, self.constant(np.array([2])))
        product = self.add("Mul", embedded, wide)
        return self.add("ReduceSum", product, self.constant(np.array([1])), keepdims=0)


def build_graph(seed: int, repeat: int = 1) -> onnx.ModelProto:
    """Sums of embeddings and projections of each side, added per candidate, then one sigmoid per task."""
    graph = _Graph(seed)
    rows = encoder().table_rows
    tables = {name: graph.random_weight(count, DIM) for name, count in rows.items()}
    sides: dict[str, list[str]] = {"R": [], "N": []}
    for f in schema().features:
        side = sides["N" if f.side == "item" else "R"]
        if f.kind == "categorical":
            side.append(graph.add("Gather", tables[str(f.table)], f.name))
        elif f.kind == "multi":
            embedded = graph.add("Gather", tables[str(f.table)], f.name)
            side.append(graph.masked_sum(embedded, f"{f.name}.length", f.max_length, f"{f.name}.weight"))
    for s in schema().sequences:
        for a in s.attributes:
            embedded = graph.add("Gather", tables[a.table], s.key(a.name))
            sides["R"].append(graph.masked_sum(embedded, f"{s.name}.length", s.max_length, f"{s.name}.age"))
    signature = model_signature(schema())
    for spec in signature:
        if spec.name.startswith("dense."):
            projection = graph.random_weight(int(spec.dims[1]), DIM)
            sides[str(spec.dims[0])].append(graph.add("MatMul", spec.name, projection))
    user = graph.add("Gather", graph.add("Sum", *sides["R"]), "request_index")
    hidden = graph.add("Tanh", graph.add("Add", user, graph.add("Sum", *sides["N"])))
    for _ in range(repeat - 1):
        wide = graph.add("Relu", graph.add("MatMul", hidden, graph.random_weight(DIM, 512)))
        hidden = graph.add("Tanh", graph.add("MatMul", wide, graph.random_weight(512, DIM)))
    for task in TASKS:
        logits = graph.add("MatMul", hidden, graph.random_weight(DIM))
        graph.nodes.append(helper.make_node("Sigmoid", [logits], [task]))
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(s.name, types[s.dtype], list(s.dims)) for s in signature]
    outputs = [helper.make_tensor_value_info(task, TensorProto.FLOAT, ["N"]) for task in TASKS]
    built = helper.make_graph(graph.nodes, "value_model", inputs, outputs, graph.weights)
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    return model


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])))
