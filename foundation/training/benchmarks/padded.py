"""What stands in for the project's kernels in benchmarks: attention over padded sequences, and PyTorch's operators.

Every sequence is padded to the longest of the batch, rounded up to a multiple of ``STEP``. Softmax attention is
PyTorch's, with a mask of the real keys; generated networks are batched matrix products. A window is left out: PyTorch's
attention would compute all pairs and hide them. Rows still go to their padded places and back by the project's kernels,
which is to the favour of the padded side.

A compiler cannot read lengths on the device. They are therefore looked up once for each module and batch, and handed
over as the sizes of empty tensors, which a graph takes for numbers that may change.

Legend: T rows, B sequences, L padded length, H heads, d head width, M keys per sequence where they are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.cross import SequenceSummary
from foundation.model.events import Events, History
from foundation.model.joint import HistoryAttention
from foundation.model.sequence import GeneratedNetwork, SelfAttention
from kernels.block_attention.reference import BLOCK, angles, rotate
from kernels.common.requests import request_offsets
from kernels.jagged import from_padded, to_padded

Kernels = Literal["ours", "padded", "torch"]
"""The project's; padded attention in their place; that, and PyTorch's operators for norms and interactions too."""

STEP = 64
"""Padded lengths above it are multiples of it, which PyTorch's attention wants of a mask, and blocks divide."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

_SIZES: dict[str, Tensor] = {}
"""Of the module that runs: ``rows``, padded length of its sequences; ``impressions``, the most of a request."""


@contextmanager
def kernels_of(kind: Kernels) -> Iterator[None]:
    """The model runs with these kernels while the block does."""
    with ExitStack() as stack:
        if kind in ("padded", "torch"):
            for name in ("sequence", "joint", "pooling"):
                stack.enter_context(patch(f"foundation.model.{name}.jagged_attention", padded_attention))
            stack.enter_context(patch("foundation.model.sequence.gdpa", padded_gdpa))
            stack.enter_context(patch("foundation.model.sequence.block_attention", padded_block_attention))
        if kind == "torch":
            stack.enter_context(patch("foundation.model.norm.layer_norm", plain_layer_norm))
            stack.enter_context(patch("foundation.model.sequence.rms_norm", plain_rms_norm))
            stack.enter_context(patch("foundation.model.interaction.mix_tokens", plain_mix_tokens))
            stack.enter_context(patch("foundation.model.interaction.fm_block", plain_fm_block))
            stack.enter_context(patch("foundation.model.pooling.sum_kron", plain_sum_kron))
        yield
        _SIZES.clear()


class Lengths:
    """Tells padded attention how long the sequences of a batch are, without a wait for the device in later steps.

    Args:
        model: whose modules are told when they run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch = 0
        """Which batch comes next; its lengths are counted when it comes first, and known from then on."""
        self._known: dict[tuple[str, int], dict[str, Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, GeneratedNetwork | SelfAttention | HistoryAttention | SequenceSummary):
                module.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            key = (name, self.batch)
            if key not in self._known:
                self._known[key] = _sizes(inputs)
            _SIZES.update(self._known[key])

        return before


def _sizes(inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    first = inputs[0]
    events = first.events if isinstance(first, History) else first
    offsets = events.offsets if isinstance(events, Events) else inputs[1]
    request = first.request if isinstance(first, History) else None
    sizes = {"rows": _longest(offsets), "impressions": 1 if request is None else int(request.bincount().max())}
    holders = {name: torch.empty(max(2, size), 0) for name, size in sizes.items()}  # 1 would have a graph of its own
    for holder in holders.values():
        torch._dynamo.maybe_mark_dynamic(holder, 0)
    return holders


def _longest(offsets: Tensor) -> int:
    longest = max(1, int(offsets.diff().max()))
    return longest if longest <= STEP else -(-longest // STEP) * STEP


def _rows(offsets: Tensor) -> int:
    return _SIZES["rows"].shape[0] if _SIZES else _longest(offsets)


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
    """As `kernels.jagged_attention`, without causal and window."""
    sequences, length = kv_offsets.shape[0] - 1, _rows(kv_offsets)
    keys, values = (to_padded(x.to(q.dtype), kv_offsets, length).transpose(1, 2) for x in (k, v))  # [B, H, L, d]
    asked = length  # queries of a sequence
    if request_index is not None:
        assert q_offsets is not None
        each = q.shape[0] // max(1, request_index.shape[0])
        q_offsets = request_offsets(q_offsets, request_index, sequences)
        asked = _SIZES["impressions"].shape[0] * each if _SIZES else _longest(q_offsets)
    if q_offsets is None:
        queries = q.transpose(0, 1)[None].expand(sequences, -1, -1, -1)
    else:
        queries = to_padded(q, q_offsets, asked).transpose(1, 2)
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    real = torch.arange(length, device=q.device) < kv_offsets.diff()[:, None].clamp(min=1)
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
    batch, blocks = offsets.shape[0] - 1, -(-_rows(offsets) // BLOCK)
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
    """As `kernels.gdpa` with dense keys `[B, M, H, d]`, whose few elements are scaled in place of the many scores."""
    assert kv_offsets is None
    queries = to_padded(q, q_offsets, _rows(q_offsets)).transpose(1, 2)
    keys, values = (x.to(q.dtype).transpose(1, 2) for x in (k * logit_scale, v * scale))
    out = torch.matmul(_ACTIVATIONS[activation](torch.matmul(queries, keys.transpose(2, 3))), values).transpose(1, 2)
    return from_padded(out.contiguous(), q_offsets, q.shape[0])


def plain_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, dtype: torch.dtype | None
) -> Tensor:
    """As `kernels.norms.layer_norm`."""
    own = dtype or x.dtype
    weight, bias = (None if t is None else t.to(own) for t in (weight, bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(own), x.shape[-1:], weight, bias, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `kernels.norms.rms_norm`."""
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def plain_mix_tokens(x: Tensor, weight: Tensor) -> Tensor:
    """As `kernels.token_mixing.mix_tokens`: ``x [N, n, D]`` and ``weight [n, o]`` to ``[N, o, D]``."""
    return torch.matmul(weight.t().to(x.dtype), x)


def plain_fm_block(x: Tensor, y: Tensor) -> Tensor:
    """As `kernels.interaction.fm_block`: ``X X^T Y`` of ``x [N, n, D]`` and ``y [n, k]`` or ``[N, n, k]``."""
    return torch.matmul(torch.bmm(x, x.transpose(1, 2)), y.to(x.dtype))


def plain_sum_kron(x: Tensor, mix: Tensor, maps: Tensor) -> Tensor:
    """As `kernels.token_mixing.sum_kron`: ``sum_k mix_k^T x maps_k`` of ``x [N, n, D]``."""
    terms, inputs, outputs = mix.shape
    flat = mix.permute(2, 0, 1).reshape(outputs * terms, inputs).to(x.dtype)
    mixed = torch.matmul(flat, x).view(x.shape[0], outputs, terms * x.shape[2])
    return torch.matmul(mixed, maps.flatten(0, 1).to(x.dtype))
