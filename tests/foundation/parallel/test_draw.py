"""Tables drawn where they lie are the same however they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foundation.parallel import draw
from foundation.parallel.draw import draw_rows, draw_tables
from foundation.parallel.parallelize import parallelize
from foundation.parallel.pieces import local_shards
from foundation.parallel.plan import SparseConfig
from foundation.parallel.tables import table_weights
from tests.foundation.parallel import small_model
from tests.foundation.parallel.ranks import on_ranks, one_rank

ALL = slice(0, 8)


def drawn(first: int, last: int, columns: slice = ALL, key: tuple[int, ...] = (3, 1)) -> torch.Tensor:
    rows = torch.full((last - first, columns.stop - columns.start), torch.nan)
    draw_rows(rows, first, (1000, 8), columns, 0.5, key)
    return rows


def test_any_part_of_a_table_is_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 64)
    whole = drawn(0, 1000)
    for first, last in ((0, 1), (63, 65), (100, 900), (960, 1000), (500, 500)):
        assert torch.equal(drawn(first, last), whole[first:last])
    assert torch.equal(drawn(37, 201, slice(2, 6)), whole[37:201, 2:6])


def test_rows_are_normal_and_differ_by_table_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 64)
    whole = drawn(0, 1000)
    assert whole.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(whole.mean().item()) < 0.03
    assert len({row[0].item() for row in whole}) == 1000
    assert not torch.equal(whole, drawn(0, 1000, key=(3, 2)))


def redrawn(config: SparseConfig) -> dict[str, list]:
    model = parallelize(small_model.build(), config, torch.device("cpu"))
    draw_tables(model, lambda name: 0.0 if "user" in name else 0.1, seed=5)
    return {name: list(local_shards(table)) for name, table in table_weights(model).items()}


def test_any_number_of_ranks_draws_the_same_tables(tmp_path: Path) -> None:
    with one_rank():
        whole = {name: shards[0][1].clone() for name, shards in redrawn(SparseConfig()).items()}
    assert any(value.any() for value in whole.values())
    for answer in on_ranks(redrawn, 2, tmp_path, SparseConfig(row_wise_from=1)):
        for name, shards in answer.items():
            for place, shard in shards:
                assert torch.equal(shard, whole[name][place]), name
