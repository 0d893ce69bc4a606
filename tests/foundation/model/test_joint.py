"""User layers and shared histories."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from foundation.data.batch import Batch
from foundation.model.benchmarks.batches import one_impression_each
from foundation.model.cross import CrossConfig
from foundation.model.events import Events, History
from foundation.model.gem import GEM, GEMConfig
from foundation.model.joint import JointArm
from foundation.model.layer import LayerConfig
from foundation.model.rotary import Rotary
from foundation.model.sequence import SequenceConfig
from foundation.model.streams import StreamsConfig
from kernels.jagged import offsets_from_lengths
from tests.foundation.model.batches import TABLE_ROWS, encoded_batch, make_batch, model_schema

WIDTH, SIZES = 8, [3, 0, 1, 4, 2]


def make_events(lengths: list[int]) -> Events:
    offsets = offsets_from_lengths(torch.tensor(lengths))
    total = int(offsets[-1])
    return Events(torch.randn(total, WIDTH, dtype=torch.float64), offsets, torch.rand(total) * 9)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_joint_arm_equals_its_equations(norm: str) -> None:
    torch.manual_seed(0)
    config = SequenceConfig(kv_per_summary=3, rotary="both", qk_norm=True, norm=norm)  # type: ignore[arg-type]
    arm = JointArm(config, WIDTH).double()
    events, index = make_events([3, 0, 5]), torch.tensor([0, 0, 1, 2])
    cls, summaries = torch.randn(4, 2, WIDTH, dtype=torch.float64), torch.randn(4, 2, WIDTH, dtype=torch.float64)
    out = arm(History(events, cls, index), summaries).cls
    network, attention = arm.feed_forward, arm.attention
    assert out is not None and network is not None and attention is not None

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()

    def pre(norm_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return norm_(x) if norm == "pre" else x

    def post(norm_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if norm == "pre" else norm_(x)

    rotary = Rotary(WIDTH // 2, "both")
    for n in range(4):
        c, r = cls[n], int(index[n])
        s, gap = (x[events.offsets[r] : events.offsets[r + 1]] for x in (events.values, events.gap))
        keys, values = (m(summaries[n]).view(6, WIDTH) for m in (network.keys, network.values))
        hidden = F.silu(unit(pre(network.norm, c)) @ unit(keys).T / WIDTH**0.5)
        c = post(network.norm, c + hidden @ values / 6**0.5)
        k, v = attention.key_value(attention.history_norm(s)).chunk(2, dim=1)
        q = attention.query(pre(attention.norm, c))
        here, there = rotary.at(torch.full((2,), len(s)), torch.zeros(2)), rotary.at(torch.arange(len(s)), gap)
        q, k, v = (x.view(-1, 2, WIDTH // 2) for x in (q, k, v))
        q, k = here.rotate(unit(q)), there.rotate(unit(k))
        mixed = torch.zeros(2, 2, WIDTH // 2, dtype=torch.float64)
        if len(s):
            weights = torch.softmax(torch.einsum("chd,thd->hct", q, k) / (WIDTH / 2) ** 0.5, dim=2)
            mixed = torch.einsum("hct,thd->chd", weights, v)
        c = post(attention.norm, c + attention.out(mixed.flatten(1)))
        torch.testing.assert_close(out[n], c, rtol=1e-6, atol=1e-6)  # angles are float32


CONFIGS = {
    "copies": GEMConfig(width=8, layers=3, user_layers=2, members=2, streams=StreamsConfig(merge_after=1)),
    "shared": GEMConfig(width=8, layers=2, user_layers=1, joint="shared"),
    "shared, seeds": GEMConfig(
        width=8, joint="shared", layer=LayerConfig(cross=CrossConfig(pooling="hsp", seeds=4), skip="alternate")
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sharing_changes_nothing(name: str) -> None:
    """A request computed once for all its impressions gives each what it would get alone; so do gradients."""
    schema = model_schema()
    torch.manual_seed(0)
    model = GEM(CONFIGS[name], schema, TABLE_ROWS)
    encoded = encoded_batch(schema, SIZES)
    together, apart = (Batch.from_encoded(b, schema) for b in (encoded, one_impression_each(encoded)))
    gradients = []
    for batch in (together, apart):
        out = model(batch)
        model.zero_grad()
        (out.logits.square().sum() + out.embedding.square().sum()).backward()
        gradients.append((out, {key: p.grad for key, p in model.named_parameters()}))
    (a, ga), (b, gb) = gradients
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.embedding, b.embedding, rtol=1e-4, atol=1e-5)
    for key, want in gb.items():
        scale = float(want.abs().max())
        torch.testing.assert_close(ga[key], want, rtol=1e-3, atol=1e-5 * scale, msg=lambda m, k=key: f"{k}: {m}")


def test_shared_histories_are_not_copied() -> None:
    """The joint layers of a shared history hold R rows of events, however many impressions there are."""
    schema = model_schema()
    model = GEM(CONFIGS["shared"], schema, TABLE_ROWS)
    seen = []
    arm = model.layers[1].sequences["watched"]
    assert isinstance(arm, JointArm)
    arm.register_forward_hook(lambda module, args, out: seen.append(out.events.values.shape[0]))
    for sizes in ([1, 1], [5, 7]):
        model(make_batch(schema, sizes, histories=[4, 2]))
    assert seen == [6, 6]


def test_dropped_rows_are_the_appended_ones() -> None:
    events, cls = make_events([3, 0, 5]), torch.randn(3, 2, WIDTH, dtype=torch.float64)
    left, tail = events.append(cls).drop_last(2)
    assert torch.equal(left.values, events.values)
    assert torch.equal(left.offsets, events.offsets)
    assert torch.equal(left.gap, events.gap)
    assert torch.equal(tail, cls)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"user_layers": 2}, r"model\.user_layers"),
        ({"joint": "both"}, r"model\.joint"),
        ({"joint": "shared", "streams": StreamsConfig(merge_after=1)}, r"merge_after: must be at most user_layers"),
        ({"joint": "shared", "streams": StreamsConfig(cls_tokens={"bought": 0})}, r"model\.joint: .* CLS tokens"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        GEM(GEMConfig(width=8, **options), model_schema(), TABLE_ROWS)  # type: ignore[arg-type]
