"""Feature tokens and event tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foundation.data.encoding import NO_TIME
from foundation.model.embeddings import Embeddings, EmbeddingsConfig
from foundation.model.events import LONGEST_GAP, Events, EventsConfig, EventTokens, hats
from foundation.model.tokens import FeatureTokens, TokensConfig
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

SIZES = [3, 0, 1, 4]


def build(
    config: TokensConfig, width: int = 8, members: int = 2, **options: object
) -> tuple[Embeddings, FeatureTokens]:
    torch.manual_seed(0)
    schema = model_schema()
    embeddings = Embeddings(EmbeddingsConfig(**options), schema, TABLE_ROWS)  # type: ignore[arg-type]
    return embeddings, FeatureTokens(config, schema, embeddings.dims, width, members)


def test_every_feature_has_a_token() -> None:
    embeddings, tokens = build(TokensConfig(dense_tokens=2))
    batch = make_batch(model_schema(), SIZES)
    out = tokens(embeddings(batch), batch)
    assert out.shape == (2, 8, len(tokens.names), 8)
    request = ["interests", "hour", "user_id", "liked_topics", "dense.0", "dense.1", "surface"]
    item = ["author_id", "item_id", "topics", "dense.0", "dense.1", "image"]
    assert list(tokens.names) == request + item
    assert tokens.item_count == len(item)


def test_a_token_depends_on_its_own_input_only() -> None:
    embeddings, tokens = build(TokensConfig())
    batch = make_batch(model_schema(), SIZES)
    before = tokens(embeddings(batch), batch)
    changed = batch.item_dense.clone()
    changed[:, 1:4] += 1.0  # the image
    after = tokens(embeddings(batch), dataclasses.replace(batch, item_dense=changed))
    touched = (before != after).flatten(3).any(3).any(1).any(0)
    assert [name for name, hit in zip(tokens.names, touched, strict=True) if hit] == ["image"]
    changed = batch.item_dense.clone()
    changed[:, 4] += 1.0  # the length, behind the image
    after = tokens(embeddings(batch), dataclasses.replace(batch, item_dense=changed))
    touched = (before != after).flatten(3).any(3).any(1).any(0)
    assert [name for name, hit in zip(tokens.names, touched, strict=True) if hit] == ["dense.0"]


def test_request_tokens_are_handed_to_the_impressions() -> None:
    embeddings, tokens = build(TokensConfig())
    batch = make_batch(model_schema(), SIZES)
    out = tokens(embeddings(batch), batch)[:, :, : len(tokens.names) - tokens.item_count]
    assert torch.equal(out[:, 0], out[:, 2])
    assert torch.equal(out[:, 4], out[:, 7])
    assert not torch.equal(out[:, 0], out[:, 3])


def test_tables_of_the_right_dim_can_be_taken_as_they_are() -> None:
    embeddings, tokens = build(TokensConfig(project_equal=False))
    batch = make_batch(model_schema(), SIZES)
    embedded = embeddings(batch)
    place = tokens.names.index("item_id")
    bias = tokens.item.bias[:, place - len(tokens.names) + tokens.item_count]
    out = tokens(embedded, batch)[:, :, place]
    torch.testing.assert_close(out, embedded.item["item_id"] + bias[:, None])
    assert "dim8" not in tokens.item.projections
    assert "dim4" in tokens.item.projections


def test_hats_interpolate() -> None:
    x = torch.tensor([-1.0, 0.0, 0.25, 0.3, 1.0, 7.0])
    out = hats(x, 5)
    torch.testing.assert_close(out.sum(1), torch.ones(6))
    torch.testing.assert_close(out @ torch.linspace(0, 1, 5), x.clamp(0, 1))
    assert out[2].tolist() == [0, 1, 0, 0, 0]


def test_events_carry_their_time_and_place() -> None:
    schema = model_schema()
    embeddings = Embeddings(EmbeddingsConfig(), schema, TABLE_ROWS)
    tokens = EventTokens(EventsConfig(), schema.sequence("watched"), embeddings.dims, 8)
    batch = make_batch(schema, SIZES, histories=[6, 0, 2, 3])
    times = batch.sequence_times["watched"].clone()
    times[0] = NO_TIME
    times[1] = batch.request_time[0] - 1000
    times[2] = batch.request_time[0] + 5000
    batch = dataclasses.replace(batch, sequence_times={"watched": times})
    events = tokens(embeddings(batch), batch)
    assert events.values.shape == (11, 8)
    assert events.offsets.tolist() == [0, 6, 6, 8, 11]
    assert events.gap[0] == LONGEST_GAP
    assert events.gap[1] == pytest.approx(0.6931, abs=1e-4)
    assert events.gap[2] == 0, "an event after its request counts as now"
    later = dataclasses.replace(batch, request_time=batch.request_time + 86_400_000)
    moved = tokens(embeddings(batch), later)
    assert torch.equal(moved.values[0], events.values[0]), "an unknown time has no gap"
    assert not torch.equal(moved.values[1], events.values[1])


def test_a_sequence_without_times() -> None:
    schema = model_schema()
    embeddings = Embeddings(EmbeddingsConfig(), schema, TABLE_ROWS)
    for config in (EventsConfig(), EventsConfig(time_knots=0, position_knots=0)):
        tokens = EventTokens(config, schema.sequence("bought"), embeddings.dims, 8)
        batch = make_batch(schema, SIZES)
        assert (tokens(embeddings(batch), batch).gap == LONGEST_GAP).all()


def test_gathering_and_appending() -> None:
    events = Events(torch.arange(4.0).view(4, 1), torch.tensor([0, 1, 1, 4]), torch.arange(4.0))
    gathered = events.gather(torch.tensor([2, 0, 1, 2]))
    assert gathered.values.flatten().tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert gathered.offsets.tolist() == [0, 3, 4, 4, 7]
    longer = events.append(torch.tensor([[[9.0]], [[8.0]], [[7.0]]]))
    assert longer.values.flatten().tolist() == [0, 9, 8, 1, 2, 3, 7]
    assert longer.gap.tolist() == [0, 0, 0, 1, 2, 3, 0]
    assert longer.offsets.tolist() == [0, 2, 3, 7]


@pytest.mark.parametrize("key", ["time_knots", "position_knots"])
def test_wrong_event_options_are_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"events.{key}"):
        EventsConfig(**{key: 1})


def test_wrong_token_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"tokens\.dense_tokens"):
        TokensConfig(dense_tokens=0)
    with pytest.raises(ValueError, match=r"tokens\.dropout"):
        TokensConfig(dropout=1.0)


def test_attributes_can_weigh_one_another() -> None:
    """MaskNet: the elements of all attributes times what a network makes of them, then one projection."""
    torch.manual_seed(0)
    schema, batch = model_schema(), make_batch(model_schema(), SIZES)
    embeddings = Embeddings(EmbeddingsConfig(), schema, TABLE_ROWS)
    config = EventsConfig(mask_hidden=5, time_knots=0, position_knots=0)
    tokens = EventTokens(config, schema.sequence("watched"), embeddings.dims, 8)
    rows = torch.cat([embeddings(batch).events[f"watched.{name}"] for name in ("item", "author", "action")], dim=1)
    assert tokens.mask is not None
    first, _, second = tokens.mask
    mask = torch.relu(rows @ first.weight.T + first.bias) @ second.weight.T + second.bias
    want = tokens.norm((rows * mask) @ tokens.projection.weight.T + tokens.projection.bias)
    torch.testing.assert_close(tokens(embeddings(batch), batch).values, want)
