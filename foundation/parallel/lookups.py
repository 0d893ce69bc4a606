"""Lookups in sharded tables, taken apart: where ids go out, where they are waited for, where rows are.

The ids of the next batch can go out while the current one is computed; then its lookup need not wait for them. Only the
ids: rows are read when the update of the step before is done, so nothing that is computed changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from foundation.data.batch import Batch
from foundation.model.embeddings import Embeddings
from foundation.parallel.ranges import LOOKUP, ROWS_WAIT, SPARSE_DIST, SPARSE_WAIT


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
        self._lookups = [_Lookup(module, self.stream) for module in modules if isinstance(module, ShardedModule)]

    @property
    def draws(self) -> bool:
        """Random numbers are drawn for ids."""
        return self._embeddings is not None and bool(self._embeddings.config.id_dropout)

    def start(self, batch: Batch) -> None:
        """Sends the ids of a batch out before its turn; a collective call of the ranks that share tables.

        What is random about them is drawn now. The batch may have been copied to the device on `stream`. The next
        forward pass of another batch, an evaluation's, leaves it alone.

        Args:
            batch: trained on next, in the mode that the model is in.
        """
        assert self._embeddings is not None, "the model has no Embeddings, or several"
        with self._aside(), record_function(SPARSE_DIST):
            ids = self._embeddings.prepare(batch)
            for lookup in self._lookups:
                lookup.send_counts(ids)
            for lookup in self._lookups:
                lookup.send_ids()

    def drop(self) -> None:
        """Forgets what was started; a collective call."""
        for lookup in self._lookups:
            lookup.drop()

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class _Lookup:
    """One collection. TorchRec sends counts first, which the host waits for, then ids."""

    def __init__(self, module: ShardedModule, stream: torch.cuda.Stream | None) -> None:
        self._module, self._stream = module, stream
        self._features: KeyedJaggedTensor | None = None
        self._context: Any = None
        self._coming: Any = None
        self._sent = None if stream is None else torch.cuda.Event()
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Rows, to be waited for."""
        early = features is self._features
        if early:
            context, coming = self._context, self._coming
        else:
            with record_function(SPARSE_DIST):
                context = self._module.create_context()
                coming = self._module.input_dist(context, features).wait()
        with record_function(SPARSE_WAIT):
            if early and self._sent is not None:
                here = torch.cuda.current_stream()
                here.wait_event(self._sent)
                for value in (features, coming, context):
                    value.record_stream(here)
                ids = coming
            else:
                ids = coming.wait()
        if early:
            self._features = self._context = self._coming = None
        with record_function(LOOKUP):
            return _Rows(self._module.compute_and_output_dist(context, ids))

    def send_counts(self, features: KeyedJaggedTensor) -> None:
        self._features, self._context = features, self._module.create_context()
        self._coming = self._module.input_dist(self._context, features)

    def send_ids(self) -> None:
        self._coming = self._coming.wait()
        if self._stream is not None and self._sent is not None:
            # The stream waits, not the host. Numbers that the host needs later are fetched now.
            self._coming = self._coming.wait()
            for sharding in getattr(self._context, "sharding_contexts", ()):
                before = getattr(sharding, "features_before_input_dist", None)
                if before is not None:
                    before.sync()
            for before in getattr(self._context, "input_features", ()):
                before.sync()
            self._sent.record(self._stream)

    def drop(self) -> None:
        if self._features is not None and self._stream is None:
            self._coming.wait()
        self._features = self._context = self._coming = None


class _Rows(LazyAwaitable[Any]):
    """Rows on their way; the wait for them has a name."""

    def __init__(self, rows: LazyAwaitable[Any]) -> None:
        super().__init__()
        self._rows = rows

    def _wait_impl(self) -> Any:
        with record_function(ROWS_WAIT):
            return self._rows.wait()
