"""Match statistics against a loop over events."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.encoding import NO_TIME, EncodedBatch
from foundation.model.match import MatchConfig, MatchStatistics
from tests.foundation.model.batches import encoded_batch, make_batch, model_schema

SIZES = [3, 0, 2, 1, 2]
CONFIG = MatchConfig(
    sequences=("watched",), outcomes={"watched.action": 0.3}, recent=(1, 3), windows_hours=(1.0, 24.0), decay=0.5
)


def loop(encoded: EncodedBatch, n: int) -> list[float]:
    """The statistics of one impression, in order."""
    r = int(encoded.request_index[n])
    lengths = encoded.request.lengths["watched.item"]
    span = slice(lengths[:r].sum(), lengths[: r + 1].sum())
    ids = {a: encoded.request.ids[f"watched.{a}"][span] for a in ("item", "author", "action")}
    seconds = [
        math.inf if t == NO_TIME else max(0, encoded.request_time[r] - t) / 1000
        for t in encoded.request.times["watched"][span]
    ]
    events = range(len(seconds))
    compared = [
        list(events),
        [e for e in events if ids["item"][e] == encoded.item.ids["item_id"][n] > 1],
        [e for e in events if ids["author"][e] == encoded.item.ids["author_id"][n] > 1],
    ]
    out = []
    for among in compared:
        known = sum(seconds[e] < math.inf for e in among)
        out += [math.log1p(known), math.log1p(len(among) - known)]
    for among in compared:
        out.append(math.log1p(sum(ids["action"][e] in (2, 3) for e in among)))
    for among in compared:
        seen, hits = (sum(ids["action"][e] in wanted for e in among) for wanted in ((2, 3), (3,)))
        out.append(2 * (hits + 2 * 0.3) / (seen + 2) - 1)
    seen_weight = sum(0.5 ** (len(seconds) - 1 - e) * (ids["action"][e] in (2, 3)) for e in events)
    hit_weight = sum(0.5 ** (len(seconds) - 1 - e) * (ids["action"][e] == 3) for e in events)
    out.append(2 * (hit_weight - 0.3 * seen_weight) / (seen_weight + 0.5))
    for place in (1, 3):
        there = place <= len(seconds) and seconds[-place] < math.inf
        out.append((math.log1p(seconds[-place]) if there else 14.0) / 5 - 2)
    for hours in (1, 24):
        out.append(math.log1p(sum(s < hours * 3600 for s in seconds)) - 1)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_equals_a_loop(seed: int) -> None:
    schema = model_schema()
    encoded = encoded_batch(
        schema,
        SIZES,
        seed=seed,
        table_rows=dict.fromkeys(("user", "item", "author", "topic", "action", "interest", "hour"), 6),
    )
    match = MatchStatistics(CONFIG, schema)
    out = match(Batch.from_encoded(encoded, schema))
    assert out.dtype == torch.float32
    assert out.shape == (8, match.width)
    for n in range(8):
        np.testing.assert_allclose(out[n].numpy(), loop(encoded, n), rtol=1e-5, atol=1e-5)


def test_features_of_the_context_are_compared_too() -> None:
    raw: dict[str, Any] = model_schema().to_dict()
    raw["features"]["place"] = {"side": "context", "kind": "categorical", "table": "author"}
    schema = model_schema(features=raw["features"])
    assert [p[1:] for p in MatchStatistics(CONFIG, schema).plans[0].pairs] == [
        ("item_id", True),
        ("author_id", True),
        ("place", False),
    ]
    encoded = encoded_batch(schema, [2], histories=[4])
    encoded.request.ids["place"][:] = 7
    encoded.request.ids["watched.author"][:] = [7, 5, 7, 7]
    encoded.request.times["watched"][:] = encoded.request_time[0] - 1000
    out = MatchStatistics(CONFIG, schema)(Batch.from_encoded(encoded, schema))
    assert out[:, 6].tolist() == pytest.approx([math.log1p(3)] * 2)


def test_a_sequence_without_times_and_an_empty_batch() -> None:
    schema = model_schema()
    match = MatchStatistics(MatchConfig(sequences=("bought", "watched")), schema)
    for sizes in ([], SIZES):
        out = match(make_batch(schema, sizes))
        assert out.shape == (sum(sizes), match.width)
        assert torch.isfinite(out).all()
    assert MatchStatistics(MatchConfig(), schema).width == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": ("seen",)}, "match.sequences: no sequence 'seen'; known: watched, bought"),
        (
            {"sequences": ("watched",), "outcomes": {"watched.item": 0.5}},
            "watched.item: its table item must be of kind",
        ),
        ({"sequences": ("watched",), "outcomes": {"watched.click": 0.5}}, "watched.click: no such attribute"),
        ({"outcomes": {"watched.action": 0.5}}, "its sequence is not among"),
        ({"sequences": ("watched",), "outcomes": {"watched.action": 0.0}}, "between 0 and 1"),
        ({"prior_events": 0}, "match.prior_events"),
        ({"recent": (0,)}, "match.recent"),
        ({"windows_hours": (0.0,)}, "match.windows_hours"),
        ({"decay": 0.0}, "match.decay"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatchStatistics(MatchConfig(**options), model_schema())
