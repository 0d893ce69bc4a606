"""Whatever a client sends, it gets an answer that blames it, and the server lives on."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.app import Addresses
from tests.serving.clients import http, infer_inputs
from tests.serving.model_folder import random_inputs, raw_request

LENIENT = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# 504: the fuzz may ask for a deadline that has passed.
BLAMED = {400, 404, 409, 413, 504}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64 - 1, 1e38, 1e300, -0.0, "", "click", "\0", "\ud7ff", "1"]),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def post(address: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Sends the body; checks that an error is in the right form; the status."""
    answer = http(address, "POST", path, body, headers)
    if answer.status != 200:
        assert answer.status in BLAMED, (answer.status, answer.body)
        error = answer.json()
        assert error["error"] and error["reason"] and len(error["error"]) < 2000
    return answer.status


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A valid body in which one to three places are replaced, removed or added to."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        target = body
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(target[key], dict | list) and draw(st.booleans()):
                target = target[key]
                continue
            action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
            if action == "replace":
                target[key] = draw(values)
            elif action == "remove":
                del target[key]
            elif isinstance(target, dict):
                target[draw(st.text(max_size=6))] = draw(values)
            else:
                target.append(draw(values))
            break
    return body


@LENIENT
@given(body=changed(raw_request(3)))
def test_rank_with_changed_bodies(server: Addresses, body: Any) -> None:
    post(server.http, "/rank", json.dumps(body).encode())


@LENIENT
@given(body=values | st.fixed_dictionaries({"surface": st.just("feed"), "candidates": values, "user": values}))
def test_rank_with_any_json(server: Addresses, body: Any) -> None:
    post(server.http, "/rank", json.dumps(body).encode())


def json_infer() -> dict[str, Any]:
    return {
        "id": "1",
        "parameters": {"timeout": 1_000_000, "binary_data_output": False},
        "inputs": [
            {
                "name": name,
                "datatype": {"int64": "INT64", "float32": "FP32"}[str(array.dtype)],
                "shape": list(array.shape),
                "data": array.tolist(),
            }
            for name, array in random_inputs(1, 3).items()
        ],
        "outputs": [{"name": "click", "parameters": {"binary_data": False}}],
    }


def test_the_unchanged_bodies_are_valid(server: Addresses) -> None:
    assert post(server.http, "/rank", json.dumps(raw_request(3)).encode()) == 200
    assert post(server.http, "/v2/models/feed/infer", json.dumps(json_infer()).encode()) == 200
    body, length = binary_infer()
    assert post(server.http, "/v2/models/feed/infer", body, {"Inference-Header-Content-Length": length}) == 200


@LENIENT
@given(body=changed(json_infer()))
def test_infer_with_changed_json(server: Addresses, body: Any) -> None:
    post(server.http, "/v2/models/feed/infer", json.dumps(body).encode())


def binary_infer() -> tuple[bytes, str]:
    tensors = infer_inputs(triton_http, random_inputs(1, 3))
    body, length = triton_http.InferenceServerClient.generate_request_body(tensors)
    return body, str(length)


@LENIENT
@given(data=st.data())
def test_infer_with_damaged_binary(server: Addresses, data: st.DataObject) -> None:
    body, length = binary_infer()
    position = data.draw(st.integers(0, len(body) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "insert", "header", "numbers"]))
    if damage == "cut":
        body = body[:position]
    elif damage == "flip":
        body = body[:position] + bytes([body[position] ^ (1 << position % 8)]) + body[position + 1 :]
    elif damage == "insert":
        body = body[:position] + data.draw(st.binary(max_size=20)) + body[position:]
    elif damage == "header":
        length = data.draw(st.sampled_from(["0", "-1", str(len(body)), str(10**30), "x", str(position)]))
    else:
        position = data.draw(st.integers(int(length), len(body) - 8))
        body = body[:position] + struct.pack("<q", data.draw(st.integers(-(2**63), 2**63 - 1))) + body[position + 8 :]
    post(server.http, "/v2/models/feed/infer", body, {"Inference-Header-Content-Length": length})


@LENIENT
@given(body=st.binary(max_size=200), encoding=st.sampled_from(["identity", "gzip", "deflate", "br", ""]))
def test_any_bytes_at_any_door(server: Addresses, body: bytes, encoding: str) -> None:
    for path in ("/rank", "/v2/models/feed/infer", "/v2/repository/models/nope/load"):
        assert post(server.http, path, body, {"Content-Encoding": encoding}) != 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"surface":"feed","candidates":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"surface":"feed","candidates":[{"video_id":' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"surface":"feed","candidates":[{"video_id":1e400}]}',
        b'{"surface":"feed","candidates":[{"price":NaN,"video_id":100}]}',
        b'{"surface":"feed","candidates":[{"video_id":' + b"9" * 5000 + b"}]}",
        b'{"surface":"' + b"a" * 100_000 + b'","candidates":[]}',
        b'{"surface":"feed","candidates":[{"' + b"k" * 100_000 + b'":1,"video_id":100}]}',
        b'{"surface":"feed","user":{"user_id":"' + b"x" * 100_000 + b'"},"candidates":[3]}',
        b'{"inputs":[{"name":"user_id","datatype":"INT64","shape":[9223372036854775807],"data":[]}]}',
        b'{"inputs":[{"name":"user_id","datatype":"INT64","shape":[0,0,0,0,0,0,0,0],"data":[]}]}',
    ],
    ids=lambda body: body[:40].decode(),
)
def test_extreme_bodies(server: Addresses, body: bytes) -> None:
    for path in ("/rank", "/v2/models/feed/infer"):
        assert post(server.http, path, body) != 200


@LENIENT
@given(data=st.data())
def test_grpc_with_changed_messages(server: Addresses, data: st.DataObject) -> None:
    request = service_pb2.ModelInferRequest(model_name="feed")
    for tensor in infer_inputs(triton_grpc, random_inputs(1, 3)):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    index = data.draw(st.integers(0, len(request.inputs) - 1))
    entry = request.inputs[index]
    damage = data.draw(
        st.sampled_from(["name", "datatype", "shape", "raw", "extra", "contents", "version", "output", "timeout"])
    )
    if damage == "name":
        entry.name = data.draw(st.text(max_size=10))
    elif damage == "datatype":
        entry.datatype = data.draw(st.sampled_from(["", "BYTES", "BF16", "FP16", "INT32", "BOOL", "int64", "X"]))
    elif damage == "shape":
        del entry.shape[:]
        entry.shape.extend(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10)))
    elif damage == "raw":
        request.raw_input_contents[index] = data.draw(st.binary(max_size=64))
    elif damage == "extra":
        request.raw_input_contents.append(b"")
    elif damage == "contents":
        if data.draw(st.booleans()):
            del request.raw_input_contents[:]
        entry.contents.fp64_contents.extend([1.0, float("nan")])
    elif damage == "version":
        request.model_version = data.draw(st.text(max_size=5))
    elif damage == "output":
        request.outputs.add(name=data.draw(st.text(max_size=5)))
    else:
        request.parameters["timeout"].int64_param = data.draw(st.integers(-(2**63), 100_000))
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=30)
        except grpc.RpcError as error:
            assert error.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ), error
            assert error.details()
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live


@pytest.mark.parametrize(
    ("field", "values_", "datatype", "message"),
    [
        ("int64_contents", [100], "INT64", None),
        ("int_contents", [100], "INT64", "datatype INT64 takes int64_contents, got int_contents"),
        ("fp32_contents", [1.0], "INT64", "datatype INT64 takes int64_contents, got fp32_contents"),
        ("int_contents", [300], "INT8", "a value is outside INT8"),
        ("bytes_contents", [b"a"], "BYTES", "expected datatype INT64, got BYTES"),
        ("fp32_contents", [1.0], "FP16", "datatype FP16 takes raw_input_contents, got fp32_contents"),
    ],
)
def test_grpc_typed_contents(
    server: Addresses, field: str, values_: list[Any], datatype: str, message: str | None
) -> None:
    request = service_pb2.ModelInferRequest(model_name="feed")
    for name, array in random_inputs(1, 1).items():
        kind = "INT64" if array.dtype == np.int64 else "FP32"
        tensor = request.inputs.add(name=name, datatype=kind, shape=array.shape)
        contents = tensor.contents.int64_contents if kind == "INT64" else tensor.contents.fp32_contents
        contents.extend(array.reshape(-1).tolist())
    changed_one = next(t for t in request.inputs if t.name == "user_id")
    changed_one.datatype = datatype
    changed_one.contents.Clear()
    getattr(changed_one.contents, field).extend(values_)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if message is None:
            assert len(stub.ModelInfer(request).raw_output_contents) == 2
            return
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert f"user_id: {message}" in caught.value.details()
        assert dict(caught.value.trailing_metadata())["reason"] == "invalid"
