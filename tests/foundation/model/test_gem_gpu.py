"""Training with the Triton kernels goes as it goes with the references."""

from __future__ import annotations

import contextlib

import pytest
import torch

from foundation.model.gem import GEM, GEMConfig
from foundation.model.layer import LayerConfig
from foundation.model.sequence import SequenceConfig
from kernels.gdpa import op as gdpa_op
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged_attention import op as attention_op
from kernels.jagged_attention import reference as attention_reference
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

pytestmark = pytest.mark.gpu

STEPS = 12


def losses(precision: torch.dtype) -> list[float]:
    """Of every step, from the same weights and on the same batch."""
    torch.manual_seed(0)
    config = GEMConfig(width=64, layers=2, layer=LayerConfig(sequence=SequenceConfig(width=64, window=4)))
    model = GEM(config, model_schema(), TABLE_ROWS).cuda()
    batch = make_batch(model_schema(), [3, 0, 5, 4, 2, 7]).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = torch.autocast("cuda", dtype=precision) if precision != torch.float32 else contextlib.nullcontext()
    seen = []
    for _ in range(STEPS):
        with half:
            loss = model.loss(model(batch), batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_kernels_train_as_the_references_do(
    precision: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerances, of the loss: attention off by 1e-6 moves it by 3e-6 in float32; off by a bf16 rounding, by 3%."""
    with_kernels = losses(precision)
    monkeypatch.setattr(gdpa_op, "_backend", lambda q: gdpa_reference)
    monkeypatch.setattr(attention_op, "_backend", lambda q, v: attention_reference)
    without = losses(precision)
    assert with_kernels[-1] < 0.8 * with_kernels[0]
    assert with_kernels == pytest.approx(without, rel=tolerance)
