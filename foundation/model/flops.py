"""Useful floating point operations of a forward pass, by part, counted from a model's sizes and the lengths.

Only matrix products count, two operations per multiplication, as ``torch.utils.flop_counter`` does. Padding does not
count, nor does what a backward pass computes again; a training step has three times the operations of its forward pass.

Legend: R requests, N impressions, T events, E event width, c CLS tokens, S summary tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from foundation.data.batch import Batch
from foundation.model.cross import FeatureSummary
from foundation.model.gem import GEM
from foundation.model.interaction import InteractionArm
from foundation.model.joint import JointArm
from foundation.model.pooling import Pooling
from foundation.model.sequence import GeneratedNetwork, SequenceArm, SequenceConfig
from foundation.model.streams import MERGED, Stream
from kernels.interaction import products_first

PARTS = ("projections", "interaction", "gdpa", "attention", "cross", "heads")
"""Inputs to tokens and events; interaction arms; generated networks; self-attention (in shared joint layers, of CLS
tokens over the history); summaries, pooling, CLS tokens and the merge; trunk and towers. Projections of a part count
with it."""

TRAINING = 3
"""Operations of forward and backward pass over those of the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a batch holds.

    Args:
        impressions: of each request, int64 ``[R]``.
        events: of each request by sequence, int64 ``[R]``.
    """

    impressions: np.ndarray
    events: Mapping[str, np.ndarray]

    @staticmethod
    def of(batch: Batch) -> Load:
        """The load of a batch; waits for the device."""
        counts = torch.bincount(batch.request_index, minlength=batch.num_requests)
        events = {name: offsets.diff().cpu().numpy() for name, offsets in batch.sequence_offsets.items()}
        return Load(impressions=counts.cpu().numpy(), events=events)


def forward_flops(model: GEM, load: Load) -> dict[str, float]:
    """Operations of a forward pass over a whole batch, by part (``PARTS``).

    Left out are the match statistics, which have no parameters. The low-rank adapters of all surfaces count, as all are
    computed. The model may be on the meta device.
    """
    count = _Counter(model, load)
    count.inputs()
    count.layers()
    count.outputs()
    return {part: count.flops[part] for part in PARTS}


class _Counter:
    def __init__(self, model: GEM, load: Load) -> None:
        self.model, self.load = model, load
        self.requests, self.impressions = len(load.impressions), int(load.impressions.sum())
        self.flops: dict[str, float] = defaultdict(float)
        events = dict(load.events)
        if model.merge is not None:
            events[MERGED] = sum(load.events.values(), np.zeros(self.requests, dtype=np.int64))
        self.events = events

    def add(self, part: str, module: nn.Module | nn.Parameter | None, rows: float) -> None:
        """All matrices of a module, each times ``rows`` vectors."""
        if isinstance(module, nn.Parameter):
            self.flops[part] += 2.0 * rows * module.numel()
        elif module is not None:
            for name, parameter in module.named_parameters():
                if parameter.dim() > 1 and not name.endswith("bias"):
                    self.flops[part] += 2.0 * rows * parameter.numel()

    def inputs(self) -> None:
        model: Any = self.model
        for side, rows in ((model.tokens.request, self.requests), (model.tokens.item, self.impressions)):
            for module in (*side.projections.values(), side.dense, *side.numbers.values()):
                self.add("projections", module, rows)
        self.add("projections", model.match_token, self.impressions)
        for name, tokens in model.events.items():
            for part in (tokens.mask, tokens.projection, tokens.place):
                self.add("projections", part, float(self.load.events[name].sum()))

    def layers(self) -> None:
        model, config = self.model, self.model.config
        self.add("cross", model.target, self.impressions)
        self.add("cross", model.own_targets, self.impressions)
        users = config.user_layers
        first, joint = model.phases[0], model.phases[users]
        if users:
            self.cls(first, model.user_cls, model.own_user_cls, self.requests)
        self.cls(joint, model.cls, model.own_cls, self.impressions)
        for place, layer in enumerate(model.layers):
            if place == model.merge_after:
                self.merge(place)
            self.layer(layer, place)
        if model.merge_after == config.layers:
            self.merge(config.layers)

    def outputs(self) -> None:
        model = self.model
        rows = self.impressions
        if model.feature_summary is not None:
            self.summary(model.feature_summary, rows)
        for name, summary in model.sequence_summary.summaries.items():
            self.sequence_summary(summary, name, joint=True)
        heads = model.heads
        for module in (heads.trunk, heads.adapters, heads.towers, heads.conditions, heads.surface_bias):
            self.add("heads", module, rows)

    def layer(self, layer: Any, place: int) -> None:
        joint = place >= self.model.config.user_layers
        rows = self.impressions if joint else self.requests
        for summary in (layer.feature_summary, *layer.own_summaries.values()):
            if summary is not None:
                self.summary(summary, rows)
        for name, own in layer.sequence_summary.summaries.items():
            self.sequence_summary(own, name, joint)
        self.interaction(layer.interaction, rows)
        streams = {stream.name: stream for stream in layer.streams}
        tokens = self.model.config.layer.cross.feature_tokens
        for name, arm in layer.sequences.items():
            stream = streams[name]
            lengths = self.lengths(stream, joint)
            if isinstance(arm, JointArm):
                self.joint_arm(arm, stream, tokens)
            elif isinstance(arm, SequenceArm):
                if arm.feed_forward is not None:
                    self.generated(arm.feed_forward, stream, float(lengths.sum()), rows, tokens)
                if arm.attention is not None:
                    self.add("attention", arm.attention.qkv, float(lengths.sum()))
                    self.add("attention", arm.attention.out, float(lengths.sum()))
                    self.flops["attention"] += 4.0 * stream.width * pairs(stream.sequence, lengths)

    def lengths(self, stream: Stream, joint: bool) -> np.ndarray:
        """Of the sequences that a sequence arm works on, CLS tokens included."""
        events = self.events[stream.name]
        events = np.repeat(events, self.load.impressions) if joint else events
        return events + stream.cross.cls_tokens

    def generated(self, network: GeneratedNetwork, stream: Stream, events: float, rows: int, tokens: int) -> None:
        self.add("gdpa", network.keys, rows * tokens)
        self.add("gdpa", network.values, rows * tokens)
        self.flops["gdpa"] += 4.0 * events * tokens * network.units * stream.width

    def joint_arm(self, arm: JointArm, stream: Stream, tokens: int) -> None:
        cls = self.impressions * stream.cross.cls_tokens
        if arm.feed_forward is not None:
            self.generated(arm.feed_forward, stream, cls, self.impressions, tokens)
        if arm.attention is not None:
            events = self.events[stream.name]
            self.add("attention", arm.attention.query, cls)
            self.add("attention", arm.attention.out, cls)
            self.add("attention", arm.attention.key_value, float(events.sum()))
            seen = float((events * self.load.impressions).sum())
            self.flops["attention"] += 4.0 * stream.width * stream.cross.cls_tokens * seen

    def summary(self, summary: Any, rows: int) -> None:
        if summary.hidden:
            self.add("cross", summary.mix, rows)
            self.add("cross", summary.project, rows)
        else:
            self.add("cross", summary.mix, rows * summary.project.in_features)
            self.add("cross", summary.project, rows * summary.outputs)
        self.add("cross", summary.gate, rows * summary.outputs)

    def cls(self, streams: tuple[Stream, ...], base: FeatureSummary | None, own: nn.ModuleDict, rows: int) -> None:
        for module in (base, *own.values()):
            if module is not None:
                self.summary(module, rows)

    def sequence_summary(self, summary: Any, name: str, joint: bool) -> None:
        config = summary.config
        shared = joint and self.model.config.joint == "shared"
        rows = self.impressions if joint else self.requests
        events = self.events[name]
        seen = np.repeat(events, self.load.impressions) if joint else events
        if not shared:
            seen = seen + config.cls_tokens
        held = events if shared else seen
        pool = summary.pool
        made = rows * config.sequence_tokens
        if shared:  # tokens that the impressions of a request have in common are made once
            own = config.cls_tokens + (config.pooled_tokens if config.reads_target else 0)
            made = rows * own + self.requests * (config.sequence_tokens - own)
        self.add("cross", summary.gate, made)
        self.add("cross", summary.project, made)
        if pool is None:
            return
        asking = rows if pool.target_aware else 1
        answered = rows if pool.target_aware or not shared else self.requests
        looked = float(seen.sum() if pool.target_aware else held.sum())
        queries, width = pool.seeds.shape
        self.add("cross", pool.query, asking * queries)
        self.add("cross", pool.out, answered * queries)
        if isinstance(pool, Pooling):
            self.add("cross", pool.key, asking * queries)
            self.add("cross", pool.value, answered * queries)
            self.flops["cross"] += 4.0 * queries * pool.heads * width * looked
        else:
            self.add("cross", pool.key, float(held.sum()))
            self.add("cross", pool.value, float(held.sum()))
            self.flops["cross"] += 4.0 * queries * width * looked
            outputs = pool.compress.mix.shape[2]
            self.add("cross", pool.compress.mix, answered * width)
            self.add("cross", pool.compress.maps, answered * outputs)

    def merge(self, place: int) -> None:
        model = self.model
        assert model.merge is not None
        joint = place > model.config.user_layers
        for name, project in model.merge.project.items():
            events = np.repeat(self.events[name], self.load.impressions) if joint else self.events[name]
            self.add("cross", project, float((events + model.merge.cls_tokens[name]).sum()))

    def interaction(self, arm: InteractionArm, rows: int) -> None:
        groups = arm.compression.weight.shape[0]
        self.add("interaction", arm.compression, rows * arm.width)
        blocks: Mapping[str, Any] = {arm.config.block: arm.block}
        if arm.config.block == "dhen":
            blocks = dict(arm.block.blocks.named_children())  # type: ignore[union-attr, operator]
        for name, block in blocks.items():
            if name == "fm":
                products = arm.tokens**2 * arm.width
                if block.y is not None:
                    products = _fm_products(arm.tokens, arm.width, block.rank)
                self.flops["interaction"] += 2.0 * groups * rows * products
                if arm.config.compression == "attentive":
                    self.add("interaction", block.y.compress, rows * arm.width)
                    self.add("interaction", block.y.hidden, rows)
                    self.add("interaction", block.y.out, rows)
                self.add("interaction", block.mlp, rows)
                self.add("interaction", block.out, rows)
            else:
                self.add("interaction", block, rows)


def pairs(config: SequenceConfig, lengths: np.ndarray) -> float:
    """Pairs of events that self-attention compares, over sequences of these lengths."""
    n = lengths.astype(np.float64)
    if config.attention == "block":
        return float(((n // 64) * 64**2 + (n % 64) ** 2).sum())
    reach = np.minimum(config.window, n - 1) if config.attention == "window" else n - 1
    before = (n * reach - reach * (reach + 1) / 2).sum()
    return float(n.sum() + (1 if config.causal else 2) * before)


def _jagged_attention(q: Any, k: Any, v: Any, q_offsets: Any, kv_offsets: Any, *rest: Any, out_val: Any) -> float:
    causal, window = rest[1], rest[2]
    keys = kv_offsets.diff().cpu().numpy()
    queries = np.full_like(keys, q.shape[0]) if q_offsets is None else q_offsets.diff().cpu().numpy()
    seen = float((queries * keys).sum())
    if causal or window >= 0:
        assert (queries == keys).all()
        config = SequenceConfig(attention="full" if window < 0 else "window", window=max(window, 0), causal=causal)
        seen = pairs(config, keys)
    return 2.0 * seen * q.shape[1] * (q.shape[2] + v.shape[2])


def _gdpa(q: Any, k: Any, v: Any, q_offsets: Any, kv_offsets: Any, *rest: Any, out_val: Any) -> float:
    assert q_offsets is not None and kv_offsets is None, "the model has dense keys"
    return 4.0 * q.shape[0] * k.shape[1] * q.shape[1] * q.shape[2]


def _block_attention(q: Any, k: Any, v: Any, offsets: Any, *rest: Any, out_val: Any) -> float:
    return 4.0 * pairs(SequenceConfig(attention="block"), offsets.diff().cpu().numpy()) * q.shape[1] * q.shape[2]


def _fm_products(tokens: int, width: int, rank: int) -> int:
    """Products of ``Z (Z^T Y)`` for a row of the batch, in the cheaper order."""
    return tokens**2 * (width + rank) if products_first(tokens, width, rank) else 2 * tokens * width * rank


def _fm_block(x: Any, y: Any, *, out_val: Any) -> float:
    return 2.0 * x.shape[0] * _fm_products(x.shape[1], x.shape[2], y.shape[-1])


def _mix_tokens(x: Any, matrix: Any, *, out_val: Any) -> float:
    return 2.0 * x.shape[0] * x.shape[2] * matrix.numel()


def op_formulas() -> dict[Any, Callable[..., float]]:
    """Operations of the forward pass of the project's operators that multiply, as the model calls them.

    For ``torch.utils.flop_counter.FlopCounterMode(custom_mapping=...)``.
    """
    formulas: dict[Any, Callable[..., float]] = {
        torch.ops.opengem.jagged_attention: _jagged_attention,
        torch.ops.opengem.gdpa: _gdpa,
        torch.ops.opengem.block_attention: _block_attention,
        torch.ops.opengem.fm_block: _fm_block,
        torch.ops.opengem.mix_tokens: _mix_tokens,
    }
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined]  # they need the offsets, not only shapes
    return formulas
