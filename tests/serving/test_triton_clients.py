"""The real tritonclient, all four flavours, against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from serving.app import Addresses
from tests.serving.clients import infer_inputs
from tests.serving.model_folder import direct_scores, random_inputs

SIZES = [(1, 0), (1, 1), (1, 7), (3, 40), (1, 600)]


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Any]:
    module = {"http": triton_http, "grpc": triton_grpc}[request.param]
    made = module.InferenceServerClient(getattr(server, request.param))
    yield made
    made.close()


def module_of(client: Any) -> Any:
    return triton_http if type(client).__module__.startswith("tritonclient.http") else triton_grpc


def plain(answer: Any) -> Any:
    """A gRPC message or the JSON of REST, as plain values with the same keys."""
    if isinstance(answer, dict | list):
        return answer
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(answer, preserving_proto_field_name=True)


@pytest.mark.parametrize(("requests", "rows"), SIZES)
def test_scores_equal_onnxruntime(client: Any, models: Path, requests: int, rows: int) -> None:
    inputs = random_inputs(requests, rows, seed=rows)
    answer = client.infer("feed", infer_inputs(module_of(client), inputs), request_id="abc")
    response = plain(answer.get_response())
    assert (response["model_name"], response["model_version"], response["id"]) == ("feed", "2", "abc")
    for task, expected in direct_scores(models / "feed" / "2", inputs).items():
        np.testing.assert_array_equal(answer.as_numpy(task), expected)


@pytest.mark.parametrize("version", ["1", "2"])
def test_versions_answer_for_themselves(client: Any, models: Path, version: str) -> None:
    inputs = random_inputs(1, 5)
    answer = client.infer("feed", infer_inputs(module_of(client), inputs), model_version=version)
    expected = direct_scores(models / "feed" / version, inputs)["click"]
    np.testing.assert_array_equal(answer.as_numpy("click"), expected)
    assert plain(answer.get_response())["model_version"] == version


def test_only_the_outputs_asked_for_come_back(client: Any) -> None:
    module = module_of(client)
    tensors = infer_inputs(module, random_inputs(1, 3))
    answer = client.infer("feed", tensors, outputs=[module.InferRequestedOutput("like")])
    assert answer.as_numpy("like").shape == (3,) and answer.as_numpy("click") is None


def test_http_without_binary_data(server: Addresses, models: Path) -> None:
    inputs = random_inputs(2, 9)
    with triton_http.InferenceServerClient(server.http) as client:
        tensors = infer_inputs(triton_http, inputs, binary_data=False)
        outputs = [triton_http.InferRequestedOutput("click", binary_data=False)]
        answer = client.infer("feed", tensors, outputs=outputs)
    expected = direct_scores(models / "feed" / "2", inputs)["click"]
    np.testing.assert_array_equal(answer.as_numpy("click"), expected)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_compression(server: Addresses, models: Path, algorithm: str) -> None:
    inputs = random_inputs(1, 9)
    with triton_http.InferenceServerClient(server.http) as client:
        answer = client.infer(
            "feed",
            infer_inputs(triton_http, inputs),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    expected = direct_scores(models / "feed" / "2", inputs)["click"]
    np.testing.assert_array_equal(answer.as_numpy("click"), expected)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("feed") and client.is_model_ready("feed", "1")
    assert not client.is_model_ready("feed", "9") and not client.is_model_ready("nope")
    server = plain(client.get_server_metadata())
    assert server["name"] == "opengem"
    assert server["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "schedule_policy",
        "statistics",
    ]
    metadata = plain(client.get_model_metadata("feed"))
    assert metadata["versions"] == ["2", "1"] and metadata["platform"] == "onnxruntime_onnx"
    shapes = {t["name"]: (t["datatype"], [int(d) for d in t["shape"]]) for t in metadata["inputs"]}
    assert shapes["topics"] == ("INT64", [-1, 3]) and shapes["watched.age"] == ("FP32", [-1, 5])
    assert [t["name"] for t in metadata["outputs"]] == ["click", "like"]


def test_configuration(client: Any) -> None:
    answer = plain(client.get_model_config("feed"))
    config = answer.get("config", answer)
    assert config["backend"] == "onnxruntime" and config["name"] == "feed"
    entry = next(t for t in config["input"] if t["name"] == "topics")
    dims = json.loads(config["parameters"]["dims"]["string_value"])
    assert (dims["user_id"], dims["topics"]) == (["R"], ["N", 3])
    assert entry["data_type"] == "TYPE_INT64" and [int(d) for d in entry["dims"]] == [-1, 3]


def test_index_and_statistics(client: Any) -> None:
    index = plain(client.get_model_repository_index())
    models = index if isinstance(index, list) else index["models"]
    assert [(m["name"], m["version"], m["state"]) for m in models] == [
        ("feed", "1", "READY"),
        ("feed", "2", "READY"),
        ("reels", "1", "READY"),
    ]
    client.infer("reels", infer_inputs(module_of(client), random_inputs(1, 4)))
    (stats,) = plain(client.get_inference_statistics("reels"))["model_stats"]
    assert int(stats["execution_count"]) >= 1 and int(stats["inference_count"]) >= 4
    assert int(stats["inference_stats"]["success"]["count"]) == int(stats["execution_count"])
    assert len(plain(client.get_inference_statistics())["model_stats"]) == 3


@pytest.mark.parametrize(
    ("model", "version", "change", "code", "message"),
    [
        ("nope", "", {}, ("404", "NOT_FOUND"), "there is no model 'nope'; models: feed, reels"),
        ("feed", "9", {}, ("404", "NOT_FOUND"), "has no version 9; loaded: 2, 1"),
        ("feed", "x", {}, ("400", "INVALID_ARGUMENT"), "version: expected a number"),
        ("feed", "", {"video_id": None}, ("400", "INVALID_ARGUMENT"), "video_id: this input is missing"),
        (
            "feed",
            "",
            {"video_id": np.zeros(3, np.int32)},
            ("400", "INVALID_ARGUMENT"),
            "video_id: expected datatype INT64, got INT32",
        ),
        (
            "feed",
            "",
            {"dense.item": np.full((3, 3), np.nan, np.float32)},
            ("400", "INVALID_ARGUMENT"),
            "dense.item[0, 0]: nan is not a finite number",
        ),
        ("feed", "", {"extra": np.zeros(3)}, ("400", "INVALID_ARGUMENT"), "extra: is not an input of feed"),
        (
            "feed",
            "",
            {"extra": np.array([b"a"], object)},
            ("400", "INVALID_ARGUMENT"),
            "extra: is not an input of feed",
        ),
        ("feed", "", 601, ("413", "RESOURCE_EXHAUSTED"), "601 candidates in one call, at most 600"),
    ],
)
def test_errors_have_codes_and_name_the_field(
    client: Any, model: str, version: str, change: Any, code: tuple[str, str], message: str
) -> None:
    inputs: dict[str, Any] = random_inputs(1, change if isinstance(change, int) else 3)
    if isinstance(change, dict):
        inputs |= change
    tensors = infer_inputs(module_of(client), {k: v for k, v in inputs.items() if v is not None})
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, tensors, model_version=version)
    assert message in caught.value.message()
    assert caught.value.status().removeprefix("StatusCode.") in code
    assert client.is_server_live()


def test_unknown_output(client: Any) -> None:
    module = module_of(client)
    with pytest.raises(InferenceServerException, match="outputs: 'buy' is not one of click, like"):
        client.infer(
            "feed",
            infer_inputs(module, random_inputs(1, 3)),
            outputs=[module.InferRequestedOutput("buy")],
        )


def test_what_is_not_built_says_so(server: Addresses) -> None:
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            client.get_trace_settings()
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            client.get_system_shared_memory_status()


def test_aio_twins(server: Addresses, models: Path) -> None:
    inputs = random_inputs(1, 20)
    expected = direct_scores(models / "feed" / "2", inputs)["click"]

    async def ask(module: Any, sync_module: Any, address: str) -> None:
        async with module.InferenceServerClient(address) as client:
            assert await client.is_server_ready() and await client.is_model_ready("feed")
            tensors = infer_inputs(sync_module, inputs)
            answers = await asyncio.gather(*(client.infer("feed", tensors) for _ in range(20)))
            for answer in answers:
                np.testing.assert_array_equal(answer.as_numpy("click"), expected)
            with pytest.raises(InferenceServerException, match="there is no model"):
                await client.infer("nope", tensors)

    asyncio.run(ask(triton_http_aio, triton_http, server.http))
    asyncio.run(ask(triton_grpc_aio, triton_grpc, server.grpc))


def test_http_async_infer(server: Addresses) -> None:
    with triton_http.InferenceServerClient(server.http, concurrency=4) as client:
        tensors = infer_inputs(triton_http, random_inputs(1, 5))
        pending = [client.async_infer("feed", tensors) for _ in range(12)]
        assert all(p.get_result().as_numpy("click").shape == (5,) for p in pending)
