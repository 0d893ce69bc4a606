from __future__ import annotations

import pytest
import torch

from foundation.parallel.parallelize import SparseConfig, parallelize
from foundation.parallel.pieces import local_shards
from foundation.parallel.tables import dense_parameters, table_weights
from foundation.training.ema import EMA, EMAConfig
from tests.foundation.parallel import small_model
from tests.foundation.parallel.ranks import one_rank

CPU = torch.device("cpu")


def whole(tensors: dict) -> dict[str, torch.Tensor]:
    return {name: next(local_shards(value))[1].detach().clone() for name, value in tensors.items()}


def weights(model) -> dict[str, torch.Tensor]:
    return whole({**dense_parameters(model), **table_weights(model)})


def step(model, seed: int) -> None:
    batch = small_model.batch(seed)
    small_model.loss_of(model(batch), batch.label).backward()
    with torch.no_grad():
        for p in dense_parameters(model).values():
            if p.grad is not None:
                p -= 0.1 * p.grad
                p.grad = None


@pytest.mark.parametrize(("warm_up", "every"), [(False, 1), (True, 1), (False, 3)])
def test_averages_follow_the_recurrence(warm_up: bool, every: int) -> None:
    with one_rank():
        model = parallelize(small_model.build(), SparseConfig(lr=0.1), CPU)
        ema = EMA(model, EMAConfig(decay=0.8, warm_up=warm_up, every=every))
        expected = weights(model)
        for n in range(1, 7):
            step(model, n)
            ema.update(n)
            if n % every == 0:
                decay = min(0.8**every, (1 + n // every) / (10 + n // every)) if warm_up else 0.8**every
                now = weights(model)
                expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
        got = whole(ema.tensors())
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def test_swapped_evaluates_the_average_and_gives_the_weights_back_bit_for_bit() -> None:
    with one_rank():
        model = parallelize(small_model.build(), SparseConfig(lr=0.1), CPU)
        ema = EMA(model, EMAConfig(decay=0.9))
        for n in range(1, 4):
            step(model, n)
            ema.update(n)
        before, averages = weights(model), whole(ema.tensors())
        batch = small_model.batch(99)
        plain = model(batch)
        with ema.swapped():
            assert all(torch.equal(value, averages[name]) for name, value in weights(model).items())
            assert not torch.equal(model(batch), plain)
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        assert all(torch.equal(value, averages[name]) for name, value in whole(ema.tensors()).items())
        with pytest.raises(RuntimeError, match="on purpose"), ema.swapped():
            raise RuntimeError("on purpose")
        assert torch.equal(model(batch), plain)


def test_without_tables_and_restart() -> None:
    with one_rank():
        model = parallelize(small_model.build(), SparseConfig(lr=0.1), CPU)
        dense_only = EMA(model, EMAConfig(decay=0.9, tables=False))
        assert dense_only.tensors().keys() == dense_parameters(model).keys()
        ema = EMA(model, EMAConfig(decay=0.9))
        step(model, 1)
        ema.update(1)
        ema.restart_tables()
        averages = whole(ema.tensors())
        for name, value in whole(table_weights(model)).items():
            assert torch.equal(averages[name], value)
        assert not torch.equal(averages["out.weight"], weights(model)["out.weight"])


@pytest.mark.parametrize(("key", "value"), [("decay", 1.0), ("every", 0)])
def test_config_names_the_wrong_key(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"ema.{key}"):
        EMAConfig(**{key: value})  # type: ignore[arg-type]
