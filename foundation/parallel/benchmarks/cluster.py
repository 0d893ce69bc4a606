"""The parallel trainer on the GPUs of a host, checked and measured by one command.

    python -m foundation.parallel.benchmarks.cluster --ranks 4 --out OUT [--preset foundation/large] [--limit 300]

Samples per second, MFU, local MFU of layers, weak and strong scaling of a preset on heavy-tailed histories, with and
without overlap and load balance, with rounded rows and gradients, with every dense dimension; memory beside what
`opengem plan` says; exposed communication and a picture of a step; equality with one process; a run that is saved on
all ranks and goes on with the same losses on half of them and on one; a run of which a rank is killed and that restarts
by itself. Without GPUs it runs on processes over Gloo.

What says most comes first, every part has a time limit, and checks of small models run side by side. What is found is
in `OUT/results.jsonl` at once, and in `OUT/results.json` in the end; what failed or took too long is there by name, and
the parts after it are run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from foundation.data.options import parse_config
from foundation.parallel.benchmarks.cluster_bench import Options, ways
from foundation.parallel.benchmarks.cluster_parts import EVERY, SAVED
from foundation.parallel.benchmarks.fully_sharded import CASES
from foundation.parallel.preview.memory import OUTSIDE
from foundation.parallel.preview.plan import PlanConfig, work_out
from foundation.parallel.topology import DenseSizes, SparseSizes
from foundation.training.compile import Compile

LIMITS = {
    "links": 20.0,
    "equality": 60.0,
    "weak": 45.0,
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
CORES = 8
"""From so many on, processes start before they are needed."""


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
    _prepared: dict[tuple[Any, ...], tuple[int, Any]] = field(default_factory=dict)

    def run(self, ranks: int, parts: list[str], first_limit: float = 0.0) -> None:
        """Runs parts on so many ranks; after one that fails, the rest in new processes.

        Args:
            first_limit: added to the limit of the first part, which compiles kernels.
        """
        left = list(parts)
        while left:
            if self.left() <= 0:
                self.note(left, "not run: no time left")
                return
            launch, process = self.start(ranks, left)
            why = self._watch(launch, process, left, first_limit)
            done = {line["part"] for line in self.lines(launch) if "part" in line}
            left = [part for part in left if part not in done]
            if left:
                self.note(left[:1], why)
                left = left[1:]

    def prepare(self, ranks: int, parts: list[str], *more: str, devices: str | None = None) -> None:
        """Starts processes that import what they need and wait until `start` is called in the same way.

        Where there are few cores these would only be in one another's way.
        """
        if parts and len(os.sched_getaffinity(0)) >= CORES:
            self._prepared[ranks, *parts, *more, devices] = self._begin(ranks, parts, more, devices)

    def start(self, ranks: int, parts: list[str], *more: str, devices: str | None = None) -> tuple[int, Any]:
        """Starts processes for some parts; `more` goes to torchrun, `devices` says which GPUs it sees."""
        waiting = self._prepared.pop((ranks, *parts, *more, devices), None)
        launch, process = waiting or self._begin(ranks, parts, more, devices)
        (self.options.out / f"go-{launch}").touch()
        return launch, process

    def end(self) -> None:
        """Ends processes that were prepared and not needed."""
        for launch, process in self._prepared.values():
            self.stop(launch, process)

    def _begin(
        self, ranks: int, parts: list[str], more: tuple[str, ...], devices: str | None
    ) -> tuple[int, subprocess.Popen[bytes]]:
        with self._lock:
            self.launches += 1
            launch = self.launches
        values = json.dumps({**asdict(self.options), "out": str(self.options.out)})
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(ranks),
            "--rdzv_backend",
            "c10d",
        ]
        command += ["--rdzv_endpoint", "localhost:0", *more, "-m", "foundation.parallel.benchmarks.cluster_parts"]
        command += ["--launch", str(launch), "--options", values, *parts]
        environment = dict(os.environ) | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
        log = (self.options.out / f"launch-{launch}.log").open("w")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return launch, process

    def _watch(self, launch: int, process: Any, parts: list[str], first_limit: float) -> str:
        """Waits until the processes end or a part takes too long; returns why they ended."""
        started = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            lines = self.lines(launch)
            begun = [line for line in lines if "begin" in line]
            if not begun:
                late = time.monotonic() - started > START
            else:
                part = begun[-1]["begin"]
                allowed = LIMITS[part.partition(":")[0]] + (first_limit if part == parts[0] else 0.0)
                late = time.time() - begun[-1]["time"] > allowed
            if late or self.left() <= 0:
                self.stop(launch, process)
                return "took too long"
        return f"ended with {process.returncode}: {self.tail(launch)}"

    def stop(self, launch: int, process: Any) -> None:
        """Ends a launch and its ranks."""
        process.terminate()
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            process.kill()
        for file in self.options.out.glob(f"pid-{launch}-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)

    def wait(self, launch: int, process: Any, seconds: float) -> None:
        """Waits for the end of a launch, no longer than that."""
        try:
            process.wait(max(1.0, min(seconds, self.left())))
        except subprocess.TimeoutExpired:
            self.stop(launch, process)

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
        """The end of what a launch printed."""
        text = (self.options.out / f"launch-{launch}.log").read_text()
        errors = [line for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
        return " | ".join(errors[-3:])[-600:]

    def left(self) -> float:
        """Seconds that are left for everything."""
        return self.limit - (time.monotonic() - self.begun)


RESTARTS = ("--max-restarts", "2")


def fewer(ranks: int) -> dict[int, str | None]:
    """Half of the ranks and one: on which GPUs each number of them runs, so that they can run at once."""
    seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    found: dict[int, str | None] = {}
    for size in sorted({max(1, ranks // 2), 1}):
        first = sum(found)
        found[size] = ",".join(seen[first : first + size]) if torch.cuda.is_available() else None
    return found


def resume_elsewhere(launcher: Launcher, ranks: int) -> None:
    """The saved run goes on with half of the ranks and with one, both at once."""
    sizes = fewer(ranks)
    started = [launcher.start(size, ["resume"], devices=devices) for size, devices in sizes.items()]
    for launch, process in started:
        launcher.wait(launch, process, START + LIMITS["resume"])
    saved = [line["found"]["losses"] for line in launcher.lines() if line.get("part") == "save"]
    for (launch, _), size in zip(started, sizes, strict=True):
        found = [line["found"]["losses"] for line in launcher.lines(launch) if line.get("part") == "resume"]
        if not (found and saved):
            launcher.note([f"resume on {size}"], launcher.tail(launch))
            continue
        pairs = zip(found[-1], saved[-1][SAVED:], strict=True)
        launcher.write({"resumed on": size, "largest difference of a loss": max(abs(a - b) for a, b in pairs)})


def kill_a_rank(launcher: Launcher, ranks: int) -> None:
    """Kills the last rank between two checkpoints with signal 9 and measures what that costs."""
    launch, process = launcher.start(ranks, ["survive"], *RESTARTS)
    killed, at = 0.0, EVERY + 2
    until = time.monotonic() + min(START, launcher.left())
    while time.monotonic() < until and process.poll() is None and not killed:
        time.sleep(0.05)
        if any(line.get("step", 0) >= at for line in launcher.lines(launch)):
            os.kill(int((launcher.options.out / f"pid-{launch}-{ranks - 1}").read_text()), signal.SIGKILL)
            killed = time.time()
    launcher.wait(launch, process, START + LIMITS["survive"])
    lines = launcher.lines(launch)
    steps = [line for line in lines if "step" in line]
    before = max((line["step"] for line in steps if not line["restarts"]), default=0)
    again = [line for line in steps if line["restarts"]]
    ended = [line["found"]["losses"] for line in lines if line.get("part") == "survive"]
    whole = [line["found"]["losses"] for line in launcher.lines() if line.get("part") == "save"]
    if not (killed and again and ended and whole):
        launcher.note(["survive"], f"killed: {bool(killed)}; {launcher.tail(launch)}")
        return
    back = next(line["time"] for line in again if line["step"] > before)
    launcher.write(
        {
            "killed after step": before,
            "went on from step": again[0]["step"] - 1,
            "seconds to the first repeated step": again[0]["time"] - killed,
            "seconds lost": back - killed,
            "largest difference of a loss": max(abs(a - b) for a, b in zip(ended[-1], whole[-1], strict=True)),
        }
    )


def planned_gb(options: Options, ranks: int, dense: DenseSizes, sparse: SparseSizes) -> float:
    """GB that `opengem plan` says of a rank's tensors at most in a step."""
    topology = options.out / f"topology-{ranks}.yaml"
    topology.write_text(f"gpus_per_host: {ranks}\n")
    values = {
        "config": options.preset,
        "schema": options.schema,
        "topology": topology,
        "most_rows": options.most_rows,
        "impressions": options.impressions,
        "events": options.mean,
        "sigma": options.sigma,
        "reader.batch_size": options.requests * options.impressions,
        "precision": "bf16",
        "ema.decay": 0,
        "parallel.dense.shard": dense.shard,
        "parallel.dense.expert": dense.expert,
        "parallel.dense.wire": dense.wire,
        "parallel.sparse.replicas": sparse.replicas,
        "parallel.sparse.wire": sparse.wire,
    }
    arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    terms = work_out(parse_config(PlanConfig, arguments, name="plan")).memory.terms
    return sum(count for name, count in terms.items() if name != OUTSIDE) / 1e9


def plan_all(launcher: Launcher, ranks: int, pool: ProcessPoolExecutor) -> None:
    """Starts to plan all ways; what is planned comes into the results when it is there."""

    def tell(name: str, size: int, future: Future[float]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            launcher.note([f"plan {name} on {size}"], str(error))
        elif not future.cancelled():
            launcher.write({"planned": name, "on": size, "gb": future.result()})

    wanted = ["replica", "bf16", "shard", "expert", "table replicas"]
    for size in sorted({1, ranks}):
        for name, way in ways(size).items():
            if name in wanted:
                future = pool.submit(planned_gb, launcher.options, size, way.parallel.dense, way.parallel.sparse)
                future.add_done_callback(partial(tell, name, size))


def summary(launcher: Launcher, ranks: int) -> dict[str, Any]:
    """All results by name, with scaling ratios and planned memory."""
    lines = launcher.lines()
    found: dict[str, Any] = {
        f"{line['measured']} on {line['ranks']}": line["found"] for line in lines if "measured" in line
    }
    found |= {f"{line['part']} on {line['ranks']}": line["found"] for line in lines if "part" in line}
    one = found.get("weak:replica on 1", {})
    planned = {(line["planned"], line["on"]): line["gb"] for line in lines if "planned" in line}
    for name, line in found.items():
        kind, _, rest = name.partition(":")
        if kind not in ("weak", "strong"):
            continue
        way, _, size = rest.rpartition(" on ")
        if one and int(size) == ranks:
            line["scaling"] = line["samples_per_second"] / ranks / one["samples_per_second"]
        if one.get("mfu") and int(size) == ranks:
            line["scaling_of_mfu"] = line["mfu"] / one["mfu"]
        if kind == "weak" and (way, int(size)) in planned and line["memory_gb"]:
            line["planned_gb"] = planned[way, int(size)]
            line["planned_over_measured"] = line["planned_gb"] / line["memory_gb"]
    more = [line for line in lines if not {"begin", "part", "step", "case", "measured", "planned"} & line.keys()]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "options": {**asdict(launcher.options), "out": str(launcher.options.out)},
        "found": found,
        "cases": [line for line in lines if "case" in line],
        "more": more,
    }


def launches(ranks: int) -> tuple[list[str], list[str]]:
    """Parts before and after the checks of small models, what says most first.

    Traces come last: the profiler may leave a process slower than it was.
    """
    if ranks == 1:
        return ["trace:replica", "save"], []
    every = list(ways(ranks))
    others = [f"weak:{way}" for way in every if way not in ("replica", "bf16")]
    waits = ["waits:bf16"] if torch.cuda.is_available() else []
    first = ["links", "weak:bf16", "weak:replica", "layers:replica", "save", *waits, "trace:bf16"]
    return first, [*others[:2], "strong:bf16", *others[2:], "trace:bf16 no overlap", "trace:replica"]


def main() -> None:
    """Runs everything and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="foundation/large")
    parser.add_argument("--schema", default="configs/datasets/streams.yaml")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--impressions", type=int, default=16)
    parser.add_argument("--mean", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--most_rows", type=int, default=1_000_000)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", choices=get_args(Compile), default="none")
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--only", nargs="*", help="parts to run, such as equality weak:replica survive")
    values = vars(parser.parse_args())
    ranks, limit, only = values.pop("ranks"), values.pop("limit"), values.pop("only")
    options = Options(**values)
    first, rest = launches(ranks)
    known = dict.fromkeys(
        ["weak:replica", "layers:replica", *first, *rest, "equality", "resume", "survive", "fully sharded"]
    )
    if unknown := [part for part in only or [] if part not in known]:
        raise SystemExit(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(known)}")
    if options.out.is_dir() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(options, limit)

    def chosen(parts: list[str]) -> list[str]:
        return [part for part in parts if not only or part in only]

    one = chosen(["weak:replica", *(["layers:replica"] if ranks == 1 else [])])
    first, rest = chosen(first), chosen(rest)
    sharded = chosen(["fully sharded"] if torch.cuda.is_available() and ranks > 1 else [])
    sharded = [f"fully sharded:{name}" for name in CASES] if sharded else []
    checks = {
        "equality": lambda: launcher.run(ranks, ["equality"], first_limit=60.0),
        "resume": lambda: resume_elsewhere(launcher, ranks),
        "survive": lambda: kill_a_rank(launcher, ranks),
        "fully sharded": lambda: launcher.run(ranks, sharded, first_limit=30.0),
    }

    def prepare() -> None:
        while one and not launcher.lines() and launcher.left() > 0:  # the first imports alone, then compiles kernels
            time.sleep(0.2)
        launcher.prepare(ranks, first)
        launcher.prepare(ranks, chosen(["equality"]))
        launcher.prepare(ranks, chosen(["survive"]), *RESTARTS)
        launcher.prepare(ranks, sharded)
        for size, devices in fewer(ranks).items():
            launcher.prepare(size, chosen(["resume"]), devices=devices)
        launcher.prepare(ranks, rest)

    with ProcessPoolExecutor(2, mp_context=mp.get_context("spawn")) as pool:
        ahead = threading.Thread(target=prepare)
        ahead.start()
        launcher.run(1, one, first_limit=90.0)
        ahead.join()
        if chosen(["plan"]):
            plan_all(launcher, ranks, pool)
        launcher.run(ranks, first, first_limit=60.0)
        threads = [threading.Thread(target=checks[name]) for name in chosen(list(checks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        launcher.run(ranks, rest, first_limit=30.0)
        launcher.end()
        pool.shutdown(wait=launcher.left() > 0, cancel_futures=True)
    found = summary(launcher, ranks)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, line in found["found"].items():
        shown = {key: value for key, value in line.items() if isinstance(value, int | float)}
        print(f"{name:<32} " + "  ".join(f"{key} {value:.4g}" for key, value in shown.items()))


if __name__ == "__main__":
    main()
