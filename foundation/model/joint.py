"""The sequence arm of layers that share the user's history between the impressions of a request.

Each impression has a few tokens of its own (CLS tokens made from its features), which read the history; the history
does not read them. So its keys and values exist once per request: ``C' = C + GDPA(LN(C), K(X_sum), V(X_sum))`` and
``C'' = C' + MHA(LN(C'), LN(S), LN(S))``. That candidates see the history and not one another is the mask of
target-aware attention (arXiv 2601.20083, 2508.02929).

Legend: N impressions, R requests, T events of the requests, c CLS tokens, S summary tokens, E event width, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.events import History
from foundation.model.norm import LayerNorm
from foundation.model.rotary import Rotary
from foundation.model.sequence import GeneratedNetwork, QKNorm, SequenceConfig
from kernels.jagged_attention import jagged_attention


class JointArm(nn.Module):
    """One layer for one shared stream: CLS tokens in, CLS tokens out.

    ``attention`` other than ``none`` lets the tokens see the whole history; window and block do not apply.
    """

    def __init__(self, config: SequenceConfig, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.feed_forward = GeneratedNetwork(config, width, bias) if config.kv_per_summary else None
        self.attention = HistoryAttention(config, width, bias) if config.attention != "none" else None

    def forward(self, history: History, summaries: Tensor | None) -> History:
        """A shared history under the feature summaries ``[N, S, E]`` of its rows."""
        cls = history.cls
        assert cls is not None
        count, tokens, width = cls.shape
        if self.feed_forward is not None:
            assert summaries is not None
            offsets = torch.arange(count + 1, device=cls.device) * tokens
            cls = self.feed_forward(cls.reshape(-1, width), offsets, summaries).view(count, tokens, width)
        if self.attention is not None:
            cls = self.attention(History(history.events, cls, history.request))
        return History(history.events, cls, history.request)


class HistoryAttention(nn.Module):
    """CLS tokens of impressions attend to the history of their request.

    Raises:
        ValueError: the width is no multiple of the heads, or rotary needs more even heads.
    """

    def __init__(self, config: SequenceConfig, width: int, bias: bool) -> None:
        super().__init__()
        if width % config.heads:
            raise ValueError(f"sequence.heads: width {width} is no multiple of {config.heads}")
        self.heads, self.pre = config.heads, config.norm == "pre"
        self.norm = LayerNorm(width, bias=bias)
        self.history_norm = LayerNorm(width, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = None if config.rotary == "none" else Rotary(width // config.heads, config.rotary)
        self.qk_norm = QKNorm(width // config.heads) if config.qk_norm else None

    def forward(self, history: History) -> Tensor:
        """CLS tokens ``[N, c, E]``; residual and norm included."""
        events, cls, request = history
        assert cls is not None and request is not None
        count, tokens, width = cls.shape
        shape = (-1, self.heads, width // self.heads)
        q = self.query(self.norm(cls) if self.pre else cls).reshape(shape)
        x = self.history_norm(events.values)
        biases = (None,) * 2 if self.key_value.bias is None else self.key_value.bias.chunk(2)
        parts = zip(self.key_value.weight.chunk(2), biases, strict=True)
        k, v = (F.linear(x, w, b).view(shape) for w, b in parts)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if self.rotary is not None:
            # A CLS token stands right behind the latest event, at the time of the request.
            place = events.offsets.diff().index_select(0, request)[:, None].expand(-1, tokens).reshape(-1)
            q = self.rotary.at(place, torch.zeros_like(place, dtype=torch.float32)).rotate(q)
            k = self.rotary.of_events(events).rotate(k)
        q_offsets = torch.arange(count + 1, device=cls.device) * tokens
        out = jagged_attention(q.to(v.dtype), k, v, q_offsets, events.offsets, request_index=request)
        cls = cls + self.dropout(self.out(out.reshape(count, tokens, width)))
        return cls if self.pre else self.norm(cls)
