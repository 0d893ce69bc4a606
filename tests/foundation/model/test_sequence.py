"""The sequence arm and the cross arm, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foundation.model.cross import CrossConfig, FeatureSummary, SequenceSummary
from foundation.model.events import Events, History
from foundation.model.pooling import Pooling
from foundation.model.rotary import Rotary
from foundation.model.sequence import SequenceArm, SequenceConfig
from kernels.jagged import offsets_from_lengths

LENGTHS, WIDTH, SUMMARIES = [3, 0, 5, 1], 8, 2


def make_events(lengths: list[int] | None = None, seed: int = 0) -> Events:
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_from_lengths(torch.tensor(LENGTHS if lengths is None else lengths))
    total = int(offsets[-1])
    return Events(torch.randn(total, WIDTH, generator=generator), offsets, torch.rand(total, generator=generator) * 9)


def parts(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return [values[offsets[b] : offsets[b + 1]] for b in range(offsets.numel() - 1)]


def test_the_layer_equals_its_equations() -> None:
    torch.manual_seed(0)
    arm = SequenceArm(SequenceConfig(heads=2, kv_per_summary=3, activation="silu"), WIDTH)
    events, summaries = make_events(), torch.randn(4, SUMMARIES, WIDTH)
    out = arm(events, summaries)
    network, attention = arm.feed_forward, arm.attention
    assert network is not None
    assert attention is not None
    for b, s in enumerate(parts(events.values, events.offsets)):
        keys, values = (m(summaries[b]).view(SUMMARIES * 3, WIDTH) for m in (network.keys, network.values))
        s = s + F.silu(network.norm(s) @ keys.T / WIDTH**0.5) @ values / (SUMMARIES * 3) ** 0.5
        q, k, v = (x.view(-1, 2, WIDTH // 2).transpose(0, 1) for x in attention.qkv(attention.norm(s)).chunk(3, dim=1))
        mixed = torch.softmax(q @ k.transpose(1, 2) / (WIDTH // 2) ** 0.5, dim=2) @ v
        s = s + attention.out(mixed.transpose(0, 1).reshape(-1, WIDTH))
        torch.testing.assert_close(parts(out.values, out.offsets)[b], s)


def test_post_norm_and_normalised_queries_and_keys() -> None:
    torch.manual_seed(0)
    arm = SequenceArm(SequenceConfig(heads=2, kv_per_summary=3, norm="post", qk_norm=True), WIDTH, bias=False).double()
    events, summaries = make_events(), torch.randn(4, SUMMARIES, WIDTH, dtype=torch.float64)
    events = events._replace(values=events.values.double())
    out = arm(events, summaries)
    network, attention = arm.feed_forward, arm.attention
    assert network is not None
    assert attention is not None

    def unit(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()

    for b, s in enumerate(parts(events.values, events.offsets)):
        keys, values = (m(summaries[b]).view(SUMMARIES * 3, WIDTH) for m in (network.keys, network.values))
        hidden = F.silu(unit(s) @ unit(keys).T / WIDTH**0.5)
        s = F.layer_norm(s + hidden @ values / (SUMMARIES * 3) ** 0.5, (WIDTH,))
        q, k, v = (x.view(-1, 2, WIDTH // 2).transpose(0, 1) for x in attention.qkv(s).chunk(3, dim=1))
        mixed = torch.softmax(unit(q) @ unit(k).transpose(1, 2) / (WIDTH // 2) ** 0.5, dim=2) @ v
        s = F.layer_norm(s + attention.out(mixed.transpose(0, 1).reshape(-1, WIDTH)), (WIDTH,))
        torch.testing.assert_close(parts(out.values, out.offsets)[b], s)


def test_without_biases_no_parameter_is_one() -> None:
    arm = SequenceArm(SequenceConfig(), WIDTH, bias=False)
    assert not [name for name, _ in arm.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("rotary", ["none", "position", "time", "both"])
def test_blocks_limit_what_an_event_sees(rotary: str) -> None:
    """Each block of 64 events alone gives the same under full attention; rotary counts places from its first event."""
    torch.manual_seed(0)
    options = {"kv_per_summary": 0, "rotary": rotary}
    arm = SequenceArm(SequenceConfig(attention="block", **options), WIDTH)  # type: ignore[arg-type]
    full = SequenceArm(SequenceConfig(attention="full", **options), WIDTH)  # type: ignore[arg-type]
    full.load_state_dict(arm.state_dict())
    events = make_events([150, 0, 64, 65])
    got = arm(events, None).values
    for start, end in zip(events.offsets[:-1].tolist(), events.offsets[1:].tolist(), strict=True):
        for first in range(start, end, 64):
            rows = slice(first, min(first + 64, end))
            alone = Events(events.values[rows], torch.tensor([0, rows.stop - first]), events.gap[rows])
            torch.testing.assert_close(got[rows], full(alone, None).values)


@pytest.mark.parametrize("attention", ["full", "window", "block", "none"])
@pytest.mark.parametrize("rotary", ["none", "position", "time", "both"])
def test_a_sequence_alone_gives_the_same(attention: str, rotary: str) -> None:
    torch.manual_seed(0)
    config = SequenceConfig(attention=attention, window=1, rotary=rotary, gdpa_heads=2)  # type: ignore[arg-type]
    arm = SequenceArm(config, WIDTH)
    events, summaries = make_events(), torch.randn(4, SUMMARIES, WIDTH)
    together = parts(arm(events, summaries).values, events.offsets)
    for b in (0, 1, 2, 3):
        own = events.gather(torch.tensor([b]))
        torch.testing.assert_close(arm(own, summaries[b : b + 1]).values, together[b])


def test_window_limits_what_an_event_sees() -> None:
    arm = SequenceArm(SequenceConfig(attention="window", window=1, kv_per_summary=0), WIDTH)
    events, summaries = make_events([6]), torch.randn(1, SUMMARIES, WIDTH)
    before = arm(events, summaries).values
    values = events.values.clone()
    values[5, 0] += 1.0
    after = arm(events._replace(values=values), summaries).values
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


@pytest.mark.parametrize("attention", ["full", "window"])
def test_causal_attention_sees_what_was_before(attention: str) -> None:
    config = SequenceConfig(attention=attention, window=2, causal=True, kv_per_summary=0)  # type: ignore[arg-type]
    arm, events = SequenceArm(config, WIDTH), make_events([6])
    changed = events.values.clone()
    changed[2, 0] += 1.0  # all alike would be taken away by the norm
    moved = (arm(events, None).values != arm(events._replace(values=changed), None).values).any(1)
    assert moved.tolist() == [False, False, True, True, True, attention == "full"]


def test_rotary_products_depend_on_differences_only() -> None:
    rotary = Rotary(4, "both")
    x = torch.randn(1, 1, 4).expand(4, 1, 4)
    shifted = Events(x, torch.tensor([0, 4]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rotated = rotary(x, shifted)[:, 0]
    products = rotated @ rotated.T
    torch.testing.assert_close(products[0, 1], products[2, 3])
    torch.testing.assert_close(products[0, 2], products[1, 3])
    assert not torch.allclose(products[0, 1], products[0, 2])
    torch.testing.assert_close(rotated.norm(dim=1), x.norm(dim=2)[:, 0])


@pytest.mark.parametrize("target_aware", [False, True])
def test_pooling_equals_multi_head_attention(target_aware: bool) -> None:
    torch.manual_seed(0)
    pool = Pooling(3, 2, target_aware, WIDTH)
    events, target = make_events(), torch.randn(4, WIDTH)
    out = pool(events.values, events.offsets, target)
    assert out.shape == (4, 3, WIDTH)
    for b, s in enumerate(parts(events.values, events.offsets)):
        queries = pool.query(pool.seeds + target[b] if target_aware else pool.seeds).view(3, 2, 4)
        pooled = torch.zeros(3, 2, 4)
        for h in range(2 if len(s) else 0):
            keys, values = s @ pool.key[h].T, s @ pool.value[h]
            pooled[:, h] = torch.softmax(queries[:, h] @ keys.T / 2.0, dim=1) @ values
        torch.testing.assert_close(out[b], pool.out(pooled.flatten(1)))


def test_summary_holds_cls_recent_and_pooled_tokens() -> None:
    torch.manual_seed(0)
    config = CrossConfig(cls_tokens=1, recent_tokens=2, pooled_tokens=2)
    summary = SequenceSummary(config, WIDTH, 5)
    cls = torch.randn(4, 1, WIDTH)
    events = make_events().append(cls)
    out = summary(History(events), torch.zeros(4, WIDTH))
    assert out.shape == (4, config.sequence_tokens, 5)
    first = summary.norm(events.values)

    def gated(x: Tensor) -> Tensor:
        return summary.project(x * torch.sigmoid(summary.gate(x)))

    torch.testing.assert_close(out[2, :3], gated(first[events.offsets[3] - 3 : events.offsets[3]]))
    torch.testing.assert_close(out[1, 2], gated(first[events.offsets[2] - 1]))
    torch.testing.assert_close(out[1, :2], gated(torch.zeros(2, WIDTH)))


@pytest.mark.parametrize("hidden", [0, 7])
def test_feature_summary(hidden: int) -> None:
    torch.manual_seed(0)
    summary = FeatureSummary(hidden, 3, tokens=4, members=2, width=6, out_width=WIDTH)
    x = torch.randn(2, 5, 4, 6)
    out = summary(x)
    assert out.shape == (5, 3, WIDTH)
    if not hidden:
        rows = torch.cat([x[0], x[1]], dim=1)
        mixed = torch.einsum("on,bnd->bod", summary.mix.weight, rows) + summary.mix.bias[:, None]
        plain = summary.project(mixed)
        torch.testing.assert_close(out, plain * torch.sigmoid(summary.gate(plain)))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"heads": 0}, "heads"),
        ({"activation": "softmax"}, "activation"),
        ({"attention": "causal"}, "attention"),
        ({"rotary": "yes"}, "rotary"),
        ({"window": -1}, "window"),
        ({"attention": "block", "causal": True}, "causal"),
        ({"norm": "sandwich"}, "norm"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=rf"sequence\.{key}"):
        SequenceConfig(**options)  # type: ignore[arg-type]


def test_sizes_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ValueError, match=r"sequence\.heads: width 8"):
        SequenceArm(SequenceConfig(heads=3), WIDTH)
    with pytest.raises(ValueError, match=r"sequence\.gdpa_heads"):
        SequenceArm(SequenceConfig(gdpa_heads=3), WIDTH)
    with pytest.raises(ValueError, match=r"sequence\.rotary"):
        SequenceArm(SequenceConfig(heads=4, rotary="both"), WIDTH)
    with pytest.raises(ValueError, match=r"cross\.pooling_heads"):
        Pooling(2, 3, True, WIDTH)
    with pytest.raises(ValueError, match="cross: one of"):
        CrossConfig(cls_tokens=0, pooled_tokens=0, recent_tokens=0)
