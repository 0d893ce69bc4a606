"""Inputs that do not go together are refused before a kernel reads beyond their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.interaction import fm_block
from kernels.jagged_attention import jagged_attention
from kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron

OFF = jagged.offsets_from_lengths(torch.tensor([3, 0, 5]))
FEWER = OFF[[0, 1, 3]]
X = torch.randn(8, 5)
Q = torch.randn(8, 4, 16)
KEYS = torch.randn(3, 6, 4, 16)
THREE = torch.tensor([0, 1, 2])
EIGHT = torch.arange(8)
FAR = Q.to("meta")
MAPS = torch.randn(2, 16, 5)


@pytest.mark.parametrize("kernel", [gdpa, jagged_attention])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((Q, Q, Q, OFF, FEWER), "q_offsets has 3 sequences, where 2 are expected"),
        ((Q, Q, Q, FEWER, OFF), "q_offsets has 2 sequences, where 3 are expected"),
        ((Q, Q, Q, OFF, OFF.int()), r"kv_offsets must be an int64 tensor \[B \+ 1\], is torch.int32 \[4\]"),
        ((Q, Q, Q, OFF[None], OFF), r"q_offsets must be an int64 tensor \[B \+ 1\], is torch.int64 \[1, 4\]"),
        ((Q, Q, Q, OFF[:0], OFF), r"q_offsets must be an int64 tensor \[B \+ 1\], is torch.int64 \[0\]"),
        ((Q, Q, Q, OFF.tolist(), OFF), r"q_offsets must be an int64 tensor \[B \+ 1\], is list"),
        ((Q.long(), Q, Q, OFF, OFF), "q is torch.int64"),
        ((Q, Q, Q, OFF, OFF.to("meta")), "kv_offsets is on meta, but the values are on cpu"),
    ],
)
def test_attention(kernel: Callable[..., Any], arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=f"{kernel.__name__}: {problem}"):
        kernel(*arguments)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: gdpa(Q, KEYS[:2], KEYS[:2], OFF), "q_offsets has 3 sequences, where 2 are expected"),
        (lambda: gdpa(Q, KEYS[:2], KEYS[:2], OFF, request_index=THREE[:2]), r"request_index is \[2\], where \[3\] is"),
        (lambda: gdpa(Q, KEYS, KEYS, OFF, request_index=THREE.float()), "request_index must be int64 or int32"),
        (
            lambda: jagged_attention(Q, Q, Q, OFF, FEWER, request_index=THREE[:2]),
            r"request_index is \[2\], where \[3\]",
        ),
        (
            lambda: block_attention(Q, Q, Q, OFF.float()),
            r"offsets must be an int64 tensor \[B \+ 1\], is torch.float32",
        ),
        (lambda: jagged.offsets_from_lengths(torch.tensor([1.5])), "lengths must be integers"),
        (lambda: jagged.to_padded(X, OFF, -1), "max_length must not be negative, got -1"),
        (lambda: jagged.last_k(X, OFF, -1), "k must not be negative, got -1"),
        (lambda: jagged.from_padded(torch.randn(2, 5, 5), OFF, 8), "offsets has 3 sequences, where 2 are expected"),
        (lambda: jagged.concat(X, OFF, X, FEWER), "b_offsets has 2 sequences, where 3 are expected"),
        (lambda: jagged.concat(X, OFF, X[:, :2], OFF), "rows differ"),
        (lambda: jagged.split(X, FEWER, OFF, 8), "b_offsets has 3 sequences, where 2 are expected"),
        (lambda: jagged.split(X, OFF, OFF, -3), "a_rows must not be negative"),
        (lambda: jagged.gather_rows(X, torch.tensor([1.0])), "index must be int64 or int32"),
        (lambda: jagged.gather_sequences(X, OFF.int(), THREE), "offsets must be an int64 tensor"),
        (lambda: jagged.broadcast_add(X, OFF, torch.randn(2, 5)), "offsets has 3 sequences, where 2 are expected"),
        (lambda: jagged.broadcast_add(X, OFF, torch.randn(3, 4)), "rows differ"),
        (lambda: jagged.segment_mean(X, OFF.int()), "offsets must be an int64 tensor"),
    ],
)
def test_one_operator(call: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: gdpa(Q, Q, FAR, OFF, OFF), "gdpa: v is on meta, but q on cpu"),
        (lambda: gdpa(Q, KEYS.to("meta"), KEYS, OFF), "gdpa: k is on meta, but q on cpu"),
        (lambda: jagged_attention(FAR, Q, Q, OFF, OFF), "jagged_attention: k is on cpu, but q on meta"),
        (lambda: block_attention(Q, FAR, Q, OFF), "block_attention: k is on meta, but q on cpu"),
        (
            lambda: block_attention(Q, Q, Q, OFF, positions=FAR[:, 0, 0], frequencies=Q[0, 0, :8]),
            "block_attention: positions is on meta, but q on cpu",
        ),
        (lambda: jagged.to_padded(X, OFF.to("meta"), 3), "to_padded: offsets is on meta"),
        (lambda: jagged.concat(X, OFF, X.to("meta"), OFF), "concat: b is on meta, but a on cpu"),
        (lambda: jagged.broadcast_add(X, OFF, X[:3].to("meta")), "broadcast_add: dense is on meta, but values on cpu"),
        (lambda: jagged.embedding_add(X, X.to("meta"), EIGHT), "embedding_add: table is on meta, but values on cpu"),
        (lambda: jagged.embedding_add(X, X, EIGHT.to("meta")), "embedding_add: index is on meta"),
        (lambda: jagged.gather_sequences(X, OFF, THREE.to("meta")), "gather_sequences: index is on meta"),
        (lambda: add_layer_norm(X, X.to("meta")), "add_layer_norm: residual is on meta, but x on cpu"),
        (lambda: rms_norm(X, X[0].to("meta")), "rms_norm: weight is on meta, but x on cpu"),
        (lambda: rms_norm(X, X[0], gate=X.to("meta")), "rms_norm: gate is on meta, but x on cpu"),
        (lambda: fm_block(Q, Q[0].to("meta")), "fm_block: y is on meta, but x on cpu"),
        (lambda: mix_tokens(Q, X[:4].to("meta")), "mix_tokens: matrix is on meta, but x on cpu"),
        (lambda: sum_kron(Q, Q[:2, :, :3], MAPS.to("meta")), "sum_kron: maps is on meta, but x on cpu"),
    ],
)
def test_tensors_on_two_devices(call: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


def test_an_index_of_sequences_has_one_dim() -> None:
    with pytest.raises(ValueError, match=r"gather_sequences: index must be int64 or int32 \[N\], is .*\[3, 1\]"):
        jagged.gather_sequences(X, OFF, THREE[:, None])


def test_what_goes_together_is_taken() -> None:
    assert gdpa(Q, KEYS, KEYS, OFF).shape == Q.shape
    assert gdpa(Q, KEYS[:2], KEYS[:2], OFF, request_index=torch.tensor([0, 0, 1])).shape == Q.shape
    assert gdpa(Q, KEYS, KEYS, None).shape == (3, 8, 4, 16)
    assert jagged_attention(Q[:0], Q[:0], Q[:0], OFF[:1], OFF[:1]).shape == (0, 4, 16)
    assert jagged.concat(X, OFF, X.double(), OFF)[0].shape == (16, 5)


NOT_OFFSETS = {
    "go from 1 to 8": torch.tensor([1, 3, 3, 8]),
    "go from 0 to 7": torch.tensor([0, 3, 3, 7]),
    "go from 0 to 9": torch.tensor([0, 3, 3, 9]),
    "fall somewhere": torch.tensor([0, 5, 3, 8]),
}
OF_OFFSETS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gdpa: q_offsets": lambda o: gdpa(Q, Q, Q, o, OFF),
    "gdpa: kv_offsets": lambda o: gdpa(Q, Q, Q, OFF, o),
    "gdpa: q_offsets, dense keys": lambda o: gdpa(Q, KEYS, KEYS, o),
    "gdpa: q_offsets, requests": lambda o: gdpa(Q, KEYS, KEYS, o, request_index=THREE),
    "gdpa: kv_offsets, learned queries": lambda o: gdpa(Q, Q, Q, None, o),
    "jagged_attention: q_offsets": lambda o: jagged_attention(Q, Q, Q, o, OFF),
    "jagged_attention: q_offsets, requests": lambda o: jagged_attention(Q, Q, Q, o, OFF, request_index=THREE),
    "jagged_attention: kv_offsets": lambda o: jagged_attention(Q, Q, Q, OFF, o),
    "block_attention: offsets": lambda o: block_attention(Q, Q, Q, o),
    "to_padded: offsets": lambda o: jagged.to_padded(X, o, 5),
    "from_padded: offsets": lambda o: jagged.from_padded(torch.randn(3, 5, 5), o, 8),
    "last_k: offsets": lambda o: jagged.last_k(X, o, 2),
    "concat: a_offsets": lambda o: jagged.concat(X, o, X, OFF),
    "concat: b_offsets": lambda o: jagged.concat(X, OFF, X, o),
    "split: a_offsets": lambda o: jagged.split(torch.cat([X, X]), o, OFF, 8),
    "split: b_offsets": lambda o: jagged.split(torch.cat([X, X]), OFF, o, 8),
    "gather_sequences: offsets": lambda o: jagged.gather_sequences(X, o, THREE),
    "segment_sum: offsets": lambda o: jagged.segment_sum(X, o),
    "segment_mean: offsets": lambda o: jagged.segment_mean(X, o),
    "broadcast_add: offsets": lambda o: jagged.broadcast_add(X, o, X[:3]),
    "sequence_ids: offsets": lambda o: jagged.sequence_ids(o, 8),
}


@pytest.mark.parametrize("found", NOT_OFFSETS)
@pytest.mark.parametrize("named", OF_OFFSETS)
def test_numbers_that_are_no_offsets(named: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"{named.split(',')[0]} {found}, but must begin at 0, never fall and end at"):
        OF_OFFSETS[named](NOT_OFFSETS[found])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: jagged.gather_rows(X, torch.tensor([0, 8])), "gather_rows: index has numbers from 0 to 8, but the 8"),
        (lambda: jagged.gather_rows(X, torch.tensor([-1])), "gather_rows: index has numbers from -1"),
        (lambda: jagged.gather_rows(X, THREE.flip(0), rising=True), "gather_rows: index falls somewhere"),
        (lambda: jagged.gather_rows(X, [0]), "gather_rows: index must be a tensor, is list"),
        (lambda: jagged.scatter_sum(X, EIGHT, 5), "scatter_sum: index has numbers from 0 to 7, but the 5 rows"),
        (lambda: jagged.scatter_sum(X, THREE, 5), "scatter_sum: .* differ in rows"),
        (lambda: jagged.scatter_sum(X, EIGHT, -1), "rows must not be negative"),
        (lambda: jagged.embedding_add(X, X[:4], EIGHT), "embedding_add: index has numbers from 0 to 7, but the 4"),
        (
            lambda: jagged.embedding_add(X, X[:4], torch.tensor([[3, 0]]).repeat(8, 1), sizes=(2, 2)),
            "embedding_add: column 0 of index has numbers from 3 to 3",
        ),
        (lambda: jagged.gather_sequences(X, OFF, THREE + 1), "gather_sequences: index has numbers from 1 to 3"),
        (
            lambda: jagged.gather_sequences(X, OFF, THREE, total=7),
            "gather_sequences: total is 7, but the sequences have 8",
        ),
        (lambda: gdpa(Q, KEYS, KEYS, OFF, request_index=THREE.flip(0)), "gdpa: request_index falls somewhere: put"),
        (lambda: gdpa(Q, KEYS, KEYS, OFF, request_index=THREE + 1), "gdpa: request_index has numbers from 1 to 3"),
        (
            lambda: jagged_attention(Q, Q, Q, OFF, OFF, request_index=THREE.flip(0)),
            "jagged_attention: request_index falls somewhere",
        ),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, max_keys=4), "gdpa: max_keys is 4, but a sequence has 5 keys"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, window=1.5), "gdpa: window must be an integer, got 1.5"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, window=True), "gdpa: window must be an integer, got True"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, scale=torch.nan), "gdpa: scale must be finite, got nan"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, logit_scale=torch.inf), "gdpa: logit_scale must be finite, got inf"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, scale="1"), "gdpa: scale must be a number, got '1'"),
        (lambda: block_attention(Q, Q, Q, OFF, scale=torch.nan), "block_attention: scale must be finite, got nan"),
        (lambda: jagged_attention(Q, Q, Q, OFF, OFF, causal="no"), "causal must be True or False, got 'no'"),
        (lambda: jagged.gather_rows(X, THREE, rising="no"), "gather_rows: rising must be True or False, got 'no'"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, max_keys=100.0), "max_keys must be an integer"),
        (lambda: gdpa(Q, Q, Q, OFF, OFF, max_keys=-1), "gdpa: max_keys must not be negative, got -1"),
        (lambda: jagged_attention(Q, Q, Q, OFF, OFF, window=torch.tensor(3)), r"is a tensor: pass int\(window\)"),
        (
            lambda: block_attention(Q, Q[..., None].expand(-1, 4, 16, 16), Q[..., None].expand(-1, 4, 16, 16), OFF),
            "do not go",
        ),
        (lambda: gdpa(Q, Q[:, :0], Q[:, :0], OFF, OFF), "at least one head"),
        (lambda: gdpa(Q, X[0], X[0], OFF, OFF), "do not go together"),
        (lambda: gdpa(Q, Q, Q[:, :, :8], OFF, OFF), "do not go together: they must have one shape"),
        (lambda: jagged_attention(Q, KEYS, KEYS, OFF, OFF), r"must be \[Tk, G, d\] and \[Tk, G, e\]"),
        (lambda: jagged_attention(Q, Q[:, :3], Q[:, :3], OFF, OFF), "4 query heads are no multiple of 3 key heads"),
        (lambda: jagged_attention(Q, Q, Q, None, OFF, request_index=THREE), "request_index needs q_offsets"),
        (lambda: gdpa(Q, Q + 0j, Q, OFF, OFF), "gdpa: k is torch.complex64"),
        (lambda: jagged_attention(Q[:, :, :0], Q[:, :, :0], Q, OFF, OFF), "at least one head and one element"),
        (lambda: jagged_attention(Q, Q, Q > 0, OFF, OFF), "jagged_attention: v is torch.bool"),
        (lambda: block_attention(Q, Q, Q.long(), OFF), "block_attention: v is torch.int64"),
        (
            lambda: block_attention(Q, Q, Q, OFF, positions=torch.rand(8, 1, 1), frequencies=torch.rand(8)),
            "positions .* do not fit",
        ),
        (lambda: rms_norm(X.long()), "rms_norm: x is torch.int64"),
        (lambda: add_layer_norm(X, X.long()), "add_layer_norm: residual is torch.int64"),
        (lambda: rms_norm(X, dtype=torch.int32), "rms_norm: dtype must be of floats"),
        (lambda: rms_norm(torch.tensor(1.0)), r"rms_norm: x must be \[..., D\]"),
        (lambda: jagged.offsets_from_lengths(torch.tensor([1, -1])), "lengths must not be negative, one is -1"),
        (lambda: jagged.offsets_from_lengths([1]), "lengths must be a tensor"),
        (lambda: jagged.lengths_from_offsets(NOT_OFFSETS["fall somewhere"]), "lengths_from_offsets: offsets fall some"),
        (lambda: jagged.lengths_from_offsets(OFF[1:]), "offsets go from 3 to 8, but must begin at 0 and never fall"),
        (lambda: jagged.lengths_from_offsets([0, 1]), "lengths_from_offsets: offsets must be an int64 tensor"),
        (lambda: jagged.gather_sequences(X, OFF, THREE, total=8.0), "gather_sequences: total must be an integer"),
        (lambda: jagged.gather_sequences(X, OFF, THREE, total=OFF[-1]), r"is a tensor: pass int\(total\)"),
        (lambda: jagged.sequence_ids(OFF, 8.0), "sequence_ids: total must be an integer, got 8.0"),
        (lambda: jagged.sequence_ids(OFF, 7), "sequence_ids: offsets go from 0 to 8, but .* end at total, 7"),
        (lambda: jagged.split(X, FEWER, FEWER, 7), "split: a_offsets go from 0 to 8, but .* end at a_rows, 7"),
        (lambda: jagged.to_padded(X, OFF, 3, X[0, 0]), "to_padded: padding must be a number, is a tensor"),
        (lambda: jagged.embedding_add(X, X, EIGHT[:, None], sizes=8), "sizes must be a list or tuple of integers"),
        (lambda: jagged.embedding_add(X, X, EIGHT[:, None], sizes=(8.0,)), "each of sizes must be an integer, got 8.0"),
        (lambda: jagged.gather_rows(X, THREE.float()), r"index must be int64 or int32 \[N\] or \[N, C\]"),
        (lambda: add_layer_norm(X, None), "add_layer_norm: residual must be a tensor, is NoneType"),
        (lambda: add_rms_norm(X, None), "add_rms_norm: residual must be a tensor, is NoneType"),
        (lambda: rms_norm(X, eps=torch.nan), "rms_norm: eps must be finite, got nan"),
        (lambda: gdpa(Q, Q[..., :8], Q[..., :8], OFF, OFF), "heads of q have 16 elements, those of k 8"),
        (lambda: jagged_attention(X, Q, Q, OFF, OFF), "jagged_attention: .* q must have three dims"),
        (lambda: jagged.to_padded(X, OFF, 2.5), "max_length must be an integer"),
        (lambda: jagged.from_padded(X[0], OFF, 8), "from_padded: padded must be"),
        (lambda: jagged.broadcast_add(X.long(), OFF, X[:3]), "broadcast_add: dense is torch.float32, which does not"),
        (lambda: jagged.segment_mean(X.long(), OFF), "segment_mean: values is torch.int64"),
        (lambda: jagged.segment_sum(torch.tensor(1.0), OFF), "segment_sum: values must have at least one dim"),
    ],
)
def test_what_would_be_wrong_without_a_word(call: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gdpa: q", lambda x: gdpa(x, Q, Q, OFF, OFF)),
        ("gdpa: k", lambda x: gdpa(Q, x, Q, OFF, OFF)),
        ("gdpa: request_index", lambda x: gdpa(Q, Q, Q, OFF, OFF, request_index=x or [0])),
        ("jagged_attention: v", lambda x: jagged_attention(Q, Q, x, OFF, OFF)),
        ("block_attention: q", lambda x: block_attention(x, Q, Q, OFF)),
        ("block_attention: positions", lambda x: block_attention(Q, Q, Q, OFF, positions=x or [0], frequencies=Q)),
        ("to_padded: values", lambda x: jagged.to_padded(x, OFF, 1)),
        ("from_padded: padded", lambda x: jagged.from_padded(x, OFF, 1)),
        ("concat: b", lambda x: jagged.concat(X, OFF, x, OFF)),
        ("gather_rows: values", lambda x: jagged.gather_rows(x, THREE)),
        ("gather_rows: index", lambda x: jagged.gather_rows(X, x)),
        ("embedding_add: index", lambda x: jagged.embedding_add(X, X, x)),
        ("segment_sum: values", lambda x: jagged.segment_sum(x, OFF)),
        ("broadcast_add: dense", lambda x: jagged.broadcast_add(X, OFF, x)),
        ("layer_norm: x", lambda x: layer_norm(x)),
        ("rms_norm: weight", lambda x: rms_norm(X, x or [1])),
        ("fm_block: y", lambda x: fm_block(Q, x)),
        ("mix_tokens: matrix", lambda x: mix_tokens(Q, x)),
        ("sum_kron: mix", lambda x: sum_kron(Q, x, MAPS)),
    ],
)
@pytest.mark.parametrize("value", [None, [1.0]])
def test_what_is_no_tensor(name: str, call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a tensor, is (NoneType|list)"):
        call(value)


def test_compiled_code_looks_at_types() -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda offsets: gdpa(Q, Q, Q, offsets, offsets),
        lambda offsets: jagged.segment_sum(X, offsets),
        lambda index: jagged.gather_rows(X, index.half()),
    ]
    for call in calls:
        torch._dynamo.reset()
        with pytest.raises(ValueError, match=r"must be (an int64 tensor|int64 or int32)"):
            torch.compile(call, backend="eager")(OFF.int())


@pytest.mark.parametrize("wanted", [np.int64(4), np.int32(4)])
def test_integers_of_numpy_are_integers(wanted: Any) -> None:
    assert jagged.to_padded(X, OFF, wanted).shape == (3, 4, 5)
    assert jagged.last_k(X, OFF, wanted)[0].shape == (3, 4, 5)


@pytest.mark.parametrize("wanted", [4.0, True, "4"])
def test_what_is_no_integer_is_refused_under_a_compiler(wanted: Any) -> None:
    with pytest.raises(ValueError, match="to_padded: max_length must be an integer"):
        torch.compile(lambda x: jagged.to_padded(x, OFF, wanted), backend="aot_eager")(X)
