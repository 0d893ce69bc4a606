"""Counting, and not counting for ever."""

from __future__ import annotations

import numpy as np

from serving.errors import Reason
from serving.metrics import Metrics, Timing

TIMING = Timing(queue=0.001, decode=0.002, compute=0.003, encode=0.004, total=0.0105)


def make() -> Metrics:
    return Metrics(lambda: 3, lambda: 1)


def test_answers_add_up() -> None:
    metrics = make()
    metrics.loaded("feed", "1")
    for _ in range(2):
        metrics.answered("feed", "1", TIMING, 5, {"click": np.full(5, 0.5, np.float32)})
    text = metrics.text().decode()
    for line in (
        'nv_inference_request_success{model="feed",version="1"} 2.0',
        'nv_inference_count{model="feed",version="1"} 10.0',
        'nv_inference_compute_infer_duration_us{model="feed",version="1"} 6000.0',
        'opengem_stage_seconds_sum{model="feed",stage="encode",version="1"} 0.008',
        'opengem_request_seconds_bucket{le="0.015",model="feed",version="1"} 2.0',
        'opengem_request_seconds_bucket{le="0.01",model="feed",version="1"} 0.0',
        'opengem_score_sum_total{model="feed",task="click",version="1"} 5.0',
        'opengem_score_rows_total{model="feed",task="click",version="1"} 10.0',
        "opengem_queue_waiting 3.0",
        "opengem_running 1.0",
    ):
        assert line in text.splitlines()
    assert metrics.totals() == (2, 0)


def test_names_made_up_by_clients_make_no_series() -> None:
    metrics = make()
    for index in range(50):
        metrics.rejected(f"model-{index}", "1", Reason.NOT_FOUND, 0.001)
    text = metrics.text().decode()
    assert 'opengem_requests_rejected_total{model="",reason="not_found",version=""} 50.0' in text
    assert "model-1" not in text


def test_a_version_that_is_gone_leaves_no_series_even_when_it_answers_late() -> None:
    metrics = make()
    metrics.loaded("feed", "1")
    metrics.answered("feed", "1", TIMING, 1, {"click": np.ones(1, np.float32)})
    metrics.rejected("feed", "1", Reason.QUEUE_FULL, 0.0)
    metrics.forget("feed", "1")
    metrics.answered("feed", "1", TIMING, 1, {"click": np.ones(1, np.float32)})
    assert 'version="1"' not in metrics.text().decode()
    assert metrics.statistics() == {} and metrics.totals() == (2, 1)
