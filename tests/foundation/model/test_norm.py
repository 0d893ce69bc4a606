"""Norms of the model: their dtype under autocast, and rows wider than the kernels take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from foundation.model import norm
from foundation.model.gem import GEM, GEMConfig
from foundation.model.grouped import GroupedNorm
from foundation.model.interaction import InteractionArm, InteractionConfig
from foundation.model.norm import LayerNorm, normalise
from foundation.model.sequence import QKNorm
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

HALF = torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [LayerNorm, lambda width: GroupedNorm(2, width)], ids=["layer", "grouped"])
def test_norms_have_the_dtype_of_autocast_and_its_accuracy(make: Callable[[int], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = make(16), torch.randn(2, 5, 16) * 3 + 1
    plain = module(x)
    assert plain.dtype == torch.float32
    with HALF:
        half = module(x)
        assert module(x.double()).dtype == torch.float64
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain, rtol=2**-8, atol=2**-8)


def test_wide_rows_are_normalised_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU rows beyond the widest go to PyTorch's kernel; the arithmetic is the same on a CPU."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 24), torch.randn(24), torch.randn(24)
    expected = F.layer_norm(x, (24,), weight, bias)
    torch.testing.assert_close(normalise(x, weight, bias), expected)
    monkeypatch.setattr(norm, "on_gpu", lambda x: True)
    monkeypatch.setattr(norm, "WIDEST", 8)
    torch.testing.assert_close(normalise(x, weight, bias), expected)
    torch.testing.assert_close(normalise(x, None, None), F.layer_norm(x, (24,)))
    with HALF:
        half = normalise(x, weight, bias)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


def test_queries_and_keys_keep_their_dtype() -> None:
    torch.manual_seed(0)
    module = QKNorm(8)
    with torch.no_grad():
        module.query.weight.uniform_(0.5, 2.0)
    q, k = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    own, _ = module(q, k)
    torch.testing.assert_close(own, F.rms_norm(q, (8,), module.query.weight))
    with HALF:
        halves = module(q.bfloat16(), k.bfloat16())
    assert {x.dtype for x in halves} == {torch.bfloat16}


def test_the_interaction_arm_works_in_the_dtype_of_autocast() -> None:
    torch.manual_seed(0)
    arm = InteractionArm(InteractionConfig(experts=2, partition="split", block_tokens=3, linear_tokens=2), 6, 8, 1)
    x, summaries = torch.randn(1, 4, 4, 8), torch.randn(4, 2, 8)
    with HALF:
        half = arm(x, summaries)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), arm(x, summaries), rtol=0.1, atol=0.1)


def test_a_model_in_bf16_comes_near_the_one_in_fp32() -> None:
    torch.manual_seed(0)
    schema = model_schema()
    model = GEM(GEMConfig(width=16, layers=2, user_layers=1, joint="shared"), schema, TABLE_ROWS).eval()
    batch = make_batch(schema, [3, 1, 4])
    with torch.no_grad():
        plain = model(batch).logits
        with HALF:
            half = model(batch).logits
    assert 0 < float((half.float() - plain).abs().max()) < 0.1 * float(plain.abs().max())
