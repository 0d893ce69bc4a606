"""Steps that the device leaves out: tables stay, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foundation.data.batch import Batch
from foundation.model.embeddings import Embeddings
from foundation.model.gem import GEM, GEMConfig
from foundation.parallel.parallelize import parallelize
from foundation.parallel.pieces import Spread, local_shards
from foundation.parallel.plan import SparseConfig
from foundation.training.ema import EMAConfig
from foundation.training.guard import TableGuard, tensors_of
from foundation.training.optimizer import DenseConfig
from foundation.training.state import TrainState
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema
from tests.foundation.parallel.ranks import one_rank

CONFIG = GEMConfig(width=8, layers=1)


def step(state: TrainState, guard: TableGuard, batch: Batch, broken: bool) -> None:
    loss = state.model.module.loss(state.model(batch), batch).total * (float("nan") if broken else 1.0)
    guard.allow(torch.isfinite(loss.detach()))
    loss.backward()
    state.dense.step(torch.isfinite(loss.detach()))
    state.dense.zero_grad()


@pytest.mark.parametrize("broken", [False, True])
def test_a_loss_that_is_not_finite_changes_nothing(broken: bool) -> None:
    schema = model_schema()
    with one_rank():
        torch.manual_seed(0)
        model = parallelize(GEM(CONFIG, schema, TABLE_ROWS), SparseConfig(lr=0.1), torch.device("cpu"))
        state = TrainState.of(model, DenseConfig(), EMAConfig())
        guard = TableGuard(model)
        before = {key: clone(value) for key, value in state.tensors().items()}
        step(state, guard, make_batch(schema, [2, 1, 3]), broken)
        changed = [key for key, value in state.tensors().items() if not torch.equal(clone(value), before[key])]
    if broken:
        assert not changed
    else:
        assert any(key.startswith("model.embeddings") for key in changed)
        assert any(key.startswith("momentum") for key in changed)


class Unused(torch.autograd.Function):
    """Takes rows and says in the backward pass that nothing depends on them, as a compiled region does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_ones(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def test_a_gradient_that_is_none_stays_none() -> None:
    schema = model_schema()
    with one_rank():
        model = parallelize(GEM(CONFIG, schema, TABLE_ROWS), SparseConfig(), torch.device("cpu"))
        guard = TableGuard(model)
        guard.allow(torch.tensor(True))
        embeddings = next(module for module in model.modules() if isinstance(module, Embeddings))
        used, *others = [rows for rows in tensors_of(embeddings(make_batch(schema, [2, 1]))) if rows.requires_grad]
        assert others
        (sum(Unused.apply(rows) for rows in others) + used.sum()).backward()


def clone(value: Spread) -> torch.Tensor:
    ((_, whole),) = local_shards(value)
    return whole.detach().clone()
