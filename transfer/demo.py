"""`opengem demo`: every stage on a small synthetic world, on CPU, ending in a ranked request and a report page.

Each stage runs as `opengem STAGE` would run it and leaves its output under `OUT/`; the server is a process of its
own. Nothing is downloaded and nothing outside `OUT/` is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from foundation.data.doctor import DoctorConfig, doctor
from foundation.data.files import require_free
from foundation.data.options import parse_config
from foundation.data.prepare import PrepareConfig, prepare
from foundation.data.settings import quiet, save, show
from foundation.data.world import WorldConfig, world
from foundation.training.train import TrainConfig, train
from transfer.demo_measure import Measured, Served, measure_served, measure_students, student_folder
from transfer.demo_report import print_summary, write_report
from transfer.demo_server import running_server
from transfer.distill import DistillConfig, distill
from transfer.score import ScoreConfig, score
from value_models.export import ExportConfig, export

VALUE = "click * (1 + 2 * conversion) + 0.5 * like"
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The demo's size and settings.

    Args:
        out: folder to write; holds the output of every stage and `report.html`.
        rows: impressions of the synthetic world.
        seed: of the world and of every model.
        surfaces: surfaces that get a value model; at least two.
        teacher: preset or file with the settings of `train`.
        student: preset or file with the settings of `distill` for every student.
        transfer: preset or file with what the distilled students get besides: losses and shared tables.
        requests: requests per surface that are sent to the server, for the comparison of scores and for latencies.
        candidates: candidates of a request when latencies are measured.
        overwrite: replace what an earlier demo left in `out`.
    """

    out: Path = Path("demo")
    rows: int = 120_000
    seed: int = 0
    surfaces: tuple[str, ...] = ("feed", "reels")
    teacher: str = "foundation/demo"
    student: str = "value_models/demo"
    transfer: str = "transfer/demo"
    requests: int = 200
    candidates: int = 100
    overwrite: bool = False

    def __post_init__(self) -> None:
        if len(set(self.surfaces)) < 2:
            raise ValueError(f"surfaces must name at least two different surfaces, are {list(self.surfaces)}")
        for key in ("requests", "candidates"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, is {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Where the report is, what was measured, and how long each stage took in seconds."""

    report: Path
    measured: dict[str, Measured]
    seconds: dict[str, float]


@dataclass(slots=True)
class Stages:
    """The stages so far: name, seconds and one or two lines of detail. Prints a headline as each begins."""

    total: int
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[None]:
        """Runs a stage: headline, then its own progress bar, then its time."""
        print(f"[{len(self.seconds) + 1}/{self.total}] {name}: {doing}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def boxes(self) -> list[tuple[str, str]]:
        """For the picture of the pipeline: name, details and seconds."""
        return [(name, f"{self.details.get(name, '')}\n{taken:.1f} s") for name, taken in self.seconds.items()]


def demo(config: DemoConfig) -> DemoResult:
    """Runs all stages and writes the report.

    Raises:
        FileExistsError: `out` is not empty and `overwrite` is false.
        ValueError, OSError: from a stage; what earlier stages wrote stays.
    """
    show(config, "demo")
    require_free(config.out, overwrite=config.overwrite)
    config.out.mkdir(parents=True, exist_ok=True)
    save(config, config.out / "demo.yaml")
    stages = Stages(total=9)
    with quiet():
        _build(config, stages)
        served = _serve(config, stages)
        with stages.stage("report", "tables and pictures"):
            measured = measure_students(config.out, config.surfaces)
            stages.details["report"] = REPORT
    report = config.out / REPORT
    write_report(report, stages.boxes(), measured, served, config.out / "teacher")
    print_summary(measured, served)
    total = sum(stages.seconds.values())
    print(f"\n{report}: the whole run in pictures ({total:.0f} s)")
    return DemoResult(report=report, measured=measured, seconds=stages.seconds)


def _build(config: DemoConfig, stages: Stages) -> None:
    """From nothing to exported models."""
    out, again, seed = config.out, config.overwrite, str(config.seed)
    raw, dataset, run, store = out / "raw", out / "dataset", out / "teacher", out / "labels"
    with stages.stage("world", f"{config.rows:,} impressions on three surfaces, true probabilities known"):
        made = world(WorldConfig(out=raw, rows=config.rows, seed=config.seed, overwrite=again))
        stages.details["world"] = f"{made.impressions:,} impressions"
    with stages.stage("prepare", "point-in-time histories, split by time"):
        options = ["--config", str(raw / "prepare.yaml"), "--out", str(dataset), "--overwrite", str(again).lower()]
        rows = prepare(parse_config(PrepareConfig, options, name="prepare logs")).rows
        stages.details["prepare"] = f"{rows['train']:,} training rows"
    with stages.stage("doctor", "is the dataset sound?"):
        findings = doctor(DoctorConfig(dataset=dataset))
        if findings.exit_code:
            raise ValueError(f"{dataset}: the doctor found faults in the demo's dataset; see above")
        stages.details["doctor"] = "no faults"
    with stages.stage("train", "the foundation model, all surfaces and tasks"):
        options = ["--config", config.teacher, "--dataset", str(dataset), "--out", str(run), "--seed", seed]
        trained = train(parse_config(TrainConfig, [*options, "--overwrite", str(again).lower()], name="train"))
        stages.details["train"] = f"{trained.steps:,} steps"
    with stages.stage("score", "the teacher's answers for every impression"):
        scored = score(ScoreConfig(run=run, dataset=str(dataset), out=store, overwrite=again))
        stages.details["score"] = f"{scored.rows:,} rows"
    with stages.stage("distill", f"value models of {', '.join(config.surfaces)}, alone and with the teacher"):
        for surface in config.surfaces:
            common = ["--config", config.student, "--dataset", str(dataset), "--surface", surface, "--seed", seed]
            common += ["--overwrite", str(again).lower()]
            taught = ["--config", config.transfer, "--store", str(store), "--teacher", str(run)]
            kinds: dict[str, list[str]] = {"alone": [], "distilled": taught}
            for kind, more in kinds.items():
                options = [*common, *more, "--out", str(student_folder(out, surface, kind))]
                distill(parse_config(DistillConfig, options, name="distill"))
        stages.details["distill"] = f"{2 * len(config.surfaces)} value models"
    with stages.stage("export", "ONNX, refused unless its scores equal PyTorch's"):
        worst = 0.0
        for surface in config.surfaces:
            student = student_folder(out, surface, "distilled")
            settings = ExportConfig(student=student, out=out / "models", version=1, value=VALUE, overwrite=again)
            worst = max(worst, export(settings).max_abs_diff)
        stages.details["export"] = f"parity {worst:.0e}"


def _serve(config: DemoConfig, stages: Stages) -> dict[str, Served]:
    """Starts the server and asks it; what was measured, by surface."""
    with (
        stages.stage("serve", "one process, /rank and tritonclient"),
        running_server(config.out / "models", config.out / "serve.log") as server,
    ):
        served = {
            surface: measure_served(
                server,
                config.out,
                surface,
                requests=config.requests,
                candidates=config.candidates,
                seed=config.seed,
            )
            for surface in config.surfaces
        }
        stages.details["serve"] = f"{sum(s.requests for s in served.values()):,} requests"
    return served
