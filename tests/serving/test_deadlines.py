"""Deadlines, overload and clients that leave, against a live server whose model the tests can hold."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from serving.app import Addresses, ServeConfig, running
from serving.model import ServedModel
from serving.rest_api import HttpLimits
from serving.service import SchedulingConfig
from tests.serving.clients import Answer, http, infer_inputs
from tests.serving.model_folder import random_inputs, raw_request, write_model


class Held:
    """A server with one worker and a queue of two, whose model waits while `gate` is closed."""

    def __init__(self, addresses: Addresses, gate: threading.Event) -> None:
        self.addresses = addresses
        self.gate = gate
        self.pool = ThreadPoolExecutor(8)

    def rank(self, **extra: Any) -> Any:
        return self.pool.submit(http, self.addresses.http, "POST", "/rank", {**raw_request(2), **extra})

    def value(self, pattern: str) -> float:
        text = http(self.addresses.http, "GET", "/metrics").body.decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(pattern, line))

    def wait_for(self, pattern: str, value: float) -> None:
        end = time.monotonic() + 60
        while self.value(pattern) != value:
            assert time.monotonic() < end, (pattern, value, self.value(pattern))
            time.sleep(0.01)

    def rejected(self, reason: str) -> float:
        return self.value(rf'opengem_requests_rejected_total{{.*reason="{reason}"')


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    write_model(tmp_path)
    gate = threading.Event()
    gate.set()
    original = ServedModel.run

    def run(self: ServedModel, inputs: Any) -> Any:
        gate.wait(240)
        return original(self, inputs)

    monkeypatch.setattr(ServedModel, "run", run)
    config = ServeConfig(
        models=tmp_path,
        http_port=0,
        grpc_port=0,
        scheduling=SchedulingConfig(workers=1, queue=2, default_deadline_ms=30_000),
        http=HttpLimits(max_in_flight=6),
    )
    with running(config) as addresses:
        gate.clear()
        made = Held(addresses, gate)
        yield made
        gate.set()
        made.pool.shutdown()


def status_and_reason(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json()["reason"]


def test_a_request_without_time_left_is_not_admitted(held: Held) -> None:
    assert status_and_reason(held.rank(deadline_ms=0).result()) == (504, "deadline_admit")
    assert held.rejected("deadline_admit") == 1


def test_the_answer_comes_at_the_deadline_even_while_the_model_runs(held: Held) -> None:
    begun = time.monotonic()
    assert status_and_reason(held.rank(deadline_ms=600).result()) == (504, "deadline_response")
    assert 0.59 < time.monotonic() - begun < 60
    assert held.rejected("deadline_response") == 1


def test_a_request_that_expires_in_the_queue_is_never_scored(held: Held) -> None:
    first = held.rank()
    held.wait_for("opengem_running", 1)
    assert status_and_reason(held.rank(deadline_ms=500).result()) == (504, "deadline_queue")
    held.gate.set()
    assert first.result().status == 200
    held.wait_for("opengem_queue_waiting", 0)
    assert held.value("nv_inference_exec_count") == 1 and held.rejected("deadline_queue") == 1


def test_overload_is_shed_at_once(held: Held) -> None:
    first = held.rank()
    held.wait_for("opengem_running", 1)
    waiting = [held.rank(), held.rank()]
    held.wait_for("opengem_queue_waiting", 2)
    begun = time.monotonic()
    answer = held.rank().result()
    assert status_and_reason(answer) == (429, "queue_full") and answer.headers["retry-after"] == "1"
    assert time.monotonic() - begun < 60  # although the model is still held
    with triton_grpc.InferenceServerClient(held.addresses.grpc) as client:
        with pytest.raises(InferenceServerException, match=r"RESOURCE_EXHAUSTED.*the queue is full"):
            client.infer("feed", infer_inputs(triton_grpc, random_inputs(1, 2)))
        assert client.is_server_live() and client.is_server_ready()  # probes do not queue
    held.gate.set()
    assert [future.result().status for future in (first, *waiting)] == [200, 200, 200]
    assert held.rejected("queue_full") == 2


def test_requests_in_flight_are_bounded_before_their_bodies_are_read(held: Held) -> None:
    host, port = held.addresses.http.split(":")
    open_ones = []
    for _ in range(6):
        connection = HTTPConnection(host, int(port), timeout=120)
        connection.putrequest("POST", "/rank")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        open_ones.append(connection)
    end = time.monotonic() + 60
    while (answer := held.rank(deadline_ms=1).result()).status != 429:
        assert time.monotonic() < end
    assert "6 requests are in flight" in answer.json()["error"]
    for connection in open_ones:
        connection.close()
    end = time.monotonic() + 60
    while held.rank(deadline_ms=1).result().status == 429:
        assert time.monotonic() < end
    held.wait_for('opengem_requests_rejected_total{.*reason="cancelled"', 6)


def test_a_client_that_leaves_frees_its_place(held: Held) -> None:
    first = held.rank()
    held.wait_for("opengem_running", 1)
    host, port = held.addresses.http.split(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    connection.request("POST", "/v2/models/feed/infer", *_binary_body())
    held.wait_for("opengem_queue_waiting", 1)
    connection.close()
    held.wait_for('opengem_requests_rejected_total{.*reason="cancelled"', 1)
    held.gate.set()
    assert first.result().status == 200
    held.wait_for("opengem_queue_waiting", 0)
    assert held.value("nv_inference_exec_count") == 1


def _binary_body() -> tuple[bytes, dict[str, str]]:
    tensors = infer_inputs(triton_http, random_inputs(1, 2))
    body, length = triton_http.InferenceServerClient.generate_request_body(tensors)
    return body, {"Inference-Header-Content-Length": str(length)}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_timeout_parameter_is_a_deadline(held: Held, protocol: str) -> None:
    module = {"http": triton_http, "grpc": triton_grpc}[protocol]
    address = getattr(held.addresses, protocol)
    with module.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("feed", infer_inputs(module, random_inputs(1, 2)), timeout=500_000)
    assert caught.value.status() in ("504", "StatusCode.DEADLINE_EXCEEDED")
    assert "the deadline passed while the request was being scored" in caught.value.message()


def test_the_deadline_of_a_grpc_call_reaches_the_queue(held: Held) -> None:
    first = held.rank()
    held.wait_for("opengem_running", 1)
    with (
        triton_grpc.InferenceServerClient(held.addresses.grpc) as client,
        pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"),
    ):
        client.infer("feed", infer_inputs(triton_grpc, random_inputs(1, 2)), client_timeout=0.2)
    pattern = 'opengem_requests_rejected_total{.*reason="(cancelled|deadline_queue)"'
    held.wait_for(pattern, 1)
    held.gate.set()
    assert first.result().status == 200
    held.wait_for("opengem_queue_waiting", 0)
    assert held.value("nv_inference_exec_count") == 1


def test_shutting_down_finishes_what_was_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    entered, gate = threading.Event(), threading.Event()
    gate.set()
    original = ServedModel.run

    def run(self: ServedModel, inputs: Any) -> Any:
        entered.set()
        gate.wait(240)
        return original(self, inputs)

    monkeypatch.setattr(ServedModel, "run", run)
    config = ServeConfig(models=tmp_path, http_port=0, grpc_port=0, drain_seconds=30)
    config_pool = ThreadPoolExecutor(1)
    with running(config) as addresses:
        gate.clear()
        entered.clear()
        body = {**raw_request(2), "deadline_ms": 30_000}
        answer = config_pool.submit(http, addresses.http, "POST", "/rank", body)
        assert entered.wait(60)
        threading.Timer(0.3, gate.set).start()  # the block below this line is the shutdown
    assert answer.result().status == 200
    with pytest.raises(OSError):
        http(addresses.http, "GET", "/v2/health/live")
