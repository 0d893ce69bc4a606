"""Training with the Triton kernels goes as it goes with the references."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernels
from foundation.model.cross import CrossConfig
from foundation.model.gem import GEM, GEMConfig
from foundation.model.interaction import InteractionConfig
from foundation.model.layer import LayerConfig
from foundation.model.match import MatchConfig
from foundation.model.sequence import SequenceConfig
from foundation.model.streams import StreamsConfig
from tests.foundation.model.batches import SCHEMA, TABLE_ROWS, make_batch, model_schema

pytestmark = pytest.mark.gpu

STEPS = 16

OPS = tuple(
    importlib.import_module(f"kernels.{package.name}.op")
    for package in pkgutil.iter_modules(kernels.__path__)
    if (Path(kernels.__path__[0]) / package.name / "op.py").exists()
)
"""The modules of all operators; ``BACKEND`` of each chooses between its kernels and its reference."""

ONLY_16_BIT = {"kernels.interaction.triton", "kernels.token_mixing.triton"}
"""Kernels that leave float32 to PyTorch's products."""

WATCHED, BOUGHT = SCHEMA["sequences"]["watched"], SCHEMA["sequences"]["bought"]
SEQUENCES: dict[str, Any] = {
    "watched": {**WATCHED, "max_length": 150},
    "bought": {**BOUGHT, "max_length": 60},
    "seen": {
        "timestamp": "seen_time",
        "max_length": 90,
        "attributes": {"item": {"column": "seen_item", "table": "item"}},
    },
}
"""Long enough for several blocks of 64."""


def every_op(joint: str) -> GEMConfig:
    """A model that calls every operator: all forms of attention, pooling by seeds, Wukong."""
    return GEMConfig(
        width=64,
        layers=3,
        user_layers=1,
        joint=joint,  # type: ignore[arg-type]
        match=MatchConfig(sequences=("watched",), outcomes={"watched.action": 0.4}),
        streams=StreamsConfig(attention={"watched": "block", "bought": "window"}, window={"bought": 8}),
        layer=LayerConfig(
            cross=CrossConfig(pooling="hsp", seeds=16, kron_terms=2),
            interaction=InteractionConfig(experts=2, partition="split", fm_rank=8),
            sequence=SequenceConfig(width=128, rotary="both", qk_norm=True),
        ),
    )


def losses(config: GEMConfig, precision: torch.dtype, device: str = "cuda") -> list[float]:
    """Of every step, from the same weights and on the same batch."""
    torch.manual_seed(0)
    schema = model_schema(sequences=SEQUENCES)
    model = GEM(config, schema, TABLE_ROWS).to(device)
    batch = make_batch(schema, [3, 0, 4, 1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = torch.autocast(device, dtype=precision) if precision != torch.float32 else contextlib.nullcontext()
    seen = []
    for _ in range(STEPS):
        with half:
            loss = model.loss(model(batch), batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("joint", ["copies", "shared"])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_kernels_train_as_the_references_do(
    precision: torch.dtype, tolerance: float, joint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all operators at once. Tolerances, of the loss: results and gradients of all of them that are off by 1e-6 at
    random move it by 1e-5 in float32; off by a bf16 rounding, by 1.5%."""
    used: set[str] = set()

    def watched(op: ModuleType) -> Any:
        choose = op.BACKEND.of

        def backend(*tensors: torch.Tensor) -> ModuleType:
            chosen = choose(*tensors)
            used.add(chosen.__name__)
            return chosen

        return backend

    for op in OPS:
        monkeypatch.setattr(op.BACKEND, "of", watched(op))
    with_kernels = losses(every_op(joint), precision)
    everything = {op.__name__.removesuffix("op") + "triton" for op in OPS}
    assert everything - used == (ONLY_16_BIT if precision == torch.float32 else set())
    for op in OPS:
        monkeypatch.setattr(op.BACKEND, "of", lambda *tensors, reference=op.reference: reference)
    without = losses(every_op(joint), precision)
    assert with_kernels[-1] < 0.8 * with_kernels[0]
    assert with_kernels == pytest.approx(without, rel=tolerance)
