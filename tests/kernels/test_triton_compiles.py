"""The Triton kernels compiled for Hopper and Blackwell, without either."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on", allow_module_level=True)

from kernels.common import attention_backward, attention_forward, tuning  # noqa: E402
from tests.kernels.compiled import compile_for, resources  # noqa: E402

SHARED_MEMORY = 232448


def constants(act: str, width: int, short: bool, **options: Any) -> dict[str, Any]:
    block = max(64, triton.next_power_of_2(width))
    common = {
        "GROUP": 1,
        "D": width,
        "BLOCK_D": block,
        "ACT": act,
        "WINDOW": False,
        "BROADCAST": False,
        "DENSE": False,
        "ROUNDS": 2,
        "FAST": True,
        "PRECISION": "tf32",
    }
    general = {} if short else {"E": width, "BLOCK_E": block, "CAUSAL": False}
    absent = {} if act == "softmax" else {"LSE": None, "DELTA": None}
    return {**common, **general, **absent, **options}


def build(name: str, config: dict[str, Any], act: str, width: int, arch: int) -> Any:
    module = attention_forward if name.startswith("forward") else attention_backward
    kernel = getattr(module, name)
    config = dict(config)
    options = {name: config.pop(name) for name in ("num_warps", "maxnreg") if name in config}
    wanted = {
        k: v for k, v in constants(act, width, name == "forward_short", **config).items() if k in kernel.arg_names
    }
    return compile_for(kernel, wanted, options, arch)


CASES = [
    ("forward_short", "forward_short", "gelu", 128, 64),
    ("forward_general", "forward_softmax", "softmax", 128, 2048),
    ("backward_kv", "backward_short", "silu", 64, 64),
    ("backward_kv", "backward_general", "gelu_tanh", 128, 2048),
    ("backward_q", "backward_softmax", "softmax", 64, 2048),
]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("kernel", "family", "act", "width", "keys"), CASES)
def test_kernel_compiles_and_fits(kernel: str, family: str, act: str, width: int, keys: int, arch: int) -> None:
    config = tuning.choose(family, "NVIDIA H200", torch.bfloat16, width, 512, keys)
    if kernel == "backward_q":
        config = config["query"]
    if kernel == "backward_kv":
        config = {**config, "WHOLE": "query" not in config}
        config.pop("query", None)
    compiled = build(kernel, config, act, width, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] < 512, "a few registers may spill, not the accumulators"


def test_defaults_fit_the_widest_heads() -> None:
    for kernel, family, act in (
        ("forward_general", "forward_softmax", "softmax"),
        ("backward_kv", "backward_general", "gelu"),
    ):
        config = tuning.default(family, "bfloat16", 256, 2048)
        config = {**config, "WHOLE": False} if config.pop("query", None) else config
        compiled = build(kernel, config, act, 256, 90)
        assert compiled.metadata.shared <= SHARED_MEMORY
