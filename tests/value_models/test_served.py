"""An exported value model behind the real server scores what PyTorch scores, through every door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from serving.app import Addresses, ServeConfig, running
from serving.benchmarks.requests import rank_request
from serving.encoder import Counts, RankRequest
from serving.model import ServedModel
from tests.serving.clients import http, infer_inputs
from value_models.export import ExportResult, torch_scorer
from value_models.parity import random_inputs
from value_models.student import Student


@pytest.fixture(scope="module")
def server(exported: ExportResult) -> Iterator[Addresses]:
    with running(ServeConfig(models=exported.path.parents[1], http_port=0, grpc_port=0)) as addresses:
        yield addresses


@pytest.mark.parametrize(("requests", "rows"), [(1, 0), (1, 1), (1, 300), (7, 60)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors(student: Student, server: Addresses, protocol: str, requests: int, rows: int) -> None:
    module: Any = {"http": triton_http, "grpc": triton_grpc}[protocol]
    rng = np.random.default_rng(rows)
    inputs = random_inputs(student.schema, student.encoder.table_rows, rng, requests, rows)
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        answer = client.infer("feed", infer_inputs(module, inputs))
    found = np.stack([answer.as_numpy(task) for task in student.schema.task_names], axis=1)
    np.testing.assert_allclose(found, torch_scorer(student.calibrated())(inputs), rtol=0, atol=1e-5)


def test_raw_values(student: Student, exported: ExportResult, server: Addresses) -> None:
    model = ServedModel.load(exported.path)
    body = rank_request(model, 40)
    result = http(server.http, "POST", "/rank", body).json()
    encoded = model.request_encoder.encode(RankRequest.parse(body, 100), Counts(), reject_unknown=True)
    expected = torch_scorer(student.calibrated())(encoded)
    assert len(result["ranked"]) == 40
    for entry in result["ranked"]:
        click, conversion = expected[entry["index"]].tolist()
        assert entry["probabilities"] == pytest.approx({"click": click, "conversion": conversion}, abs=1e-5)
        assert entry["value"] == pytest.approx(click * (1 + conversion), abs=3e-5)
