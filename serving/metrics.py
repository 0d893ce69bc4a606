"""What the server counts: per model and version, for Prometheus and for the protocol's ModelStatistics.

Counters whose meaning equals one of NVIDIA Triton's keep its `nv_inference_*` names, so that dashboards made
for Triton work; the rest starts with `opengem_`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.errors import Reason

_MILLISECONDS = (0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 250, 500, 1000)
_SECONDS = tuple(value / 1000 for value in _MILLISECONDS)
_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
STAGES = ("queue", "decode", "compute", "encode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds that one answered request spent in each stage, and from arrival to answer."""

    queue: float
    decode: float
    compute: float
    encode: float
    total: float


@dataclass(slots=True)
class Duration:
    """A number of events and the nanoseconds that they took together."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        """One more event."""
        self.count += 1
        self.ns += int(seconds * 1e9)


@dataclass(slots=True)
class ModelStats:
    """Running totals of one version of a model, in the protocol's terms."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


class Metrics:
    """All metrics of one server, in a registry of its own. Safe to use from several threads.

    Args:
        waiting: gives the number of queued requests. running: gives the number being worked on.
    """

    def __init__(self, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._stats: dict[tuple[str, str], ModelStats] = {}
        self._lock = threading.Lock()
        self._answered = self._refused = 0
        of_model = ("model", "version")
        self._request = self._histogram("opengem_request_seconds", "From arrival to answer", of_model, _SECONDS)
        self._stage = self._histogram(
            "opengem_stage_seconds", "Time in queue, decode, compute, encode", (*of_model, "stage"), _SECONDS
        )
        self._candidates = self._histogram("opengem_candidates", "Candidates of a request", of_model, _SIZES)
        self._rejected = self._counter(
            "opengem_requests_rejected", "Requests that got no scores", (*of_model, "reason")
        )
        self._score_sum = self._counter(
            "opengem_score_sum", "Sum of the probabilities sent, for drift", (*of_model, "task")
        )
        self._score_rows = self._counter("opengem_score_rows", "Number of the probabilities sent", (*of_model, "task"))
        self._repairs = self._counter(
            "opengem_rank_repairs", "Values that /rank filled, dropped or ignored", (*of_model, "kind")
        )
        self._loads = self._counter("opengem_model_loads", "Attempts to load a model version", ("model", "result"))
        self._loaded = Gauge(
            "opengem_model_loaded_timestamp_seconds",
            "When the version was loaded",
            of_model,
            registry=self.registry,
        )
        gauges = (
            ("opengem_queue_waiting", "Requests in the queue", waiting),
            ("opengem_running", "Requests being worked on", running),
        )
        for name, text, read in gauges:
            Gauge(name, text, registry=self.registry).set_function(read)
        self.registry.register(_TritonNames(self))

    def _histogram(self, name: str, text: str, labels: Iterable[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, tuple(labels), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, tuple(labels), registry=self.registry)

    def answered(self, model: str, version: str, timing: Timing, rows: int, outputs: Mapping[str, np.ndarray]) -> None:
        """Counts one answered request: its stages, its candidates, the mean of its scores. A version that was
        unloaded meanwhile is not counted, else its series would come back."""
        with self._lock:
            self._answered += 1
            stats = self._stats.get((model, version))
            if stats is None:
                return
            stats.inference_count += rows
            stats.execution_count += 1
            stats.last_inference_ms = time.time_ns() // 1_000_000
            stats.success.add(timing.total)
            stats.queue.add(timing.queue)
            stats.compute_input.add(timing.decode)
            stats.compute_infer.add(timing.compute)
            stats.compute_output.add(timing.encode)
        self._request.labels(model, version).observe(timing.total)
        for stage in STAGES:
            self._stage.labels(model, version, stage).observe(getattr(timing, stage))
        self._candidates.labels(model, version).observe(rows)
        for task, scores in outputs.items():
            self._score_sum.labels(model, version, task).inc(float(scores.sum(dtype=np.float64)))
            self._score_rows.labels(model, version, task).inc(rows)

    def rejected(self, model: str, version: str, reason: Reason, seconds: float) -> None:
        """Counts one request that got no scores; without model and version where that version is not loaded,
        so that names made up by clients make no series."""
        with self._lock:
            self._refused += 1
            stats = self._stats.get((model, version))
            if stats is not None:
                stats.fail.add(seconds)
        labels = ("", "") if stats is None else (model, version)
        self._rejected.labels(*labels, reason.label).inc()

    def repaired(self, model: str, version: str, kind: str, values: int) -> None:
        """Counts values that `/rank` filled in, dropped or ignored."""
        if values:
            self._repairs.labels(model, version, kind).inc(values)

    def loaded(self, model: str, version: str) -> None:
        """Counts a successful load and starts the statistics of the version."""
        self._loads.labels(model, "loaded").inc()
        self._loaded.labels(model, version).set(time.time())
        with self._lock:
            self._stats.setdefault((model, version), ModelStats())

    def refused(self, model: str) -> None:
        """Counts a load that was refused."""
        self._loads.labels(model, "refused").inc()

    def forget(self, model: str, version: str) -> None:
        """Drops the series of a version that is no longer loaded, so that reloads do not add up for ever."""
        with self._lock:
            self._stats.pop((model, version), None)
        for metric in (
            self._request,
            self._stage,
            self._candidates,
            self._rejected,
            self._score_sum,
            self._score_rows,
            self._repairs,
            self._loaded,
        ):
            metric.remove_by_labels({"model": model, "version": version})

    def statistics(self) -> dict[tuple[str, str], ModelStats]:
        """Running totals by (model, version). The objects are live; read, do not change."""
        with self._lock:
            return dict(self._stats)

    def totals(self) -> tuple[int, int]:
        """Requests answered and refused since the start, of all models, unloaded ones included."""
        with self._lock:
            return self._answered, self._refused

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _TritonNames(Collector):
    """Exposes ModelStats under Triton's names, which lack the `_total` that prometheus-client appends."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        columns: list[tuple[str, str, Callable[[ModelStats], float]]] = [
            ("request_success", "Requests answered", lambda s: s.success.count),
            ("request_failure", "Requests that failed", lambda s: s.fail.count),
            ("count", "Candidates scored", lambda s: s.inference_count),
            ("exec_count", "Model executions", lambda s: s.execution_count),
            ("request_duration_us", "Time of answered requests", lambda s: s.success.ns / 1e3),
            ("queue_duration_us", "Time in the queue", lambda s: s.queue.ns / 1e3),
            ("compute_input_duration_us", "Time decoding inputs", lambda s: s.compute_input.ns / 1e3),
            ("compute_infer_duration_us", "Time in the model", lambda s: s.compute_infer.ns / 1e3),
            ("compute_output_duration_us", "Time encoding outputs", lambda s: s.compute_output.ns / 1e3),
        ]
        statistics = self._metrics.statistics()
        for name, text, read in columns:
            metric = Metric(f"nv_inference_{name}", text, "unknown")
            for (model, version), stats in statistics.items():
                metric.add_sample(metric.name, {"model": model, "version": version}, read(stats))
            yield metric
