"""Layers of which several independent copies run as one batched product: ensemble members and experts.

Legend: G groups, N rows, I inputs, O outputs, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.norm import normalise


class GroupedLinear(nn.Module):
    """G independent linear maps, ``[G, N, I]`` to ``[G, N, O]``.

    Args:
        gain: standard deviation of an output at the start, for inputs of standard deviation 1.
    """

    def __init__(self, groups: int, inputs: int, outputs: int, *, bias: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        bound = gain * math.sqrt(3.0 / max(1, inputs))
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(groups, 1, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Applies map g to ``x[g]``."""
        if self.weight.shape[0] == 1:
            bias = None if self.bias is None else self.bias[0, 0]
            return F.linear(x[0], self.weight[0].t(), bias).unsqueeze(0)
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)


class GroupedNorm(nn.Module):
    """Layer norm over the last dim of ``[G, N, ..., D]``, with scale and shift of each group."""

    def __init__(self, groups: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(groups, width))
        self.bias = nn.Parameter(torch.zeros(groups, width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each row; the affine map is that of the row's group."""
        groups, width = self.weight.shape
        if groups == 1:
            return normalise(x, self.weight[0], None if self.bias is None else self.bias[0])
        shape = (groups, *([1] * (x.dim() - 2)), width)
        plain = normalise(x, None, None)
        weight = self.weight.view(shape).to(plain.dtype)
        if self.bias is None:
            return plain * weight
        return torch.addcmul(self.bias.view(shape).to(plain.dtype), plain, weight)


class GroupedMLP(nn.Module):
    """Linear, SiLU, dropout for each of ``widths``: ``[G, N, I]`` to ``[G, N, widths[-1]]``."""

    def __init__(self, groups: int, inputs: int, widths: Sequence[int], dropout: float, *, bias: bool = True) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            GroupedLinear(groups, i, o, bias=bias) for i, o in zip((inputs, *widths), widths, strict=False)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Applies network g to ``x[g]``."""
        for linear in self.linears:
            x = self.dropout(F.silu(linear(x)))
        return x
