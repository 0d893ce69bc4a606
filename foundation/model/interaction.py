"""The interaction arm: feature tokens and sequence summaries against one another.

Wukong's layer (arXiv 2403.02545): ``X' = LN(concat(Block(Z), LCB(Z)) + W_r Z)`` with ``Z = [X || S_sum]``, a linear
compression ``LCB(Z) = W_L Z`` and a residual that is projected to the number of tokens that come out. The block is
one of

* ``fm``: ``MLP(LN(flatten(Z (Z^T Y))))``, the factorisation machine in its low-rank form, Y learned or made from a
  compression of Z by a network (attentive); with ``fm_rank: 0`` the whole ``Z Z^T``;
* ``cross``: low-rank cross layers on the flattened tokens, ``x_{l+1} = x_0 * V(U x_l) + x_l`` (DCN-V2, arXiv
  2008.13535);
* ``mlp``: a plain network on the flattened tokens;
* ``dhen``: the sum of several of these side by side (DHEN, arXiv 2203.11014).

Experts are independent layers whose outputs stand side by side; each sees all tokens, or a part of them (Kunlun, arXiv
2602.10016). Maps over the token axis and ``Z (Z^T Y)`` are operators of ``kernels``, which read Z once on a GPU.

Legend: M ensemble members, E experts of a member, G = M * E, N impressions, n tokens in, o tokens out, D width, k rank,
p tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.grouped import GroupedLinear, GroupedMLP, GroupedNorm
from foundation.model.norm import autocast_dtype
from kernels.interaction import fm_block
from kernels.token_mixing import mix_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class InteractionConfig:
    """One interaction arm.

    Args:
        block: ``fm``, ``cross``, ``mlp`` or ``dhen``.
        mix: the blocks of ``dhen``.
        block_tokens: tokens that an expert's block makes (n_F).
        linear_tokens: tokens of an expert's linear compression (n_L); may be 0.
        experts: independent blocks; their outputs stand side by side.
        partition: ``all``, every expert sees all tokens; ``split``, each sees its part of them, dealt out in turn (the
            first few tokens twice where the numbers do not divide).
        fm_rank: columns of Y (k), for ``fm``; 0: the full matrix of dot products.
        compression: Y of ``fm`` is ``learned``, or ``attentive``: made by a network of ``attentive_hidden`` hidden
            units from ``attentive_tokens`` combinations of the tokens.
        attentive_tokens, attentive_hidden: sizes of the latter.
        cross_layers: number of cross layers. cross_rank: their rank. Both for ``cross``.
        hidden: widths of the hidden layers of ``fm`` and ``mlp``; for ``cross`` of a network beside the cross layers,
            none if empty.
        norm: normalise the tokens that come out, as Wukong does. Without it a token keeps its size, and with it how
            much is known about rare ids.
        pre_norm: normalise the tokens that go in.
        dropout: in hidden layers.
        input_scale: spread of a learned factor per expert and input element at the start, so that experts and members
            begin apart; 0: no such factor.
    """

    block: Literal["fm", "cross", "mlp", "dhen"] = "fm"
    mix: tuple[Literal["fm", "cross", "mlp"], ...] = ("fm", "cross")
    block_tokens: int = 8
    linear_tokens: int = 8
    experts: int = 1
    partition: Literal["all", "split"] = "all"
    fm_rank: int = 16
    compression: Literal["learned", "attentive"] = "learned"
    attentive_tokens: int = 4
    attentive_hidden: int = 64
    cross_layers: int = 2
    cross_rank: int = 64
    hidden: tuple[int, ...] = (256,)
    norm: bool = True
    pre_norm: bool = False
    dropout: float = 0.0
    input_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.block not in _BLOCKS:
            raise ValueError(f"interaction.block: must be one of {', '.join(_BLOCKS)}, got {self.block!r}")
        if not self.mix or not {"fm", "cross", "mlp"}.issuperset(self.mix):
            raise ValueError(f"interaction.mix: expected some of fm, cross and mlp, got {list(self.mix)}")
        for key, words in (("partition", ("all", "split")), ("compression", ("learned", "attentive"))):
            if getattr(self, key) not in words:
                raise ValueError(f"interaction.{key}: must be {' or '.join(words)}, got {getattr(self, key)!r}")
        for key in ("block_tokens", "experts", "cross_layers", "cross_rank", "attentive_tokens", "attentive_hidden"):
            if getattr(self, key) < 1:
                raise ValueError(f"interaction.{key}: must be at least 1, got {getattr(self, key)}")
        if self.fm_rank < 0 or (self.fm_rank == 0 and self.compression == "attentive"):
            raise ValueError(
                f"interaction.fm_rank: must be 0 or more, and at least 1 for attentive compression, got {self.fm_rank}"
            )
        if self.linear_tokens < 0:
            raise ValueError(f"interaction.linear_tokens: must not be negative, got {self.linear_tokens}")
        uses_mlp = self.block == "mlp" or (self.block == "dhen" and "mlp" in self.mix)
        if any(width < 1 for width in self.hidden) or (uses_mlp and not self.hidden):
            raise ValueError(f"interaction.hidden: expected widths of at least 1, got {list(self.hidden)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"interaction.dropout: must be in [0, 1), got {self.dropout}")
        if self.input_scale < 0:
            raise ValueError(f"interaction.input_scale: must not be negative, got {self.input_scale}")

    @property
    def tokens_out(self) -> int:
        """Tokens of a member after the layer."""
        return self.experts * (self.block_tokens + self.linear_tokens)


Exchange = Callable[[Tensor, Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]], Tensor]
"""From ``z [M, N, n, D]``, what a block sees of it, and blocks on what they see, to all blocks' ``[G, N, o, D]``."""


class InteractionArm(nn.Module):
    """One layer of interactions for every member: ``[M, N, n, D]`` to ``[M, N, o, D]``."""

    part: Tensor

    def __init__(self, config: InteractionConfig, tokens: int, width: int, members: int, *, bias: bool = True) -> None:
        super().__init__()
        self.config, self.members, self.width = config, members, width
        groups = members * config.experts
        self.pre_norm = GroupedNorm(members, width, bias=bias) if config.pre_norm else None
        if config.partition == "split":
            part = partition(tokens, config.experts)
            self.register_buffer("part", part.flatten(), persistent=False)
            tokens = part.shape[1]
        self.tokens = tokens
        self.scale: nn.Parameter | None = None
        if config.input_scale:
            self.scale = nn.Parameter(1.0 + torch.randn(groups, 1, tokens, width) * config.input_scale)
        self.block = _BLOCKS[config.block](config, tokens, width, groups, bias)
        # Linear compression and the projected residual are one product over the token axis.
        self.compression = GroupedLinear(
            groups, tokens, config.linear_tokens + config.block_tokens + config.linear_tokens, bias=False
        )
        self.norm = GroupedNorm(groups, width, bias=bias) if config.norm else None
        # Where blocks lie on several ranks: runs this rank's for the rows of all, and returns all blocks' of its own.
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor, summaries: Tensor) -> Tensor:
        """Tokens ``x [M, N, n_x, D]`` with sequence summaries ``[N, n_s, D]``, the same for all members."""
        config, (members, count) = self.config, x.shape[:2]
        x = x.to(autocast_dtype(x) or x.dtype)
        z = torch.cat([x, summaries.to(x.dtype).expand(members, -1, -1, -1)], dim=2)
        if self.pre_norm is not None:
            z = self.pre_norm(z)
        if self.exchange is not None:
            out = self.exchange(z, self._input, self._blocks)
        elif config.partition == "split":
            # Expert e has tokens e, e + E, ...: a step through z, the first ones once more where numbers do not divide.
            missing = config.experts * self.tokens - z.shape[2]
            if missing > z.shape[2]:
                z = z.index_select(2, self.part.view(config.experts, -1).t().flatten())
            elif missing:
                z = torch.cat([z, z[:, :, :missing]], dim=2)
            parts = z.view(members, count, self.tokens, config.experts, self.width)
            out = self._blocks(part for own in parts.unbind(0) for part in own.unbind(2))
        else:
            out = self._blocks(own for own in z.unbind(0) for _ in range(config.experts))
        if config.experts > 1:
            out = out.view(members, config.experts, count, *out.shape[2:]).transpose(1, 2)
            out = out.reshape(members, count, config.tokens_out, self.width)
        return out

    def _input(self, z: Tensor, block: int) -> Tensor:
        """What block g sees of ``z [M, N, n, D]``: ``[N, p, D]``."""
        member, expert = divmod(block, self.config.experts)
        own = z[member]
        return own if self.config.partition == "all" else own.index_select(1, self.part.view(-1, self.tokens)[expert])

    def _blocks(self, parts: Iterable[Tensor]) -> Tensor:
        """Each of G blocks on its own tokens, G times ``[N, p, D]``: ``[G, N, n_F + n_L, D]``."""
        config = self.config
        z = list(parts)
        if self.scale is not None:
            z = [own * factor for own, factor in zip(z, self.scale, strict=True)]
        sizes = [config.linear_tokens, config.block_tokens + config.linear_tokens]
        outs = []
        for block, own, weight in zip(self.block(z), z, self.compression.weight, strict=True):
            linear, residual = _over_tokens(weight, own).split(sizes, dim=1)
            outs.append(torch.cat([block, linear.to(block.dtype)], dim=1) + residual)
        out = torch.stack(outs)
        return out if self.norm is None else self.norm(out)


def _over_tokens(weight: Tensor, z: Tensor) -> Tensor:
    """``weight [n, o]`` transposed, times ``z [N, n, D]``: ``[N, o, D]``, in autocast's dtype."""
    return mix_tokens(z.to(autocast_dtype(z) or z.dtype), weight)


def partition(tokens: int, experts: int) -> Tensor:
    """Which tokens each expert sees, int64 ``[E, p]`` with ``p = ceil(n / E)``: expert e has e, e + E, e + 2E, ...

    Neighbours, which tend to be of one side, so come to different experts. Numbers beyond n start over.
    """
    size = -(-tokens // experts)
    return (torch.arange(experts)[:, None] + torch.arange(size) * experts) % max(1, tokens)


class _FactorizationMachine(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.rank, self.tokens_out = config.fm_rank or tokens, config.block_tokens
        self.y: _AttentiveCompression | GroupedLinear | None = None
        if config.compression == "attentive":
            self.y = _AttentiveCompression(config, tokens, width, groups, bias)
        elif config.fm_rank:
            self.y = GroupedLinear(groups, tokens, config.fm_rank, bias=False)
        self.norm = GroupedNorm(groups, tokens * self.rank, bias=bias)
        self.mlp = GroupedMLP(groups, tokens * self.rank, config.hidden, config.dropout, bias=bias)
        inputs = config.hidden[-1] if config.hidden else tokens * self.rank
        self.out = GroupedLinear(groups, inputs, config.block_tokens * width, bias=bias)

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """G times tokens ``[N, n, D]`` to ``[G, N, n_F, D]``."""
        count, _, width = z[0].shape
        pairs = torch.stack([self._pairs(own, block).flatten(1) for block, own in enumerate(z)])
        return self.out(self.mlp(self.norm(pairs))).view(len(z), count, self.tokens_out, width)

    def _pairs(self, z: Tensor, block: int) -> Tensor:
        """``Z Z^T Y`` of one block, ``[N, n, k]``."""
        if self.y is None:
            return torch.bmm(z, z.transpose(1, 2))
        z = z.to(autocast_dtype(z) or z.dtype)
        return fm_block(z, self.y(z, block) if isinstance(self.y, _AttentiveCompression) else self.y.weight[block])


class _AttentiveCompression(nn.Module):
    """``Y = MLP(C Z)`` of each row; the last bias, which is always there, is the learned Y."""

    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.shape = (tokens, config.fm_rank)
        self.compress = GroupedLinear(groups, tokens, config.attentive_tokens, bias=False)
        self.hidden = GroupedLinear(groups, config.attentive_tokens * width, config.attentive_hidden, bias=bias)
        self.out = GroupedLinear(groups, config.attentive_hidden, tokens * config.fm_rank, bias=False)
        self.learned = nn.Parameter(torch.randn(groups, 1, tokens * config.fm_rank) * tokens**-0.5)

    def forward(self, z: Tensor, block: int) -> Tensor:
        """Y of one block from its tokens ``[N, n, D]``: ``[N, n, k]``."""
        few = _over_tokens(self.compress.weight[block], z).transpose(1, 2).flatten(1)
        bias = None if self.hidden.bias is None else self.hidden.bias[block, 0]
        hidden = F.silu(F.linear(few, self.hidden.weight[block].t(), bias))
        y = F.linear(hidden, self.out.weight[block].t()) + self.learned[block]
        return y.view(-1, *self.shape)


class _Cross(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.tokens_out = config.block_tokens
        inputs = tokens * width
        self.down = nn.ModuleList(
            GroupedLinear(groups, inputs, config.cross_rank, bias=False) for _ in range(config.cross_layers)
        )
        self.up = nn.ModuleList(
            GroupedLinear(groups, config.cross_rank, inputs, bias=bias) for _ in range(config.cross_layers)
        )
        self.mlp = GroupedMLP(groups, inputs, config.hidden, config.dropout, bias=bias) if config.hidden else None
        self.dropout = nn.Dropout(config.dropout)
        outputs = config.block_tokens * width
        self.out = GroupedLinear(groups, inputs + (config.hidden[-1] if config.hidden else 0), outputs, bias=bias)

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """G times tokens ``[N, n, D]`` to ``[G, N, n_F, D]``."""
        first = _flat(z)
        (groups, count), width = first.shape[:2], z[0].shape[2]
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, first, up(down(x)).to(x.dtype))
        if self.mlp is not None:
            x = torch.cat([x, self.mlp(first)], dim=2)
        return self.out(self.dropout(x)).view(groups, count, self.tokens_out, width)


class _Network(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.tokens_out = config.block_tokens
        self.mlp = GroupedMLP(groups, tokens * width, config.hidden, config.dropout, bias=bias)
        self.out = GroupedLinear(groups, config.hidden[-1], config.block_tokens * width, bias=bias)

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """G times tokens ``[N, n, D]`` to ``[G, N, n_F, D]``."""
        count, _, width = z[0].shape
        return self.out(self.mlp(_flat(z))).view(len(z), count, self.tokens_out, width)


class _Mix(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: _BLOCKS[name](config, tokens, width, groups, bias) for name in config.mix})

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """G times tokens ``[N, n, D]`` to ``[G, N, n_F, D]``, the sum of the blocks, of the spread of one."""
        outs = [block(z) for block in self.blocks.values()]
        return torch.stack(outs).sum(0) * len(outs) ** -0.5


def _flat(z: Sequence[Tensor]) -> Tensor:
    """``[G, N, n * D]``; no copy for a single block."""
    return z[0].flatten(1).unsqueeze(0) if len(z) == 1 else torch.stack([own.flatten(1) for own in z])


_BLOCKS: dict[str, type[nn.Module]] = {
    "fm": _FactorizationMachine,
    "cross": _Cross,
    "mlp": _Network,
    "dhen": _Mix,
}
