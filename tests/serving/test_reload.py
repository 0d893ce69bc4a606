"""Loading, refusing and unloading through the protocol's repository API while requests run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from serving.app import Addresses, ServeConfig, running
from tests.serving.clients import http, infer_inputs
from tests.serving.model_folder import direct_scores, random_inputs, read_manifest, write_manifest, write_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", version=1, seed=1)
    write_model(tmp_path / "next", version=2, seed=2)
    return tmp_path / "models"


@pytest.fixture
def address(root: Path) -> Iterator[Addresses]:
    with running(ServeConfig(models=root, http_port=0, grpc_port=0)) as addresses:
        yield addresses


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, address: Addresses) -> Iterator[Any]:
    module = {"http": triton_http, "grpc": triton_grpc}[request.param]
    made = module.InferenceServerClient(getattr(address, request.param))
    made.module = module
    yield made
    made.close()


def version_of(client: Any) -> str:
    response = client.infer("feed", infer_inputs(client.module, random_inputs(1, 2))).get_response()
    return str(response["model_version"] if isinstance(response, dict) else response.model_version)


def publish(root: Path) -> Path:
    """Version 2 appears under its name in one step, as the exporter does it."""
    return Path(shutil.move(root.parent / "next" / "feed" / "2", root / "feed" / "2"))


def test_a_new_version_serves_after_an_explicit_load_only(client: Any, root: Path) -> None:
    publish(root)
    assert version_of(client) == "1"
    client.load_model("feed")
    assert version_of(client) == "2"
    client.unload_model("feed")
    with pytest.raises(InferenceServerException, match="version 2: unloaded by request"):
        version_of(client)
    assert not client.is_model_ready("feed") and client.is_server_ready()
    client.load_model("feed")
    assert version_of(client) == "2"


def _truncated(folder: Path) -> None:
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: len(content) // 2])


def _truncated_and_signed(folder: Path) -> None:
    _truncated(folder)
    write_manifest(folder, read_manifest(folder))


def _golden(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["golden"]["outputs"]["click"][0] += 0.01
    write_manifest(folder, manifest)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncated, "model.onnx: sha256 is"),
        (_truncated_and_signed, "model.onnx: onnxruntime cannot load it"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: is missing"),
        (_golden, "golden rows: click differs by 1.00e-02"),
    ],
    ids=["sha256", "truncated", "manifest", "golden"],
)
def test_a_bad_version_is_refused_and_the_old_one_goes_on(client: Any, root: Path, damage: Any, reason: str) -> None:
    damage(publish(root))
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("feed")
    assert reason in caught.value.message() and "version 1 goes on serving" in caught.value.message()
    assert caught.value.status() in ("409", "StatusCode.FAILED_PRECONDITION")
    assert version_of(client) == "1"


def test_the_index_and_the_metrics_show_the_refusal(address: Addresses, root: Path) -> None:
    _golden(publish(root))
    assert http(address.http, "POST", "/v2/repository/models/feed/load").status == 409
    index = {e["version"]: e for e in http(address.http, "POST", "/v2/repository/index").json()}
    assert index["1"]["state"] == "READY" and index["2"]["state"] == "UNAVAILABLE"
    assert "golden rows" in index["2"]["reason"]
    ready = http(address.http, "POST", "/v2/repository/index", {"ready": True}).json()
    assert [entry["version"] for entry in ready] == ["1"]
    text = http(address.http, "GET", "/metrics").body.decode()
    assert 'opengem_model_loads_total{model="feed",result="refused"} 1.0' in text


def test_rolling_back_through_rest_and_grpc(address: Addresses, root: Path) -> None:
    publish(root)
    path = "/v2/repository/models/feed/load"
    assert http(address.http, "POST", path).json() == {"name": "feed", "version": "2"}
    rolled = http(address.http, "POST", path, {"parameters": {"version": 1}})
    assert rolled.json() == {"name": "feed", "version": "1"}
    assert http(address.http, "POST", path, {"parameters": {"version": "2"}}).json()["version"] == "2"
    assert http(address.http, "POST", path, {"parameters": {"version": 9}}).status == 404


def test_series_of_replaced_versions_disappear(address: Addresses, root: Path) -> None:
    publish(root)
    http(address.http, "POST", "/v2/repository/models/feed/load")
    assert 'version="1"' not in http(address.http, "GET", "/metrics").body.decode()


def test_no_request_fails_and_no_score_is_mixed_while_versions_swap(address: Addresses, root: Path) -> None:
    publish(root)
    inputs = random_inputs(1, 8)
    expected = {v: direct_scores(root / "feed" / v, inputs)["click"] for v in ("1", "2")}
    stop, faults, seen = threading.Event(), [], set()

    def ask() -> None:
        with triton_http.InferenceServerClient(address.http) as client:
            tensors = infer_inputs(triton_http, inputs)
            while not stop.is_set():
                try:
                    answer = client.infer("feed", tensors)
                    version = answer.get_response()["model_version"]
                    seen.add(version)
                    np.testing.assert_array_equal(answer.as_numpy("click"), expected[version])
                except BaseException as error:
                    faults.append(error)
                    return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in (2, 1, 2, 1, 2):
        body = {"parameters": {"version": version}}
        assert http(address.http, "POST", "/v2/repository/models/feed/load", body).status == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults and seen == {"1", "2"}
