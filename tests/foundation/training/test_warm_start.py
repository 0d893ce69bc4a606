"""Adding a surface to a trained model."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.model.gem import GEMConfig
from foundation.training.checkpoint import load_model
from foundation.training.ema import EMAConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.train import train
from tests.foundation.data.builders import SCHEMA, small_schema, small_table, write_dataset
from tests.foundation.training import small_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on two of the three surfaces ("stories" counts as "other"), and two runs that start from it on all."""
    folder = tmp_path_factory.mktemp("warm")
    surface = {"column": "surface", "values": ["reels", "feed"]}  # and in another order
    table = small_table([1 + i % 4 for i in range(80)])
    tables = {
        "train/part-00000.parquet": table,
        "validation/part-00000.parquet": small_table([3] * 20, first_id=10_000),
    }
    write_dataset(folder / "old-data", tables, schema=small_schema(surface=surface))
    write_dataset(folder / "new-data", tables)
    train(small_run.config(folder / "old-data", folder / "old"))
    for name, freeze in (("frozen", "trunk"), ("tuned", "none")):
        options = {"init_from": folder / "old", "freeze": freeze, "ema": EMAConfig(decay=0.9)}
        train(small_run.config(folder / "new-data", folder / name, **options))
    return {name: folder / name for name in ("old", "frozen", "tuned", "old-data", "new-data")}


def predictions(run: Path, data: Path) -> tuple[torch.Tensor, list[str]]:
    """Logits of all validation rows, with the run's own encoder, and each row's surface."""
    loaded = load_model(run, "latest" if run.name != "old" else "best")
    dataset = dataclasses.replace(Dataset.open(str(data)), encoder=loaded.encoder)
    reader = LogReader(dataset, "validation", ReaderConfig(batch_size=64, shuffle_window=0, workers=0))
    logits, surfaces = [], []
    with torch.no_grad():
        for encoded in reader:
            batch = Batch.from_encoded(encoded, loaded.schema)
            logits.append(loaded.model(batch).logits)
            rows = batch.surface[batch.request_index].tolist()
            surfaces += [loaded.schema.surface_names[row] for row in rows]
    return torch.cat(logits), surfaces


def test_a_frozen_trunk_forgets_nothing(runs: dict[str, Path]) -> None:
    before, _ = predictions(runs["old"], runs["old-data"])
    after, surfaces = predictions(runs["frozen"], runs["new-data"])
    kept = torch.tensor([surface != "stories" for surface in surfaces])
    assert kept.any()
    assert not kept.all()
    # The adapters' product now has more columns, zeros for these surfaces: the same sum, perhaps in another order, so
    # a logit may move by a few of its last bits.
    torch.testing.assert_close(before[kept], after[kept], rtol=8 * torch.finfo(torch.float32).eps, atol=1e-7)
    assert not torch.isclose(before[~kept], after[~kept]).any()


def test_the_new_surface_learns(runs: dict[str, Path]) -> None:
    old, new = load_model(runs["old"]).model, load_model(runs["frozen"], "latest").model
    place = new.schema.surface_index("stories")
    assert new.heads.surface_bias is not None
    assert old.heads.surface_bias is not None
    assert new.heads.surface_bias[:, place].all(), "biases start at 0"
    for name in ("feed", "reels", "other"):
        mine = new.heads.surface_bias[:, new.schema.surface_index(name)]
        assert torch.equal(mine, old.heads.surface_bias[:, old.schema.surface_index(name)])


def test_without_freezing_everything_goes_on_learning(runs: dict[str, Path]) -> None:
    before, _ = predictions(runs["old"], runs["old-data"])
    after, _ = predictions(runs["tuned"], runs["new-data"])
    assert not torch.isclose(before, after).any(1).all()


def test_a_wrong_start_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    old, new = runs["old"], runs["new-data"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"data": runs["old-data"], "freeze": "trunk"}, "freeze: .* has no surface that"),
        ({"data": new, "model": GEMConfig(width=8, layers=2)}, "is in one only"),
        ({"data": new, "model": dataclasses.replace(small_run.MODEL, width=12)}, "use the same model"),
    )
    for options, message in wrong:
        data = options.pop("data")
        with pytest.raises(ValueError, match=message):
            train(small_run.config(data, tmp_path / "out", init_from=old, **options))
    tables = copy.deepcopy(SCHEMA["tables"])
    tables["user"]["rows"] = 60
    table = small_table([2] * 5)
    write_dataset(tmp_path / "other", {"train/part-00000.parquet": table}, schema=small_schema(tables=tables))
    with pytest.raises(ValueError, match=r"differs from the schema of .* in tables"):
        train(small_run.config(tmp_path / "other", tmp_path / "out", init_from=old))
    with pytest.raises(ValueError, match="freeze: trunk needs init_from"):
        small_run.config(new, tmp_path / "out", freeze="trunk")
    with pytest.raises(ValueError, match=r"neither dense\.weight_decay"):
        small_run.config(new, tmp_path / "out", freeze="trunk", init_from=old, dense=DenseConfig(weight_decay=0.1))
