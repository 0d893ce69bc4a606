"""Keeps TorchRec's input distribution from waiting for the device in every step.

For each batch TorchRec copies a permutation to the device that depends on the placement of the tables alone, and the
copy waits for all work queued before it. Here each permutation is copied once.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed import dist_data


class _Remembered:
    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: dict[Any, torch.Tensor | None] = {}

    def __call__(
        self,
        local_split: int,
        num_splits: int,
        stagger: int = 1,
        device: torch.device | None = None,
        batch_size_per_rank: list[int] | None = None,
    ) -> torch.Tensor | None:
        if batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1:  # then it depends on the batch
            return self._make(local_split, num_splits, stagger, device, batch_size_per_rank)
        key = (local_split, num_splits, stagger, device)
        if key not in self._made:
            self._made[key] = self._make(local_split, num_splits, stagger, device, None)
        return self._made[key]


def remember_permutations() -> None:
    """Puts a memory in front of `torchrec.distributed.dist_data._get_recat`, for this process and once."""
    if not isinstance(dist_data._get_recat, _Remembered):
        dist_data._get_recat = _Remembered(dist_data._get_recat)
