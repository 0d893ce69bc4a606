"""The kernels scheduled by hand, run on the CPU in many orders: see ``emulated.py``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels import emulated
from tests.kernels.emulated import Int, Machine, Pointer

D = 8
SCALE = 0.3


class Case:
    """Ragged sequences of one head, the third all NaN, with what the kernels should make of them."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed, self.draw = seed, draw
        self.act = draw.choice(("softmax", "silu"))
        self.causal = self.act == "softmax" and draw.random() < 0.4
        self.window = draw.choice((0, 64, 128, -1, *(draw.randrange(1, 140) for _ in range(6)), 200))
        lengths = [draw.choice((0, 1, 64, 128, 700, *(draw.randrange(400) for _ in range(5)))) for _ in range(5)]
        kind = "same" if self.causal else draw.choice(("same", "other", "dense"))
        self.dense = draw.randrange(400) if kind == "dense" else 0
        keys = lengths
        if kind != "same":
            keys = [draw.choice((0, 1, 64, 256, *(draw.randrange(600) for _ in range(6)))) for _ in lengths]
        if self.dense:
            keys = [self.dense] * 5
        self.programs = draw.choice((1, 2, 5))
        self.qo, self.ko = (np.cumsum([0, *x]) for x in (lengths, keys))
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v, self.grad = (rng.normal(size=(n[-1], D)) for n in (self.qo, self.ko, self.ko, self.qo))
        self.bad = draw.randrange(5)
        for x, where in self._sides(self.q, self.k, self.v, self.grad):
            x[where[self.bad] : where[self.bad + 1]] = 0
        self.want = self._reference()
        for x, where in self._sides(self.q, self.k, self.v, self.grad):
            x[where[self.bad] : where[self.bad + 1]] = np.nan

    def _sides(self, q: Any, k: Any, v: Any, grad: Any) -> Any:
        return zip((q, k, v, grad), (self.qo, self.ko, self.ko, self.qo), strict=True)

    def _reference(self) -> dict[str, np.ndarray]:
        out, dq, dk, dv = (np.zeros_like(x) for x in (self.q, self.q, self.k, self.v))
        lse, delta = np.zeros(len(self.q)), np.zeros(len(self.q))
        for b in range(5):
            a, e = (slice(x[b], x[b + 1]) for x in (self.qo, self.ko))
            q, k, v, g = self.q[a], self.k[e], self.v[e], self.grad[a]
            if not len(q) or not len(k):
                continue
            i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
            if self.act == "softmax":
                i = i + len(k) - len(q)
            seen = (j <= i) if self.causal else np.ones((len(q), len(k)), bool)
            if self.window >= 0:
                seen = seen & (abs(i - j) <= self.window)
            s = q @ k.T * SCALE
            dp = g @ v.T
            if self.act == "softmax":
                p = np.where(seen, np.exp(s), 0)
                total = p.sum(1)
                lse[a] = np.where(total > 0, np.log(np.where(total > 0, total, 1)), 0)
                p /= np.where(total > 0, total, 1)[:, None]
                delta[a] = (p * dp).sum(1)
                ds = p * (dp - delta[a][:, None])
            else:
                gate = 1 / (1 + np.exp(-s))
                p, ds = np.where(seen, s * gate, 0), np.where(seen, dp * gate * (1 + s * (1 - gate)), 0)
            out[a], dq[a], dk[e], dv[e] = p @ v, ds @ k * SCALE, ds.T @ q * SCALE, p.T @ g
        return {"out": out, "lse": lse, "delta": delta, "dq": dq, "dk": dk, "dv": dv}

    def check(self, name: str, got: np.ndarray, where: np.ndarray) -> None:
        a, b = where[self.bad], where[self.bad + 1]
        want = self.want[name]
        for part in (slice(0, a), slice(b, None)):
            np.testing.assert_allclose(got.reshape(want.shape)[part], want[part], atol=1e-9, err_msg=name)

    def run(self, name: str, config: dict[str, Any], seed: int) -> list[int]:
        machine = Machine(seed)
        softmax = self.act == "softmax"
        q, k, v, grad = (Pointer(np.append(x.ravel(), np.nan)) for x in (self.q, self.k, self.v, self.grad))
        lse, delta = (Pointer(np.full(len(self.q) + 1, np.nan)) for _ in range(2))
        where = [Pointer(x) for x in (self.qo, self.ko, np.zeros(1, int))]
        sizes = [Int(x) for x in (5, len(self.q), len(self.k))]
        window, strides = Int(self.window), [Int(x) for x in (D, D, D, D, D, D)]
        flags = {
            "D": D,
            "ACT": self.act,
            "CAUSAL": self.causal,
            "WINDOW": self.window >= 0,
            "ROUNDS": 1,
            "SCALED": True,
            "TMA": True,
        }
        numbers = (window, SCALE, 1.0, Int(1), *strides)
        made = {
            n: Pointer(np.full(x.size + 1, np.nan))
            for n, x in (("out", self.q), ("dq", self.q), ("dk", self.k), ("dv", self.v))
        }
        if name != "forward_long":
            if softmax:
                lse.memory[:-1] = self.want["lse"]
            made["out"].memory[:-1] = self.want["out"].ravel()
        run = emulated.kernel(name, machine)
        if name == "forward_long":
            machine.launch(
                run, self.programs, q, k, v, made["out"], lse, *where, *sizes, Int(self.dense), *numbers,
                **flags, **config, GROUP=1, DENSE=self.dense > 0,
            )  # fmt: skip
            self.check("out", made["out"].memory[:-1], self.qo)
            if softmax:
                self.check("lse", lse.memory[:-1], self.qo)
        elif name == "backward_long_q":
            machine.launch(
                run, self.programs, q, k, v, grad, made["out"], made["dq"], lse, delta, *where, *sizes, *numbers,
                **flags, **config, GROUP=1,
            )  # fmt: skip
            self.check("dq", made["dq"].memory[:-1], self.qo)
            if softmax:
                self.check("delta", delta.memory[:-1], self.qo)
        else:
            delta.memory[:-1] = self.want["delta"]
            machine.launch(
                run, self.programs, q, k, v, grad, made["dk"], made["dv"], lse, delta, *where, *sizes, *numbers,
                **flags, **config,
            )  # fmt: skip
            self.check("dk", made["dk"].memory[:-1], self.ko)
            self.check("dv", made["dv"].memory[:-1], self.ko)
        streamed = (q, grad) if name == "backward_long_kv" else (k, v)
        block, addresses = config.get("BLOCK_KV", 64), [id(x.memory) for x in streamed]
        often = [n for (_, memory, _), n in machine.loads.items() if memory in addresses]
        if self.window >= 0 and 2 * self.window + block - 1 <= config["STAGES"] * block:
            assert max(often, default=1) == 1, "a program loads a block again"
        return often


CONFIGS = {
    "forward_long": [
        {"BLOCK_KV": kv, "STAGES": stages, "OVERLAP": overlap}
        for kv, stages in ((64, 4), (64, 5), (128, 2), (64, 2))
        for overlap in (True, False)
    ],
    "backward_long_q": [{"KEPT": kept, "STAGES": stages} for kept, stages in ((4, 3), (4, 8), (3, 4), (3, 2))],
    "backward_long_kv": [{"KEPT": kept, "STAGES": stages} for kept, stages in ((4, 3), (4, 8), (3, 4), (3, 2))],
}


@pytest.mark.parametrize("kernel", list(CONFIGS))
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 150))])
def test_every_block_is_where_it_is_read_and_nobody_waits_forever(kernel: str, seed: int) -> None:
    case = Case(seed)
    case.run(kernel, case.draw.choice(CONFIGS[kernel]), seed)
