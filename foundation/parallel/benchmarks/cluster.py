"""The parallel trainer on the GPUs of a host, checked and measured by one command.

    python -m foundation.parallel.benchmarks.cluster --ranks 4 --out OUT [--preset foundation/large] [--limit 300]

Equality with one process; samples per second, MFU, weak and strong scaling of a preset on heavy-tailed histories, with
and without overlap, with rounded rows, with every dense dimension; exposed communication and a picture of a step; a run
that is saved on all ranks and goes on with the same losses on half of them and on one; a run of which a rank is killed
and that restarts by itself. Without GPUs it runs on processes over Gloo.

Every part has a time limit. What is found is in `OUT/results.jsonl` at once, and in `OUT/results.json` in the end; what
failed or took too long is there by name, and the parts after it are run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foundation.parallel.benchmarks.cluster_parts import EVERY, SAVED, Options, ways

LIMITS = {
    "links": 20.0,
    "equality": 60.0,
    "weak": 45.0,
    "strong": 30.0,
    "trace": 40.0,
    "save": 25.0,
    "resume": 30.0,
    "survive": 60.0,
}
"""Seconds that a part may take, by its kind."""
START = 60.0
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

    def run(self, ranks: int, parts: list[str], first_limit: float = 0.0) -> None:
        """Runs parts on so many ranks; after one that fails, the rest in new processes.

        Args:
            first_limit: added to the limit of the first part, which compiles kernels.
        """
        left = list(parts)
        while left:
            if not self._time():
                self.note(left, "not run: no time left")
                return
            launch, process = self.start(ranks, left)
            why = self._watch(launch, process, left, first_limit)
            done = {line["part"] for line in self.lines(launch) if "part" in line}
            left = [part for part in left if part not in done]
            if left:
                self.note(left[:1], why)
                left = left[1:]

    def start(self, ranks: int, parts: list[str], *more: str, devices: str | None = None) -> tuple[int, Any]:
        """Starts processes for some parts; `more` goes to torchrun, `devices` says which GPUs it sees."""
        self.launches += 1
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
        command += ["--launch", str(self.launches), "--options", values, *parts]
        environment = dict(os.environ) | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
        log = (self.options.out / f"launch-{self.launches}.log").open("w")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return self.launches, process

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
            if late or not self._time():
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
            process.wait(max(1.0, min(seconds, self.limit - (time.monotonic() - self.begun))))
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

    def tail(self, launch: int) -> str:
        """The end of what a launch printed."""
        text = (self.options.out / f"launch-{launch}.log").read_text()
        errors = [line for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
        return " | ".join(errors[-3:])[-600:]

    def _time(self) -> bool:
        return time.monotonic() - self.begun < self.limit


def resume_elsewhere(launcher: Launcher, ranks: int) -> None:
    """The saved run goes on with half of the ranks and with one, both at once."""
    sizes = sorted({max(1, ranks // 2), 1})
    started, first = [], 0
    for size in sizes:
        devices = ",".join(str(first + i) for i in range(size)) if torch.cuda.is_available() else None
        started.append(launcher.start(size, ["resume"], devices=devices))
        first += size
    for launch, process in started:
        launcher.wait(launch, process, START + LIMITS["resume"])
    saved = [line["found"]["losses"] for line in launcher.lines() if line.get("part") == "save"]
    for (launch, _), size in zip(started, sizes, strict=True):
        found = [line["found"]["losses"] for line in launcher.lines(launch) if line.get("part") == "resume"]
        if not (found and saved):
            launcher.note([f"resume on {size}"], launcher.tail(launch))
            continue
        pairs = zip(found[-1], saved[-1][SAVED:], strict=True)
        _write(launcher, {"resumed on": size, "largest difference of a loss": max(abs(a - b) for a, b in pairs)})


def kill_a_rank(launcher: Launcher, ranks: int) -> None:
    """Kills the last rank between two checkpoints with signal 9 and measures what that costs."""
    launch, process = launcher.start(ranks, ["survive"], "--max-restarts", "2")
    killed, at = 0.0, EVERY + 2
    until = time.monotonic() + START
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
    _write(
        launcher,
        {
            "killed after step": before,
            "went on from step": again[0]["step"] - 1,
            "seconds to the first repeated step": again[0]["time"] - killed,
            "seconds lost": back - killed,
            "largest difference of a loss": max(abs(a - b) for a, b in zip(ended[-1], whole[-1], strict=True)),
        },
    )


def _write(launcher: Launcher, line: dict[str, Any]) -> None:
    with (launcher.options.out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def summary(launcher: Launcher, ranks: int) -> dict[str, Any]:
    """All results by name, with scaling ratios."""
    lines = launcher.lines()
    found: dict[str, Any] = {f"{line['part']} on {line['ranks']}": line["found"] for line in lines if "part" in line}
    one = found.get("weak:replica on 1", {}).get("samples_per_second")
    for name, line in found.items():
        if one and name.endswith(f" on {ranks}") and name.startswith(("weak:", "strong:")):
            line["scaling"] = line["samples_per_second"] / ranks / one
    more = [line for line in lines if not {"begin", "part", "step", "case"} & line.keys()]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "options": {**asdict(launcher.options), "out": str(launcher.options.out)},
        "found": found,
        "cases": [line for line in lines if "case" in line],
        "more": more,
    }


def together(ranks: int) -> list[list[str]]:
    """Parts by launch: what is compared starts from fresh processes."""
    first, *others = ways(ranks)
    return [
        ["links", f"weak:{first}", f"trace:{first}", "save", "equality"],
        [f"strong:{first}"],
        *([f"weak:{way}", f"trace:{way}"] for way in others),
    ]


def main() -> None:
    """Runs everything and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="foundation/large")
    parser.add_argument("--schema", default="configs/datasets/streams.yaml")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--impressions", type=int, default=8)
    parser.add_argument("--mean", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--most_rows", type=int, default=1_000_000)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--only", nargs="*", help="parts to run, such as equality weak:replica survive")
    values = vars(parser.parse_args())
    ranks, limit, only = values.pop("ranks"), values.pop("limit"), values.pop("only")
    options = Options(**values)
    if options.out.is_dir() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(options, limit)
    if not only or "weak:replica" in only:
        launcher.run(1, ["weak:replica"], first_limit=90.0)
    for parts in together(ranks):
        launcher.run(ranks, [part for part in parts if not only or part in only], first_limit=60.0)
    if not only or "resume" in only:
        resume_elsewhere(launcher, ranks)
    if not only or "survive" in only:
        kill_a_rank(launcher, ranks)
    found = summary(launcher, ranks)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, line in found["found"].items():
        shown = {key: value for key, value in line.items() if isinstance(value, int | float)}
        print(f"{name:<32} " + "  ".join(f"{key} {value:.4g}" for key, value in shown.items()))


if __name__ == "__main__":
    main()
