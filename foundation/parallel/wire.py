"""How rows of tables travel between ranks: in float32, or rounded for the way by TorchRec's codecs.

Rounding is done once per way, of rows in the forward pass and of their gradients in the backward pass, also for rows
that a rank holds itself; tables and sums stay in float32.

| wire | a row of D numbers | largest relative error of a number, forward and backward |
|---|---|---|
| fp32 | 4 D bytes | 0 |
| bf16 | 2 D bytes | 2^-8, 2^-8 |
| fp8 | D + 8 bytes per `row_length` numbers | 2^-4, 2^-3 of numbers near the largest of their row; the rest fades |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from foundation.parallel.topology import Wire

SHORTEST: Final = 16
"""Numbers of a row below which fp8 with its 8 bytes of scale saves too little."""


def codecs(wire: Wire, dims: Iterable[int], device: torch.device) -> dict[str, QuantizedCommCodecs] | None:
    """TorchRec's registry of codecs; None where rows travel as they are.

    Bags that are cut by rows are summed on the way, for which TorchRec has no fp8: they use fp16 forward and bf16
    backward instead.

    Args:
        wire: the format.
        dims: of all tables.
        device: what computes.

    Raises:
        ValueError: fp8 on CPU, for which FBGEMM has no kernels, or with dims that have no common divisor of 16 or more.
    """
    if wire == "fp32":
        return None
    kind = CommType(wire)
    if wire == "bf16":
        config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    else:
        if device.type != "cuda":
            raise ValueError("parallel.sparse.wire: fp8 needs CUDA (FBGEMM has no kernels for CPU); use bf16 or fp32")
        length = row_length(dims)
        config = QCommsConfig(
            forward_precision=kind, backward_precision=kind, fp8_quantize_dim=length, fp8_quantize_dim_bwd=length
        )
    if device.type == "cuda":
        return get_qcomm_codecs_registry(config, device=device)
    # TorchRec would take fp16 on CPU, as Gloo once had no bf16.
    return {op.name: get_qcomm_codecs(config) for op in CommOp}


def row_length(dims: Iterable[int]) -> int:
    """Numbers that share a scale in fp8.

    Raises:
        ValueError: it would be below 16; the message lists the dims.
    """
    every = sorted(set(dims))
    length = math.gcd(*every)
    if length < SHORTEST:
        raise ValueError(
            f"parallel.sparse.wire: fp8 keeps one scale per {length} numbers, the common divisor of the tables' dims "
            f"{every}; it must be at least {SHORTEST}. Choose other dims, or bf16"
        )
    return length


def row_bytes(wire: Wire, dim: int, length: int) -> int:
    """Bytes of a row of `dim` numbers on its way; `length` is that of `row_length`."""
    return {"fp32": 4 * dim, "bf16": 2 * dim, "fp8": dim // length * (length + 8)}[wire]
