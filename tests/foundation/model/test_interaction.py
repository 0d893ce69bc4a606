"""The interaction arm against its equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foundation.model.grouped import GroupedLinear, GroupedMLP, GroupedNorm
from foundation.model.interaction import InteractionArm, InteractionConfig, partition

COUNT, TOKENS, SUMMARIES, WIDTH = 5, 4, 2, 6


def inputs(members: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(members, COUNT, TOKENS, WIDTH), torch.randn(COUNT, SUMMARIES, WIDTH)


def build(members: int = 1, *, bias: bool = True, rank: int = 4, **options: object) -> InteractionArm:
    torch.manual_seed(0)
    config = InteractionConfig(block_tokens=3, linear_tokens=2, fm_rank=rank, cross_rank=5, **options)  # type: ignore[arg-type]
    return InteractionArm(config, TOKENS + SUMMARIES, WIDTH, members, bias=bias)


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_layers_are_independent_plain_layers(groups: int) -> None:
    x = torch.randn(groups, COUNT, WIDTH)
    linear, norm, mlp = (
        GroupedLinear(groups, WIDTH, 7),
        GroupedNorm(groups, WIDTH),
        GroupedMLP(groups, WIDTH, (5,), 0.0),
    )
    with torch.no_grad():
        for value in (linear.bias, norm.weight, norm.bias):
            assert value is not None
            value.normal_()
    for g in range(groups):
        assert linear.bias is not None
        torch.testing.assert_close(linear(x)[g], x[g] @ linear.weight[g] + linear.bias[g])
        want = F.layer_norm(x[g], (WIDTH,), norm.weight[g], norm.bias[g])
        torch.testing.assert_close(norm(x)[g], want)
        hidden = mlp.linears[0]
        torch.testing.assert_close(mlp(x)[g], F.silu(x[g] @ hidden.weight[g] + hidden.bias[g]))


def test_factorization_machine_equals_the_published_layer() -> None:
    arm, (x, s) = build(block="fm", hidden=(9,)), inputs()
    out = arm(x, s)[0]
    z = torch.cat([x[0], s], dim=1)
    block = arm.block
    pairs = z @ (z.transpose(1, 2) @ block.y.weight[0])
    hidden = block.mlp.linears[0]
    flat = F.layer_norm(pairs.flatten(1), (pairs[0].numel(),))
    fm = F.silu(flat @ hidden.weight[0] + hidden.bias[0, 0]) @ block.out.weight[0] + block.out.bias[0, 0]
    mixed = torch.einsum("bnd,no->bod", z, arm.compression.weight[0])
    linear, residual = mixed[:, :2], mixed[:, 2:]
    want = F.layer_norm(torch.cat([fm.view(COUNT, 3, WIDTH), linear], dim=1) + residual, (WIDTH,))
    torch.testing.assert_close(out, want)


def test_attentive_compression_equals_its_equations() -> None:
    arm = build(block="fm", hidden=(), compression="attentive", attentive_tokens=2, attentive_hidden=7, bias=False)
    arm, (x, s) = arm.double(), inputs()
    z = torch.cat([x[0], s], dim=1).double()
    block, n = arm.block, TOKENS + SUMMARIES
    few = torch.einsum("bnd,na->bda", z, block.y.compress.weight[0]).flatten(1)
    y = F.silu(few @ block.y.hidden.weight[0]) @ block.y.out.weight[0] + block.y.learned[0]
    pairs = torch.stack([z[b] @ (z[b].T @ y[b].view(n, 4)) for b in range(COUNT)])
    fm = F.layer_norm(pairs.flatten(1), (n * 4,)) @ block.out.weight[0]
    mixed = torch.einsum("bnd,no->bod", z, arm.compression.weight[0])
    want = F.layer_norm(torch.cat([fm.view(COUNT, 3, WIDTH), mixed[:, :2]], dim=1) + mixed[:, 2:], (WIDTH,))
    torch.testing.assert_close(arm(x.double(), s.double())[0], want)


def test_rank_0_is_the_whole_matrix_of_products() -> None:
    arm, (x, s) = build(block="fm", hidden=(), rank=0), inputs()
    z = torch.cat([x[0], s], dim=1)
    flat = F.layer_norm((z @ z.transpose(1, 2)).flatten(1), ((TOKENS + SUMMARIES) ** 2,))
    fm = flat @ arm.block.out.weight[0] + arm.block.out.bias[0, 0]
    torch.testing.assert_close(arm.block([z])[0], fm.view(COUNT, 3, WIDTH))


@pytest.mark.parametrize(("tokens", "experts"), [(6, 2), (7, 3), (2, 4), (5, 1)])
def test_partitions_cover_all_tokens(tokens: int, experts: int) -> None:
    parts = partition(tokens, experts)
    assert set(parts.flatten().tolist()) == set(range(tokens))
    assert all(len(set(row)) == len(row) for row in parts.tolist())


@pytest.mark.parametrize("members", [1, 2])
def test_an_expert_sees_its_part_only(members: int) -> None:
    arm, (x, s) = (
        build(members=members, block="mlp", hidden=(7,), experts=3, partition="split", norm=False),
        inputs(members),
    )
    out = arm(x, s)
    assert out.shape == (members, COUNT, 15, WIDTH)
    other = x.clone()
    other[:, :, 1] += 1.0  # the second expert's
    after = arm(other, s)
    assert torch.equal(out[:, :, :5], after[:, :, :5])
    assert not torch.equal(out[:, :, 5:10], after[:, :, 5:10])
    assert torch.equal(out[:, :, 10:], after[:, :, 10:])
    z = torch.cat([x, s.expand(members, -1, -1, -1)], dim=2)
    for m in range(members):
        e = 3 * m + 1
        part = z[m][:, [1, 4]]
        hidden = F.silu(part.flatten(1) @ arm.block.mlp.linears[0].weight[e] + arm.block.mlp.linears[0].bias[e, 0])
        block = (hidden @ arm.block.out.weight[e] + arm.block.out.bias[e, 0]).view(COUNT, 3, WIDTH)
        mixed = torch.einsum("bnd,no->bod", part, arm.compression.weight[e])
        want = torch.cat([block, mixed[:, :2]], dim=1) + mixed[:, 2:]
        torch.testing.assert_close(out[m, :, 5:10], want)


def test_dhen_sums_its_blocks() -> None:
    arm, (x, s) = build(block="dhen", mix=("fm", "mlp"), hidden=(7,)), inputs()
    z = list(torch.cat([x, s[None]], dim=2))
    want = sum(arm.block.blocks[name](z) for name in ("fm", "mlp")) / 2**0.5
    torch.testing.assert_close(arm.block(z), want)


def test_tokens_can_be_normalised_on_the_way_in() -> None:
    (x, s), arm = inputs(), build(block="cross", pre_norm=True)
    plain = build(block="cross")
    state = {name: value for name, value in arm.state_dict().items() if not name.startswith("pre_norm")}
    plain.load_state_dict(state)
    torch.testing.assert_close(arm(x, s), plain(F.layer_norm(x, (WIDTH,)), F.layer_norm(s, (WIDTH,))))


def test_cross_layers_equal_the_published_ones() -> None:
    arm, (x, s) = build(block="cross", hidden=()), inputs()
    z = torch.cat([x[0], s], dim=1).flatten(1)
    crossed = z
    for down, up in zip(arm.block.down, arm.block.up, strict=True):
        crossed = z * (crossed @ down.weight[0] @ up.weight[0] + up.bias[0, 0]) + crossed
    block = (crossed @ arm.block.out.weight[0] + arm.block.out.bias[0, 0]).view(COUNT, 3, WIDTH)
    mixed = torch.einsum("bnd,no->bod", z.view(COUNT, -1, WIDTH), arm.compression.weight[0])
    want = F.layer_norm(torch.cat([block, mixed[:, :2]], dim=1) + mixed[:, 2:], (WIDTH,))
    torch.testing.assert_close(arm(x, s)[0], want)


def test_tokens_can_keep_their_size() -> None:
    (x, s), plain = inputs(), build(block="cross", norm=False)
    torch.testing.assert_close(F.layer_norm(plain(x, s), (WIDTH,)), build(block="cross")(x, s))


@pytest.mark.parametrize("block", ["fm", "cross", "mlp"])
@pytest.mark.parametrize("experts", [1, 2])
def test_members_and_experts_do_not_mix(block: str, experts: int) -> None:
    arm, (x, s) = build(members=3, block=block, experts=experts, input_scale=0.5), inputs(3)
    before = arm(x, s)
    assert before.shape == (3, COUNT, arm.config.tokens_out, WIDTH)
    assert arm.config.tokens_out == experts * 5
    other = x.clone()
    other[1] += 1.0
    after = arm(other, s)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])
    with torch.no_grad():
        for value in arm.parameters():
            value[experts * 2] += 0.5  # the first expert of the last member
    changed = arm(x, s)
    assert torch.equal(before[:2], changed[:2])
    assert not torch.equal(before[2, :, :5], changed[2, :, :5])
    assert torch.equal(before[2, :, 5:], changed[2, :, 5:]), "the other expert's tokens"


def test_no_linear_tokens_and_no_summaries() -> None:
    arm = InteractionArm(InteractionConfig(block_tokens=2, linear_tokens=0), TOKENS, WIDTH, 1)
    x, s = inputs()
    assert arm(x, s[:, :0]).shape == (1, COUNT, 2, WIDTH)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"block": "dot"}, "block"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"linear_tokens": -1}, "linear_tokens"),
        ({"experts": 0}, "experts"),
        ({"mix": ("dhen",)}, "mix"),
        ({"partition": "half"}, "partition"),
        ({"compression": "none"}, "compression"),
        ({"compression": "attentive", "fm_rank": 0}, "fm_rank"),
        ({"block": "dhen", "mix": ("mlp",), "hidden": ()}, "hidden"),
        ({"hidden": (0,)}, "hidden"),
        ({"block": "mlp", "hidden": ()}, "hidden"),
        ({"dropout": 1.0}, "dropout"),
        ({"input_scale": -0.1}, "input_scale"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=rf"interaction\.{key}"):
        InteractionConfig(**options)  # type: ignore[arg-type]
