"""Table replicas that keep a part of their rows alone while no table needs whole ones: fully sharded 2D.

Replicas are equal when a lookup begins. Behind it each keeps its part, one over the number of replicas, and lets the
rest go, so that activations can have the memory; before the backward pass of the tables the parts are gathered. What is
computed is what whole replicas compute, bit for bit. AdaGrad's sums, one number a row, stay whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag


class ReplicaParts:
    """The rows of a model's tables on this rank.

    Args:
        model: its tables are TorchRec's already, and filled.
        group: ranks that hold the same rows.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        kernels = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)
        self._rows = [_Rows(module, group) for module in model.modules() if isinstance(module, kernels)]

    def gather(self) -> None:
        """Makes all rows whole where they are not; a collective call of the group."""
        for rows in self._rows:
            rows.gather()


class _Rows:
    """The memory of the rows of one kernel, which looks up in several tables at once."""

    def __init__(self, kernel: nn.Module, group: dist.ProcessGroup) -> None:
        tables: Any = kernel._emb_module
        held = [t for t in (tables.weights_dev, tables.weights_host) if t.numel()]
        assert len(held) <= 1 and not tables.weights_uvm.numel(), "rows lie in one place"
        self._group, self._copies = group, dist.get_world_size(group)
        self._rows = held[0].detach() if held else None
        self._part: torch.Tensor | None = None
        if self._rows is not None:
            assert self._rows.storage_offset() == 0
            kernel.register_forward_pre_hook(lambda *_: self.gather())  # after a step without a backward pass
            kernel.register_forward_hook(self._looked_up)
            kernel.register_full_backward_pre_hook(lambda *_: self.gather())

    def _looked_up(self, kernel: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            self._release()

    @torch.no_grad()
    def _release(self) -> None:
        assert self._rows is not None and self._part is None
        each = -(-self._rows.numel() // self._copies)
        first = min(self._rows.numel(), each * dist.get_rank(self._group))
        self._part = self._rows.new_zeros(each)
        own = self._rows[first : first + each]
        self._part[: own.numel()] = own
        self._rows.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self) -> None:
        if self._part is None:
            return
        assert self._rows is not None
        part, self._part = self._part, None
        storage = self._rows.untyped_storage()
        storage.resize_(part.numel() * self._copies * part.element_size())
        # A tensor of its own: it may be longer than the rows, and autograd counts what is written to them.
        whole = torch.empty(0, dtype=part.dtype, device=part.device)
        whole.set_(storage, 0, (part.numel() * self._copies,), (1,))
        dist.all_gather_into_tensor(whole, part, group=self._group)
