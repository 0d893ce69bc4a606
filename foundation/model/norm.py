"""Layer norm through ``kernels.norms``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.norms import layer_norm


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, several times faster on a GPU; float32 under autocast, as there."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each row of ``[..., D]``."""
        return normalise(input, self.weight, self.bias, self.eps)


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dim of ``x``; float32 under autocast, otherwise of the dtype of x."""
    wide = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return layer_norm(x, weight, bias, eps=eps, dtype=torch.float32 if wide else None)
