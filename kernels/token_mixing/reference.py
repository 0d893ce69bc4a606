"""Maps over the token axis in plain PyTorch: the CPU path and the oracle of the GPU kernels.

``O = M^T X`` for each row of a batch, with one M for all; ``dX = M dO`` and ``dM`` the sum of ``X dO^T``. M may come as
K terms ``[K, n, p]``: output ``K i + k`` then is column i of term k, so that terms of a column stand side by side.

Legend: N rows of a batch, n tokens in, P tokens out, D width, K terms, p = P / K.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, matrix: Tensor) -> Tensor:
    """Output ``[N, P, D]`` of x ``[N, n, D]`` and matrix ``[n, P]`` or ``[K, n, p]``."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.bmm(_joined(matrix).t().expand(x.shape[0], -1, -1), x)


def backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and matrix."""
    with torch.autocast(x.device.type, enabled=False):
        dx = torch.bmm(_joined(matrix).expand(x.shape[0], -1, -1), grad)
        return dx, as_terms(torch.bmm(x, grad.transpose(1, 2)).sum(0), matrix)


def sides(matrix: Tensor) -> tuple[int, int, int]:
    """Tokens in and out, and terms."""
    if matrix.dim() == 2:
        inputs, outputs = matrix.shape
        return inputs, outputs, 1
    terms, inputs, columns = matrix.shape
    return inputs, terms * columns, terms


def as_terms(joined: Tensor, like: Tensor) -> Tensor:
    """``[n, P]`` in the shape of a matrix."""
    if like.dim() == 2:
        return joined
    return joined.unflatten(1, (like.shape[2], like.shape[0])).permute(2, 0, 1).contiguous()


def _joined(matrix: Tensor) -> Tensor:
    """``[n, P]`` of a matrix in either shape."""
    return matrix if matrix.dim() == 2 else matrix.permute(1, 2, 0).flatten(1)
