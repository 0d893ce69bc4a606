"""Lookups in sharded tables, taken apart: where ids go out, where they are waited for, where rows are.

The ids of the next batch can go out while the current one is computed; then its lookup need not wait for them. Only the
ids: rows are read when the update of the step before is done, so nothing that is computed changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from foundation.data.batch import Batch
from foundation.model.embeddings import Embeddings
from foundation.parallel.ranges import LOOKUP, ROWS_WAIT, SPARSE_COUNTS, SPARSE_DIST, SPARSE_WAIT


class Lookups:
    """The sharded collections of a model. Their forward is replaced by one that takes what was distributed before.

    Args:
        model: its tables are TorchRec's already.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found = [module for module in model.modules() if isinstance(module, Embeddings)]
        self._embeddings = found[0] if len(found) == 1 else None
        cuda = device.type == "cuda"
        # Its kernels are small and others wait for them, so they go first.
        self.stream = torch.cuda.Stream(device, priority=-1) if cuda else None
        modules = self._embeddings.modules() if self._embeddings is not None else model.modules()
        self._next: tuple[Batch, KeyedJaggedTensor | None] | None = None
        self._lookups = [_Lookup(module, self.stream) for module in modules if isinstance(module, ShardedModule)]

    @property
    def draws(self) -> bool:
        """Random numbers are drawn for ids."""
        return self._embeddings is not None and bool(self._embeddings.config.id_dropout)

    def announce(self, batch: Batch) -> None:
        """Tells the ranks that share tables how many ids of a batch will come; a collective call.

        To be called before the forward pass of the batch before it, `send` after that. Where random numbers are drawn
        for ids, `send` does both, so that the order of draws is that of a run without. The batch may have been copied
        to the device on `stream`. Forward passes of other batches, an evaluation's, leave it alone.

        Args:
            batch: trained on next, in the mode that the model is in.
        """
        assert self._embeddings is not None, "the model has no Embeddings, or several"
        assert self._next is None, "the ids of the batch before were not sent"
        self._next = (batch, None)
        if not self.draws:
            self._next = (batch, self._count(batch))

    def send(self) -> None:
        """Sends the ids of the batch that was announced, if one was; a collective call."""
        if self._next is None:
            return
        (batch, ids), self._next = self._next, None
        ids = self._count(batch) if ids is None else ids
        with self._aside(), record_function(SPARSE_DIST):
            for lookup in self._lookups:
                lookup.send_ids(ids)

    def drop(self) -> None:
        """Forgets what was sent; a collective call."""
        assert self._next is None, "announced, but not sent"
        if self._embeddings is not None:
            self._embeddings.forget()
        for lookup in self._lookups:
            lookup.drop()

    def _count(self, batch: Batch) -> KeyedJaggedTensor:
        assert self._embeddings is not None
        with self._aside(), record_function(SPARSE_COUNTS):
            ids = self._embeddings.prepare(batch)
            for lookup in self._lookups:
                lookup.send_counts(ids)
        return ids

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass(slots=True)
class _Early:
    """Ids on their way: what they were, TorchRec's notes on them, and what is waited for."""

    features: KeyedJaggedTensor
    context: Any
    coming: Any
    sent: torch.cuda.Event | None = None


class _Lookup:
    """One collection. TorchRec sends counts first, which the host waits for, then ids."""

    def __init__(self, module: ShardedModule, stream: torch.cuda.Stream | None) -> None:
        self._module, self._stream = module, stream
        self._early: dict[int, _Early] = {}  # by the id() of features, which are kept so long
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Rows, to be waited for."""
        early = self._early.pop(id(features), None)
        if early is None:
            with record_function(SPARSE_DIST):
                context = self._module.create_context()
                early = _Early(features, context, self._module.input_dist(context, features).wait())
        with record_function(SPARSE_WAIT):
            if early.sent is None:
                ids = early.coming.wait()
            else:
                here = torch.cuda.current_stream()
                here.wait_event(early.sent)
                for value in (features, early.coming, early.context):
                    value.record_stream(here)
                ids = early.coming
        with record_function(LOOKUP):
            return _Rows(self._module.compute_and_output_dist(early.context, ids))

    def send_counts(self, features: KeyedJaggedTensor) -> None:
        context = self._module.create_context()
        self._early[id(features)] = _Early(features, context, self._module.input_dist(context, features))

    def send_ids(self, features: KeyedJaggedTensor) -> None:
        early = self._early[id(features)]
        early.coming = early.coming.wait()
        if self._stream is not None:
            # The stream waits, not the host. Numbers that the host needs later are fetched now.
            early.coming = early.coming.wait()
            for sharding in getattr(early.context, "sharding_contexts", ()):
                before = getattr(sharding, "features_before_input_dist", None)
                if before is not None:
                    before.sync()
            for before in getattr(early.context, "input_features", ()):
                before.sync()
            early.sent = torch.cuda.Event()
            early.sent.record(self._stream)

    def drop(self) -> None:
        for early in self._early.values():
            if early.sent is None:
                early.coming.wait()
        self._early.clear()


class _Rows(LazyAwaitable[Any]):
    """Rows on their way; the wait for them has a name."""

    def __init__(self, rows: LazyAwaitable[Any]) -> None:
        super().__init__()
        self._rows = rows

    def _wait_impl(self) -> Any:
        with record_function(ROWS_WAIT):
            return self._rows.wait()
