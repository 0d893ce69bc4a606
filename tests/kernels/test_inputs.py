"""Inputs that do not go together are refused before a kernel reads beyond their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.jagged_attention import jagged_attention

OFF = jagged.offsets_from_lengths(torch.tensor([3, 0, 5]))
FEWER = OFF[[0, 1, 3]]
X = torch.randn(8, 5)
Q = torch.randn(8, 4, 16)
KEYS = torch.randn(3, 6, 4, 16)
THREE = torch.tensor([0, 1, 2])


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


def test_what_goes_together_is_taken() -> None:
    assert gdpa(Q, KEYS, KEYS, OFF).shape == Q.shape
    assert gdpa(Q, KEYS[:2], KEYS[:2], OFF, request_index=torch.tensor([0, 0, 1])).shape == Q.shape
    assert gdpa(Q, KEYS, KEYS, None).shape == (3, 8, 4, 16)
    assert jagged_attention(Q[:0], Q[:0], Q[:0], OFF[:1], OFF[:1]).shape == (0, 4, 16)
    assert jagged.concat(X, OFF, X.double(), OFF)[0].shape == (16, 5)
