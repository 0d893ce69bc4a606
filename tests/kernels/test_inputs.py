"""Inputs that do not go together are refused before a kernel reads beyond their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.interaction import fm_block
from kernels.jagged_attention import jagged_attention
from kernels.norms import add_layer_norm, rms_norm
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
        (lambda: jagged.split(X, FEWER, OFF, 3), "b_offsets has 3 sequences, where 2 are expected"),
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
        (lambda: add_layer_norm(X, X.to("meta")), "norm: residual is on meta, but x on cpu"),
        (lambda: rms_norm(X, X[0].to("meta")), "norm: weight is on meta, but x on cpu"),
        (lambda: rms_norm(X, X[0], gate=X.to("meta")), "norm: gate is on meta, but x on cpu"),
        (lambda: fm_block(Q, Q[0].to("meta")), "fm_block: y is on meta, but x on cpu"),
        (lambda: mix_tokens(Q, X[:4].to("meta")), "mix_tokens: matrix is on meta, but x on cpu"),
        (lambda: sum_kron(Q, Q[:2, :, :3], MAPS.to("meta")), "sum_kron: maps is on meta, but x on cpu"),
    ],
)
def test_tensors_on_two_devices(call: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


def test_an_index_of_sequences_has_one_dim() -> None:
    with pytest.raises(ValueError, match=r"gather_sequences: index must be \[N\], is \[3, 1\]"):
        jagged.gather_sequences(X, OFF, THREE[:, None])


def test_what_goes_together_is_taken() -> None:
    assert gdpa(Q, KEYS, KEYS, OFF).shape == Q.shape
    assert gdpa(Q, KEYS[:2], KEYS[:2], OFF, request_index=torch.tensor([0, 0, 1])).shape == Q.shape
    assert gdpa(Q, KEYS, KEYS, None).shape == (3, 8, 4, 16)
    assert jagged_attention(Q[:0], Q[:0], Q[:0], OFF[:1], OFF[:1]).shape == (0, 4, 16)
    assert jagged.concat(X, OFF, X.double(), OFF)[0].shape == (16, 5)
