"""What attention operators ask of queries, keys, values and offsets before a kernel sees them.

Legend: Tq query rows, Tk key rows, B sequences, R requests, M keys per sequence where they are dense, H heads, G key
heads, d key width, e value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.eager import readable
from kernels.common.inputs import (
    FLOATS,
    falls,
    require_floats,
    require_index,
    require_one_device,
    require_packed,
    require_range,
)
from kernels.common.requests import request_offsets


def require_shapes(operator: str, of_q: torch.Size, of_k: torch.Size, of_v: torch.Size) -> None:
    """Refuses shapes that do not go together: of q ``[.., H, d]``, k ``[.., G, d]`` and v ``[.., G, e]``.

    Raises:
        ValueError: names the operator, the shapes and what differs.
    """
    if len(of_q) != 3 or len(of_k) < 3 or of_k[-1] != of_q[2] or (of_k != of_v and of_k[:-1] != of_v[:-1]):
        shapes = f"q {list(of_q)}, k {list(of_k)} and v {list(of_v)}"
        raise ValueError(f"{operator}: {shapes} do not go together: {_difference(of_q, of_k, of_v)}")
    if not of_k[-1] or not of_k[-2]:
        raise ValueError(f"{operator}: q {list(of_q)} and k {list(of_k)} need at least one head and one element")
    if of_q[1] % of_k[-2]:
        raise ValueError(
            f"{operator}: {of_q[1]} query heads are no multiple of {of_k[-2]} key heads: they do not go together"
        )


def _difference(of_q: torch.Size, of_k: torch.Size, of_v: torch.Size) -> str:
    if len(of_q) != 3:
        return "q must have three dims, [Tq, H, d]"
    if len(of_k) < 3:
        return "k and v must have three dims at least, [Tk, G, d]"
    if of_k[-1] != of_q[2]:
        return f"heads of q have {of_q[2]} elements, those of k {of_k[-1]}"
    return "k and v may differ in the last dim only"


def alike(operator: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v in the dtype of q.

    Raises:
        ValueError: not of real floats, or on two devices; names the operator and the input.
    """
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype or dtype not in FLOATS:
        require_floats(operator, q=q, k=k, v=v)
        k, v = k.to(dtype), v.to(dtype)
    if not q.device == k.device == v.device:
        require_one_device(operator, q=q, k=k, v=v)
    return k, v


def by_request(operator: str, q: Tensor, q_offsets: Tensor | None, request_index: Tensor, requests: int) -> Tensor:
    """Offsets of the queries by request, int64 ``[R + 1]``, from those by impression.

    Raises:
        ValueError: learned queries, or an index that does not go with the offsets, or falls, or names no request.
    """
    if q_offsets is None:
        raise ValueError(
            f"{operator}: request_index needs q_offsets: learned queries are asked once per sequence of keys"
        )
    require_packed(operator, "q_offsets", q_offsets, q)
    require_index(operator, q, request_index, name="request_index", rows=q_offsets.shape[0] - 1)
    require_range(operator, request_index, requests, name="request_index")
    if readable(request_index) and falls(request_index):
        raise ValueError(
            f"{operator}: request_index falls somewhere: put the impressions of a request side by side, requests in "
            "rising order, and with them the rows of q and q_offsets"
        )
    return request_offsets(q_offsets, request_index, requests)
