"""Several impressions of one request that look at the same keys."""

from __future__ import annotations

import torch
from torch import Tensor


def request_offsets(q_offsets: Tensor, request_index: Tensor, requests: int) -> Tensor:
    """Offsets of the queries by request in place of by impression.

    Impressions of a request stand side by side, so their queries are one run of rows. Where a query's place among the
    others does not matter, a request is then one sequence.

    Args:
        q_offsets: int64 ``[B + 1]``, of the impressions.
        request_index: int64 ``[B]``, rising, below ``requests``.

    Returns:
        int64 ``[requests + 1]``.
    """
    first = torch.arange(requests + 1, device=q_offsets.device)
    return q_offsets.index_select(0, torch.searchsorted(request_index, first))
