"""Rates of a candidate's earlier impressions against a count by hand."""

from __future__ import annotations

import ibis
import numpy as np
import pyarrow as pa
import pytest

from foundation.data.candidate_rates import HOUR_MS, Outcome, with_rates

DELAY = 48


def test_rates_count_what_was_known_in_time() -> None:
    rng = np.random.default_rng(0)
    rows = 200
    video = rng.integers(0, 5, rows)
    hours, label = rng.integers(0, 300, rows), rng.integers(0, 2, rows)  # several rows at the same time
    missing = np.arange(rows) % 50 == 3
    untold = np.arange(rows) % 7 == 2  # impressions whose label is not there
    like = pa.array(label, mask=untold)
    log = pa.table({"video_id": pa.array(video, mask=missing), "t": hours * HOUR_MS, "like": like, "n": range(rows)})
    connection = ibis.duckdb.connect()
    connection.con.register("impressions", log)
    law = {"like": Outcome(label="like", expected=0.1, strength=5)}
    found = with_rates(connection.table("impressions"), {"video": "video_id"}, law, "t", DELAY)
    built = found.order_by("n").to_pyarrow().to_pylist()
    for i, row in enumerate(built):
        if missing[i]:
            assert row["video_shown"] is None and row["video_like_rate"] is None
            continue
        earlier = (video == video[i]) & ~missing & (hours <= hours[i] - DELAY)
        told = earlier & ~untold
        rate = (label[told].sum() + 0.5) / (told.sum() + 5)
        assert row["video_shown"] == pytest.approx(np.log1p(earlier.sum()))
        assert row["video_like_rate"] == pytest.approx(np.log(rate / (1 - rate)) - np.log(0.1 / 0.9), abs=1e-12)
    assert built[int(hours.argmin())]["video_like_rate"] == pytest.approx(0.0, abs=1e-12)
