"""The examples of docs/serving.md run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from serving.app import Addresses
from serving.errors import Reason
from tests.serving.clients import http

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_tritonclient_example(server: Addresses, models: Path, protocol: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("models/feed/1", str(models / "feed" / "2"))
    code = code.replace("127.0.0.1:8000", getattr(server, protocol))
    assert "timeout=50_000" in code
    code = code.replace("timeout=50_000", "timeout=20_000_000")  # a busy machine may miss 50 ms
    if protocol == "grpc":
        code = code.replace("tritonclient.http", "tritonclient.grpc")
        code = code.replace('get_model_metadata("feed")', 'get_model_metadata("feed", as_json=True)')
        code = code.replace("array.shape, spec", "list(array.shape), spec")
    exec(compile(code, "docs/serving.md", "exec"), {})


def test_the_rank_example(server: Addresses) -> None:
    (body,) = re.findall(r"/rank -d '(.*?)'", PAGE, re.DOTALL)
    answer = http(server.http, "POST", "/rank", {**json.loads(body), "deadline_ms": 20_000})
    assert answer.status == 200, answer.body
    (shown,) = re.findall(r"The answer:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert set(re.findall(r'"(\w+)":', shown)) - {"click", "like", "image"} == {
        *answer.json(),
        *answer.json()["ranked"][0],
        *answer.json()["counts"],
    }


def test_every_reason_is_in_the_table() -> None:
    for reason in Reason:
        if reason in (Reason.METHOD, Reason.CANCELLED, Reason.INTERNAL):
            continue  # nobody needs to act on these by name
        row = next(line for line in PAGE.splitlines() if f"`{reason.label}`" in line and line.startswith("|"))
        assert f"| {reason.http} |" in row
        assert reason.grpc in row or reason is Reason.SLOW_BODY


def test_paths_of_the_table_exist(server: Addresses) -> None:
    for path in ("/v2/models/feed/config", "/v2/models/feed/versions/2/stats", "/v2/models/stats", "/metrics"):
        assert http(server.http, "GET", path).status == 200
