"""Layer norm through ``kernels.norms``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.norms import layer_norm

WIDEST = 8192
"""Wider rows are more than the GPU kernels of ``kernels.norms`` take; PyTorch's are then faster than the reference."""


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, several times faster on a GPU; see ``normalise`` for autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each row of ``[..., D]``."""
        return normalise(input, self.weight, self.bias, self.eps)


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dim of ``x``, of the dtype of x, or under autocast of autocast's.

    Sums are made in float32 either way. PyTorch's own gives float32 under autocast, which every matrix product behind
    it then reads, rounds and writes once more.
    """
    dtype = autocast_dtype(x)
    if not (on_gpu(x) and x.shape[-1] > WIDEST):
        return layer_norm(x, weight, bias, eps=eps, dtype=dtype)
    own = dtype or x.dtype
    weight, bias = (None if t is None else t.to(own) for t in (weight, bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(own), x.shape[-1:], weight, bias, eps)


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a CUDA device."""
    return x.is_cuda


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast makes matrix products of ``x``; None where it does not."""
    device = x.device.type
    wide = x.dtype == torch.float64 or not torch.is_autocast_enabled(device)
    return None if wide else torch.get_autocast_dtype(device)
