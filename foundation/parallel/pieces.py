"""Tensors that are spread over ranks, however that was done: where this rank's pieces lie in the whole.

TorchRec's tables, FSDP's parameters and the blocks of an expert group each have a class of their own in their
libraries. Optimizers, averages and checkpoints see all of them as `Sharded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchrec.distributed.shards_wrapper import LocalShardsWrapper


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor: its first element's place in the whole, and the memory that holds it."""

    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def place(self) -> tuple[slice, ...]:
        """The block in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Sharded:
    """One tensor over all ranks, of which this rank holds the pieces; none is empty, there may be none.

    `torch.distributed.checkpoint` writes and fills it through the three methods of its `_Checkpointable` protocol and
    the planners below. A piece that several ranks hold is written once.

    Args:
        shape: of the whole tensor.
        pieces: this rank's.
        copies: how many ranks hold each piece.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    copies: int = 1

    def over(self, tensors: list[torch.Tensor]) -> Sharded:
        """The same places with other memory, one tensor per piece."""
        pairs = zip(self.pieces, tensors, strict=True)
        return Sharded(self.shape, tuple(Piece(piece.offset, tensor) for piece, tensor in pairs), self.copies)

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """What to write."""
        return [
            WriteItem(
                index=MetadataIndex(key, torch.Size(piece.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=torch.Size(self.shape),
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read."""
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of a piece."""
        for piece in self.pieces:
            if index.offset is not None and tuple(index.offset) == piece.offset:
                return piece.tensor
        raise ValueError(f"this rank has no piece at {index}")


Spread = torch.Tensor | Sharded


class SavePlanner(DefaultSavePlanner):
    """Finds the pieces of `Sharded` values, which torch's looks for in its own classes only."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The memory to write."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Sharded) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """The same for reading."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the values as they are; torch's would copy those of classes that are not its own."""
        self.original_state_dict = self.state_dict = state_dict
        self.flatten_state_dict = False
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory to fill."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Sharded) else super().lookup_tensor(index)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.size())


def spread(value: Any, groups: tuple[int, int] | None = None) -> Spread:
    """A tensor of any library as this rank's pieces; a plain tensor that every rank holds whole stays one.

    Args:
        value: a tensor, TorchRec's `ShardedTensor` or `DTensor` of local shards, or FSDP's `DTensor`.
        groups: for blocks of an expert group, first block of this rank and number of all; they lie along dim 0.
    """
    if isinstance(value, ShardedTensor):
        held = [(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in value.local_shards()]
        size, copies = tuple(value.metadata().size), 1
    elif isinstance(value, DTensor):
        size = tuple(value.shape)
        copies = 1
        for dim, placement in enumerate(value.placements):
            copies *= value.device_mesh.size(dim) if placement.is_replicate() else 1
        local = value._local_tensor
        if isinstance(local, LocalShardsWrapper):
            shards = local.local_shards()  # where there are none, it still names an offset
            held = [(tuple(o), t.detach()) for o, t in zip(local.local_offsets(), shards, strict=False)]
        else:
            _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            held = [(tuple(offset), local.detach())]
    elif groups is None:
        return value.detach()
    else:
        size, copies = tuple(value.shape), 1
        held = [((0,) * value.ndim, value.detach())]
    if groups is not None:
        first, count = groups
        size = (count, *size[1:])
        held = [((offset[0] + first, *offset[1:]), tensor) for offset, tensor in held]
    for _, tensor in held:
        assert not tensor.numel() or tensor.untyped_storage().nbytes(), "rows were let go; call gather_tables before"
    return Sharded(size, tuple(Piece(offset, tensor) for offset, tensor in held if tensor.numel()), copies)


def local_shards(value: Spread) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """This rank's pieces of a tensor: the place in the whole one and the memory that holds them."""
    if isinstance(value, Sharded):
        yield from ((piece.place, piece.tensor) for piece in value.pieces)
    else:
        yield tuple(slice(0, size) for size in value.shape), value


def clone(value: Spread) -> Spread:
    """A copy in fresh memory; spread like the original."""
    if isinstance(value, Sharded):
        return value.over([piece.tensor.detach().clone() for piece in value.pieces])
    return value.detach().clone()
