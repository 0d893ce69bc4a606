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
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from foundation.data.options import parse_config
from foundation.data.processes import ProcessPool
from foundation.parallel.benchmarks.cluster_bench import COMPILED, Options, ways
from foundation.parallel.benchmarks.cluster_parts import EVERY, SAVED
from foundation.parallel.benchmarks.fully_sharded import CASES
from foundation.parallel.benchmarks.launcher import LIMITS, START, Launcher
from foundation.parallel.preview.memory import OUTSIDE
from foundation.parallel.preview.plan import PlanConfig, work_out
from foundation.parallel.topology import DenseSizes, SparseSizes
from foundation.training.compile import Compile

COMPILING = 300.0
"""Seconds that the first part of processes with a compiled model may take more, with empty caches."""


def resume_elsewhere(launcher: Launcher, ranks: int) -> None:
    """The saved run goes on with half of the ranks and with one, both at once on GPUs of their own."""
    sizes = sorted({max(1, ranks // 2), 1})
    started = [launcher.start(size, ["resume"], first_gpu=sum(sizes[:place])) for place, size in enumerate(sizes)]
    for _, processes in started:
        launcher.wait(processes, START + LIMITS["resume"])
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
    launch, process = launcher.torchrun(ranks, ["survive"], "--max-restarts", "2")
    killed, at = 0.0, EVERY + 2
    until = time.monotonic() + min(START, launcher.left())
    while time.monotonic() < until and process.poll() is None and not killed:
        time.sleep(0.05)
        if any(line.get("step", 0) >= at for line in launcher.lines(launch)):
            os.kill(int((launcher.options.out / f"pid-{launch}-{ranks - 1}").read_text()), signal.SIGKILL)
            killed = time.time()
    launcher.wait_torchrun(launch, process, START + LIMITS["survive"])
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
        "parallel.sparse.fully_sharded": str(sparse.fully_sharded).lower(),
    }
    arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    terms = work_out(parse_config(PlanConfig, arguments, name="plan")).memory.terms
    return sum(count for name, count in terms.items() if name != OUTSIDE) / 1e9


def plan_all(launcher: Launcher, ranks: int, pool: ProcessPool) -> None:
    """Starts to plan all ways; what is planned comes into the results when it is there."""

    def tell(name: str, size: int, future: Future[float]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            launcher.note([f"plan {name} on {size}"], str(error))
        elif not future.cancelled():
            launcher.write({"planned": name, "on": size, "gb": future.result()})

    wanted = ["replica", "bf16", "shard", "expert", "table replicas", "fully sharded"]
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
    planned = {(line["planned"], line["on"]): line["gb"] for line in lines if "planned" in line}
    for name, line in found.items():
        kind, _, rest = name.partition(":")
        if kind not in ("weak", "again", "strong"):
            continue
        way, _, size = rest.rpartition(" on ")
        compiled = way.endswith(COMPILED)
        one = found.get(f"weak:replica{COMPILED if compiled else ''} on 1", {})
        if one and int(size) == ranks:
            line["scaling"] = line["samples_per_second"] / ranks / one["samples_per_second"]
        if one.get("mfu") and int(size) == ranks:
            line["scaling_of_mfu"] = line["mfu"] / one["mfu"]
        plan = planned.get((way.removesuffix(COMPILED), int(size)))
        if kind == "weak" and plan and line["memory_gb"]:
            line["planned_gb"] = plan
            line["planned_over_measured"] = plan / line["memory_gb"]
    more = [line for line in lines if not {"begin", "part", "step", "case", "measured", "planned"} & line.keys()]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "options": {**asdict(launcher.options), "out": str(launcher.options.out)},
        "found": found,
        "cases": [line for line in lines if "case" in line],
        "more": more,
    }


def launches(ranks: int, cuda: bool) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Parts on one rank, a GPU for each list, and on all before and after the checks of small models, in their order.

    Those of an inner list share processes. Each eager way has its own, in which the trace comes last, since the
    profiler may leave a process slower than it was. Compiled ways share theirs for their graphs, and the first of them
    is measured again in the end. Inductor takes minutes on CPU, so nothing is compiled there.
    """
    alone = [["weak:replica"], *([[f"weak:replica{COMPILED}"]] if cuda else [])]
    if ranks == 1:
        alone = [[*parts, parts[0].replace("weak", "trace")] for parts in alone]
        return [["weak:replica", "layers:replica", "trace:replica"], *alone[1:]], [["save"]], []
    every = ways(ranks)
    eager = [way for way in every if not every[way].compiled and way not in ("replica", "bf16")]
    base = f"bf16{COMPILED}"
    # Parameters that are gathered in bfloat16 have graphs of their own, which take minutes again.
    compiled = [way for way in every if every[way].compiled and way != base and every[way].parallel.dense.shard == 1]
    shared = [f"weak:{base}", f"strong:{base}", *(f"weak:{way}" for way in compiled), f"again:{base}", f"trace:{base}"]
    first = [
        ["links"],
        ["weak:bf16", *(["waits:bf16"] if cuda else []), "trace:bf16"],
        *([shared] if cuda else []),
        ["save"],
    ]
    rest = [["strong:bf16"], *([f"weak:{way}"] for way in eager), ["weak:replica", "layers:replica", "trace:replica"]]
    for parts in rest:
        if parts == ["weak:bf16 no overlap"]:
            parts.append("trace:bf16 no overlap")
    return alone, first, rest


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
    parser.add_argument("--compile", choices=get_args(Compile), default="parts", help="what compiled ways compile")
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--only", nargs="*", help="parts to run, in this order where it matters, such as weak:replica")
    values = vars(parser.parse_args())
    ranks, limit, only = values.pop("ranks"), values.pop("limit"), values.pop("only")
    options = Options(**values)
    cuda = torch.cuda.is_available()
    alone, first, rest = launches(ranks, cuda)
    checks: dict[str, Callable[[], None]] = {
        "equality": lambda: launcher.run(ranks, ["equality"], first_limit=60.0),
        "resume": lambda: resume_elsewhere(launcher, ranks),
        "survive": lambda: kill_a_rank(launcher, ranks),
        "fully sharded": lambda: launcher.run(ranks, [f"fully sharded:{name}" for name in CASES], first_limit=30.0),
    }
    if not cuda or ranks == 1:
        del checks["fully sharded"]
    known = dict.fromkeys([part for parts in (*alone, *first, *rest) for part in parts] + [*checks, "plan"])
    if unknown := [part for part in only or [] if part not in known]:
        raise SystemExit(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(known)}")
    if options.out.is_dir() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(options, limit)

    def chosen(groups: list[list[str]]) -> list[list[str]]:
        wanted = [[part for part in parts if not only or part in only] for parts in groups]
        return sorted(filter(None, wanted), key=lambda parts: only.index(parts[0]) if only else 0)

    def run(size: int, parts: list[str], first_gpu: int = 0) -> None:
        launcher.run(size, parts, COMPILING if COMPILED in "".join(parts) else 90.0, first_gpu)

    with ProcessPool(2, method="forkserver") as pool:
        at_once = [threading.Thread(target=run, args=(1, parts, gpu)) for gpu, parts in enumerate(chosen(alone))]
        for thread in at_once:
            thread.start()
            if torch.cuda.device_count() < len(at_once):
                thread.join()
        for thread in at_once:
            thread.join()
        if not only or "plan" in only:
            plan_all(launcher, ranks, pool)
        for parts in chosen(first):
            run(ranks, parts)
        threads = [threading.Thread(target=checks[name]) for name in checks if not only or name in only]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for parts in chosen(rest):
            run(ranks, parts)
        launcher.end()
        pool.shutdown(wait=launcher.left() > 0, cancel_futures=True)
    found = summary(launcher, ranks)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, line in found["found"].items():
        shown = {key: value for key, value in line.items() if isinstance(value, int | float)}
        print(f"{name:<32} " + "  ".join(f"{key} {value:.4g}" for key, value in shown.items()))


if __name__ == "__main__":
    main()
