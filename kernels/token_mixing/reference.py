"""Maps over the token axis in plain PyTorch: the CPU path and the oracle of the GPU kernels.

``O = M^T X`` for each row of a batch, with one M for all; ``dX = M dO`` and ``dM`` the sum of ``X dO^T``.

Legend: N rows of a batch, n tokens in, P tokens out, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, matrix: Tensor) -> Tensor:
    """Output ``[N, P, D]`` of x ``[N, n, D]`` and matrix ``[n, P]``."""
    return torch.bmm(matrix.t().expand(x.shape[0], -1, -1), x)


def backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and matrix."""
    dx = torch.bmm(matrix.expand(x.shape[0], -1, -1), grad)
    return dx, torch.bmm(x, grad.transpose(1, 2)).sum(0)
