"""Pooling a sequence into a few tokens by attention of learned queries: PMA, and hierarchical seed pooling.

``PMA = MHA(Q, S, S)`` with as many learned queries as tokens (InterFormer, arXiv 2411.09852). Hierarchical seed
pooling asks with more seeds than tokens and compresses: ``H = MHA(Norm(E_seed), S, S)`` and ``Y = SumKron(H) = sum_k
Z_k^T H W_k`` (Kunlun, arXiv 2602.10016). In both, queries can depend on the candidate (target attention).

Sequences belong to the rows that ask, or to requests: then ``index`` says whose, and each request's keys exist once.

Legend: T events, B sequences, N asking rows (B, or the impressions of B requests), E event width, Q tokens that come
out, n seeds, H heads, d = E / H, K terms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.norm import LayerNorm, autocast_dtype
from kernels.jagged import gather_rows
from kernels.jagged_attention import jagged_attention
from kernels.token_mixing import sum_kron

WIDEST_KEYS = 256
"""Events wider than this are more than the GPU kernels take as keys."""


class Pooling(nn.Module):
    """Multi-head attention of Q queries over a sequence: ``[T, E]`` to ``[N, Q, E]`` (PMA; 0 for an empty sequence).

    Up to a width of ``WIDEST_KEYS`` keys and values are not made: with few queries it is cheaper to carry the key
    projection over to the query and the value projection over to the pooled result, the same product in another order.
    """

    def __init__(self, tokens: int, heads: int, target_aware: bool, width: int, *, bias: bool = True) -> None:
        super().__init__()
        _check_heads(width, heads)
        self.heads, self.target_aware = heads, target_aware
        head = width // self.heads
        self.seeds = nn.Parameter(torch.randn(tokens, width))
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Parameter(torch.randn(self.heads, head, width) * width**-0.5)
        self.value = nn.Parameter(torch.randn(self.heads, width, head) * width**-0.5)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, values: Tensor, offsets: Tensor, target: Tensor, index: Tensor | None = None) -> Tensor:
        """Pools ``values [T, E]``; ``target [N, E]`` is added to the queries if the pooling is target-aware.

        Args:
            index: int64 ``[N]``, rising: the sequence that each row looks at; None: its own.
        """
        seeds = self.seeds + target[:, None] if self.target_aware else self.seeds[None]
        count, queries, width = seeds.shape
        q = self.query(seeds).view(count, queries, self.heads, width // self.heads)
        if width > WIDEST_KEYS:
            return self._with_keys(q, values, offsets, index)
        q = torch.einsum("nqhd,hde->nqhe", q, self.key).reshape(-1, 1, width)
        kv = values.unsqueeze(1)
        rows, asks = queries * self.heads, self.target_aware
        pooled = _ask(q, kv, kv, offsets, rows if asks else 0, index, (width // self.heads) ** -0.5)
        pooled = pooled.view(-1, queries, self.heads, width)
        out = self.out(torch.einsum("nqhe,hed->nqhd", pooled, self.value).flatten(2))
        return out if asks or index is None else gather_rows(out, index)

    def _with_keys(self, q: Tensor, values: Tensor, offsets: Tensor, index: Tensor | None) -> Tensor:
        """The same with keys and values that are made, head by head."""
        queries, width = q.shape[1], values.shape[1]
        k = F.linear(values, self.key.flatten(0, 1)).view(-1, self.heads, width // self.heads)
        v = F.linear(values, self.value.transpose(1, 2).flatten(0, 1)).view(-1, self.heads, width // self.heads)
        asks = self.target_aware
        q = q.flatten(0, 1).to(v.dtype)
        pooled = _ask(q, k, v, offsets, queries if asks else 0, index, None)
        out = self.out(pooled.reshape(-1, queries, width))
        return out if asks or index is None else gather_rows(out, index)


class SeedPooling(nn.Module):
    """Hierarchical seed pooling: ``[T, E]`` to ``[N, Q, E]``; the attention of an empty sequence is 0."""

    def __init__(
        self, tokens: int, seeds: int, terms: int, heads: int, target_aware: bool, width: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        _check_heads(width, heads)
        self.heads, self.target_aware = heads, target_aware
        self.seeds = nn.Parameter(torch.randn(seeds, width))
        self.norm = LayerNorm(width, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=False)  # the same for all keys, softmax would not see it
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.compress = SumKron(seeds, tokens, width, terms)

    def forward(self, values: Tensor, offsets: Tensor, target: Tensor, index: Tensor | None = None) -> Tensor:
        """As in :class:`Pooling`."""
        seeds = self.seeds + target[:, None] if self.target_aware else self.seeds[None]
        queries, width = seeds.shape[1:]
        shape = (-1, self.heads, width // self.heads)
        k, v = self.key(values).view(shape), self.value(values).view(shape)
        q = self.query(self.norm(seeds)).view(shape)
        pooled = _ask(q, k, v, offsets, queries if self.target_aware else 0, index, None)
        out = self.compress(self.out(pooled.reshape(-1, queries, width)))
        return out if self.target_aware or index is None else gather_rows(out, index)


class SumKron(nn.Module):
    """``Y = sum_k Z_k^T X W_k``: ``[N, n, E]`` to ``[N, Q, E]``, a sum of Kronecker products as one linear map."""

    def __init__(self, inputs: int, outputs: int, width: int, terms: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(terms, inputs, outputs) * inputs**-0.5)
        self.maps = nn.Parameter(torch.randn(terms, width, width) * (terms * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Y of ``x [N, n, E]``."""
        return sum_kron(x.to(autocast_dtype(x) or x.dtype), self.mix, self.maps)


def _ask(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, rows: int, index: Tensor | None, scale: float | None
) -> Tensor:
    """Attention of ``rows`` queries for each asking row; 0: the same queries for all sequences, ``[B, ...]`` comes."""
    if not rows:
        return jagged_attention(q, k, v, None, offsets, scale=scale)
    count = offsets.shape[0] - 1 if index is None else index.shape[0]
    q_offsets = torch.arange(count + 1, device=offsets.device) * rows
    return jagged_attention(q, k, v, q_offsets, offsets, scale=scale, request_index=index)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"cross.pooling_heads: width {width} is no multiple of {heads}")
