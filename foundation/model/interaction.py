"""The interaction arm: feature tokens and sequence summaries against one another.

Wukong's layer (arXiv 2403.02545): ``X' = LN(concat(Block(Z), LCB(Z)) + W_r Z)`` with ``Z = [X || S_sum]``, a linear
compression ``LCB(Z) = W_L Z`` and a residual that is projected to the number of tokens that come out. The block is
one of

* ``fm``: ``MLP(LN(flatten(Z (Z^T Y))))``, the factorisation machine in its low-rank form, Y learned;
* ``cross``: low-rank cross layers on the flattened tokens, ``x_{l+1} = x_0 * V(U x_l) + x_l`` (DCN-V2, arXiv
  2008.13535);
* ``mlp``: a plain network on the flattened tokens.

Legend: M ensemble members, E experts of a member, G = M * E, N impressions, n tokens in, o tokens out, D width, k rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.model.grouped import GroupedLinear, GroupedMLP, GroupedNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class InteractionConfig:
    """One interaction arm.

    Args:
        block: ``fm``, ``cross`` or ``mlp``.
        block_tokens: tokens that an expert's block makes (n_F).
        linear_tokens: tokens of an expert's linear compression (n_L); may be 0.
        experts: independent blocks that all see all tokens; their outputs stand side by side.
        fm_rank: columns of Y (k), for ``fm``.
        cross_layers: number of cross layers. cross_rank: their rank. Both for ``cross``.
        hidden: widths of the hidden layers of ``fm`` and ``mlp``; for ``cross`` of a network beside the cross layers,
            none if empty.
        norm: normalise the tokens that come out, as Wukong does. Without it a token keeps its size, and with it how
            much is known about rare ids.
        dropout: in hidden layers.
        input_scale: spread of a learned factor per expert and input element at the start, so that experts and members
            begin apart; 0: no such factor.
    """

    block: Literal["fm", "cross", "mlp"] = "fm"
    block_tokens: int = 8
    linear_tokens: int = 8
    experts: int = 1
    fm_rank: int = 16
    cross_layers: int = 2
    cross_rank: int = 64
    hidden: tuple[int, ...] = (256,)
    norm: bool = True
    dropout: float = 0.0
    input_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.block not in ("fm", "cross", "mlp"):
            raise ValueError(f"interaction.block: must be fm, cross or mlp, got {self.block!r}")
        for key in ("block_tokens", "experts", "fm_rank", "cross_layers", "cross_rank"):
            if getattr(self, key) < 1:
                raise ValueError(f"interaction.{key}: must be at least 1, got {getattr(self, key)}")
        if self.linear_tokens < 0:
            raise ValueError(f"interaction.linear_tokens: must not be negative, got {self.linear_tokens}")
        if any(width < 1 for width in self.hidden) or (self.block == "mlp" and not self.hidden):
            raise ValueError(f"interaction.hidden: expected widths of at least 1, got {list(self.hidden)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"interaction.dropout: must be in [0, 1), got {self.dropout}")
        if self.input_scale < 0:
            raise ValueError(f"interaction.input_scale: must not be negative, got {self.input_scale}")

    @property
    def tokens_out(self) -> int:
        """Tokens of a member after the layer."""
        return self.experts * (self.block_tokens + self.linear_tokens)


class InteractionArm(nn.Module):
    """One layer of interactions for every member: ``[M, N, n, D]`` to ``[M, N, o, D]``."""

    def __init__(self, config: InteractionConfig, tokens: int, width: int, members: int) -> None:
        super().__init__()
        self.config, self.members, self.width = config, members, width
        groups = members * config.experts
        self.scale: nn.Parameter | None = None
        if config.input_scale:
            self.scale = nn.Parameter(1.0 + torch.randn(groups, 1, tokens, width) * config.input_scale)
        self.block = _BLOCKS[config.block](config, tokens, width, groups)
        # Linear compression and the projected residual are one product over the token axis.
        self.compression = GroupedLinear(
            groups, tokens, config.linear_tokens + config.block_tokens + config.linear_tokens, bias=False
        )
        self.norm = GroupedNorm(groups, width) if config.norm else None

    def forward(self, x: Tensor, summaries: Tensor) -> Tensor:
        """Tokens ``x [M, N, n_x, D]`` with sequence summaries ``[N, n_s, D]``, the same for all members."""
        config, (members, count) = self.config, x.shape[:2]
        z = torch.cat([x, summaries.to(x.dtype).expand(members, -1, -1, -1)], dim=2)
        if config.experts > 1:
            z = z.repeat_interleave(config.experts, dim=0)
        if self.scale is not None:
            z = z * self.scale
        groups, _, tokens, width = z.shape
        columns = z.transpose(2, 3).reshape(groups, count * width, tokens)
        sizes = [config.linear_tokens, config.block_tokens + config.linear_tokens]
        mixed = self.compression(columns).view(groups, count, width, sum(sizes)).transpose(2, 3)
        linear, residual = mixed.split(sizes, dim=2)
        out = torch.cat([self.block(z, columns), linear], dim=2) + residual
        if self.norm is not None:
            out = self.norm(out)
        if config.experts > 1:
            out = out.view(members, config.experts, count, sizes[1], width).transpose(1, 2)
            out = out.reshape(members, count, config.tokens_out, width)
        return out


class _FactorizationMachine(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int) -> None:
        super().__init__()
        self.rank, self.tokens_out = config.fm_rank, config.block_tokens
        self.y = GroupedLinear(groups, tokens, config.fm_rank, bias=False)
        self.norm = GroupedNorm(groups, tokens * config.fm_rank)
        self.mlp = GroupedMLP(groups, tokens * config.fm_rank, config.hidden, config.dropout)
        inputs = config.hidden[-1] if config.hidden else tokens * config.fm_rank
        self.out = GroupedLinear(groups, inputs, config.block_tokens * width)

    def forward(self, z: Tensor, columns: Tensor) -> Tensor:
        """Tokens ``z [G, N, n, D]`` and the same as ``columns [G, N * D, n]`` to ``[G, N, n_F, D]``."""
        groups, count, tokens, width = z.shape
        zty = self.y(columns).view(groups * count, width, self.rank)
        pairs = torch.bmm(z.reshape(groups * count, tokens, width), zty)
        hidden = self.mlp(self.norm(pairs.view(groups, count, tokens * self.rank)))
        return self.out(hidden).view(groups, count, self.tokens_out, width)


class _Cross(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int) -> None:
        super().__init__()
        self.tokens_out = config.block_tokens
        inputs = tokens * width
        self.down = nn.ModuleList(
            GroupedLinear(groups, inputs, config.cross_rank, bias=False) for _ in range(config.cross_layers)
        )
        self.up = nn.ModuleList(GroupedLinear(groups, config.cross_rank, inputs) for _ in range(config.cross_layers))
        self.mlp = GroupedMLP(groups, inputs, config.hidden, config.dropout) if config.hidden else None
        self.dropout = nn.Dropout(config.dropout)
        outputs = config.block_tokens * width
        self.out = GroupedLinear(groups, inputs + (config.hidden[-1] if config.hidden else 0), outputs)

    def forward(self, z: Tensor, columns: Tensor) -> Tensor:
        """Tokens ``z [G, N, n, D]`` to ``[G, N, n_F, D]``."""
        groups, count, _, width = z.shape
        first = z.flatten(2)
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, first, up(down(x)).to(x.dtype))
        if self.mlp is not None:
            x = torch.cat([x, self.mlp(first)], dim=2)
        return self.out(self.dropout(x)).view(groups, count, self.tokens_out, width)


class _Network(nn.Module):
    def __init__(self, config: InteractionConfig, tokens: int, width: int, groups: int) -> None:
        super().__init__()
        self.tokens_out = config.block_tokens
        self.mlp = GroupedMLP(groups, tokens * width, config.hidden, config.dropout)
        self.out = GroupedLinear(groups, config.hidden[-1], config.block_tokens * width)

    def forward(self, z: Tensor, columns: Tensor) -> Tensor:
        """Tokens ``z [G, N, n, D]`` to ``[G, N, n_F, D]``."""
        groups, count, _, width = z.shape
        return self.out(self.mlp(z.flatten(2))).view(groups, count, self.tokens_out, width)


_BLOCKS = {"fm": _FactorizationMachine, "cross": _Cross, "mlp": _Network}
