"""The factorisation machine of Wukong in plain PyTorch: the CPU path and the oracle of the GPU kernels.

``O = X X^T Y`` for each row of a batch (arXiv 2403.02545, the block's low-rank form). With ``P = X X^T`` and the
gradient dO: ``dY = P dO``, ``dP = dO Y^T`` and ``dX = (dP + dP^T) X``.

Legend: N rows of a batch, n tokens, D width, k rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, y: Tensor) -> Tensor:
    """Output ``[N, n, k]`` of x ``[N, n, D]`` and y ``[n, k]`` or ``[N, n, k]``, in whichever order costs less."""
    products, y = products_first(x.shape[1], x.shape[2], y.shape[-1]), y.expand(x.shape[0], -1, -1)
    with torch.autocast(x.device.type, enabled=False):
        if products:
            return torch.bmm(torch.bmm(x, x.transpose(1, 2)), y)
        return torch.bmm(x, torch.bmm(x.transpose(1, 2), y))


def backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y."""
    with torch.autocast(x.device.type, enabled=False):
        products = torch.bmm(x, x.transpose(1, 2))
        dy = torch.bmm(products, grad)
        inner = torch.bmm(grad, y.expand(x.shape[0], -1, -1).transpose(1, 2))
        return torch.bmm(inner + inner.transpose(1, 2), x), dy if y.dim() == 3 else dy.sum(0)


def products_first(tokens: int, width: int, rank: int) -> bool:
    """Whether ``(X X^T) Y`` takes fewer operations than ``X (X^T Y)``."""
    return tokens * (width + rank) < 2 * width * rank
