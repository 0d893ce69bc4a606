"""One training step of one rank on fake tensors: what it holds, queues and moves, from shapes alone.

The real model runs, forward and backward, under autocast as on a GPU; only table lookups, exchanges between ranks and
the collectives of FSDP and DDP are stood in for. No memory is taken, so a model of any size can be rehearsed.

Legend: E ranks of an expert group, N impressions, n and o tokens in and out, D width, G blocks of an arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from foundation.data.batch import Batch
from foundation.data.options import whole_keys
from foundation.data.schema import Schema
from foundation.model.flops import Load, forward_flops
from foundation.model.gem import GEM, GEMConfig
from foundation.parallel.experts import arms, block_parameters
from foundation.parallel.plan import collections_of, tables_of
from foundation.parallel.preview.meter import Meter
from foundation.training.activations import recompute, regions
from foundation.training.launch import Precision

LOOKUPS = "table lookups"
"""The region of rows on their way from the tables to the model."""

SORT_BYTES = 48
"""Bytes per id that the fused backward of tables needs to sort them: keys and values in int64, twice each, and where
runs of equal ids begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The exchange of an interaction arm: bytes of the tokens of one rank that go in, and of the results that all
    blocks make for them."""

    tokens: int
    results: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """What a rank asks of a table: ids, different ones among them, and rows that come back pooled (0: one per id)."""

    ids: int
    unique: int
    pooled: int
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What one rank's step needs.

    Args:
        kept: bytes alive at the end of the forward pass by the module that made them; copies of weights in the
            precision of products have a name of their own.
        trail: bytes held when the forward pass of a module ended, in the order in which they do.
        frontier: by bytes of gradients of (other weights, weights of blocks), the most bytes of everything else.
        operators: kernels queued by forward and backward pass.
        moved: bytes that they read and write.
        by_region: the same two of the forward pass, by module.
        batch: bytes of the batch.
        flops: useful operations of the forward pass.
        lookups: of this rank, by table.
        rest, blocks: dense parameters outside of the interaction arms' blocks, and this rank's of these.
        layers: by FSDP unit that is gathered alone, parameters of (what is cut over all ranks, blocks).
        arms: exchange of each interaction arm in a forward pass.
    """

    kept: Mapping[str, int]
    trail: tuple[tuple[str, int], ...]
    frontier: Mapping[tuple[int, ...], int]
    operators: int
    moved: int
    by_region: Mapping[str, tuple[int, int]]
    batch: int
    flops: float
    lookups: Mapping[str, Lookup]
    rest: int
    blocks: int
    layers: tuple[tuple[int, int], ...]
    arms: tuple[Arm, ...]


def rehearse(
    config: GEMConfig,
    schema: Schema,
    table_rows: Mapping[str, int],
    batch: Batch,
    *,
    precision: Precision = "fp32",
    experts: int = 1,
    again: Iterable[str] = (),
    copies_of_rows: int = 1,
) -> Rehearsal:
    """Runs a step.

    Args:
        config, schema, table_rows: the model.
        batch: of one rank, for its sizes.
        precision: bf16 runs matrix products in bfloat16.
        experts: ranks that share the blocks of interaction arms (E).
        again: regions (`foundation.training.activations`) that compute their activations again.
        copies_of_rows: how often looked-up rows are copied on their way between ranks.

    Raises:
        ValueError: the blocks cannot be shared evenly, or what the model refuses.
    """
    with torch.device("meta"), whole_keys(GEMConfig, "model"):
        model = GEM(config, schema, table_rows)
    lookups = {
        table.name: _lookup(table, batch.sparse, isinstance(module, EmbeddingBagCollection))
        for module in collections_of(model).values()
        for table in tables_of(module)
    }
    flops = sum(forward_flops(model, Load.of(batch)).values())
    exchanged: list[Arm] = []
    with FakeTensorMode() as mode:
        _stand_in_for_tables(model, copies_of_rows)
        _split_blocks(model, experts, exchanged)
        _materialise(model)
        fake = batch._map(_fake, _fake_keyed)
        blocks = [p for arm in arms(model).values() for _, p in block_parameters(arm)] if experts > 1 else []
        own = set(blocks)
        rest = [p for p in model.parameters() if p not in own]
        model.train()
        recompute(model, again)
        inputs = [t for t in _tensors_of(fake) if isinstance(t, Tensor)]
        known = [*inputs, *model.buffers(), *(p for p in rest if p.requires_grad)]
        with Meter([rest, blocks], known) as meter:
            trail: list[tuple[str, int]] = []
            handles = _name_regions(model, meter, trail)
            bf16 = precision == "bf16"
            with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
                output = model(fake)
            loss = model.loss(output, fake).total
            kept = meter.held()
            by_region = {name: (meter.operators[name], meter.moved[name]) for name in meter.operators}
            meter.region = "backward"
            loss.backward()
            for handle in handles:
                handle()
        del mode
    return Rehearsal(
        kept=kept,
        trail=tuple(trail),
        frontier=meter.frontier,
        operators=sum(meter.operators.values()),
        moved=sum(meter.moved.values()),
        by_region=by_region,
        batch=sum(t.numel() * t.element_size() for t in _tensors_of(batch)),
        flops=flops,
        lookups=lookups,
        rest=sum(p.numel() for p in rest),
        blocks=sum(p.numel() for p in blocks),
        layers=tuple(
            (sum(p.numel() for p in layer.parameters() if p not in own), sum(p.numel() for p in own_of(layer, own)))
            for layer in model.layers
        ),
        arms=tuple(exchanged),
    )


def own_of(module: nn.Module, own: set[nn.Parameter]) -> list[nn.Parameter]:
    """A module's parameters that are among `own`."""
    return [p for p in module.parameters() if p in own]


def _lookup(table: EmbeddingConfig | EmbeddingBagConfig, sparse: KeyedJaggedTensor, pooled: bool) -> Lookup:
    ids = torch.cat([sparse[name].values() for name in table.feature_names])
    return Lookup(
        ids=len(ids),
        unique=len(ids.unique()),
        pooled=sparse.stride() * len(table.feature_names) if pooled else 0,
        dim=table.embedding_dim,
    )


class _Rows(torch.autograd.Function):
    """Rows from tables: a tensor of its own, and in the backward pass what sorting the ids takes."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: int, dim: int, ids: int, copies: int) -> Tensor:
        ctx.ids, ctx.copies = ids, copies
        held = [anchor.new_empty(rows, dim) for _ in range(copies)]
        return held[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (gradient,) = gradients
        held = [torch.empty_like(gradient) for _ in range(ctx.copies - 1)]
        held.append(gradient.new_empty(ctx.ids * SORT_BYTES // 4))
        return None, None, None, None, None


class _Lookup(nn.Module):
    """Stands for an `EmbeddingCollection`: one tensor for all its keys, as TorchRec makes it."""

    def __init__(self, tables: list[Any], copies: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(1, device="meta"))
        self.names = [name for table in tables for name in table.feature_names]
        self.dim, self.copies = tables[0].embedding_dim, copies

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Empty rows for every id."""
        own = {name: sparse[name] for name in self.names}
        counts = [int(jagged.values().shape[0]) for jagged in own.values()]
        rows = _Rows.apply(self.anchor, sum(counts), self.dim, sum(counts), self.copies)
        parts = zip(own.items(), rows.split(counts), strict=True)
        return {name: JaggedTensor(part, lengths=jagged.lengths()) for (name, jagged), part in parts}


class _Bags(nn.Module):
    """Stands for an `EmbeddingBagCollection`."""

    def __init__(self, tables: list[Any], copies: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(1, device="meta"))
        self.dims = {name: table.embedding_dim for table in tables for name in table.feature_names}
        self.copies = copies

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Empty rows for every request."""
        ids = sum(int(sparse[name].values().shape[0]) for name in self.dims)
        rows = _Rows.apply(self.anchor, sparse.stride(), sum(self.dims.values()), ids, self.copies)
        return KeyedTensor(list(self.dims), list(self.dims.values()), rows)


def _stand_in_for_tables(model: GEM, copies: int) -> None:
    embeddings = model.embeddings
    for name, collection in list(embeddings.ec.items()):
        embeddings.ec[name] = _Lookup(tables_of(collection), copies)  # type: ignore[arg-type]
    if embeddings.ebc is not None:
        embeddings.ebc = _Bags(tables_of(embeddings.ebc), copies)  # type: ignore[assignment]
    if embeddings.first_order is not None:
        embeddings.first_order = _Lookup(tables_of(embeddings.first_order), copies)  # type: ignore[assignment]


class _Exchange:
    """The work of one rank's blocks for all E ranks of its group, without the others."""

    def __init__(self, size: int, blocks: int, found: list[Arm]) -> None:
        self.size, self.blocks, self.found = size, blocks, found

    def __call__(self, z: Tensor, sees: Callable[[Tensor, int], Tensor], blocks: Callable[[Tensor], Tensor]) -> Tensor:
        own = self.blocks // self.size
        every = z.repeat(1, self.size, 1, 1)
        out = blocks(torch.stack([sees(every, block) for block in range(own)]))
        back = out.view(own, self.size, z.shape[1], *out.shape[2:]).transpose(0, 1).clone()
        back = back.reshape(self.blocks, z.shape[1], *out.shape[2:])
        self.found.append(Arm(tokens=_bytes(z), results=_bytes(back)))
        return back


def _split_blocks(model: GEM, size: int, found: list[Arm]) -> None:
    """Leaves each arm the blocks of one rank, as `foundation.parallel.experts.split_experts` does."""
    for path, arm in arms(model).items() if size > 1 else ():
        blocks = arm.members * arm.config.experts
        if blocks % size:
            raise ValueError(
                f"parallel.dense.expert: {size} ranks cannot share the {blocks} blocks of {path} evenly "
                f"({arm.members} members x {arm.config.experts} experts); change model.layer.interaction.experts"
            )
        arm.exchange = _Exchange(size, blocks, found)
        for name, parameter in list(block_parameters(arm)):
            owner, _, own_name = name.rpartition(".")
            part = torch.empty(blocks // size, *parameter.shape[1:], device="meta")
            setattr(arm.get_submodule(owner), own_name, nn.Parameter(part))


def _materialise(model: nn.Module) -> None:
    """Fake memory for weights and buffers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_fake(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(buffer)


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _fake_keyed(keyed: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keyed.keys()),
        values=_fake(keyed.values()),
        lengths=_fake(keyed.lengths()),
        stride=keyed.stride(),
        length_per_key=keyed.length_per_key(),
        offset_per_key=keyed.offset_per_key(),
    )


def parts_of(model: GEM) -> dict[str, nn.Module]:
    """The modules by which memory is told apart: lookups, arms of layers, and what lies beside the layers."""
    named: dict[str, nn.Module] = {LOOKUPS: model.embeddings}
    named |= {name: module for name, module in model.named_children() if name not in ("embeddings", "layers")}
    return named | regions(model)


def _name_regions(model: GEM, meter: Meter, trail: list[tuple[str, int]]) -> list[Callable[[], None]]:
    """Makes the meter know whose forward pass runs; returns what undoes it."""
    removals: list[Callable[[], None]] = []
    for name, module in parts_of(model).items():
        before: list[str] = []

        def enter(_: nn.Module, __: Any, name: str = name, before: list[str] = before) -> None:
            before.append(meter.region)
            meter.region = name

        def leave(_: nn.Module, __: Any, ___: Any, name: str = name, before: list[str] = before) -> None:
            meter.region = before.pop()
            trail.append((name, meter.other))

        removals += [module.register_forward_pre_hook(enter).remove, module.register_forward_hook(leave).remove]
    return removals


def _tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    batch._map(
        lambda t: found.append(t) or t,  # type: ignore[func-returns-value]
        lambda k: found.extend([k.values(), k.lengths()]) or k,  # type: ignore[func-returns-value]
    )
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
