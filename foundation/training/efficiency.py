"""What a run's ledger amounts to: seconds by phase, and the figures that tell how well accelerators were used.

What is not known is None and has a reason in `unknown`; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.training.ledger import LEDGER, whole_lines
from foundation.training.phases import (
    AWAY,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    DOWN,
    OPTIMIZER,
    PHASES,
    STEP,
)

NEED_PEAK = "the device's peak rate is not known (foundation/training/peaks.py)"
NEED_BASELINE = "needs --baseline: a one-GPU run, or the JSON of `python -m foundation.training.benchmarks.step`"


class LedgerError(ValueError):
    """A run without a ledger, or a ledger or baseline that cannot be used; the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One device alone, without communication.

    Args:
        source: where it comes from.
        mfu: useful operations of the layers over the peak rate, FLOP-weighted over the layers.
        layers: the same for each type of layer, where it was measured.
        samples_per_second: of a whole step, None where it is not known.
    """

    source: str
    mfu: float | None
    layers: Mapping[str, float | None] = field(default_factory=dict)
    samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What became of a run's time.

    Args:
        run: the folder.
        ended: how, or why that is not known.
        device: name of a rank's device.
        world: ranks of the last process.
        starts: processes that rank 0 was.
        wall: seconds from the first start to the last line.
        allocated: those without `AWAY`, in which nobody says that the run held machines.
        seconds: by phase, `DOWN` and `AWAY` included; they sum up to `wall`.
        accelerator_hours: allocated hours times ranks.
        steps: steps done, without those repeated.
        repeated_steps: steps done again.
        samples: impressions trained on, each once per epoch.
        samples_per_second, tokens_per_second: of all ranks in steps that count; tokens are events of histories.
        goodput: compute, exposed communication and optimizer, over allocated time.
        e2e_mfu: useful operations over what the devices could do at their peak while steps ran.
        compute_mfu: the same over compute alone.
        run_mfu: the same over allocated time.
        local_mfu, local_layers: of the baseline.
        scaling_ratio: `e2e_mfu / local_mfu`, so that E2E MFU = local MFU x scaling ratio; where no MFU is known,
            samples per second of a rank over those of the baseline.
        scaling_of: which of the two.
        token_imbalance: events of the heaviest rank over the mean, by step.
        time_imbalance: own time of the slowest rank over the mean, by interval.
        slow_rank, slow_share, slow_lag: the rank that was called slow most often, in which share of intervals, and
            seconds per step that it took more than the median of the others.
        padding: useful over padded operations.
        joules, joules_per_million: energy of all devices; per million impressions.
        ne_first, ne_last: normalised entropy of the first and the last evaluation.
        ne_per_hour: fall between them per accelerator-hour between them.
        unknown: why a figure is None.
    """

    run: str
    ended: str
    device: str
    precision: str
    world: int
    starts: int
    wall: float
    allocated: float
    seconds: Mapping[str, float]
    accelerator_hours: float
    steps: int
    repeated_steps: int
    samples: int
    samples_per_second: float | None
    tokens_per_second: float | None
    goodput: float
    e2e_mfu: float | None
    compute_mfu: float | None
    run_mfu: float | None
    local_mfu: float | None
    local_layers: Mapping[str, float | None]
    scaling_ratio: float | None
    scaling_of: str
    token_imbalance: float | None
    time_imbalance: float | None
    slow_rank: int | None
    slow_share: float | None
    slow_lag: float | None
    padding: float | None
    joules: float | None
    joules_per_million: float | None
    ne_first: float | None
    ne_last: float | None
    ne_per_hour: float | None
    unknown: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def read_efficiency(run: Path, baseline: Baseline | None = None) -> Efficiency:
    """The figures of a run, ended or not.

    Raises:
        LedgerError: there is no such run, it has no ledger, or the ledger is damaged.
    """
    if not run.is_dir():
        raise LedgerError(f"{run}: there is no such run folder; `opengem train` makes one")
    path = run / LEDGER
    if not path.is_file():
        raise LedgerError(
            f"{run}: has no {LEDGER}, so it is not the folder of a run of this version of `opengem train`"
        )
    try:
        lines = whole_lines(path)
    except ValueError as error:
        raise LedgerError(str(error)) from None
    if not lines:
        raise LedgerError(f"{path}: is empty; the run has not begun its first step yet")
    return _Sums(run, lines).efficiency(baseline)


def read_baseline(path: Path) -> Baseline:
    """What one device does alone: from a run of one rank, or from the JSON of the step benchmark.

    Raises:
        LedgerError: it is neither.
    """
    if path.is_dir():
        alone = read_efficiency(path)
        if alone.world != 1:
            raise LedgerError(f"{path}: a baseline is a run of one rank, this one has {alone.world}")
        rate = alone.samples_per_second
        return Baseline(source=str(path), mfu=alone.compute_mfu, samples_per_second=rate)
    if not path.is_file():
        raise LedgerError(f"{path}: there is no such run or file; the step benchmark writes one with --out")
    try:
        found = json.loads(path.read_text())
        layers = {name: (float(row["seconds"]), row["mfu"]) for name, row in found["local"].items()}
        rate = float(found["samples_per_second"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path}: is neither a run nor the JSON of the step benchmark ({error!r})") from None
    mfu = None
    if layers and all(own is not None for _, own in layers.values()):
        # All operations over all seconds: layers count by their operations.
        mfu = sum(own * seconds for seconds, own in layers.values()) / sum(seconds for seconds, _ in layers.values())
    own = {name: own for name, (_, own) in layers.items()}
    return Baseline(source=str(path), mfu=mfu, layers=own, samples_per_second=rate)


class _Sums:
    """Adds up the lines of a ledger."""

    def __init__(self, run: Path, lines: list[dict[str, Any]]) -> None:
        self.run, self.lines = run, lines
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.starts = [line for line in lines if line["kind"] == "start"]
        self.intervals = [line for line in lines if line["kind"] == "interval"]
        self.evaluations = [line for line in lines if line["kind"] == "evaluation" and line["ne"] is not None]
        self.rank_seconds = 0.0  # allocated
        self.hours_at: list[float] = []  # by evaluation
        # Of steps that count, in intervals that say what they held; the seconds of those steps, and of their compute.
        self.samples = self.tokens = self.flops = self.stepping = self.computing = 0.0
        self._walk()

    def _walk(self) -> None:
        at, seen, world = 0.0, 0.0, 1
        for number, line in enumerate(self.lines):
            if line["kind"] == "start":
                kind = DOWN if line["restarts"] else AWAY
                gap = max(0.0, line["started"] - at) if number else 0.0
                self.seconds[kind] += gap
                world, at, seen = line["world"], line["started"], float(line["samples"])
                self.rank_seconds += gap * world if kind == DOWN else 0.0
            self.rank_seconds += (line["at"] - at) * world
            at = line["at"]
            for name, value in line["seconds"].items():
                self.seconds[name] += value
            if line["kind"] == "evaluation" and line["ne"] is not None:
                self.hours_at.append(self.rank_seconds / 3600)
            if line["kind"] == "interval" and "samples" in line:  # else it was cut off
                self._interval(line, seen)
                seen = float(line["samples"])

    def _interval(self, line: dict[str, Any], seen: float) -> None:
        """Adds what the steps that count held."""
        counting = line["steps"] - line["repeated"]
        if COMPILE in line["seconds"] and not line["repeated"]:
            counting -= 1  # the first step of the process, whose time is start-up
        share = counting / line["steps"] if line["steps"] else 0.0
        self.samples += (line["samples"] - seen) * share
        self.tokens += line["tokens"] * share
        self.flops += line["flops"] * share
        self.stepping += sum(line["seconds"].get(name, 0.0) for name in STEP)
        self.computing += line["seconds"].get(COMPUTE, 0.0)

    def efficiency(self, baseline: Baseline | None) -> Efficiency:
        last = self.starts[-1]
        unknown: dict[str, str] = {}
        allocated = sum(value for name, value in self.seconds.items() if name != AWAY)
        complete = [line for line in self.intervals if "samples" in line]
        samples = max([0, *(line["samples"] for line in complete), *(int(line["samples"]) for line in self.starts)])
        peak = last["peak"]
        mfu: dict[str, Any] = {name: None for name in ("e2e_mfu", "compute_mfu", "run_mfu")} | self._mfu(
            peak, allocated
        )
        if peak is None:
            unknown |= dict.fromkeys(mfu, NEED_PEAK)
        local = baseline.mfu if baseline else None
        if baseline is None:
            unknown |= {"local_mfu": NEED_BASELINE, "scaling_ratio": NEED_BASELINE}
        elif local is None:
            unknown |= {name: f"{baseline.source} has no MFU" for name in ("local_mfu", "scaling_ratio")}
        rate = self._rate(self.samples)
        ratio, of = _ratio(mfu["e2e_mfu"], local, rate and rate / last["world"], baseline)
        if ratio is not None:
            unknown.pop("scaling_ratio", None)
        joules = self._joules(complete, unknown)
        ne = [line["ne"] for line in self.evaluations]
        if len(ne) < 2:
            unknown["ne_per_hour"] = "needs two evaluations (evaluation.every)"
        hours = self.hours_at[-1] - self.hours_at[0] if ne else 0.0
        rates: dict[str, Any] = {"samples_per_second": rate, "tokens_per_second": self._rate(self.tokens)}
        unknown |= {name: "no interval after the first step is whole" for name, rate in rates.items() if rate is None}
        if last["world"] == 1:
            unknown |= dict.fromkeys(("token_imbalance", "time_imbalance"), "there is one rank")
        ended = [line["ended"] for line in self.lines[-1:] if line["kind"] == "end"]
        furthest = max((line["step"] for line in self.intervals), default=int(last["step"]))
        return Efficiency(
            run=str(self.run),
            ended=ended[0] if ended else "not yet: it runs, or it was killed",
            device=last["device"],
            precision=last["precision"],
            world=last["world"],
            starts=len(self.starts),
            wall=self.lines[-1]["at"] - self.starts[0]["started"],
            allocated=allocated,
            seconds=self.seconds,
            accelerator_hours=self.rank_seconds / 3600,
            steps=furthest,
            repeated_steps=sum(line["repeated"] for line in self.intervals),
            samples=samples,
            **rates,
            goodput=sum(self.seconds[name] for name in (COMPUTE, COMMUNICATION, OPTIMIZER)) / allocated,
            **mfu,
            local_mfu=local,
            local_layers=baseline.layers if baseline else {},
            scaling_ratio=ratio,
            scaling_of=of,
            **self._imbalance(complete, last["world"]),
            padding=_mean([line["padding"] for line in complete], [line["steps"] for line in complete]),
            joules=joules,
            joules_per_million=joules / samples * 1e6 if joules is not None and samples else None,
            ne_first=ne[0] if ne else None,
            ne_last=ne[-1] if ne else None,
            ne_per_hour=(ne[0] - ne[-1]) / hours if hours > 0 else None,
            unknown=unknown,
        )

    def _rate(self, amount: float) -> float | None:
        return amount / self.stepping if amount and self.stepping else None

    def _mfu(self, peak: float | None, allocated: float) -> dict[str, float | None]:
        if not peak or not self.flops:
            return {}
        could = peak * self.starts[-1]["world"]
        spans = {"e2e_mfu": self.stepping, "compute_mfu": self.computing, "run_mfu": allocated}
        return {name: self.flops / span / could if span else None for name, span in spans.items()}

    def _joules(self, complete: list[dict[str, Any]], unknown: dict[str, str]) -> float | None:
        values = [line["joules"] for line in complete]
        if not values or None in values:
            reason = self.starts[-1]["energy_unknown"] or "not every interval has a reading"
            unknown |= {"joules": reason, "joules_per_million": reason}
            return None
        return math.fsum(values)

    def _imbalance(self, complete: list[dict[str, Any]], world: int) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(
            ("token_imbalance", "time_imbalance", "slow_rank", "slow_share", "slow_lag")
        )
        steps = [line["steps"] for line in complete]
        if world == 1:
            return found
        for name in ("token_imbalance", "time_imbalance"):
            found[name] = _mean([line[name] for line in complete], steps)
        slow = [line["slow"] for line in complete if line["slow"]]
        if slow:
            rank, times = Counter(row["rank"] for row in slow).most_common(1)[0]
            lags = [row["own"] - row["others"] for row in slow if row["rank"] == rank]
            found |= {"slow_rank": rank, "slow_share": times / len(complete), "slow_lag": sum(lags) / len(lags)}
        return found


def _ratio(
    e2e: float | None, local: float | None, rate: float | None, baseline: Baseline | None
) -> tuple[float | None, str]:
    """Scaling ratio and what it is of: MFU where both are known, else samples per second and rank."""
    if e2e is not None and local:
        return e2e / local, "MFU"
    if rate is not None and baseline and baseline.samples_per_second:
        return rate / baseline.samples_per_second, "samples/s of a rank"
    return None, ""


def _mean(values: list[float | None], weights: list[float]) -> float | None:
    """Weighted, over the values that are known."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None
