"""Open-loop load on a server of its own process, over loopback.

Requests leave at the moments of a Poisson process whatever the answers do, and latency counts from the planned
moment, so waiting is not hidden. Reported are the answers that came within the budget (goodput), what was shed,
and p50 and p99 of the answers; beside them, as the baseline, the same model called directly in one thread.

    python -m serving.benchmarks.load --models DIR --model feed --candidates 128 --rates 50 100 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from foundation.data.onnx_runtime import onnx_runtime
from serving.benchmarks.client import HttpPool, grpc_call
from serving.benchmarks.requests import grpc_request, infer_body, rank_body
from serving.model import ServedModel
from serving.repository import Repository

APIS = ("rank", "rest", "grpc")
MAX_OPEN = 2000
"""Requests open at once; one more is not sent and counts as shed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """What to send.

    Args:
        models: models folder. model: a model in it.
        api: "rank" (raw JSON), "rest" (binary tensors) or "grpc".
        candidates: N of each request.
        rates: requests per second, one run each.
        seconds: length of a run, at most 60.
        budget_ms: deadline of each request, and the bound for goodput.
        workers: threads of the server; 0 as the server itself decides.
    """

    models: Path
    model: str
    api: str = "rank"
    candidates: int = 128
    rates: tuple[float, ...] = (50.0, 100.0, 200.0)
    seconds: float = 5.0
    budget_ms: float = 50.0
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise ValueError(f"api: must be one of {', '.join(APIS)}, got {self.api!r}")
        if not 0 < self.seconds <= 60:
            raise ValueError(f"seconds: must be above 0 and at most 60, got {self.seconds}")
        if not self.rates or not all(0 < rate <= 10_000 for rate in self.rates):
            raise ValueError(f"rates: must be from above 0 to 10000 per second, got {self.rates}")
        if self.budget_ms <= 0:
            raise ValueError(f"budget_ms: must be above 0, got {self.budget_ms}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """One run. `codes` counts answers by status; latencies are of successful answers, in ms; `cpu_ms` is the
    server's processor time per request, which other work on the machine changes little."""

    rate: float
    sent: int
    in_budget: int
    goodput: float
    codes: dict[str, int]
    p50_ms: float
    p99_ms: float
    cpu_ms: float


Send = Callable[[], Awaitable[str]]


def load(config: LoadConfig) -> list[LoadResult]:
    """Runs every rate and prints the table.

    Raises:
        ValueError: the model cannot be served.
    """
    repository = Repository(config.models, ServedModel.load)
    model = repository.load(config.model)
    direct = direct_ms(model, config.candidates)
    print(f"{config.api}, N = {config.candidates}, budget {config.budget_ms:g} ms, {os.cpu_count()} cores")
    print(f"onnxruntime {onnx_runtime().__version__}, grpcio {grpc.__version__}, Python {platform.python_version()}")
    print(f"the model alone, one thread: {direct:.2f} ms")
    columns = ("rate/s", "goodput/s", "in budget", "p50 ms", "x alone", "p99 ms", "cpu ms")
    print(" ".join(f"{name:>9}" for name in columns), " answers")
    results = []
    with _server(config) as addresses:
        for rate in config.rates:
            result = asyncio.run(_run(config, model, addresses, rate))
            results.append(result)
            share = result.in_budget / max(result.sent, 1)
            codes = ", ".join(f"{code}: {count}" for code, count in sorted(result.codes.items()))
            print(
                f"{rate:9.0f} {result.goodput:9.1f} {share:9.1%} {result.p50_ms:9.2f} "
                f"{result.p50_ms / direct:9.1f} {result.p99_ms:9.2f} {result.cpu_ms:9.2f}  {codes}",
                flush=True,
            )
    return results


def direct_ms(model: ServedModel, candidates: int, repeats: int = 50) -> float:
    """Median milliseconds of the model called in this thread."""
    inputs = model.repeat_golden(candidates)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        model.run(inputs)
        times.append((time.perf_counter() - begun) * 1e3)
    return float(np.median(times))


async def _run(config: LoadConfig, model: ServedModel, addresses: dict[str, str], rate: float) -> LoadResult:
    random = np.random.default_rng(config.seed)
    gaps = random.exponential(1 / rate, max(1, round(rate * config.seconds)))
    latencies: list[float] = []
    codes: Counter[str] = Counter()
    async with _Sender(config, model, addresses) as send:
        for _ in range(20):
            await send()
        cpu_before = _cpu_seconds(int(addresses["pid"]))
        begun = time.perf_counter() + 0.05
        moments = begun + np.cumsum(gaps)
        open_ones: set[asyncio.Task[None]] = set()

        async def one(planned: float) -> None:
            code = await send()
            codes[code] += 1
            if code == "OK":
                latencies.append((time.perf_counter() - planned) * 1e3)

        for planned in moments.tolist():
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            if len(open_ones) >= MAX_OPEN:
                codes["not sent"] += 1
                continue
            task = asyncio.create_task(one(planned))
            open_ones.add(task)
            task.add_done_callback(open_ones.discard)
        await asyncio.gather(*open_ones)
        cpu = _cpu_seconds(int(addresses["pid"])) - cpu_before
        wall = max(time.perf_counter() - begun, config.seconds)
    in_budget = sum(latency <= config.budget_ms for latency in latencies)
    p50, p99 = np.percentile(latencies, [50, 99]) if latencies else (float("nan"), float("nan"))
    return LoadResult(
        rate=rate,
        sent=len(gaps),
        in_budget=in_budget,
        goodput=in_budget / wall,
        codes=dict(codes),
        p50_ms=float(p50),
        p99_ms=float(p99),
        cpu_ms=cpu / len(gaps) * 1e3,
    )


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, user and system (Linux; NaN elsewhere)."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return float("nan")
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Sender:
    """`async with` gives a function that sends one request and says how it ended."""

    def __init__(self, config: LoadConfig, model: ServedModel, addresses: dict[str, str]) -> None:
        self._config, self._model, self._addresses = config, model, addresses
        self._channel: grpc.aio.Channel | None = None
        self._pool: HttpPool | None = None

    async def __aenter__(self) -> Send:
        config, model = self._config, self._model
        if config.api == "grpc":
            self._channel = grpc.aio.insecure_channel(self._addresses["grpc"], options=[("grpc.enable_http_proxy", 0)])
            request = grpc_request(model, config.candidates)
            return lambda: grpc_call(self._channel, request, config.budget_ms / 1e3)
        self._pool = HttpPool(self._addresses["http"])
        if config.api == "rank":
            path, headers = "/rank", ""
            body = rank_body(model, config.candidates, config.budget_ms, config.seed)
        else:
            path = f"/v2/models/{model.name}/infer"
            body, length = infer_body(model, config.candidates, config.budget_ms)
            headers = f"Inference-Header-Content-Length: {length}\r\n"
        message = self._pool.message(path, headers, body)
        pool = self._pool
        return lambda: pool.send(message)

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self._pool is not None:
            self._pool.close()


@contextmanager
def _server(config: LoadConfig) -> Iterator[dict[str, str]]:
    """A server in a process of its own, so that it does not share this one's interpreter lock."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        code = (
            "from pathlib import Path; from serving.app import ServeConfig, serve; "
            "from serving.service import SchedulingConfig; "
            f"serve(ServeConfig(models=Path({str(config.models)!r}), http_port=0, grpc_port=0, "
            f"ready_file=Path({str(ready)!r}), scheduling=SchedulingConfig(workers={config.workers})))"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise ValueError(f"models: the server did not start with {config.models}")
                time.sleep(0.02)
            addresses: dict[str, str] = json.loads(ready.read_text())
            yield addresses
        finally:
            process.terminate()
            process.wait(30)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m serving.benchmarks.load", description="open-loop load")
    parser.add_argument("--models", type=Path, required=True, help="models folder")
    parser.add_argument("--model", required=True, help="name of a model in it")
    parser.add_argument("--api", choices=APIS, default="rank")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0, 200.0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--budget_ms", type=float, default=50.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    load(LoadConfig(**{**options, "rates": tuple(options["rates"])}))


if __name__ == "__main__":
    main()
