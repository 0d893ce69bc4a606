"""Operations counted from sizes are those that PyTorch counts while the model runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foundation.model.flops import PARTS, Load, forward_flops, op_formulas, pairs
from foundation.model.gem import GEM, GEMConfig
from foundation.model.sequence import SequenceConfig
from kernels.gdpa import reference as gdpa
from kernels.jagged_attention import reference as jagged_attention
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema
from tests.foundation.model.test_gem import CONFIGS

WITHOUT_MATCH = {name: c for name, c in CONFIGS.items() if not c.match.sequences}


@pytest.mark.parametrize("name", WITHOUT_MATCH)
def test_the_count_is_that_of_the_flop_counter(name: str) -> None:
    schema = model_schema()
    model = GEM(CONFIGS[name], schema, TABLE_ROWS).eval()
    batch = make_batch(schema, [3, 0, 1, 4, 2], histories=[6, 2, 0, 3, 5])
    with FlopCounterMode(display=False, custom_mapping=op_formulas()) as counter:
        model(batch)
    counted = forward_flops(model, Load.of(batch))
    assert tuple(counted) == PARTS
    assert sum(counted.values()) == counter.get_total_flops()


def test_the_operators_count_what_their_references_compute() -> None:
    """Of one length there is no padding, and the plain references multiply what the formulas say."""
    torch.manual_seed(0)
    offsets = torch.arange(4) * 40  # of 32 or more, so that the references need no padding
    q, dense = torch.randn(120, 2, 8), torch.randn(3, 5, 2, 8)
    formulas = op_formulas()
    with FlopCounterMode(display=False) as counter:
        jagged_attention.forward(q, q, q, offsets, offsets, 1.0, False, -1)
    want = formulas[torch.ops.opengem.jagged_attention](q, q, q, offsets, offsets, 1.0, False, -1, out_val=None)
    assert counter.get_total_flops() == want
    causal = formulas[torch.ops.opengem.jagged_attention](q, q, q, offsets, offsets, 1.0, True, -1, out_val=None)
    lengths = offsets.diff()
    assert causal * 2 == want * int((lengths * (lengths + 1)).sum()) / int((lengths**2).sum())
    with FlopCounterMode(display=False) as counter:
        gdpa.forward(q, dense, dense, offsets, None, "silu", 1.0, 1.0, -1)
    assert counter.get_total_flops() == formulas[torch.ops.opengem.gdpa](q, dense, dense, offsets, None, out_val=None)


@pytest.mark.parametrize(
    ("attention", "causal"), [("full", False), ("full", True), ("window", False), ("window", True), ("block", False)]
)
def test_pairs(attention: str, causal: bool) -> None:
    lengths = torch.tensor([0, 1, 3, 64, 130])
    got = pairs(SequenceConfig(attention=attention, window=2, causal=causal), lengths.numpy())  # type: ignore[arg-type]
    want = 0
    for length in lengths.tolist():
        i, j = torch.arange(length)[:, None], torch.arange(length)
        sees = {"full": i >= 0 * j, "window": (i - j).abs() <= 2, "block": i // 64 == j // 64}[attention]
        want += int((sees & ((j <= i) if causal else (j >= 0))).sum())
    assert got == want


def test_sharing_saves_what_does_not_depend_on_the_candidate() -> None:
    schema = model_schema()
    shared = GEM(GEMConfig(width=8, layers=2, user_layers=1, joint="shared"), schema, TABLE_ROWS)
    together, apart = (Load.of(make_batch(schema, s, histories=[6] * len(s))) for s in ([8], [1] * 8))
    a, b = forward_flops(shared, together), forward_flops(shared, apart)
    assert a["heads"] == b["heads"]
    assert a["attention"] < b["attention"]
    assert a["projections"] < b["projections"]
