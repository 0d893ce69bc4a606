"""Names of what a step does, as they stand in a profiler's trace (`torch.profiler.record_function`)."""

from __future__ import annotations

from typing import Final

SPARSE_COUNTS: Final = "sparse counts"
"""Ids of a batch are sorted by the rank that holds their rows, and ranks begin to tell one another their numbers."""
SPARSE_DIST: Final = "sparse dist"
"""When the numbers are known, which the host waits for, ids start on their way."""
SPARSE_WAIT: Final = "sparse dist wait"
"""A lookup waits until ids have come from all ranks."""
LOOKUP: Final = "lookup"
"""Rows are read, and start on their way back."""
ROWS_GATHER: Final = "rows gather"
"""Replicas that keep parts of their rows put them together."""
ROWS_WAIT: Final = "all-to-all wait"
"""The dense part waits for rows."""
FORWARD: Final = "dense forward"
"""Of the model and the loss; lookups and waits inside of it have names of their own."""
BACKWARD: Final = "backward"
"""Of everything, the tables' updates and the reductions of gradients inside of it included."""
GRADIENT_REDUCE: Final = "gradient reduce"
"""What is reduced after the backward pass: norms of gradients, and averages of table replicas."""
OPTIMIZER: Final = "optimizer"
"""Of the dense part."""
RANGES: Final = (
    SPARSE_COUNTS,
    SPARSE_DIST,
    SPARSE_WAIT,
    LOOKUP,
    ROWS_GATHER,
    ROWS_WAIT,
    FORWARD,
    BACKWARD,
    GRADIENT_REDUCE,
    OPTIMIZER,
)
COMPUTE: Final = (FORWARD, BACKWARD, OPTIMIZER)
"""Those that keep the device busy."""
