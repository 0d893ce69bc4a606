"""Attention over padded sequences, in place of the project's kernels: what `kernels: padded` of the benchmark runs.

Every sequence is padded to the longest of the batch. Softmax attention is PyTorch's, with a mask of the real keys;
generated networks are batched matrix products. A window is left out: PyTorch's attention would compute all pairs and
hide them.

Legend: T rows, B sequences, L padded length, H heads, d head width, M keys per sequence where they are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.block_attention.reference import BLOCK, angles, rotate
from kernels.jagged import from_padded, to_padded
from kernels.jagged.requests import request_offsets

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@contextmanager
def padded_kernels() -> Iterator[None]:
    """The model's attention is padded while the block runs."""
    with ExitStack() as stack:
        for name in ("sequence", "joint", "pooling"):
            stack.enter_context(patch(f"foundation.model.{name}.jagged_attention", padded_attention))
        stack.enter_context(patch("foundation.model.sequence.gdpa", padded_gdpa))
        stack.enter_context(patch("foundation.model.sequence.block_attention", padded_block_attention))
        yield


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    *,
    request_index: Tensor | None = None,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """As `kernels.jagged_attention`, without causal and window; waits for the device to learn the longest sequence."""
    if request_index is not None:
        assert q_offsets is not None
        q_offsets = request_offsets(q_offsets, request_index, kv_offsets.shape[0] - 1)
    keys, values = (_pad(x.to(q.dtype), kv_offsets) for x in (k, v))  # [B, H, L, d]
    real = torch.arange(keys.shape[2], device=q.device) < kv_offsets.diff()[:, None].clamp(min=1)
    queries = q.transpose(0, 1)[None].expand(len(keys), -1, -1, -1) if q_offsets is None else _pad(q, q_offsets)
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(queries, keys, values, real[:, None, None, :], scale=scale).transpose(1, 2)
    return out if q_offsets is None else from_padded(out.contiguous(), q_offsets, q.shape[0])


def padded_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As `kernels.block_attention`: padded sequences cut into blocks, which are then a batch of short sequences."""
    if positions is not None and frequencies is not None:
        turn = angles(positions, frequencies, torch.float32)
        q, k = rotate(q, turn).to(v.dtype), rotate(k, turn).to(v.dtype)
    batch, blocks = offsets.shape[0] - 1, max(1, -(-int(offsets.diff().max()) // BLOCK))
    shape = (batch * blocks, BLOCK, *q.shape[1:])
    parts = [to_padded(x, offsets, blocks * BLOCK).reshape(shape).transpose(1, 2) for x in (q, k, v)]
    real = torch.arange(blocks * BLOCK, device=q.device) < offsets.diff()[:, None]
    real = real.view(batch * blocks, BLOCK)
    real = real | ~real.any(1, keepdim=True)  # a block of padding must see something
    out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], real[:, None, None, :]).transpose(1, 2)
    return from_padded(out.reshape(batch, blocks * BLOCK, *q.shape[1:]), offsets, q.shape[0])


def padded_gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    activation: str,
    scale: float,
    logit_scale: float,
    **_: Any,
) -> Tensor:
    """As `kernels.gdpa` with dense keys `[B, M, H, d]`."""
    assert kv_offsets is None
    queries = _pad(q, q_offsets)
    keys, values = (x.to(q.dtype).transpose(1, 2) for x in (k, v))
    scores = _ACTIVATIONS[activation](torch.matmul(queries, keys.transpose(2, 3)) * logit_scale)
    out = (torch.matmul(scores, values) * scale).transpose(1, 2)
    return from_padded(out.contiguous(), q_offsets, q.shape[0])


def _pad(x: Tensor, offsets: Tensor) -> Tensor:
    return to_padded(x, offsets, max(1, int(offsets.diff().max()))).transpose(1, 2)
