"""Activation checkpointing: gradients do not depend on the choice, and the choice follows the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foundation.model.gem import GEM, GEMConfig
from foundation.model.layer import LayerConfig
from foundation.model.sequence import SequenceConfig
from foundation.training.activations import Cost, choose, measure, recompute, regions
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

SCHEMA = model_schema()
CONFIG = GEMConfig(width=8, layers=2, layer=LayerConfig(sequence=SequenceConfig(dropout=0.3)))


def build(config: GEMConfig = CONFIG) -> GEM:
    torch.manual_seed(0)
    return GEM(config, SCHEMA, TABLE_ROWS)


def gradients(model: GEM) -> dict[str, torch.Tensor]:
    batch = make_batch(SCHEMA, [2, 1, 3])
    torch.manual_seed(1)
    model.zero_grad()
    model.loss(model(batch), batch).total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, user_layers=1, joint="shared")], ids=["copies", "shared"])
@pytest.mark.parametrize("share", ["one", "half", "all"])
def test_gradients_do_not_depend_on_what_is_computed_again(config: GEMConfig, share: str) -> None:
    expected = gradients(build(config))
    model = build(config)
    names = sorted(regions(model))
    chosen = {"one": names[:1], "half": names[::2], "all": names}[share]
    recompute(model, chosen)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_what_a_region_keeps_is_what_computing_again_frees() -> None:
    def kept(model: GEM) -> int:
        seen: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = make_batch(SCHEMA, [3] * 40)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(batch)
        del output
        return sum(seen.values())

    model = build()
    costs = measure(model, make_batch(SCHEMA, [3] * 40))
    assert {cost.region for cost in costs} == set(regions(model))
    assert all(cost.seconds > 0 for cost in costs)
    largest = max(costs, key=lambda cost: cost.bytes)
    before = kept(model)
    inputs: list[int] = []
    region = regions(model)[largest.region]
    region.register_forward_pre_hook(lambda _, args: inputs.extend(x.untyped_storage().nbytes() for x in args))
    recompute(model, [largest.region])
    # The checkpoint keeps the region's inputs instead, which others may keep too.
    freed = before - kept(model)
    assert 0 < largest.bytes - sum(inputs) <= freed <= largest.bytes


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, other = build(), build()
    measure(model, make_batch(SCHEMA, [2, 1]))
    assert all(p.grad is None for p in model.parameters())
    first, second = gradients(model), gradients(other)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_the_budget_goes_to_what_saves_most_time_per_byte() -> None:
    costs = [Cost("a", 100, 1.0), Cost("b", 50, 1.0), Cost("c", 10, 0.01), Cost("d", 200, 1.5)]
    assert choose(costs, 1e9) == set()
    assert choose(costs, 0) == {"a", "b", "c", "d"}
    assert choose(costs, 150) == {"c", "d"}
    assert choose(costs, 70) == {"a", "d"}
