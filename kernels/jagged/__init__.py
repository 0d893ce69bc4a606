"""Moving rows between packed and padded layouts, and sums over the sequences of a batch."""

from kernels.jagged.offsets import lengths_from_offsets, offsets_from_lengths, sequence_ids
from kernels.jagged.op import (
    broadcast_add,
    concat,
    embedding_add,
    from_padded,
    gather_rows,
    gather_sequences,
    last_k,
    scatter_sum,
    segment_mean,
    segment_sum,
    split,
    to_padded,
)

__all__ = [
    "broadcast_add",
    "concat",
    "embedding_add",
    "from_padded",
    "gather_rows",
    "gather_sequences",
    "last_k",
    "lengths_from_offsets",
    "offsets_from_lengths",
    "scatter_sum",
    "segment_mean",
    "segment_sum",
    "sequence_ids",
    "split",
    "to_padded",
]
