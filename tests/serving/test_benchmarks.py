"""The benchmark's requests are valid, and its counts add up; how fast it is, is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.benchmarks.load import APIS, LoadConfig, load
from serving.benchmarks.requests import rank_request
from serving.encoder import Counts, RankRequest
from serving.model import ServedModel


@pytest.mark.parametrize("name", ["feed", "reels"])
def test_rank_requests_fill_every_field_with_known_values(models: Path, name: str) -> None:
    model = ServedModel.load(models / name / "1")
    counts = Counts()
    body = rank_request(model, 20)
    model.request_encoder.encode(RankRequest.parse(body, 100), counts, reject_unknown=True)
    assert counts == Counts()
    assert all(field in candidate for field in model.value.fields for candidate in body["candidates"])


@pytest.mark.parametrize("api", APIS)
def test_every_request_is_accounted_for(models: Path, api: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = LoadConfig(
        models=models, model="feed", api=api, candidates=8, rates=(40.0,), seconds=0.5, budget_ms=20_000
    )
    (result,) = load(config)
    assert result.sent == 20 == sum(result.codes.values())
    assert result.codes == {"OK": 20} and result.in_budget == 20
    assert "the model alone, one thread:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api": "soap"}, "api: must be one of rank, rest, grpc"),
        ({"seconds": 600}, "seconds: must be above 0 and at most 60"),
        ({"rates": ()}, "rates: must be"),
        ({"rates": (1e9,)}, "rates: must be"),
        ({"budget_ms": 0}, "budget_ms: must be above 0"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadConfig(models=Path(), model="feed", **options)
