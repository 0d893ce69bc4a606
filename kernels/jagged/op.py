"""What the operators of jagged data movement (``opengem::to_padded`` and others) share.

They are in ``padded_op``, ``rows_op``, ``sequences_op`` and ``sums_op``; most come in pairs, each the backward of the
other. The layout is that of ``kernels/jagged/reference.py``; all offsets are int64, indexes int64 or int32. Autograd
passes gradients as they come; the kernels take any row stride.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.common.backend import Backend
from kernels.jagged import reference

BACKEND = Backend(reference)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves all tensors but the first, which every operator here is linear in, and its number of rows."""
    ctx.save_for_backward(*(x for x in inputs[1:] if isinstance(x, Tensor)))
    ctx.options = [x for x in inputs[1:] if not isinstance(x, Tensor)]
    ctx.rows = inputs[0].shape[:2]
