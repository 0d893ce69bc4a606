"""Raw requests become the same inputs as training rows do, and every fault names its field."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from foundation.data.encoding import Column, Encoder, encode_rows, model_inputs
from foundation.data.schema import Schema
from serving.encoder import Counts, RankRequest, RequestEncoder
from serving.errors import Reason, ServingError
from tests.serving.model_folder import SCHEMA, encoder, raw_request, schema

TIME = 1_700_000_000_000


def encode(body: dict[str, Any], reject: bool = True) -> tuple[dict[str, np.ndarray], Counts]:
    counts = Counts()
    request = RankRequest.parse(body, 100)
    made = RequestEncoder(schema(), encoder(), "feed", ("bid",))
    return made.encode(request, counts, reject), counts


def fails(body: dict[str, Any]) -> str:
    with pytest.raises(ServingError) as caught:
        encode(body)
    assert caught.value.reason is Reason.INVALID
    return str(caught.value)


def test_inputs_equal_those_of_the_training_path() -> None:
    body = {
        "surface": "feed",
        "time_ms": TIME,
        "user": {"user_id": 7, "age": 33.5},
        "history": {"watched": {"item": [101, 777], "action": [0, 3], "time_ms": [TIME - 5000, TIME - 1000]}},
        "candidates": [
            {"video_id": 105, "topics": ["a", "zz"], "topic_weights": [0.5, 2], "price": 3, "image": [0.1, 0.2]},
            {"video_id": 9, "topics": [], "topic_weights": [], "price": None, "image": None},
        ],
    }
    columns = {
        "user_id": Column(np.array([7])),
        "age": Column(np.array([33.5])),
        "tab": Column(np.array(["feed"], object)),
        "watched_item": Column(np.array([101, 777]), None, np.array([0, 2])),
        "watched_action": Column(np.array([0, 3]), None, np.array([0, 2])),
        "watched_time": Column(np.array([TIME - 5000, TIME - 1000]), None, np.array([0, 2])),
        "video_id": Column(np.array([105, 9])),
        "topics": Column(np.array(["a", "zz"], object), None, np.array([0, 2, 2])),
        "topic_weights": Column(np.array([0.5, 2.0]), None, np.array([0, 2, 2])),
        "price": Column(np.array([3.0, 0.0]), np.array([True, False])),
        "image": Column(np.array([0.1, 0.2]), None, np.array([0, 2, 2])),
    }
    s, e = schema(), encoder()
    expected = model_inputs(
        s,
        encode_rows(e, s.request_features, s.sequences, columns, 1),
        encode_rows(e, s.item_features, (), columns, 2),
        np.zeros(2, np.int64),
        np.array([TIME]),
    )
    inputs, counts = encode(body)
    assert inputs.keys() == expected.keys()
    for name, array in expected.items():
        assert inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(inputs[name], array, err_msg=name)
    assert counts.missing == {"price": 1, "image": 1}
    assert counts.unknown_ids == {"watched.item": 1, "topics": 1, "video_id": 1}


def test_events_and_lists_are_two_forms_of_one_history() -> None:
    events = raw_request(2)
    lists = copy.deepcopy(events)
    lists["history"]["watched"] = {
        key: [event[key] for event in events["history"]["watched"]] for key in ("item", "action", "time_ms")
    }
    for name, array in encode(events)[0].items():
        np.testing.assert_array_equal(array, encode(lists)[0][name], err_msg=name)


def test_what_is_left_out_is_missing_and_counted() -> None:
    inputs, counts = encode({"model": "feed", "time_ms": TIME, "candidates": [{"video_id": 100}]})
    assert inputs["user_id"].tolist() == [0] and inputs["watched.length"].tolist() == [0]
    assert inputs["tab"].tolist() == [2]  # the model's own surface
    assert counts.missing == {"user_id": 1, "age": 1, "topics": 1, "price": 1, "image": 1}


def test_no_candidates() -> None:
    inputs, _ = encode({"model": "feed", "candidates": []})
    assert inputs["video_id"].shape == (0,) and inputs["topics"].shape == (0, 3)
    assert inputs["dense.item"].shape == (0, 3) and inputs["request_index"].shape == (0,)


def test_events_at_or_after_the_request_are_dropped_and_counted() -> None:
    body = raw_request(1)
    body["history"]["watched"] = [
        {"item": 100, "time_ms": TIME - 1},
        {"item": 101, "time_ms": TIME},
        {"item": 102, "time_ms": TIME + 9},
    ]
    inputs, counts = encode(body)
    assert inputs["watched.length"].tolist() == [1] and inputs["watched.item"][0, 0] == 2
    assert counts.future_events == 2


def test_unsorted_events_are_sorted_and_the_latest_kept() -> None:
    body = raw_request(1)
    body["history"]["watched"] = [{"item": 100 + i, "time_ms": TIME - 1000 * (i + 1)} for i in range(8)]
    inputs, _ = encode(body)
    assert inputs["watched.item"][0].tolist() == [6, 5, 4, 3, 2]  # 104 .. 100, oldest first


def test_events_without_times_keep_their_order() -> None:
    body = raw_request(1)
    body["history"]["watched"] = [{"item": 101}, {"item": 100}]
    inputs, _ = encode(body)
    assert inputs["watched.item"][0, :2].tolist() == [3, 2] and inputs["watched.age"][0].tolist() == [0] * 5


def test_outcomes_that_are_not_known_yet_are_missing() -> None:
    changed = copy.deepcopy(SCHEMA)
    changed["sequences"]["watched"]["attributes"]["action"]["known_after_hours"] = 1
    late = Schema.from_dict(changed, "tests")
    e = encoder()
    made = RequestEncoder(late, Encoder(late, e.vocabularies, e.statistics, e.hash_ids), "feed", ())
    body = raw_request(1)
    hour = 3_600_000
    body["history"]["watched"] = [
        {"item": 100, "action": 1, "time_ms": TIME - hour},
        {"item": 101, "action": 1, "time_ms": TIME - hour + 1},
    ]
    inputs = made.encode(RankRequest.parse(body, 100), Counts(), True)
    assert inputs["watched.action"][0, :2].tolist() == [3, 0]
    assert inputs["watched.item"][0, :2].tolist() == [2, 3]


def test_whole_floats_and_booleans_are_ids() -> None:
    body = raw_request(2)
    body["candidates"][0]["video_id"] = 105.0
    body["history"]["watched"][0]["action"] = True
    inputs, _ = encode(body)
    assert inputs["video_id"][0] == 7 and inputs["watched.action"][0, 0] == 3


def test_strings_that_spell_integers_are_those_integers() -> None:
    """Some clients cannot hold 64-bit integers and send them as strings."""
    numbers, texts = raw_request(2), raw_request(2)
    texts["user"]["user_id"] = str(numbers["user"]["user_id"])
    texts["candidates"][1]["video_id"] = str(numbers["candidates"][1]["video_id"])
    for event in texts["history"]["watched"]:
        event["item"] = str(event["item"])
    want = encode(numbers)[0]
    for name, array in encode(texts)[0].items():
        np.testing.assert_array_equal(array, want[name], err_msg=name)


def test_hash_tables_keep_the_type_of_their_ids() -> None:
    e = encoder()
    made = RequestEncoder(schema(), Encoder(schema(), e.vocabularies, e.statistics, {"user": "string"}), "feed", ())
    body = raw_request(1)
    body["candidates"][0].pop("bid", None)
    with pytest.raises(ServingError, match=r"^user\.user_id: expected a string, got 7$"):
        made.encode(RankRequest.parse(body, 100), Counts(), True)
    body["user"]["user_id"] = "7"
    assert made.encode(RankRequest.parse(body, 100), Counts(), True)["user_id"] != encode(body)[0]["user_id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("candidates", 3, "price", "x"), "candidates[3].price: expected a number, got 'x'"),
        (("candidates", 3, "image", [0, 1e300]), "candidates[3].image: the number is too large"),
        (("candidates", 3, "video_id", "x"), "candidates[3].video_id: expected an integer, got 'x'"),
        (("candidates", 3, "video_id", 1.5), "candidates[3].video_id: expected an integer, got 1.5"),
        (("candidates", 3, "video_id", [1]), "candidates[3].video_id: expected an integer, got a list of 1"),
        (("candidates", 3, "video_id", 2**63), "candidates[3].video_id: 9223372036854775808 does not fit"),
        (("candidates", 3, "video_id", None), "candidates[3].video_id: is missing, and this field may not be"),
        (("candidates", 3, "topics", "a"), "candidates[3].topics: expected a list, got 'a'"),
        (("candidates", 3, "topics", ["a", 2]), "candidates[3].topics[1]: expected a string, got 2"),
        (("candidates", 3, "topic_weights", [1]), "candidates[3].topic_weights: expected 2 numbers, one for"),
        (("candidates", 3, "topic_weights", [1, "x"]), "candidates[3].topic_weights[1]: expected a number"),
        (("candidates", 3, "image", [1, 2, 3]), "candidates[3].image: expected 2 numbers, or none, got 3"),
        (("candidates", 3, "image", [1, None, 3]), "candidates[3].image: expected 2 numbers, or none, got 3"),
        (("candidates", 3, "prise", 1), "candidates[3].prise: is not a known field; did you mean 'price'?"),
        (("user", "age", "x"), "user.age: expected a number, got 'x'"),
        (("user", "age", 1e300), "user.age: the number is too large"),
        (("user", "price", 3), "user.price: is not a known field; known fields: age, user_id"),
        (("user", "user_id", {}), "user.user_id: expected an integer, got an object of 0 fields"),
        (("user", "user_id", "u7"), "user.user_id: expected an integer, got 'u7'"),
        (("user", "user_id", "007"), "user.user_id: expected an integer, got '007'"),
        (("context", "tab", 3), "context.tab: expected a string, got 3"),
        (("context", "hour", 3), "context.hour: is not a known field"),
        (("history", "watched", 1, "item", "x"), "history.watched[1].item: expected an integer, got 'x'"),
        (("history", "watched", 1, "time_ms", "x"), "history.watched[1].time_ms: expected an integer"),
        (("history", "watched", 1, "time_ms", "7"), "history.watched[1].time_ms: expected an integer, got '7'"),
        (("history", "watched", 1, 3), "history.watched[1]: expected an object, got 3"),
        (("history", "watched", 1, "colour", 3), "history.watched[1].colour: is not a known field"),
        (("history", "watched", {"item": [1], "action": []}), "history.watched: its lists must have one length"),
        (("history", "watched", {"item": 3}), "history.watched.item: expected a list, got 3"),
        (("history", "watched", "x"), "history.watched: expected a list of events or an object of lists"),
        (("history", "clicked", []), "history.clicked: is not a known field; known fields: watched"),
        (("history", []), "history: expected an object, got a list of 0"),
        (("candidates", 3, 3), "candidates[3]: expected an object, got 3"),
        (("candidates", {}), "candidates: expected a list, got an object of 0 fields"),
        (("candidates", None), "candidates: expected a list, got None"),
        (("time_ms", "now"), "time_ms: expected milliseconds since 1970"),
        (("time_ms", -1), "time_ms: expected milliseconds since 1970"),
        (("deadline_ms", "x"), "deadline_ms: expected a number of milliseconds, got 'x'"),
        (("deadline_ms", -1), "deadline_ms: expected a number of milliseconds, got -1"),
        (("surface", 3), "surface: expected a string, got 3"),
        (("surface", ""), "model: name a model, or a surface"),
        (("version", 1.5), "version: expected a number, got 1.5"),
        (("candidate", []), "candidate: is not a known field; did you mean 'candidates'?"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)
def test_faults_name_their_field(change: tuple[Any, ...], message: str) -> None:
    body = {"context": {}, **raw_request(5)}
    *path, key, value = change
    target: Any = body
    for step in path:
        target = target[step]
    target[key] = value
    assert message in fails(body)


def test_unknown_fields_can_be_counted_instead() -> None:
    body = raw_request(2)
    body["candidates"][1]["colour"] = body["user"]["mood"] = body["extra"] = 1
    _, counts = encode(body, reject=False)
    assert counts.unknown_fields == 3 and counts.totals()["unknown_field"] == 3


def test_too_many_candidates() -> None:
    with pytest.raises(ServingError, match="candidates: 101 in one request, at most 100") as caught:
        RankRequest.parse(raw_request(101), 100)
    assert caught.value.reason is Reason.TOO_LARGE
