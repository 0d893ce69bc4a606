"""Table replicas that keep a part of their rows, put together when they are needed: fully sharded 2D.

With n replicas each keeps 1/n of the rows between a lookup and the update of the tables, and from the update to the
next lookup. Plain replicas average rows by an all-reduce after the update. Here its first half, the reduce-scatter,
leaves a replica with the averages of its part; the second, the gather, is done before the next lookup. What is looked
up, and so everything that is trained, is the same. Behind the lookup the rest is let go without a word to the others,
since it is not changed; a second gather before the update is what is sent more: half as much as plain replicas send.

TorchRec puts tables of the same kind into one kernel, one stretch of memory. A kernel is put together, used and let go
before the next one, so one kernel at a time is whole, with its part beside it while one is made of the other.

AdaGrad's sums, one number a row, stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag
from torchrec.distributed.types import ShardedModule

from foundation.parallel.ranges import GRADIENT_REDUCE, ROWS_GATHER

Kernel: TypeAlias = BatchedFusedEmbedding | BatchedFusedEmbeddingBag


class ReplicaParts:
    """The rows of a model's tables on this rank.

    Ranks of the group must do the same forward and backward passes; a forward pass without a backward pass, with
    gradients or without, is fine.

    Args:
        model: its tables are TorchRec's already, filled, and equal on all replicas.
        group: ranks that hold the same rows.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        kernels = list(table_kernels(model))
        assert kernels, "TorchRec keeps its kernels somewhere else"
        found = [_Rows(kernel, group) for kernel in kernels if _held(kernel) is not None]
        # The part of the last one is all that is held beside whole rows.
        self._rows = sorted(found, key=lambda rows: -rows.numel)

    @property
    def numel(self) -> int:
        """Numbers in all rows of this rank, put together."""
        return sum(rows.numel for rows in self._rows)

    @property
    def held(self) -> int:
        """Bytes of rows that are there now."""
        return sum(rows.held for rows in self._rows)

    def gather(self) -> None:
        """Puts all rows together; a collective call of the group. The next lookup for training lets them go again."""
        for rows in self._rows:
            rows.gather()


def table_kernels(model: nn.Module) -> Iterator[Kernel]:
    """TorchRec's kernels; `modules` does not find them, since they are in lists."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for lookup in module._lookups:
                yield from (found for found in lookup.modules() if isinstance(found, Kernel))


class _Rows:
    """The rows of one kernel: whole in the kernel's memory, or a part of them beside it while that is empty."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup) -> None:
        rows = _held(kernel)
        assert rows is not None and rows.storage_offset() == 0 and rows.is_contiguous()
        self._rows, self._part = rows, rows.new_empty(0)
        self._group, self._copies = group, dist.get_world_size(group)
        self._mean = dist.get_backend(group) == "nccl"  # Gloo only sums
        self._each = -(-rows.numel() // self._copies)  # the last part may be filled up
        kernel.register_forward_pre_hook(lambda *_: self.gather())
        kernel.register_forward_hook(self._looked_up)

    @property
    def numel(self) -> int:
        return self._rows.numel()

    @property
    def held(self) -> int:
        return self._rows.untyped_storage().nbytes() + self._part.untyped_storage().nbytes()

    def _looked_up(self, kernel: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            update = _update_of(output)
            update.register_prehook(lambda _: self.gather())
            update.register_hook(lambda *_: self._average())
            self._keep_part()

    @property
    def _whole(self) -> bool:
        return self._rows.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def _keep_part(self) -> None:
        """Lets rows go that all replicas have alike, but for the own part."""
        first = min(self.numel, self._each * dist.get_rank(self._group))
        own = self._rows[first : first + self._each]
        self._part = self._rows.new_zeros(self._each)
        self._part[: own.numel()] = own
        self._rows.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self) -> None:
        """Puts the rows together from all parts, if they are not."""
        if self._whole:
            return
        with record_function(ROWS_GATHER):
            self._rows.untyped_storage().resize_(self._each * self._copies * self._part.element_size())
            # Waited for from here, which the ledger sees; else NCCL computes on the stream that waits.
            dist.all_gather_into_tensor(self._padded(), self._part, group=self._group, async_op=True).wait()
            self._part = self._rows.new_empty(0)

    @torch.no_grad()
    def _average(self) -> None:
        """After the update, which differs between replicas: keeps the own part of the averages."""
        assert self._whole, "rows are gathered before their update"
        with record_function(GRADIENT_REDUCE):
            self._part = self._rows.new_empty(self._each)
            op = dist.ReduceOp.AVG if self._mean else dist.ReduceOp.SUM
            dist.reduce_scatter_tensor(self._part, self._padded(), op=op, group=self._group, async_op=True).wait()
            if not self._mean:
                self._part.div_(self._copies)
            self._rows.untyped_storage().resize_(0)

    def _padded(self) -> torch.Tensor:
        # A tensor of its own: longer than the rows, and autograd counts what is written to them.
        whole = torch.empty(0, dtype=self._rows.dtype, device=self._rows.device)
        return whole.set_(self._rows.untyped_storage(), 0, (self._each * self._copies,), (1,))


def _held(kernel: Kernel) -> torch.Tensor | None:
    """The memory of a kernel's rows; None where this rank has no row of its tables."""
    tables: Any = kernel._emb_module
    held = [rows for rows in (tables.weights_dev, tables.weights_host) if rows.numel()]
    assert len(held) <= 1 and not tables.weights_uvm.numel(), "rows lie in one place"
    return held[0].detach() if held else None


def _update_of(output: torch.Tensor) -> Node:
    """The step of the backward pass that updates the rows, which is the last one before the parameters."""
    node = output.grad_fn
    assert node is not None
    while True:
        before = [found for found, _ in node.next_functions if found is not None]
        if all("AccumulateGrad" in found.name() for found in before):
            return node
        assert len(before) == 1, f"one path leads to the rows, not {[found.name() for found in before]}"
        node = before[0]
