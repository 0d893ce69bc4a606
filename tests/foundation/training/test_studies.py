"""Studies: many runs of one preset, what is kept, refused and counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from foundation.data.dataset import Dataset
from foundation.data.options import parse_config
from foundation.data.schema import Schema
from foundation.data.settings import PRESETS
from foundation.model.benchmarks.presets import meta_model, table_rows
from foundation.training.studies.ablations import AblationsConfig, Difference, ablations, table
from foundation.training.studies.runs import Job, RunsError, plan, read, run_all, run_one, train_config
from foundation.training.studies.scaling import Line, ScalingConfig, picture, scaling
from foundation.training.studies.scaling import table as scaling_table
from tests.foundation.training.small_run import dataset

MODEL = {"width": 8, "layers": 1, "heads": {"trunk": [8], "tower": 4, "adapter_rank": 2}}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of a plan on a small dataset."""
    folder = tmp_path_factory.mktemp("study")
    dataset(folder / "data", train_requests=40)
    preset = folder / "preset.yaml"
    options = {"model": MODEL, "reader": {"batch_size": 32, "workers": 0}, "schedule": {"warmup_steps": 1}}
    preset.write_text(yaml.safe_dump(options))
    return {
        "preset": str(preset),
        "common": {},
        "dataset": str(folder / "data"),
        "split": "test",
        "out": folder / "out",
        "device": "cpu",
        "threads": 0,
    }


def _without_history(data: str) -> dict[str, Any]:
    names = [sequence.name for sequence in Dataset.open(data).schema.sequences]
    return {"model": {"streams": {"left_out": names}}}


def test_a_run_is_measured_kept_and_not_mistaken(small: dict[str, Any]) -> None:
    variants = {"whole": {}, "without history": _without_history(small["dataset"])}
    jobs = plan(variants, [0], **small)
    for job in jobs:
        run_one(job)
    whole, without = (read(job.result) for job in jobs)
    assert whole.flops > without.flops > 0
    assert whole.dense > without.dense
    assert whole.samples == without.samples == Dataset.open(small["dataset"]).split("train").rows
    for outcome in (whole, without):
        rows = [surfaces["all"]["rows"] for surfaces in outcome.metrics.values()]
        assert max(rows) == Dataset.open(small["dataset"]).split("test").rows
    assert [job.result for job in plan(variants, [0], **small)] == [job.result for job in jobs]  # the same: kept
    with pytest.raises(ValueError, match="of another config of 'whole'"):
        plan({"whole": {"model": {"width": 16}}}, [0], **small)
    with pytest.raises(ValueError, match="of another split of 'whole'"):
        plan(variants, [0], **{**small, "split": "validation"})
    more = str(dataset(small["out"].parent / "more", train_requests=41).path)  # of the same schema
    with pytest.raises(ValueError, match=r"of another (schema|data) of 'whole'"):
        plan(variants, [0], **{**small, "dataset": more})


HEADS = {"model": {"layer": {"cross": {"pooling_heads": 3}}}}


def test_a_run_that_fails_leaves_its_traceback_in_its_log(small: dict[str, Any], tmp_path: Path) -> None:
    (job,) = plan({"odd": HEADS}, [0], **{**small, "out": tmp_path})
    with pytest.raises(ValueError, match="no multiple of 3"):
        run_one(job)
    log = (job.folder / "log").read_text()
    assert "Traceback" in log and "no multiple of 3" in log and not job.result.exists()


@pytest.mark.slow
def test_runs_that_fail_are_told_in_one_line_with_their_logs(small: dict[str, Any], tmp_path: Path) -> None:
    jobs = plan({"odd": HEADS}, [0, 1], **{**small, "out": tmp_path})
    with pytest.raises(RunsError, match=r"odd/seed-0/log: .* no multiple of 3; .*odd/seed-1/log: .* no multiple of 3"):
        run_all(jobs, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"config": null, "schema": null}', "\xff"])
def test_a_damaged_result_is_named_and_kept(small: dict[str, Any], tmp_path: Path, text: str) -> None:
    path = tmp_path / "whole" / "seed-0" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"result.json: is (no whole result|of another)"):
        plan({"whole": {}}, [0], **{**small, "out": tmp_path})
    assert path.read_bytes() == text.encode("latin-1")


def test_a_result_without_its_metrics_is_named(small: dict[str, Any], tmp_path: Path) -> None:
    (job,) = plan({"whole": {}}, [0], **small)
    if not job.result.is_file():
        run_one(job)
    content = json.loads(job.result.read_text())
    del content["metrics"]
    path = tmp_path / "whole" / "seed-0" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"result.json: is no whole result of a run .*metrics"):
        plan({"whole": {}}, [0], **{**small, "out": tmp_path})


def test_seeds_and_tasks_are_checked_before_anything_is_trained(small: dict[str, Any], tmp_path: Path) -> None:
    runs = {key: small[key] for key in ("preset", "dataset", "split")}
    study: dict[str, Any] = {**runs, "out": tmp_path, "variants": {"whole": {}}, "against": "whole"}
    with pytest.raises(ValueError, match=r"seeds: .* twice"):
        AblationsConfig(**study, seeds=[0, 0])
    with pytest.raises(ValueError, match="no task 'sleep'; known"):
        ablations(AblationsConfig(**study, tasks=["sleep"]))
    assert not list(tmp_path.glob("*/*/run"))


def test_results_from_elsewhere_make_a_table_without_training(small: dict[str, Any], tmp_path: Path) -> None:
    variants = {
        "whole": {},
        "without history": _without_history(small["dataset"]),
        "never run": {"ema": {"decay": 0.5}},
    }
    runs = {key: small[key] for key in ("preset", "dataset", "split")}
    (job,) = plan({"whole": variants["whole"]}, [0], **small)
    run_one(job)
    for name in ("whole", "without history"):  # the second is another run's numbers: only the table matters here
        place = tmp_path / name / "seed-0"
        place.mkdir(parents=True)
        content = json.loads(job.result.read_text())
        content["config"]["model"]["streams"]["left_out"] = (
            variants[name].get("model", {}).get("streams", {}).get("left_out", [])
        )
        (place / "result.json").write_text(json.dumps(content))
    config = AblationsConfig(**runs, out=tmp_path, variants=variants, against="whole", train=False)
    numbers = ablations(config)
    assert list(numbers) == ["whole", "without history"] and numbers["whole"]["seeds"] == [0]
    assert not list(tmp_path.glob("*/*/run"))
    with pytest.raises(ValueError, match="no result of 'never run'"):
        ablations(AblationsConfig(**runs, out=tmp_path, variants=variants, against="never run", train=False))


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ({}, "at least one variant"),
        ({"../up": {}}, "letters, digits"),
        ({"odd": {"model": {"wide": 3}}}, "variants.odd: .*wide"),
        ({"odd": {"model": {"width": 0}}}, "variants.odd: .*width"),
        ({"odd": {"seed": 7}}, r"variants\.odd\.seed: is set by the study for each run; leave it out"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_trained(
    small: dict[str, Any], tmp_path: Path, variants: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(variants, [0], **{**small, "out": tmp_path})
    with pytest.raises(ValueError, match=r"options\.dataset: is set by the study"):
        plan({"whole": {}}, [0], **{**small, "out": tmp_path, "common": {"dataset": "other"}})
    assert not list(tmp_path.glob("*/*/run"))


def test_left_out_sequences_must_exist(small: dict[str, Any], tmp_path: Path) -> None:
    (job,) = plan({"odd": {"model": {"streams": {"left_out": ["dreams"]}}}}, [0], **{**small, "out": tmp_path})
    with pytest.raises(ValueError, match=r"streams.left_out: no sequence 'dreams'; known"):
        run_one(job)


def test_scaling_needs_a_world_that_tells_the_truth(small: dict[str, Any], tmp_path: Path) -> None:
    task = Dataset.open(small["dataset"]).schema.task_names[0]
    sizes: dict[str, Any] = {"S": {}, "L": {"model": {"width": 16}}}
    common: dict[str, Any] = {"dataset": small["dataset"], "out": tmp_path, "preset": small["preset"], "dnn": {}}
    with pytest.raises(ValueError, match=f"no column 'true_{task}'.*opengem world"):
        scaling(ScalingConfig(**common, sizes=sizes, task=task))
    with pytest.raises(ValueError, match="no task 'sleep'; known"):
        scaling(ScalingConfig(**common, sizes=sizes, task="sleep"))
    with pytest.raises(ValueError, match="at least two"):
        ScalingConfig(**common, sizes={"S": {}})


def test_a_variant_changes_what_the_study_changed_as_a_second_preset_would(
    small: dict[str, Any], tmp_path: Path
) -> None:
    (sequence, *_) = Dataset.open(small["dataset"]).schema.sequences
    layers = {"model": {"layers": 2, "streams": {"layers": {sequence.name: 0}}}}
    variants: dict[str, Any] = {"same": {}, "all": {"model": {"streams": {"layers": {}}}}}
    same, whole = (train_config(job) for job in plan(variants, [0], **{**small, "out": tmp_path, "common": layers}))
    assert same.model.streams.layers == {sequence.name: 0} and whole.model.streams.layers == {}
    assert same.model.layers == whole.model.layers == 2


def test_differences_are_paired_by_seed() -> None:
    change = Difference.of([0.01, 0.03])
    assert change.mean == pytest.approx(0.02)
    assert change.error == pytest.approx(0.01)  # std .01414 over sqrt 2
    assert math.isnan(Difference.of([0.01]).error)


def test_line_and_its_error() -> None:
    """A straight line has no error; with noise the error is that of ordinary least squares."""
    operations = [1e12, 1e13, 1e14, 1e15]
    line = Line.through(operations, [0.9, 0.88, 0.86, 0.84])
    assert line.slope == pytest.approx(-0.02)
    assert line.error == pytest.approx(0, abs=1e-9)
    noisy = Line.through(operations, [0.9, 0.89, 0.86, 0.84])
    x = np.array([12.0, 13, 14, 15])
    covariance = np.polyfit(x, [0.9, 0.89, 0.86, 0.84], 1, cov=True)[1]
    assert noisy.error == pytest.approx(math.sqrt(covariance[0, 0]))
    assert math.isnan(Line.through(operations[:2], [0.9, 0.88]).error)


def test_tables_and_picture() -> None:
    cell = {"mean": 0.75, "change": 0.0, "error": 0.0}
    other = {"mean": 0.74, "change": -0.01, "error": 0.002}
    numbers = {
        name: {
            "flops": 2e6,
            "dense": 10,
            "seeds": [0, 1],
            "tasks": {"click": dict.fromkeys(("auc", "gauc", "ne"), value)},
        }
        for name, value in {"plain": other, "whole": cell}.items()
    }
    rows = table(numbers, "whole", ["click"]).splitlines()
    assert rows[2] == "| whole | 2.00 | 2 | 0.7500 | 0.7500 | 0.7500 |"
    assert rows[3] == "| plain | 2.00 | 2 | -0.0100 ± 0.0020 | -0.0100 ± 0.0020 | -0.0100 ± 0.0020 |"

    size = {"dense": 1e6, "flops_per_impression": 1e6, "error": math.nan, "seconds": 1.0}
    sizes = {
        "dnn": {**size, "training_flops": 1e12, "ne": 0.9, "gap_closed": 0.0},
        "S": {**size, "training_flops": 2e12, "ne": 0.88, "gap_closed": 0.4},
        "L": {**size, "training_flops": 2e13, "ne": 0.86, "gap_closed": 0.8},
    }
    found = {
        "task": "click",
        "best": 0.85,
        "sizes": sizes,
        "line": {"slope": -0.02, "error": math.nan, "intercept": 1.126},
    }
    text = scaling_table(found)
    assert "| L | 1.00 M | 1.00 | 20.00 | 0.8600 | 80.0% |" in text
    assert "| best possible | | | | 0.8500 | 100.0% |" in text
    assert picture(found).startswith("<svg")


STUDIES = {
    "blocks": AblationsConfig,
    "kuairand": AblationsConfig,
    "long-histories": AblationsConfig,
    "scaling": ScalingConfig,
    "two-streams": AblationsConfig,
}


@pytest.mark.parametrize("name", STUDIES)
def test_presets_of_studies_are_configs(name: str, tmp_path: Path, small: dict[str, Any]) -> None:
    study = parse_config(STUDIES[name], ["--config", f"studies/{name}", "--dataset", "-", "--out", "-"], name=name)
    variants = study.variants if isinstance(study, AblationsConfig) else {"dnn": study.dnn, **study.sizes}
    plan(variants, [0], **{**small, "preset": study.preset, "common": study.options, "out": tmp_path})
    assert {path.stem for path in (PRESETS / "studies").glob("*.yaml")} == set(STUDIES)


@pytest.mark.slow  # 32 configs and models: ten seconds
def test_variants_of_kuairand_fit_its_schema(tmp_path: Path) -> None:
    """Names of surfaces and sequences in them are the schema's; no variant is the model of another."""
    schema = Schema.load("configs/datasets/kuairand.yaml")
    study = parse_config(AblationsConfig, ["--config", "studies/kuairand", "--dataset", "-", "--out", "-"], name="")
    models = {}
    for name, options in study.variants.items():
        fixed: dict[str, Any] = {"dataset": "-", "split": "test", "seed": 0, "device": "cpu", "threads": 0}
        changes = {"preset": study.preset, "common": study.options, "options": options}
        models[name] = train_config(Job(variant=name, folder=tmp_path / name, **changes, **fixed)).model
    assert len({repr(model) for model in models.values()}) == len(models)
    for model in models.values():
        meta_model(model, schema, table_rows(schema))


@pytest.mark.slow  # four runs in processes of their own: half a minute
def test_a_study_ends_in_a_table_and_goes_on_where_it_stopped(small: dict[str, Any], tmp_path: Path) -> None:
    variants = {"whole": {}, "without history": _without_history(small["dataset"])}
    study = AblationsConfig(
        dataset=small["dataset"],
        out=tmp_path,
        preset=small["preset"],
        variants=variants,
        against="whole",
        seeds=[0, 1],
        processes=2,
        device="cpu",
    )
    first = ablations(study)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")}
    assert len(times) == 4
    assert ablations(study) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")} == times
    assert "without history" in (tmp_path / "results.md").read_text()


def test_job_folders_are_apart(small: dict[str, Any]) -> None:
    jobs: list[Job] = plan({"a": {}, "b": {}}, [0, 1], **small)
    assert len({job.folder for job in jobs}) == 4
    assert [(job.variant, job.seed) for job in jobs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
