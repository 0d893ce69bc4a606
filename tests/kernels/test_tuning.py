"""Only a configuration whose result is that of the reference can win, however fast another is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.benchmarks import tune, tune_memory
from kernels.benchmarks.cases import Case, Inputs
from kernels.common import memory_tuning
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged import offsets_from_lengths
from kernels.jagged import reference as jagged_reference
from kernels.jagged_attention import reference as softmax_reference

Config = dict[str, Any]

SPEED = {"right": 3.0, "slow": 9.0, "off": 1.0, "nan": 0.5, "crash": 0.1}
"""Milliseconds of kernels that are right, right and slower, off by 1%, not finite in one element, and do not run."""


class Kernel:
    """Stands for a kernel that some configurations break; as a clock, tells the time of the last one that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def spoil(self, config: Config, *results: Tensor) -> tuple[Tensor, ...]:
        """What the kernel makes of right results: the last of them is wrong."""
        self.ran.append(config["name"])
        if config["name"] == "crash":
            raise RuntimeError("out of resources")
        last = results[-1].clone()
        if config["name"] == "off":
            last *= 1.01
        if config["name"] == "nan":
            last.flatten()[-1] = torch.nan
        return (*results[:-1], last)

    def milliseconds(self, call: Callable[[], Any], **options: Any) -> float:
        """Of the configuration that a call runs."""
        call()
        return SPEED[self.ran[-1]]


def orders() -> list[list[Config]]:
    """Every kernel first and last once."""
    names = list(SPEED)
    return [[{"name": name} for name in (*names[i:], *names[:i])] for i in range(len(names))]


@pytest.mark.parametrize("act", ["silu", "softmax"])
def test_attention_is_tuned_among_right_kernels(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor([5, 0, 9, 3]))
    q, k, v, grad = torch.randn(17, 4, 2, 8).bfloat16().unbind(1)
    inputs = Inputs(q, k, v, grad, offsets, offsets, 9, 9, 0)
    case = Case(name="tiny", batch=4, width=8, queries=9, heads=2, act=act)
    call, kernel = tune.to_call(case, inputs), Kernel()

    def forward(_: Any, config: Config | None = None) -> tuple[Tensor, Tensor | None]:
        where = (q, k, v, offsets, offsets)
        if act == "softmax":
            out, lse = softmax_reference.forward(*where, call.logit, False, -1)
        else:
            out, lse = gdpa_reference.forward(*where, act, 1.0, call.logit, -1), None
        return (out, lse) if config is None else (*kernel.spoil(config, out), lse)

    def backward(_: Any, grad: Tensor, out: Tensor | None, lse: Tensor | None, config: Config) -> tuple[Tensor, ...]:
        where = (grad, q, k, v)
        if act == "softmax":
            rest = (out, lse, offsets, offsets, call.logit, False, -1)
            return kernel.spoil(config, *softmax_reference.backward(*where, *rest))
        return kernel.spoil(config, *gdpa_reference.backward(*where, offsets, offsets, act, 1.0, call.logit, -1))

    monkeypatch.setattr(tune.launch, "forward", forward)
    monkeypatch.setattr(tune.launch, "backward", backward)
    monkeypatch.setattr(tune, "milliseconds", kernel.milliseconds)
    want = tune.expected(call, grad, 4)
    for choices in orders():
        best = tune._fastest(case, call, inputs, want, {"forward": choices, "backward": choices})
        assert best == {"forward": (3.0, {"name": "right"}), "backward": (3.0, {"name": "right"})}
    wrong = [{"name": name} for name in ("off", "nan", "crash")]
    assert tune._fastest(case, call, inputs, want, {"forward": wrong, "backward": wrong}) == {}


def test_movement_is_tuned_among_right_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, offsets = torch.randn(12, 8).bfloat16(), offsets_from_lengths(torch.tensor([5, 0, 4, 3]))
    job, kernel = tune_memory.Job("sum", 8, 4), Kernel()

    def own(x: Tensor, offsets: Tensor, mean: bool) -> Tensor:
        config = memory_tuning.find("sum", x.device, x.dtype, 8, 4)  # as a kernel finds what it runs with
        assert config is not None
        return kernel.spoil(config, jagged_reference.segment_sum(x, offsets, mean))[0]

    given = (own, jagged_reference.segment_sum, (x, offsets, False))
    monkeypatch.setattr(tune_memory, "arguments", lambda job, small: given)
    monkeypatch.setattr(tune_memory, "milliseconds", kernel.milliseconds)
    monkeypatch.setattr(tune_memory, "device_name", lambda device: "fake")
    for choices in orders():
        monkeypatch.setattr(tune_memory, "candidates", lambda job, choices=choices: choices)
        assert tune_memory.tune(job) == ("sum/fake/bfloat16/w8/n4", {"name": "right"})
    monkeypatch.setattr(tune_memory, "candidates", lambda job: [{"name": name} for name in ("off", "nan", "crash")])
    assert tune_memory.tune(job) is None
