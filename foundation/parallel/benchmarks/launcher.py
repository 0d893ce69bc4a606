"""Starts ranks that measure parts, watches them, and keeps what they found.

Ranks are forked from a process that has imported everything, so that each measurement can have processes of its own:
what ran before in a process may slow it. Each sees its own GPU alone, as its first, so that what Inductor keeps of one
rank serves the others.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from foundation.parallel.benchmarks.cluster_bench import Options

LIMITS = {
    "links": 20.0,
    "equality": 60.0,
    "weak": 45.0,
    "again": 45.0,
    "layers": 20.0,
    "strong": 30.0,
    "trace": 40.0,
    "waits": 15.0,
    "save": 25.0,
    "resume": 30.0,
    "survive": 60.0,
    "fully sharded": 40.0,
}
"""Seconds that a part may take, by its kind."""
START = 90.0
"""Seconds that processes may take to start."""


@dataclass
class Launcher:
    """Starts ranks and watches them.

    Args:
        options: for the parts.
        limit: seconds for everything.
    """

    options: Options
    limit: float
    begun: float = field(default_factory=time.monotonic)
    launches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or imports start CUDA, which no fork survives
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["foundation.parallel.benchmarks.cluster"])

    def run(self, ranks: int, parts: list[str], first_limit: float = 0.0, first_gpu: int = 0) -> None:
        """Runs parts on so many ranks; after one that fails, the rest in new processes.

        Args:
            first_limit: added to the limit of the first part, which compiles kernels.
            first_gpu: the ranks are on GPUs from that one on.
        """
        left = list(parts)
        while left:
            if self.left() <= 0:
                self.note(left, "not run: no time left")
                return
            launch, processes = self.start(ranks, left, first_gpu)
            why = self._watch(launch, processes, left, first_limit)
            done = self._done(launch)
            left = [part for part in left if part not in done]
            if left:
                self.note(left[:1], why)
                left = left[1:]

    def start(self, ranks: int, parts: list[str], first_gpu: int = 0) -> tuple[int, list[BaseProcess]]:
        """Starts ranks for some parts, on GPUs from that one on."""
        launch, port, seen = self._next(), _free_port(), gpus()
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            values = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": 0 if seen else rank,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
                **({"CUDA_VISIBLE_DEVICES": seen[first_gpu + rank]} if seen else {}),
            }
            arguments = (self.options, launch, parts, {name: str(value) for name, value in values.items()})
            processes.append(self._context.Process(target=_rank, args=arguments))
            processes[-1].start()
        return launch, processes

    def torchrun(self, ranks: int, parts: list[str], *more: str) -> tuple[int, subprocess.Popen[bytes]]:
        """Starts ranks by torchrun, with more arguments for it."""
        launch = self._next()
        values = json.dumps({**asdict(self.options), "out": str(self.options.out)})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *more]
        command += ["-m", "foundation.parallel.benchmarks.cluster_parts"]
        command += ["--launch", str(launch), "--options", values, *parts]
        with (self.options.out / f"launch-{launch}.log").open("w") as log:
            return launch, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, processes: Iterable[BaseProcess], seconds: float) -> None:
        """Waits for the end of ranks, no longer than that."""
        until = time.monotonic() + max(1.0, min(seconds, self.left()))
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        _kill(processes)

    def wait_torchrun(self, launch: int, process: subprocess.Popen[bytes], seconds: float) -> None:
        """The same for torchrun and its ranks."""
        try:
            process.wait(max(1.0, min(seconds, self.left())))
        except subprocess.TimeoutExpired:
            process.kill()
            for file in self.options.out.glob(f"pid-{launch}-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)

    def end(self) -> None:
        """Waits for ranks that have found everything and let go of their memory."""
        self.wait(self._ending, 10.0)

    def _next(self) -> int:
        with self._lock:
            self.launches += 1
            return self.launches

    def _watch(self, launch: int, processes: list[BaseProcess], parts: list[str], first_limit: float) -> str:
        """Waits until all is found, a process ends or a part takes too long; returns why there will be no more."""
        started = time.monotonic()
        while all(process.exitcode is None for process in processes):
            time.sleep(0.1)
            if self._done(launch) >= set(parts):
                self._ending += processes  # the next ranks need not wait for them
                return ""
            begun = [line for line in self.lines(launch) if "begin" in line]
            if not begun:
                late = time.monotonic() - started > START
            else:
                part = begun[-1]["begin"]
                allowed = LIMITS[part.partition(":")[0]] + (first_limit if part == parts[0] else 0.0)
                late = time.time() - begun[-1]["time"] > allowed
            if late or self.left() <= 0:
                _kill(processes)
                return "took too long"
        time.sleep(1.0)  # what the others say of it
        codes = [process.exitcode for process in processes]
        _kill(processes)
        return f"ended with {codes}: {self.tail(launch)}"

    def _done(self, launch: int) -> set[str]:
        return {line["part"] for line in self.lines(launch) if "part" in line}

    def lines(self, launch: int | None = None) -> list[dict[str, Any]]:
        """Results so far, of one launch or of all."""
        path = self.options.out / "results.jsonl"
        text = path.read_text() if path.is_file() else ""
        found = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in found if launch in (None, line.get("launch"))]

    def note(self, parts: list[str], why: str) -> None:
        """Writes down what was not found."""
        with (self.options.out / "results.jsonl").open("a") as file:
            file.writelines(json.dumps({"failed": part, "why": why}) + "\n" for part in parts)
        print(f"{', '.join(parts)}: {why}", flush=True)

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line to the results, and shows it."""
        with (self.options.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def tail(self, launch: int) -> str:
        """The errors that a launch printed last."""
        text = (self.options.out / f"launch-{launch}.log").read_text()
        errors = [line for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
        return " | ".join(errors[-3:])[-600:]

    def left(self) -> float:
        """Seconds that are left for everything."""
        return self.limit - (time.monotonic() - self.begun)


def gpus() -> list[str]:
    """The GPUs that this process sees, as `CUDA_VISIBLE_DEVICES` names them."""
    if not torch.cuda.is_available():
        return []
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")


def _rank(options: Options, launch: int, parts: list[str], environment: dict[str, str]) -> None:
    """A forked rank."""
    from foundation.parallel.benchmarks.cluster_parts import work

    os.environ.update(environment)
    with (options.out / f"launch-{launch}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    work(options, launch, parts)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
