"""The backward kernel for few keys, run on the CPU as it is written: see ``emulated.py``."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels import emulated
from tests.kernels.emulated import Machine, Pointer

D = 8
SCALES = (0.3, 0.7)
"""Inside the activation and after it."""
LEARNED = 90
"""Queries that all sequences ask, where they do."""


@pytest.mark.parametrize("seed", range(40))
def test_gradients_with_copies_that_arrive_late(seed: int) -> None:
    draw = random.Random(seed)
    group, heads, dense, shared = draw.choice((1, 2)), 2, draw.random() < 0.3, draw.random() < 0.2
    blocks = draw.choice((1, 2, 3))  # of 64 keys each
    most = 64 * blocks
    lengths = [draw.choice((0, 1, 64, 65, 128, *(draw.randrange(400) for _ in range(3)))) for _ in range(3)] + [20]
    each = most - 27  # keys of a sequence where they are dense
    keys = [each] * 4 if dense else [draw.choice((0, 1, 64, most, draw.randrange(most + 1))) for _ in range(3)] + [5]
    if shared:
        lengths = [LEARNED] * 4
    rng = np.random.default_rng(seed)
    qo, ko = np.cumsum([0, *lengths]), np.cumsum([0, *keys])
    q = rng.normal(size=(LEARNED if shared else qo[-1], heads * group, D))
    grad = rng.normal(size=(qo[-1], heads * group, D))
    k, v = rng.normal(size=(2, ko[-1], heads, D))
    bad = draw.randrange(3)  # whose NaN no other sequence may see
    for x, where in ((grad, qo), (k, ko), (v, ko)):
        x[where[bad] : where[bad + 1]] = np.nan
    dq, dk, dv = np.full_like(grad, np.nan), np.full_like(k, np.nan), np.full_like(v, np.nan)
    kept = np.full((qo[-1] // 64 + 4) * heads * group * 64 * D, np.nan)
    taken = np.zeros_like(kept, dtype=bool)

    def own_part_only() -> None:  # the programs of a GPU run at the same time
        mine = ~np.isnan(kept)
        assert not (mine & taken).any()
        taken[mine] = True
        kept[:] = np.nan

    tensors = [Pointer(x.reshape(-1)) for x in (q, k, v, grad, dq, kept, dk, dv)]
    constants = {
        "KV_HEADS": heads, "STQ": heads * group * D, "SHQ": D, "STK": heads * D, "SHK": D, "STV": heads * D, "SHV": D,
        "GROUP": group, "D": D, "ACT": "silu", "BROADCAST": shared, "DENSE": dense, "SCALED": True, "BLOCK_Q": 64,
        "KEYS": 64, "SEVERAL": blocks > 1,
    }  # fmt: skip
    machine = Machine(seed)
    machine.launch(
        emulated.kernel("backward_few", machine), 4 * heads, *tensors, *(Pointer(emulated.array(x)) for x in (qo, ko)),
        4, LEARNED, each, -1, *SCALES, behind=own_part_only, **constants,
    )  # fmt: skip
    for b in {0, 1, 2, 3} - {bad}:
        mine, theirs = slice(qo[b], qo[b + 1]), slice(ko[b], ko[b + 1])
        asked = q if shared else q[mine]
        of_keys, of_values = np.zeros_like(k[theirs]), np.zeros_like(k[theirs])
        for h in range(heads * group):
            s = SCALES[0] * asked[:, h] @ k[theirs, h // group].T
            gate = 1 / (1 + np.exp(-s))
            ds = SCALES[0] * SCALES[1] * (grad[mine, h] @ v[theirs, h // group].T) * gate * (1 + s * (1 - gate))
            np.testing.assert_allclose(dq[mine, h], ds @ k[theirs, h // group], rtol=1e-9, atol=1e-12)
            of_keys[:, h // group] += ds.T @ asked[:, h]
            of_values[:, h // group] += SCALES[1] * (s * gate).T @ grad[mine, h]
        np.testing.assert_allclose(dk[theirs], of_keys, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dv[theirs], of_values, rtol=1e-9, atol=1e-12)
