from __future__ import annotations

import numpy as np
import pytest
import torch

from foundation.data.encoding import model_signature
from foundation.data.schema import Schema
from tests.value_models import tiny
from tests.value_models.conftest import CONFIG, make_student
from value_models.model import ValueModel, ValueModelConfig
from value_models.parity import random_inputs
from value_models.student import to_tensors


@pytest.fixture(scope="module")
def model() -> ValueModel:
    return make_student().model


def test_scores_one_logit_per_impression_and_task(model: ValueModel) -> None:
    assert model(tiny.inputs(requests=3, impressions=8)).shape == (8, 2)


@pytest.mark.parametrize(("requests", "impressions"), [(0, 0), (1, 0), (3, 0), (1, 1), (4, 1)])
def test_any_number_of_rows(model: ValueModel, requests: int, impressions: int) -> None:
    logits = model(tiny.inputs(2, requests, impressions))
    assert logits.shape == (impressions, 2) and torch.isfinite(logits).all()


def test_takes_exactly_the_signature(model: ValueModel) -> None:
    read: set[str] = set()

    class Recorder(dict[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            read.add(key)
            return super().__getitem__(key)

    model(Recorder(tiny.inputs()))
    assert read == {s.name for s in model_signature(tiny.schema())}


def test_what_lies_behind_the_length_is_not_read(model: ValueModel) -> None:
    inputs = tiny.inputs(3)
    padded = dict(inputs)
    for owner, width, attributes in (
        ("watched", 6, ["watched.item", "watched.action", "watched.age"]),
        ("liked", 4, ["liked.item"]),
        ("likes", 3, ["likes"]),
        ("topics", 4, ["topics", "topics.weight"]),
    ):
        behind = torch.arange(width) >= inputs[f"{owner}.length"].unsqueeze(1)
        assert behind.any()
        for name in attributes:
            padded[name] = torch.where(behind, torch.ones_like(inputs[name]) * 3, inputs[name])
    torch.testing.assert_close(model(padded), model(inputs), rtol=0, atol=1e-6)


def test_every_input_moves_the_scores(model: ValueModel) -> None:
    inputs = tiny.inputs(4, requests=6, impressions=30)
    before = model(inputs)
    for spec in model_signature(tiny.schema()):
        changed = dict(inputs)
        value = inputs[spec.name]
        if spec.name.endswith(".length"):
            changed[spec.name] = (value - 1).clamp(min=0)
        elif spec.name == "request_index":
            changed[spec.name] = 5 - value
        elif spec.dtype == "int64":
            changed[spec.name] = torch.where(value > 2, value - 1, value + 1)
        else:
            changed[spec.name] = value + 1
        assert (model(changed) - before).abs().max() > 1e-4, spec.name


def test_ids_outside_a_table_read_the_unknown_row(model: ValueModel) -> None:
    inputs = tiny.inputs()
    unknown = model(inputs | {"item_id": torch.full((8,), 1)})
    for id_ in (30, 10**12, -1):
        torch.testing.assert_close(model(inputs | {"item_id": torch.full((8,), id_)}), unknown)


def test_a_request_scores_alike_alone_and_among_others(model: ValueModel) -> None:
    inputs = tiny.inputs(5, requests=4, impressions=12)
    together = model(inputs)
    sides = {s.name: s.dims[0] for s in model_signature(tiny.schema())}
    for r in range(4):
        mine = inputs["request_index"] == r
        alone = {name: value[r : r + 1] if sides[name] == "R" else value[mine] for name, value in inputs.items()}
        alone["request_index"] = torch.zeros(int(mine.sum()), dtype=torch.int64)
        torch.testing.assert_close(model(alone), together[mine], rtol=0, atol=1e-5)


def test_the_user_side_runs_once_per_request(model: ValueModel) -> None:
    rows: list[int] = []
    assert model.tower is not None
    handle = model.tower.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    model(tiny.inputs(requests=2, impressions=50))
    handle.remove()
    assert rows == [2]


def test_first_joint_layer_equals_a_dense_layer_over_both_sides() -> None:
    torch.manual_seed(1)
    schema, encoder = tiny.schema(), tiny.encoder()
    config = ValueModelConfig(hidden=(5,), cross_rank=0, request_hidden=(), event_dim=4, dropout=0.0)
    model = ValueModel(config, schema, encoder.table_rows).eval()
    inputs = tiny.inputs(requests=2, impressions=6)
    caught: dict[str, torch.Tensor] = {}
    assert model.from_request is not None and model.from_candidate is not None
    model.from_request.register_forward_hook(lambda _, args, __: caught.update(r=args[0]))
    model.from_candidate.register_forward_hook(lambda _, args, __: caught.update(c=args[0]))
    features = model.features(inputs)
    both = torch.cat([caught["r"][inputs["request_index"]], caught["c"]], dim=1)
    weight = torch.cat([model.from_request.weight, model.from_candidate.weight], dim=1)
    dense = torch.nn.functional.silu(both @ weight.T + model.from_request.bias + model.from_candidate.bias)
    torch.testing.assert_close(features, dense)


@pytest.mark.parametrize("missing", ["sequences", "item", "request"])
def test_a_schema_may_lack_a_side(missing: str) -> None:
    data = dict(tiny.SCHEMA)
    if missing == "sequences":
        data.pop("sequences")
    elif missing == "item":
        data["features"] = {k: v for k, v in data["features"].items() if v["side"] != "item"}
    else:
        data.pop("sequences")
        data["features"] = {k: v for k, v in data["features"].items() if v["side"] == "item"}
    schema = Schema.from_dict(data)
    model = ValueModel(CONFIG, schema, tiny.encoder().table_rows).eval()
    inputs = random_inputs(schema, tiny.encoder().table_rows, np.random.default_rng(0), 2, 5)
    assert model(to_tensors(inputs)).shape == (5, 2)


def test_id_dropout_reads_the_unknown_row_in_training_only() -> None:
    config = ValueModelConfig(id_dropout={"user": 0.5}, dropout=0.0)
    model = ValueModel(config, tiny.schema(), tiny.encoder().table_rows)
    ids = torch.arange(40).repeat(200)
    drawn = model.tables("user", ids).view(200, 40, -1)
    replaced = (drawn == model.tables.weight("user")[1]).all(-1).float().mean(0)
    assert replaced[0] == 0.0 and (replaced[2:] > 0.35).all() and (replaced[2:] < 0.65).all()
    model.eval()
    torch.testing.assert_close(model.tables("user", ids), model.tables.weight("user")[ids])


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"event_dim": 0}, "event_dim"),
        ({"hidden": ()}, "hidden"),
        ({"hidden": (8, 0)}, r"hidden\[1\]"),
        ({"dropout": 1.0}, "dropout"),
        ({"id_dropout": {"user": -0.1}}, "id_dropout.user"),
        ({"table_dims": {"user": 0}}, "table_dims.user"),
        ({"cross_rank": -1}, "cross_rank"),
    ],
)
def test_config_errors_name_the_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ValueModelConfig(**values)  # type: ignore[arg-type]


def test_an_unknown_table_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table_dims\.nope.*user"):
        ValueModelConfig(table_dims={"nope": 4}).dims(tiny.schema())
