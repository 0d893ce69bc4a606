"""Moving rows between packed and padded layouts, and sums over the sequences of a batch."""

from kernels.jagged.offsets import lengths_from_offsets, offsets_from_lengths, sequence_ids
from kernels.jagged.padded_op import from_padded, last_k, to_padded
from kernels.jagged.rows_op import embedding_add, gather_rows, scatter_sum
from kernels.jagged.sequences_op import concat, gather_sequences, split
from kernels.jagged.sums_op import broadcast_add, segment_mean, segment_sum

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
