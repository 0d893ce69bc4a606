"""Tables: which collection serves what, pooling against loops, id dropout, first-order weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.schema import UNKNOWN_ROW
from foundation.model.embeddings import Embeddings, EmbeddingsConfig
from tests.foundation.model.batches import TABLE_ROWS, encoded_batch, make_batch, model_schema

SIZES = [3, 0, 1, 4]


def build(**options: object) -> Embeddings:
    torch.manual_seed(0)
    return Embeddings(EmbeddingsConfig(**options), model_schema(), TABLE_ROWS)  # type: ignore[arg-type]


def weight(embeddings: Embeddings, table: str) -> torch.Tensor:
    return dict(embeddings.named_parameters())[
        next(name for name, _ in embeddings.named_parameters() if f".{table}.weight" in name)
    ].detach()


def test_one_lookup_serves_requests_items_and_histories() -> None:
    schema, embeddings = model_schema(), build()
    encoded = encoded_batch(schema, SIZES)
    out = embeddings(Batch.from_encoded(encoded, schema))
    user, item = weight(embeddings, "user"), weight(embeddings, "item")
    assert torch.equal(out.request["user_id"], user[torch.from_numpy(encoded.request.ids["user_id"])])
    assert torch.equal(out.item["item_id"], item[torch.from_numpy(encoded.item.ids["item_id"])])
    for key in ("watched.item", "bought.item"):
        assert torch.equal(out.events[key], item[torch.from_numpy(encoded.request.ids[key])])
    assert out.first_order is None


def test_names_of_parameters_are_stable() -> None:
    names = {name for name, _ in build(first_order=True).named_parameters()}
    assert names >= {
        "ec.dim8.embeddings.user.weight",
        "ec.dim8.embeddings.item.weight",
        "ec.dim4.embeddings.author.weight",
        "ebc.embedding_bags.interest.weight",
        "first_order.embeddings.first_order_item.weight",
    }


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("bags", [True, False])
def test_multi_valued_features_are_pooled(pooling: str, bags: bool) -> None:
    schema, embeddings = model_schema(), build(pooling=pooling, request_bags=bags)
    assert (embeddings.ebc is not None) == bags
    encoded = encoded_batch(schema, SIZES)
    out = embeddings(Batch.from_encoded(encoded, schema))
    cases = (
        ("interests", encoded.request, out.request, "interest"),
        ("liked_topics", encoded.request, out.request, "topic"),
        ("topics", encoded.item, out.item, "topic"),
    )
    for name, side, found, table in cases:
        rows, start = weight(embeddings, table), 0
        for row, length in enumerate(side.lengths[name]):
            span = slice(start, start + length)
            start += length
            values = rows[torch.from_numpy(side.ids[name][span])]
            factor = torch.from_numpy(side.weights.get(name, np.ones(start, dtype=np.float32))[span])
            want = (values * factor[:, None]).sum(0)
            if pooling == "mean" and length:
                want = want / factor.sum()
            torch.testing.assert_close(found[name][row].detach(), want)


def test_id_dropout_replaces_ids_by_unknown_in_training_only() -> None:
    schema, embeddings = model_schema(), build(id_dropout={"user_id": 0.5, "watched.item": 0.9})
    batch = make_batch(schema, [1] * 400)
    unknown = weight(embeddings, "user")[UNKNOWN_ROW]
    exact = embeddings.eval()(batch)
    dropped = embeddings.train()(batch)
    lost = (dropped.request["user_id"] == unknown).all(1)
    assert 0.4 < lost.float().mean() < 0.6
    assert torch.equal(dropped.request["user_id"][~lost], exact.request["user_id"][~lost])
    same = (dropped.events["watched.item"] == exact.events["watched.item"]).all(1)
    assert 0.05 < same.float().mean() < 0.2
    for name in ("hour", "interests"):
        assert torch.equal(dropped.request[name], exact.request[name])
    assert torch.equal(dropped.item["item_id"], exact.item["item_id"]), "other users of the table keep their ids"


def test_first_order_weights_are_a_linear_model() -> None:
    schema, embeddings = model_schema(), build(first_order=True, pooling="sum")
    encoded = encoded_batch(schema, SIZES)
    batch = Batch.from_encoded(encoded, schema)
    start = embeddings(batch).first_order
    assert start is not None
    assert not start[0].any()
    assert not start[1].any()
    with torch.no_grad():
        for name, value in embeddings.named_parameters():
            if name.startswith("first_order."):
                value.normal_()
    request, item = embeddings(batch).first_order  # type: ignore[misc]
    assert request.shape == (4, 3)
    assert item.shape == (8, 3)
    ids = torch.from_numpy(encoded.item.ids["item_id"])
    authors = torch.from_numpy(encoded.item.ids["author_id"])
    want = weight(embeddings, "first_order_item")[ids] + weight(embeddings, "first_order_author")[authors]
    topics, start_ = torch.from_numpy(encoded.item.ids["topics"]), 0
    for row, length in enumerate(encoded.item.lengths["topics"]):
        want[row] += weight(embeddings, "first_order_topic")[topics[start_ : start_ + length]].sum(0)
        start_ += length
    torch.testing.assert_close(item.detach(), want[:, :3])


def test_dims_can_be_set() -> None:
    embeddings = build(dim=12, dims={"user": 20})
    assert weight(embeddings, "user").shape == (30, 20)
    assert weight(embeddings, "author").shape == (20, 12)
    assert embeddings.dims["watched.item"] == 12


def test_tables_start_with_their_own_spread() -> None:
    embeddings = build(init_std=0.01, init_stds={"item": 1.0, "interest": 0.0})
    assert 0.8 < weight(embeddings, "item").std() < 1.2
    assert 0.005 < weight(embeddings, "user").std() < 0.015
    assert not weight(embeddings, "interest").any()


def test_no_requests() -> None:
    embeddings = build(first_order=True, id_dropout={"user_id": 0.5})
    out = embeddings(make_batch(model_schema(), []))
    assert out.request["interests"].shape == (0, 4)
    assert out.item["topics"].shape == (0, 8)
    assert out.events["watched.item"].shape == (0, 8)
    assert out.first_order is not None
    assert out.first_order[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id_dropout": {"nobody": 0.1}}, "id_dropout.nobody: no such feature with ids; known: user_id"),
        ({"id_dropout": {"user_id": 1.0}}, "id_dropout.user_id: must be in"),
        ({"dims": {"nothing": 8}}, "dims.nothing: no such table; known: user"),
        ({"init_stds": {"nothing": 1.0}}, "init_stds.nothing: no such table; known: user"),
        ({"init_stds": {"user": -1.0}}, "init_stds.user: must not be negative"),
        ({"dim": 6}, "embeddings.dim: must be a multiple of 4"),
        ({"pooling": "max"}, "embeddings.pooling"),
        ({"init_std": -1.0}, "embeddings.init_std"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
