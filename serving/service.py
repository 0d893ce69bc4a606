"""What the server does, whatever the protocol: both APIs call this and only translate.

A request is admitted by the scheduler before it is decoded. A worker thread then decodes, checks, scores and
encodes it, so that the event loop only moves bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from foundation.data.encoding import TensorSpec
from serving.codec import InferRequest, datatype_of
from serving.encoder import RankRequest
from serving.errors import Reason, ServingError, invalid
from serving.manifest import MODEL
from serving.metrics import Metrics, ModelStats, Timing
from serving.model import ModelLimits, ServedModel
from serving.ranking import RankJob
from serving.repository import IndexEntry, Repository
from serving.scheduler import Scheduler

log = logging.getLogger("opengem.serving")
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "schedule_policy", "statistics")
"""Extensions of the protocol that are implemented, as the server's metadata lists them."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingConfig:
    """How requests wait.

    Args:
        workers: threads that score; 0 = one less than the cores this process may use, at least 1.
        queue: requests that may wait; one more is refused at once (429).
        default_deadline_ms: time a request has when it names none.
        max_deadline_ms: the most it may name; a longer one is cut to this.
    """

    workers: int = 0
    queue: int = 64
    default_deadline_ms: float = 1000.0
    max_deadline_ms: float = 60_000.0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"scheduling.workers: must not be negative, got {self.workers}")
        if self.queue < 1:
            raise ValueError(f"scheduling.queue: must be at least 1, got {self.queue}")
        if not 0 < self.default_deadline_ms <= self.max_deadline_ms:
            raise ValueError(
                "scheduling.default_deadline_ms: must be above 0 and at most max_deadline_ms "
                f"({self.max_deadline_ms}), got {self.default_deadline_ms}"
            )


def usable_cores() -> int:
    """Cores that this process may run on, where the system tells; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Service:
    """The running server without its network side.

    Args:
        root: the models folder.
        scheduling: workers, queue, deadlines.
        limits: rows per call, execution providers.
        keep_versions: versions of a model that stay loaded.
        reject_unknown: a field of `/rank` that the model does not know is an error; else it is counted.
    """

    def __init__(
        self,
        root: Path,
        scheduling: SchedulingConfig,
        limits: ModelLimits,
        keep_versions: int,
        reject_unknown: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = scheduling
        self.limits = limits
        self.clock = clock
        self.reject_unknown = reject_unknown
        self.metrics = Metrics(lambda: self.scheduler.waiting, lambda: self.scheduler.running)
        self.repository = Repository(
            root,
            lambda folder: ServedModel.load(folder, limits),
            keep_versions,
            on_load=lambda model: self.metrics.loaded(model.name, model.version),
            on_unload=lambda model: self.metrics.forget(model.name, model.version),
        )
        self.workers = scheduling.workers or max(1, usable_cores() - 1)
        self.scheduler = Scheduler(self.workers, scheduling.queue, clock)
        self.ready = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="serving-loader")

    def deadline(self, arrived: float, budget_ms: float | None) -> float:
        """The moment until which a request that arrived at `arrived` may be answered."""
        milliseconds = self.config.default_deadline_ms if budget_ms is None else budget_ms
        return arrived + min(milliseconds, self.config.max_deadline_ms) / 1e3

    async def infer(
        self,
        name: str,
        version: str,
        deadline: float,
        arrived: float,
        request: InferRequest,
        encode: Callable[[ServedModel, Mapping[str, np.ndarray]], T],
    ) -> T:
        """Scores tensors.

        Args:
            deadline, arrived: moments on the service's clock.
            request: what was asked, tensors not decoded yet.
            encode: makes the answer from the outputs asked for; runs on a worker.

        Raises:
            ServingError: see `serving.errors`; every one is counted.
        """
        with _Counting(self, name, version, arrived) as counted:
            model = counted.model = self.repository.get(name, version)
            for output in request.outputs:
                if output not in model.manifest.tasks:
                    raise invalid(f"outputs: {output!r} is not one of {', '.join(model.manifest.tasks)}")
            wanted = tuple(request.outputs) or model.manifest.tasks

            def finish(scores: Mapping[str, np.ndarray]) -> T:
                return encode(model, {task: scores[task] for task in wanted})

            return await self._score(model, deadline, arrived, request.decode, finish)

    async def rank(self, request: RankRequest, deadline: float, arrived: float) -> bytes:
        """Answers `/rank` with JSON bytes. Raises ServingError, every one counted."""
        with _Counting(self, request.model or request.surface, request.version, arrived) as counted:
            if request.model:
                model = self.repository.get(request.model, request.version)
            else:
                model = self.repository.of_surface(request.surface)
                if request.version:
                    model = self.repository.get(model.name, request.version)
            counted.model = model
            job = RankJob(model, request, self.reject_unknown)

            def finish(scores: Mapping[str, np.ndarray]) -> bytes:
                for kind, values in job.counts.totals().items():
                    self.metrics.repaired(model.name, model.version, kind, values)
                return job.finish(scores, self.clock() - arrived)

            return await self._score(model, deadline, arrived, job.prepare, finish)

    async def _score(
        self,
        model: ServedModel,
        deadline: float,
        arrived: float,
        prepare: Callable[[], Mapping[str, np.ndarray]],
        finish: Callable[[Mapping[str, np.ndarray]], T],
    ) -> T:
        clock = self.clock

        def work(waited: float) -> tuple[T, Timing, int, Mapping[str, np.ndarray]]:
            begun = clock()
            inputs = prepare()
            rows = model.check(inputs)
            decoded = clock()
            scores = model.run(inputs)
            computed = clock()
            answer = finish(scores)
            encoded = clock()
            timing = Timing(
                queue=waited,
                decode=decoded - begun,
                compute=computed - decoded,
                encode=encoded - computed,
                total=encoded - arrived,
            )
            return answer, timing, rows, scores

        future = self.scheduler.submit(f"{model.name}/{model.version}", deadline, work)
        answer, timing, rows, scores = await self._wait(future, deadline)
        self.metrics.answered(model.name, model.version, timing, rows, scores)
        return answer

    async def _wait(self, future: Future[Any], deadline: float) -> Any:
        """The result, or an error at the deadline at the latest, even while the worker is still busy."""
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=max(0.0, deadline - self.clock()))
        except asyncio.CancelledError:  # the client went away: a queued job is dropped at dequeue
            future.cancel()
            raise
        if done:
            return waiter.result()
        if future.cancel():
            raise ServingError(Reason.DEADLINE_QUEUE, "the deadline passed while the request was in the queue")
        waiter.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody else reads it
        raise ServingError(Reason.DEADLINE_RESPONSE, "the deadline passed while the request was being scored")

    def count(self, error: ServingError) -> None:
        """Counts the refusal of a scoring request, unless it has been counted."""
        if not error.counted:
            error.counted = True
            self.metrics.rejected("", "", error.reason, 0.0)

    async def load(self, name: str, version: int | None = None) -> ServedModel:
        """Loads on the loader's thread, see :meth:`Repository.load`."""
        try:
            model = await self._on_loader(lambda: self.repository.load(name, version))
        except ServingError as error:
            if error.reason is Reason.MODEL_REFUSED:
                self.metrics.refused(name)
            log.warning("load %s: %s", name, error)
            raise
        log.info("loaded %s version %s", model.name, model.version)
        return model

    async def unload(self, name: str) -> None:
        """Unloads all versions of a model."""
        await self._on_loader(lambda: self.repository.unload(name))
        log.info("unloaded %s", name)

    async def index(self) -> list[IndexEntry]:
        """See :meth:`Repository.index`."""
        return await self._on_loader(self.repository.index)

    async def _on_loader(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, call)

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """ModelMetadata of the protocol, as plain values; a dim that varies is -1."""
        model = self.repository.get(name, version)
        return {
            "name": model.name,
            "versions": [m.version for m in self.repository.all_loaded() if m.name == model.name],
            "platform": "onnxruntime_onnx",
            "inputs": [_tensor(spec) for spec in model.manifest.inputs],
            "outputs": [_tensor(spec) for spec in model.manifest.outputs],
        }

    def model_config(self, name: str, version: str) -> dict[str, Any]:
        """ModelConfig of the protocol, as plain values. The parameter `dims` tells R from N, which the -1 of the
        protocol's dims does not."""
        model = self.repository.get(name, version)
        dims = {spec.name: list(spec.dims) for spec in model.manifest.inputs}
        return {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": 0,
            "input": [_config_tensor(spec) for spec in model.manifest.inputs],
            "output": [_config_tensor(spec) for spec in model.manifest.outputs],
            "default_model_filename": MODEL,
            "parameters": {"dims": {"string_value": json.dumps(dims)}},
        }

    def statistics(self, name: str, version: str) -> list[tuple[str, str, ModelStats]]:
        """Running totals of the loaded versions that match; an empty name or version matches all."""
        if name:
            self.repository.get(name, version)
        return [
            (model, number, stats)
            for (model, number), stats in sorted(self.metrics.statistics().items())
            if name in ("", model) and version in ("", number)
        ]

    def close(self, drain_seconds: float) -> None:
        """Stops admission, lets admitted requests finish, ends the threads."""
        self.ready = False
        self.scheduler.close(drain_seconds)
        self._loader.shutdown(wait=False, cancel_futures=True)


class _Counting:
    """Counts the error, if any, that leaves its block, under the model once that is known."""

    def __init__(self, service: Service, name: str, version: str, arrived: float) -> None:
        self.model: ServedModel | None = None
        self._service = service
        self._name, self._version, self._arrived = name, version, arrived

    def __enter__(self) -> _Counting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, ServingError):
            reason = error.reason
            error.counted = True
        elif isinstance(error, asyncio.CancelledError):
            reason = Reason.CANCELLED
        else:
            reason = Reason.INTERNAL
        if reason is Reason.INTERNAL:
            log.error("a request to %s failed", self._name, exc_info=error)
        name, version = (self.model.name, self.model.version) if self.model else (self._name, self._version)
        seconds = self._service.clock() - self._arrived
        self._service.metrics.rejected(name, version, reason, seconds)


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": datatype_of(np.dtype(spec.dtype)),
        "shape": [-1 if isinstance(dim, str) else dim for dim in spec.dims],
    }


def _config_tensor(spec: TensorSpec) -> dict[str, Any]:
    tensor = _tensor(spec)
    return {"name": spec.name, "data_type": f"TYPE_{tensor['datatype']}", "dims": tensor["shape"]}
