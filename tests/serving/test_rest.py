"""REST beyond what tritonclient asks: /rank, /metrics, errors, limits, tokens."""

from __future__ import annotations

import gzip
import socket
import zlib
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from serving.app import Addresses, ServeConfig, running
from serving.rest_api import HttpLimits, decompress
from tests.serving.clients import http
from tests.serving.model_folder import direct_scores, raw_request, write_model
from tests.serving.test_encoder import encode


@pytest.mark.parametrize("rows", [0, 1, 5, 600])
def test_rank_orders_by_value_and_scores_equal_onnxruntime(server: Addresses, models: Path, rows: int) -> None:
    body = raw_request(rows)
    answer = http(server.http, "POST", "/rank", body)
    assert answer.status == 200, answer.body
    result = answer.json()
    assert (result["model"], result["version"]) == ("feed", "2")
    assert result["counts"]["candidates"] == rows and 0 < result["latency_ms"] < 60_000
    inputs = encode({**body, "candidates": body["candidates"][:100]})[0]
    expected = direct_scores(models / "feed" / "2", inputs)
    for entry in result["ranked"]:
        index = entry["index"]
        assert entry["id"] == f"c{index}"
        if index < 100:
            for task, scores in expected.items():
                assert np.float32(entry["probabilities"][task]) == pytest.approx(scores[index], abs=1e-6)
        probabilities = entry["probabilities"]
        assert entry["value"] == pytest.approx(probabilities["click"] + 0.5 * probabilities["like"])
    values = [entry["value"] for entry in result["ranked"]]
    assert values == sorted(values, reverse=True)
    assert [entry["rank"] for entry in result["ranked"]] == list(range(1, rows + 1))
    assert sorted(entry["index"] for entry in result["ranked"]) == list(range(rows))


def test_equal_candidates_keep_their_order(server: Addresses) -> None:
    body = raw_request(1)
    body["candidates"] = [{**body["candidates"][0], "id": i} for i in range(50)]
    ranked = http(server.http, "POST", "/rank", body).json()["ranked"]
    assert [entry["id"] for entry in ranked] == list(range(50))


def test_bids_change_the_order(server: Addresses) -> None:
    body = raw_request(3)
    body["surface"] = "reels"
    for index, candidate in enumerate(body["candidates"]):
        candidate["bid"] = [1, 1000, 10][index]
    result = http(server.http, "POST", "/rank", body).json()
    assert [entry["index"] for entry in result["ranked"]] == [1, 2, 0]
    first = result["ranked"][0]
    assert first["value"] == pytest.approx(1000 * first["probabilities"]["click"], rel=1e-6)


@pytest.mark.parametrize(
    ("bid", "message"),
    [
        (None, "candidates[2].bid: the value 'click * bid' needs a number here, it is missing"),
        ("3", "candidates[2].bid: the value 'click * bid' needs a number here, got '3'"),
        (True, "candidates[2].bid: the value 'click * bid' needs a number here, got True"),
    ],
)
def test_a_bid_that_the_value_needs(server: Addresses, bid: object, message: str) -> None:
    body = raw_request(4)
    for candidate in body["candidates"]:
        candidate["bid"] = 1
    body["candidates"][2]["bid"] = bid
    answer = http(server.http, "POST", "/rank", {**body, "model": "reels"})
    assert (answer.status, answer.json()) == (400, {"error": message, "reason": "invalid"})


def test_model_version_and_surface_choose_the_model(server: Addresses) -> None:
    body = {**raw_request(1), "version": 1}
    assert http(server.http, "POST", "/rank", body).json()["version"] == "1"
    assert http(server.http, "POST", "/rank", {**body, "version": "7"}).status == 404
    assert http(server.http, "POST", "/rank", {**body, "surface": "nope", "version": ""}).status == 404


def test_what_was_repaired_is_in_the_answer_and_the_metrics(server: Addresses) -> None:
    body = raw_request(3)
    del body["candidates"][1]["price"]
    body["candidates"][0]["video_id"] = 999
    counts = http(server.http, "POST", "/rank", body).json()["counts"]
    assert counts["missing"] == {"price": 1} and counts["unknown_ids"] == {"video_id": 1}
    text = http(server.http, "GET", "/metrics").body.decode()
    assert 'opengem_rank_repairs_total{kind="unknown_id",model="feed",version="2"}' in text


def test_unknown_fields_are_refused_by_default_and_can_be_counted(models: Path, server: Addresses) -> None:
    body = raw_request(2)
    body["candidates"][1]["colour"] = "red"
    assert "candidates[1].colour" in http(server.http, "POST", "/rank", body).json()["error"]
    config = ServeConfig(models=models, http_port=0, grpc_port=0, unknown_fields="count")
    with running(config) as lenient:
        answer = http(lenient.http, "POST", "/rank", body)
        assert answer.status == 200 and answer.json()["counts"]["unknown_fields"] == 1


def test_metrics_of_a_model(server: Addresses) -> None:
    http(server.http, "POST", "/rank", raw_request(7))
    answer = http(server.http, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.body.decode()
    for line in (
        'nv_inference_request_success{model="feed",version="2"}',
        'nv_inference_count{model="feed",version="2"}',
        'nv_inference_queue_duration_us{model="feed",version="2"}',
        'opengem_request_seconds_bucket{le="0.05",model="feed",version="2"}',
        'opengem_stage_seconds_count{model="feed",stage="compute",version="2"}',
        'opengem_candidates_bucket{le="8.0",model="feed",version="2"}',
        'opengem_score_rows_total{model="feed",task="click",version="2"}',
        'opengem_model_loaded_timestamp_seconds{model="reels",version="1"}',
        "opengem_queue_waiting 0.0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/v2", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2/models/feed", 200),
        ("GET", "/v2/models/feed/versions/1/stats", 200),
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/feed/versions/x", 400),
        ("GET", "/v2/models/%2e%2e", 404),
        ("GET", "/v2/models/..%2f..%2fetc", 404),
        ("GET", "/nothing", 404),
        ("GET", "/rank", 405),
        ("POST", "/v2/health/live", 405),
        ("DELETE", "/v2/models/feed", 405),
        ("POST", "/v2/repository/index", 200),
        ("POST", "/v2/repository/models/nope/load", 404),
        ("POST", "/v2/repository/models/nope/unload", 404),
    ],
)
def test_paths(server: Addresses, method: str, path: str, status: int) -> None:
    answer = http(server.http, method, path)
    assert answer.status == status, answer.body
    if status >= 400:
        assert answer.json()["error"] and answer.json()["reason"]


@pytest.mark.parametrize(
    "body",
    [
        {"parameters": {"config": "{}"}},
        {"parameters": {"file:1/model.onnx": "AAAA"}},
        {"parameters": {"version": "x"}},
        {"parameters": {"version": -1}},
        {"parameters": []},
        [],
    ],
)
def test_load_takes_a_version_and_nothing_else(server: Addresses, body: object) -> None:
    answer = http(server.http, "POST", "/v2/repository/models/feed/load", body)
    assert (answer.status, answer.json()["reason"]) == (400, "invalid")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_web_pages_cannot_change_models(server: Addresses, action: str) -> None:
    path = f"/v2/repository/models/feed/{action}"
    answer = http(server.http, "POST", path, headers={"Origin": "http://elsewhere.example"})
    assert (answer.status, answer.json()["reason"]) == (403, "forbidden")
    assert http(server.http, "GET", "/v2/models/feed/ready").status == 200


class TestLimits:
    @pytest.fixture(scope="class")
    def small(self, models: Path) -> object:
        limits = HttpLimits(max_body_bytes=20_000, max_json_bytes=4_000, read_seconds=1.0)
        with running(ServeConfig(models=models, http_port=0, grpc_port=0, http=limits)) as addresses:
            yield addresses

    def test_a_declared_length_is_enough_to_refuse(self, small: Addresses) -> None:
        answer = http(small.http, "POST", "/rank", b"x" * 4_001)
        assert (answer.status, answer.json()["reason"]) == (413, "too_large")

    def test_a_chunked_body_is_cut_at_the_limit(self, small: Addresses) -> None:
        host, port = small.http.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /rank HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.sendall(b"1001\r\n" + b" " * 0x1001 + b"\r\n")
            assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]

    def test_json_tensors_have_the_smaller_limit(self, small: Addresses) -> None:
        answer = http(small.http, "POST", "/v2/models/feed/infer", b" " * 5_000)
        assert answer.status == 413 and "binary_data" in answer.json()["error"]

    def test_a_slow_body_times_out(self, small: Addresses) -> None:
        host, port = small.http.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /rank HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]

    def test_a_small_body_that_unpacks_to_a_large_one(self, small: Addresses) -> None:
        bomb = gzip.compress(b" " * 10_000_000)
        answer = http(small.http, "POST", "/v2/models/feed/infer", bomb, {"Content-Encoding": "gzip"})
        assert answer.status == 413

    def test_grpc_messages_have_the_same_limit(self, small: Addresses) -> None:
        with triton_grpc.InferenceServerClient(small.grpc) as client:
            tensor = triton_grpc.InferInput("x", [30_000], "INT8")
            tensor.set_data_from_numpy(np.zeros(30_000, np.int8))
            with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
                client.infer("feed", [tensor])


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (b"x", "br", "Content-Encoding: must be gzip or deflate, got 'br'"),
        (b"xxxx", "gzip", "body: not valid gzip"),
        (gzip.compress(b"abc", mtime=0)[:-4], "gzip", "cut off or has something behind it"),
        (gzip.compress(b"abc", mtime=0) + b"x", "gzip", "cut off or has something behind it"),
        (zlib.compress(b"abc" * 99), "deflate", "larger than the 100 bytes"),
    ],
)
def test_damaged_compression(body: bytes, encoding: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        decompress(body, encoding, 100)


def test_a_token_guards_everything_but_health(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    (tmp_path / "token").write_text("s3cret\n")
    config = ServeConfig(models=tmp_path / "models", http_port=0, grpc_port=0, token_file=tmp_path / "token")
    good = {"Authorization": "Bearer s3cret"}
    with running(config) as server:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/feed/ready"):
            assert http(server.http, "GET", path).status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for method, path in (("POST", "/rank"), ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/v2/models/feed")):
                answer = http(server.http, method, path, headers=headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert http(server.http, "POST", "/rank", raw_request(2), good).status == 200
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
                client.get_model_metadata("feed")
            client.get_model_metadata("feed", headers={"authorization": "Bearer s3cret"})


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_token_file_must_hold_a_token(models: Path, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with (
        pytest.raises(ValueError, match="token_file: "),
        running(ServeConfig(models=models, http_port=0, grpc_port=0, token_file=path)),
    ):
        pass
