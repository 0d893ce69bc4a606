"""The Triton kernels compiled for Hopper and Blackwell, without either."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on", allow_module_level=True)

from kernels.common import (  # noqa: E402
    attention_backward,
    attention_forward,
    backward_few,
    backward_long,
    forward_long,
    forward_stream,
    tuning,
)
from tests.kernels.compiled import compile_for, resources  # noqa: E402

SHARED_MEMORY = 232448


def constants(kernel: str, act: str, width: int, config: dict[str, Any]) -> dict[str, Any]:
    block = max(64, triton.next_power_of_2(width))
    common = {
        "HEADS": 4,
        "KV_HEADS": 4,
        **dict.fromkeys(("STQ", "STK", "STV"), 4 * width),
        **dict.fromkeys(("SHQ", "SHK", "SHV"), width),
        "GROUP": 1,
        "D": width,
        "E": width,
        "BLOCK_D": block,
        "BLOCK_E": block,
        "ACT": act,
        "CAUSAL": False,
        "WINDOW": False,
        "BROADCAST": False,
        "DENSE": False,
        "ROUNDS": 2,
        "SCALED": True,
        "TMA_OUT": False,
        "FAST": True,
        "PRECISION": "tf32",
    }
    absent = (
        [] if act == "softmax" else ["LSE", "DELTA", *(["OUT"] if kernel in ("backward_q", "backward_long_q") else [])]
    )
    absent += ["SUM"] if config.get("PASSES", 0) < 2 else []
    absent += [] if config.get("SEVERAL") else ["PART"]
    return {**common, **dict.fromkeys(absent), **config}


def build(name: str, config: dict[str, Any], act: str, width: int, arch: int, dtype: str = "bf16") -> Any:
    modules = {
        "forward_stream": forward_stream,
        "forward_long": forward_long,
        "backward_few": backward_few,
        "backward_long_q": backward_long,
        "backward_long_kv": backward_long,
        "backward_kv": attention_backward,
        "backward_q": attention_backward,
    }
    kernel = getattr(modules.get(name, attention_forward), name)
    config = dict(config)
    options = {name: config.pop(name) for name in ("num_warps", "maxnreg") if name in config}
    wanted = {key: x for key, x in constants(name, act, width, config).items() if key in kernel.arg_names}
    if name in ("forward_stream", "forward_long", "backward_long_q", "backward_long_kv"):
        del wanted["HEADS"]
    return compile_for(kernel, wanted, options, arch, dtype)


CASES = [
    ("forward_short", "forward_short", "gelu", 128, 64),
    ("forward_general", "forward_softmax", "softmax", 128, 2048),
    ("backward_kv", "backward_short", "silu", 64, 64),
    ("backward_kv", "backward_short", "gelu_tanh", 128, 256),
    ("backward_kv", "backward_general", "gelu_tanh", 128, 2048),
    ("backward_q", "backward_softmax", "softmax", 64, 2048),
]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("kernel", "family", "act", "width", "keys"), CASES)
def test_kernel_compiles_and_fits(kernel: str, family: str, act: str, width: int, keys: int, arch: int) -> None:
    config = tuning.choose(family, ("NVIDIA H200",), torch.bfloat16, width, 512, keys)
    if {"OVERLAP", "BUFFERS", "KEPT", "KEYS"} & {*config, *config.get("query", {})}:  # scheduled by hand: tested below
        config = tuning.choose(f"{family}_plain", ("NVIDIA H200",), torch.bfloat16, width, 512, keys)
    if kernel == "backward_q":
        config = config["query"]
    if kernel == "backward_kv":
        config = {**config, "PASSES": 0 if "query" in config else triton.cdiv(keys, config["BLOCK_KV"])}
        config.pop("query", None)
    compiled = build(kernel, config, act, width, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] < 512, "a few registers may spill, not the accumulators"


@pytest.mark.parametrize(("width", "blocks"), [(64, 1), (128, 1), pytest.param(128, 2, marks=pytest.mark.slow)])
def test_streaming_kernel_compiles_for_hopper(width: int, blocks: int) -> None:
    config = {"BLOCK_KV": 128, "BLOCKS": blocks, "BUFFERS": 3 - blocks, "STAGES": 5, "TMA": True, "num_warps": 4}
    compiled = build("forward_stream", config, "gelu_tanh", width, 90)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "setmaxnreg" in compiled.asm["ptx"]
    assert resources(compiled)["stack"] < 256


@pytest.mark.parametrize(
    ("act", "overlap", "block"),
    [
        ("softmax", True, 128),
        pytest.param("gelu_tanh", True, 128, marks=pytest.mark.slow),
        pytest.param("silu", False, 64, marks=pytest.mark.slow),
    ],
)
def test_long_kernel_compiles_for_hopper(act: str, overlap: bool, block: int) -> None:
    config = {"BLOCK_KV": block, "STAGES": 256 // block, "OVERLAP": overlap, "TMA": True, "num_warps": 4}
    compiled = build("forward_long", config, act, 128, 90)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "setmaxnreg" in compiled.asm["ptx"]
    assert resources(compiled)["stack"] < 64


@pytest.mark.parametrize(
    ("kernel", "act"),
    [
        ("backward_long_kv", "softmax"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("backward_long_kv", "gelu_tanh"), ("backward_long_q", "softmax"), ("backward_long_q", "silu"))
        ),
    ],
)
def test_long_backward_compiles_for_hopper(kernel: str, act: str) -> None:
    compiled = build(kernel, {"KEPT": 4, "STAGES": 3, "TMA": True, "num_warps": 4}, act, 128, 90)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "setmaxnreg" in compiled.asm["ptx"]
    assert resources(compiled)["stack"] < 64


@pytest.mark.parametrize(
    ("act", "width", "keys", "dtype", "programs", "stack"),
    [
        ("gelu_tanh", 128, 64, "bf16", 2, 64),
        ("gelu_tanh", 128, 128, "bf16", 1, 32),
        ("silu", 64, 64, "bf16", 3, 16),
        ("gelu_tanh", 128, 256, "bf16", 1, 32),
        pytest.param("gelu", 128, 128, "bf16", 1, 64, marks=pytest.mark.slow),
        pytest.param("gelu", 128, 256, "bf16", 1, 256, marks=pytest.mark.slow),
        pytest.param("silu", 64, 256, "bf16", 1, 16, marks=pytest.mark.slow),
        pytest.param("silu", 128, 64, "fp16", 2, 64, marks=pytest.mark.slow),
        pytest.param("hardswish", 128, 64, "bf16", 2, 16, marks=pytest.mark.slow),
        pytest.param("relu2", 128, 128, "bf16", 1, 32, marks=pytest.mark.slow),
    ],
)
def test_backward_of_few_keys_compiles_for_hopper(
    act: str, width: int, keys: int, dtype: str, programs: int, stack: int
) -> None:  # fmt: skip
    """As it is tuned: so many programs have room on a multiprocessor, and little is spilled."""
    name = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    config = tuning.choose("backward_short", ("NVIDIA H200",), name, width, 512, keys)
    assert config["KEYS"] == min(keys, 128)
    compiled = build("backward_few", {**config, "SEVERAL": keys > 128}, act, width, 90, dtype)
    used = resources(compiled)
    assert programs * (compiled.metadata.shared + 1024) <= SHARED_MEMORY + 1024
    assert programs * 32 * config["num_warps"] * used["registers"] <= 65536
    assert used["stack"] < stack
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "16 bytes at a time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "act", "stack"),
    [
        ("forward_long", "softmax", 16),
        ("backward_long_q", "softmax", 32),
        ("backward_long_kv", "softmax", 96),
        ("backward_long_kv", "gelu_tanh", 32),
    ],
)
def test_long_kernels_with_a_window_have_room_for_what_stays(kernel: str, act: str, stack: int) -> None:
    """Two sides of 128 keys: the tuned rows have blocks for all that a tile and the next share."""
    family = f"{kernel.split('_')[0]}_{'softmax' if act == 'softmax' else 'general'}_window"
    config = tuning.choose(family, ("NVIDIA H200",), torch.bfloat16, 128, 1024, 257)
    config = config["query"] if kernel == "backward_long_q" else {k: x for k, x in config.items() if k != "query"}
    assert config["STAGES"] * 64 >= 2 * 128 and config.get("BLOCK_KV", 64) == 64
    compiled = build(kernel, {**config, "WINDOW": True}, act, 128, 90)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert resources(compiled)["stack"] < stack


def test_defaults_fit_the_widest_heads() -> None:
    for kernel, family, act in (
        ("forward_general", "forward_softmax", "softmax"),
        ("backward_kv", "backward_general", "gelu"),
    ):
        config = tuning.default(family, "bfloat16", 256, 2048)
        config = {**config, "PASSES": 0} if config.pop("query", None) else config
        compiled = build(kernel, config, act, 256, 90)
        assert compiled.metadata.shared <= SHARED_MEMORY
