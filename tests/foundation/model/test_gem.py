"""The whole foundation model on random batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.encoding import EncodedBatch
from foundation.data.schema import Schema
from foundation.model.cross import CrossConfig
from foundation.model.embeddings import EmbeddingsConfig
from foundation.model.events import EventsConfig
from foundation.model.gem import GEM, GEMConfig, GEMOutput
from foundation.model.heads import HeadsConfig
from foundation.model.interaction import InteractionConfig
from foundation.model.layer import LayerConfig
from foundation.model.match import MatchConfig
from foundation.model.sequence import SequenceConfig
from foundation.model.streams import StreamsConfig
from foundation.model.tokens import TokensConfig
from foundation.parallel.parallelize import SparseConfig, parallelize
from tests.foundation.model.batches import TABLE_ROWS, encoded_batch, make_batch, model_schema
from tests.foundation.parallel.ranks import one_rank

SIZES = [3, 0, 1, 4, 2]
CONFIGS: dict[str, GEMConfig] = {
    "default": GEMConfig(width=8),
    "interformer": GEMConfig(width=8, layers=3, heads=HeadsConfig(reads="summaries")),
    "everything": GEMConfig(
        width=8,
        members=3,
        embeddings=EmbeddingsConfig(first_order=True, id_dropout={"user_id": 0.5}),
        tokens=TokensConfig(dropout=0.1, project_equal=False, dense_tokens=2),
        match=MatchConfig(sequences=("watched", "bought"), outcomes={"watched.action": 0.4}),
        layer=LayerConfig(
            cross=CrossConfig(feature_hidden=16, target_aware=False, dropout=0.1),
            interaction=InteractionConfig(block="cross", experts=2, input_scale=0.5, dropout=0.1),
            sequence=SequenceConfig(width=12, attention="window", window=2, rotary="position", dropout=0.1),
        ),
    ),
    "streams": GEMConfig(
        width=8,
        streams=StreamsConfig(
            width={"watched": 12, "merged": 16},
            heads={"bought": 1},
            layers={"bought": 0},
            attention={"watched": "block"},
            cls_tokens={"bought": 1},
            pooled_tokens={"watched": 3},
            recent_tokens={"watched": 1},
            merge_after=1,
        ),
        events=EventsConfig(mask_hidden=6),
    ),
    "kunlun": GEMConfig(
        width=8,
        layers=3,
        layer=LayerConfig(
            bias=False,
            skip="alternate",
            cross=CrossConfig(pooling="hsp", seeds=5, kron_terms=2),
            interaction=InteractionConfig(experts=2, partition="split", compression="attentive", fm_rank=3),
            sequence=SequenceConfig(attention="window", window=2, norm="post", qk_norm=True, rotary="both"),
        ),
    ),
    "user layers": GEMConfig(
        width=8,
        layers=3,
        user_layers=2,
        members=2,
        match=MatchConfig(sequences=("watched",)),
        streams=StreamsConfig(width={"bought": 4}, merge_after=2),
        layer=LayerConfig(interaction=InteractionConfig(block="dhen", mix=("fm", "cross", "mlp"), pre_norm=True)),
    ),
    "shared": GEMConfig(
        width=8,
        layers=3,
        user_layers=1,
        joint="shared",
        streams=StreamsConfig(width={"bought": 4}),
        layer=LayerConfig(
            skip="alternate",
            interaction=InteractionConfig(fm_rank=0),
            sequence=SequenceConfig(rotary="both", qk_norm=True, heads=1),
        ),
    ),
    "shared, no user layers": GEMConfig(
        width=8,
        joint="shared",
        streams=StreamsConfig(merge_after=0),
        layer=LayerConfig(cross=CrossConfig(target_aware=False, pooling="hsp", seeds=3, recent_tokens=0)),
        heads=HeadsConfig(reads="summaries"),
    ),
    "small": GEMConfig(width=8, layers=1, heads=HeadsConfig(adapter_rank=0)),
    "no attention": GEMConfig(
        width=8,
        layer=LayerConfig(
            cross=CrossConfig(cls_tokens=0, recent_tokens=0),
            interaction=InteractionConfig(block="mlp", linear_tokens=0, norm=False),
            sequence=SequenceConfig(attention="none", activation="relu2"),
        ),
        heads=HeadsConfig(adapter_rank=0, surface_bias=False, norm=False, trunk=(), tower=0),
    ),
}


def build(name: str = "default", schema: Schema | None = None, seed: int = 0) -> GEM:
    torch.manual_seed(seed)
    return GEM(CONFIGS[name], schema or model_schema(), TABLE_ROWS)


def all_names() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", CONFIGS)


@all_names()
@pytest.mark.parametrize("sizes", [SIZES, [1], [0, 0], []])
def test_shapes(name: str, sizes: list[int]) -> None:
    model, batch = build(name), make_batch(model_schema(), sizes)
    out = model(batch)
    assert out.logits.shape == (sum(sizes), 3)
    assert out.embedding.shape == (sum(sizes), model.embedding_width)
    assert torch.isfinite(out.logits).all()
    assert (out.member_logits is None) == (model.config.members == 1)


@all_names()
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, batch = build(name), make_batch(model_schema(), [5, 8, 9, 6, 4, 7])
    model.loss(model(batch), batch).total.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


@all_names()
def test_an_empty_batch_gives_zero_gradients_for_every_parameter(name: str) -> None:
    """A rank that has run dry must still take part in the reduction of all gradients."""
    model, batch = build(name), make_batch(model_schema(), [])
    loss = model.loss(model(batch), batch)
    assert loss.total.item() == 0
    loss.total.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert not parameter.grad.any(), key


def take(encoded: EncodedBatch, requests: np.ndarray) -> EncodedBatch:
    """Some requests of a batch, in this order."""
    rows = np.concatenate([np.flatnonzero(encoded.request_index == r) for r in requests]).astype(np.int64)
    counts = [int((encoded.request_index == r).sum()) for r in requests]
    return EncodedBatch(
        request=encoded.request.take(requests),
        item=encoded.item.take(rows),
        request_index=np.repeat(np.arange(len(requests)), counts),
        request_time=encoded.request_time[requests],
        user_id=encoded.user_id[requests],
        surface=encoded.surface[requests],
        labels=encoded.labels[rows],
        label_valid=encoded.label_valid[rows],
        weight=encoded.weight[rows],
        sampling_rate=encoded.sampling_rate[rows],
        impression_id=encoded.impression_id[rows],
    )


@all_names()
def test_requests_do_not_depend_on_one_another(name: str) -> None:
    """Any order and any company of requests gives an impression the same logits and embedding."""
    schema, model = model_schema(), build(name).eval()
    encoded = encoded_batch(schema, SIZES)
    whole = model(Batch.from_encoded(encoded, schema))
    for requests in ([4, 2, 0, 3, 1], [3], [0, 3]):
        part = take(encoded, np.asarray(requests))
        out = model(Batch.from_encoded(part, schema))
        rows = torch.from_numpy(part.impression_id)
        torch.testing.assert_close(out.logits, whole.logits[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.embedding, whole.embedding[rows], rtol=1e-4, atol=1e-5)


def test_candidates_of_a_request_do_not_see_one_another() -> None:
    schema, model = model_schema(), build().eval()
    encoded = encoded_batch(schema, SIZES)
    before = model(Batch.from_encoded(encoded, schema)).logits
    encoded.item.ids["item_id"][1] = (encoded.item.ids["item_id"][1] + 1) % 40
    after = model(Batch.from_encoded(encoded, schema)).logits
    assert not torch.equal(before[1], after[1])
    assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_history_and_candidate_both_matter() -> None:
    schema, model = model_schema(), build().eval()
    encoded = encoded_batch(schema, [2, 2], histories=[6, 6])
    before = model(Batch.from_encoded(encoded, schema)).logits
    encoded.request.ids["watched.item"][0] += 1
    after = model(Batch.from_encoded(encoded, schema)).logits
    assert not torch.allclose(before[:2], after[:2])
    torch.testing.assert_close(before[2:], after[2:])


@all_names()
def test_empty_histories(name: str) -> None:
    model, batch = build(name), make_batch(model_schema(), SIZES, histories=[0] * 5)
    out = model(batch)
    assert torch.isfinite(out.logits).all()
    model.loss(out, batch).total.backward()


def test_without_sequences_and_without_item_features() -> None:
    schema = model_schema(sequences={})
    assert build(schema=schema)(make_batch(schema, SIZES)).logits.shape == (10, 3)
    features = {k: v for k, v in model_schema().to_dict()["features"].items() if v["side"] != "item"}
    schema = model_schema(features=features)
    assert build(schema=schema)(make_batch(schema, SIZES)).logits.shape == (10, 3)


def test_members_average_their_probabilities() -> None:
    model, batch = build("everything").eval(), make_batch(model_schema(), SIZES)
    out: GEMOutput = model(batch)
    assert out.member_logits is not None
    torch.testing.assert_close(torch.sigmoid(out.logits), torch.sigmoid(out.member_logits).mean(0))
    assert not torch.allclose(out.member_logits[0], out.member_logits[1])


def test_dense_parameters_are_all_but_the_tables() -> None:
    model = build("everything")
    dense = {id(p) for p in model.dense_parameters()}
    tables = {name for name, p in model.named_parameters() if id(p) not in dense}
    assert tables == {name for name, _ in model.named_parameters() if name.startswith("embeddings.")}
    assert "embeddings.ec.dim8.embeddings.item.weight" in tables


@all_names()
def test_runs_in_bfloat16(name: str) -> None:
    model, batch = build(name).eval(), make_batch(model_schema(), SIZES)
    exact = model(batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch)
        loss = model.loss(out, batch).total
    loss.backward()
    assert torch.isfinite(loss)
    torch.testing.assert_close(out.logits.float(), exact, rtol=0.1, atol=0.1)


def test_learns_a_batch_by_heart() -> None:
    model, batch = build("small"), make_batch(model_schema(), [4] * 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert loss.total.item() < 0.1


@pytest.mark.parametrize("name", ["default", "everything"])
def test_sharded_equals_unsharded(name: str) -> None:
    batch = make_batch(model_schema(), SIZES)
    plain = build(name).eval()
    want = plain(batch).logits
    with one_rank():
        sharded = parallelize(build(name), SparseConfig(), torch.device("cpu")).eval()
        torch.testing.assert_close(sharded(batch).logits, want)
        sharded.train()
        sharded.module.loss(sharded(batch), batch).total.backward()
        empty = make_batch(model_schema(), [])
        sharded.module.loss(sharded(empty), empty).total.backward()


def test_a_task_weight_scales_its_loss() -> None:
    batch = make_batch(model_schema(), SIZES)
    tasks: dict[str, Any] = model_schema().to_dict()["tasks"]
    for task in tasks.values():
        task["weight"] = 2.0
    model, double = build(), build(schema=model_schema(tasks=tasks))
    single = model_schema(tasks={k: {**v, "weight": 1.0} for k, v in tasks.items()})
    out = model(batch)
    one = build(schema=single).loss(out, batch)
    two = double.loss(out, batch)
    torch.testing.assert_close(two.total, 2 * one.total)
    torch.testing.assert_close(two.per_task, one.per_task, equal_nan=True)


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.layers"):
        GEMConfig(layers=0)
    with pytest.raises(ValueError, match=r"model\.heads\.reads"):
        GEMConfig(members=2, heads=HeadsConfig(reads="summaries"))
    with pytest.raises(ValueError, match=r"heads: width 9"):
        GEM(GEMConfig(width=9), model_schema(), TABLE_ROWS)
