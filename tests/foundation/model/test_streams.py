"""Streams of different sizes, and their merge."""

from __future__ import annotations

import pytest
import torch

from foundation.model.cross import CrossConfig
from foundation.model.events import Events
from foundation.model.gem import GEM, GEMConfig
from foundation.model.layer import LayerConfig
from foundation.model.sequence import SequenceConfig
from foundation.model.streams import MergeStreams, Stream, StreamsConfig, resolve
from kernels.jagged import offsets_from_lengths
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema


def make_events(lengths: list[int], width: int) -> Events:
    offsets = offsets_from_lengths(torch.tensor(lengths))
    total = int(offsets[-1])
    return Events(torch.randn(total, width), offsets, (torch.rand(total) * 18).round())  # with ties


def test_merged_events_are_in_the_order_of_time() -> None:
    torch.manual_seed(0)
    streams = tuple(Stream(name, width, 1, SequenceConfig(), CrossConfig()) for name, width in (("a", 4), ("b", 6)))
    merge = MergeStreams(streams, 8, {"a": 2, "b": 1}, bias=True)
    events = {"a": make_events([4, 2, 6], 4), "b": make_events([1, 5, 3], 6)}
    out = merge(events)
    assert out.offsets.tolist() == [0, 5, 12, 21]
    for b in range(3):
        body, tail = [], []
        for s, (name, cls) in enumerate((("a", 2), ("b", 1))):
            own = events[name]
            values = merge.project[name](own.values) + merge.mark[s]
            rows = [(float(own.gap[i]), values[i]) for i in range(int(own.offsets[b]), int(own.offsets[b + 1]))]
            body += rows[: len(rows) - cls]
            tail += rows[len(rows) - cls :]
        want = sorted(body, key=lambda row: -row[0]) + tail
        got = slice(int(out.offsets[b]), int(out.offsets[b + 1]))
        torch.testing.assert_close(out.values[got], torch.stack([row for _, row in want]))
        assert out.gap[got].tolist() == [gap for gap, _ in want]


def test_a_stream_has_its_own_sizes() -> None:
    config = StreamsConfig(
        width={"a": 16}, heads={"a": 4}, layers={"b": 1}, window={"a": 3}, attention={"a": "window"},
        pooled_tokens={"b": 5}, recent_tokens={"b": 0}, cls_tokens={"b": 1},
    )  # fmt: skip
    a, b = resolve(config, ["a", "b"], SequenceConfig(heads=2), CrossConfig(), 8, 3)
    assert (a.width, a.layers, a.sequence.heads, a.sequence.attention, a.sequence.window) == (16, 3, 4, "window", 3)
    assert (b.width, b.layers, b.sequence.heads, b.sequence.attention) == (8, 1, 2, "full")
    assert a.cross == CrossConfig()
    assert b.cross == CrossConfig(cls_tokens=1, pooled_tokens=5, recent_tokens=0)


def test_events_stay_behind_the_last_layer_of_their_stream() -> None:
    schema = model_schema()
    config = GEMConfig(width=8, layers=2, streams=StreamsConfig(layers={"watched": 1, "bought": 0}))
    model = GEM(config, schema, TABLE_ROWS)
    assert [sorted(layer.sequences) for layer in model.layers] == [["watched"], []]
    model(make_batch(schema, [2, 1])).logits.sum().backward()


def test_a_merge_sees_the_time_of_events_and_not_their_stream_alone() -> None:
    """Behind the merge there is one stream, whose recent tokens are the latest events of any."""
    schema = model_schema()
    layer = LayerConfig(cross=CrossConfig(cls_tokens=0, recent_tokens=1, pooled_tokens=0))
    model = GEM(GEMConfig(width=8, layers=1, streams=StreamsConfig(merge_after=0), layer=layer), schema, TABLE_ROWS)
    assert list(model.layers[0].sequences) == ["merged"]
    assert list(model.sequence_summary.summaries) == ["merged"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"width": {"watched": 0}}, r"streams\.width\.watched"),
        ({"heads": {"seen": 2}}, r"streams\.heads\.seen: no such sequence; known: watched, bought"),
        ({"heads": {"bought": 0}}, r"streams, bought: sequence\.heads"),
        ({"width": {"merged": 8}}, r"streams\.width\.merged"),
        ({"merge_after": 3}, r"streams\.merge_after: must be at most layers, got 3"),
        ({"merge_after": -1}, r"streams\.merge_after"),
        ({"cls_tokens": {"bought": 0}, "pooled_tokens": {"bought": 0}, "recent_tokens": {"bought": 0}}, "bought"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        GEM(GEMConfig(width=8, streams=StreamsConfig(**options)), model_schema(), TABLE_ROWS)  # type: ignore[arg-type]
