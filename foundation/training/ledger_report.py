"""Stage `report`: a run's efficiency as a table, `ledger.json` and a page, alone or beside another run's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from foundation.data.files import atomic_write
from foundation.training.efficiency import Efficiency, LedgerError, read_baseline, read_efficiency
from foundation.training.phases import (
    AWAY,
    CHECKPOINT,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    DATA,
    DATASET,
    DOWN,
    EVALUATION,
    FIRST_BATCH,
    IMPORTS,
    MODEL,
    OPTIMIZER,
    OTHER,
    PHASES,
    PROCESS_GROUP,
    REPEATED,
    RESTORE,
    START_OTHER,
)
from foundation.training.report import Page
from foundation.training.run_log import finite
from foundation.training.waterfall import duration, waterfall

JSON, PAGE = "ledger.json", "ledger.html"

ADVICE = {
    IMPORTS: "keep the environment on a local disk and its bytecode compiled; start long runs, not many short ones",
    PROCESS_GROUP: "look at the rendezvous: name resolution, the interface of NCCL_SOCKET_IFNAME, slow hosts",
    DATASET: "fewer and larger files and row groups; a dataset on a disk near the ranks",
    MODEL: "smaller tables, which are drawn faster; sparse.row_wise_from, which says what tables are cut over ranks",
    RESTORE: "a faster disk for checkpoints; fewer restarts",
    FIRST_BATCH: "a smaller reader.shuffle_window, or row groups of fewer rows, or more reader.workers",
    COMPILE: "keep TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR between runs; compile: parts, the fastest to compile. "
    "With compile: none it is the first step alone, which a longer run outweighs",
    START_OTHER: "a longer run: this part of start-up has no name of its own",
    DATA: "more reader.workers and reader.prefetch, a smaller reader.shuffle_window, files nearer to the ranks",
    COMMUNICATION: "parallel.overlap, a narrower parallel.sparse.wire, tables in replica groups inside of hosts "
    "(parallel.sparse.replicas), a larger batch, less sharding of the dense part",
    CHECKPOINT: "a larger checkpoint.every, a faster disk, rarer evaluations that save a best checkpoint",
    EVALUATION: "a larger evaluation.every, evaluation.max_batches, a larger evaluation.batch_size",
    REPEATED: "a smaller checkpoint.every, and what made the run fail",
    OTHER: "a larger log_every; on CUDA this is the device waiting for the host: compile: layers, larger batches",
    DOWN: "fewer restarts: what made the run fail, and how long the launcher waits before it starts anew",
}
"""What to try where a phase is a run's largest loss."""
UNEVEN = 1.1
"""Events of the heaviest rank over the mean from which on balancing is worth more than faster links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """What to report: `opengem report RUN [RUN]`.

    Args:
        run: folder of a run; it may still be running.
        against: another run to compare it with.
        baseline: one device alone: a run of one rank, or the JSON of the step benchmark; gives local MFU and the
            scaling ratio.
        out: HTML file; by default in the folder of the run.
    """

    run: Path
    against: Path | None = None
    baseline: Path | None = None
    out: Path | None = None


def report(config: ReportConfig) -> None:
    """Prints a run's efficiency, writes its `ledger.json` and a page.

    Raises:
        LedgerError: there is no such run, or a ledger or the baseline cannot be used.
    """
    if config.against is not None and config.against.resolve() == config.run.resolve():
        raise LedgerError(f"against: {config.against} is the same run as {config.run}; name another, or only one")
    baseline = read_baseline(config.baseline) if config.baseline else None
    runs, page = [read_efficiency(config.run, baseline)], PAGE
    if config.against is not None:
        runs.append(read_efficiency(config.against, baseline))
        page = f"ledger-and-{config.against.resolve().name}.html"
    out = config.out or config.run / page
    _print(runs)  # first: the folder of somebody else's run may be for reading only
    _write(runs, config.run, out)
    _console().print(f"page: {out}", markup=False)


def publish(run: Path) -> None:
    """What training does with the ledger at its end: prints it, and writes `ledger.json` and the page."""
    runs = [read_efficiency(run)]
    _print(runs, brief=True)
    _write(runs, run, run / PAGE)


def largest_loss(run: Efficiency) -> tuple[str, float, str]:
    """The phase that took most of what was not compute or optimizer: its name, seconds, and what to try."""
    name = max(ADVICE, key=lambda name: run.seconds[name])
    advice = ADVICE[name]
    if name == PROCESS_GROUP and run.world == 1:
        advice = "a longer run: a process alone has no others to find"
    elif name == COMMUNICATION and run.slow_rank is not None and (run.slow_share or 0) > 0.5:
        advice = f"rank {run.slow_rank} is slow, and the others wait for it: look at its data, its host and its device"
    elif name == COMMUNICATION and (run.token_imbalance or 0) > UNEVEN:
        advice = f"reader.balance: ranks wait for the one with most events, {run.token_imbalance:.2f} times the mean"
    return name, run.seconds[name], advice


def bound(run: Efficiency) -> tuple[str, float]:
    """What took most of the steps' time (data, compute, communication, optimizer or other), and its share of it.

    The share is 0 where no step came after the first, whose time is start-up.
    """
    phase = max(_STEPS, key=lambda name: run.seconds[name])
    whole = sum(run.seconds[name] for name in _STEPS)
    return _STEPS[phase], run.seconds[phase] / whole if run.seconds[COMPUTE] else 0.0


_STEPS = {
    DATA: "data",
    COMPUTE: "compute",
    COMMUNICATION: "communication",
    OPTIMIZER: "optimizer",
    OTHER: "other, on CUDA a device that waits for the host",
}


def figures(run: Efficiency) -> list[tuple[str, str]]:
    """Names and formatted values; what is not known says why."""

    def known(name: str, text: str, value: float | None) -> tuple[str, str]:
        if value is not None:
            return text, _NUMBERS[name].format(value)
        return text, f"unknown: {run.unknown[name]}" if name in run.unknown else "unknown"

    rows = [(text, known(name, text, getattr(run, name))[1]) for name, text in _NAMES.items()]
    if run.scaling_ratio is not None:
        rows = [(f"{text} (of {run.scaling_of})" if text == "scaling ratio" else text, value) for text, value in rows]
    what, share = bound(run)
    rows.append(
        (
            "steps are bound by",
            f"{what} ({share:.0%} of their time)" if share else "unknown: there was none after the first",
        )
    )
    slow = "none was more than 1.25 times the median of the others"
    if run.slow_rank is not None:
        assert run.slow_share is not None and run.slow_lag is not None
        slow = f"rank {run.slow_rank}, {run.slow_lag * 1e3:.1f} ms per step in {run.slow_share:.0%} of intervals"
    if run.world > 1:
        rows.append(("slow rank", slow))
    return rows


_NAMES = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "goodput": "goodput",
    "local_mfu": "local MFU",
    "scaling_ratio": "scaling ratio",
    "e2e_mfu": "E2E MFU",
    "compute_mfu": "MFU of compute",
    "run_mfu": "MFU of the whole run",
    "padding": "useful / padded operations",
    "token_imbalance": "imbalance of tokens",
    "time_imbalance": "imbalance of time",
    "joules": "energy",
    "joules_per_million": "energy per million impressions",
    "ne_per_hour": "fall of NE per accelerator-hour",
}
_NUMBERS = {
    "samples_per_second": "{:,.0f}",
    "tokens_per_second": "{:,.0f}",
    **dict.fromkeys(("goodput", "local_mfu", "e2e_mfu", "compute_mfu", "run_mfu", "padding"), "{:.1%}"),
    **dict.fromkeys(("token_imbalance", "time_imbalance", "scaling_ratio"), "{:.3f}"),
    "joules": "{:,.0f} J",
    "joules_per_million": "{:,.0f} J",
    "ne_per_hour": "{:.4f}",
}


def _write(runs: Sequence[Efficiency], run: Path, page: Path) -> None:
    name, seconds, advice = largest_loss(runs[0])
    loss = {"phase": name, "seconds": seconds, "try": advice}
    what, share = bound(runs[0])
    whole = finite({**runs[0].to_dict(), "largest_loss": loss, "bound_by": {"what": what, "share": share}})
    atomic_write(run / JSON, json.dumps(whole, indent=1) + "\n")
    _page(runs).write(page, footer="Written by OpenGEM from the runs' ledger.jsonl.")


def _names(runs: Sequence[Efficiency]) -> list[str]:
    short = [Path(run.run).resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [run.run for run in runs]


def _shares(runs: Sequence[Efficiency]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Phases in which any run was, with seconds and share of each run's allocated time."""
    rows = []
    for name in PHASES:
        values = [(run.seconds[name], run.seconds[name] / run.allocated) for run in runs]
        if any(seconds for seconds, _ in values):
            rows.append((name, values))
    return rows


def _cells(values: list[tuple[float, float]], name: str) -> list[str]:
    cells = [text for seconds, share in values for text in (duration(seconds), "" if name == AWAY else f"{share:.1%}")]
    if len(values) == 2:
        cells.append("" if name == AWAY else f"{(values[1][1] - values[0][1]) * 100:+.1f}")
    return cells


def _headings(runs: Sequence[Efficiency]) -> list[str]:
    names = _names(runs)
    if len(runs) == 1:
        return ["time", "share"]
    return [text for name in names for text in (name, "share")] + ["points"]


def _print(runs: Sequence[Efficiency], brief: bool = False) -> None:
    console = _console()
    table = Table(
        title=f"Where the time went: {duration(runs[0].wall)}, {runs[0].ended}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("phase", no_wrap=True)
    for heading in _headings(runs):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, values in _shares(runs):
        if not brief or values[0][1] >= 0.005:
            table.add_row(name, *_cells(values, name))
    console.print(table)
    for run, name in zip(runs, _names(runs), strict=True):
        if len(runs) > 1:
            console.print(f"{name}:", markup=False)
        for text, value in figures(run):
            if not brief or not value.startswith("unknown"):
                console.print(f"  {text}: {value}", markup=False)
        phase, seconds, advice = largest_loss(run)
        console.print(f"  largest loss: {phase}, {duration(seconds)}. To try: {advice}", markup=False)


def _page(runs: Sequence[Efficiency]) -> Page:
    names = _names(runs)
    page = Page("Where the time went", " and ".join(run.run for run in runs))
    for run, name in zip(runs, names, strict=True):
        _one(page, run, name if len(runs) > 1 else "")
    points = " Points: the second run's share less the first's." if len(runs) > 1 else ""
    page.section("Phases", f"Shares are of the time in which the run held its machines.{points}")
    rows = [[name, *_cells(values, name)] for name, values in _shares(runs)]
    page.table(["phase", *_headings(runs)], rows)
    page.section("Figures", "What is not known says why.")
    columns = [dict(figures(run)) for run in runs]
    texts = list(dict.fromkeys(text for column in columns for text in column))
    page.table(
        ["figure", *(names if len(runs) > 1 else ["value"])],
        [[t, *(c.get(t, "") for c in columns)] for t in texts],
        text_columns=1 + len(runs),
    )
    layers = {name: value for run in runs for name, value in run.local_layers.items()}
    if layers:
        page.section("Local MFU by layer", "Each type of layer alone on one device, from the baseline.")
        page.table(["layer", "MFU"], [[name, "unknown" if v is None else f"{v:.1%}"] for name, v in layers.items()])
    page.section("What the phases hold")
    page.table(["phase", "what"], [[name, PHASES[name]] for name, _ in _shares(runs)], text_columns=2)
    return page


def _one(page: Page, run: Efficiency, name: str) -> None:
    phase, seconds, advice = largest_loss(run)
    lost = f"Largest loss: {phase}, {seconds / run.allocated:.1%} of the time. To try: {advice}."
    page.section(name or "Summary", lost)
    page.facts(
        [
            ("wall time", duration(run.wall)),
            *([("away", duration(run.seconds[AWAY]))] if run.seconds[AWAY] else []),
            ("ended", run.ended.split(":")[0]),
            ("devices", f"{run.world} x {run.device}, {run.precision}"),
            ("accelerator-hours", f"{run.accelerator_hours:,.3g}"),
            ("steps", f"{run.steps:,}" + (f", {run.repeated_steps:,} of them twice" if run.repeated_steps else "")),
            ("starts", f"{run.starts}"),
            ("goodput", f"{run.goodput:.1%}"),
            ("E2E MFU", "unknown" if run.e2e_mfu is None else f"{run.e2e_mfu:.1%}"),
            ("samples/s", "unknown" if run.samples_per_second is None else f"{run.samples_per_second:,.0f}"),
        ]
    )
    page.figures((waterfall(run.seconds, f"Waterfall of {run.run}"), "Each bar begins where the one before it ends."))


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
