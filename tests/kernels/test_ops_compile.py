"""The Triton kernels of block attention, jagged movement and norms, compiled for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.block_attention import triton as block_attention  # noqa: E402
from tests.kernels.compiled import resources  # noqa: E402

SHARED_MEMORY = 232448
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LONG = ("OFFSETS", "A_OFFSETS", "B_OFFSETS", "INDEX", "ORDER", "STARTS")
SINGLE = ("POSITIONS", "FREQUENCIES", "PARTIAL")
ODD = ("B", "rows")
"""Arguments that are rarely multiples of 16; lower-case names that begin with s are strides, and ``scale`` a float."""


def build(kernel: Any, constants: dict[str, Any], arch: int, dtype: torch.dtype, **options: int) -> Any:
    """Upper-case arguments are tensors of ``dtype`` unless their names say otherwise, lower-case ones integers."""
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in ODD:
            signature[name] = "*i64" if name in LONG else "*fp32" if name in SINGLE else f"*{NAMES[dtype]}"
        else:
            signature[name] = "fp32" if name in ("scale", "eps", "padding") else "i32"
        if name not in ODD and signature[name] not in ("fp32", "constexpr"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def built_block(backward: bool, width: int, columns: int, group: int, dtype: torch.dtype, arch: int) -> Any:
    kernel = block_attention.backward_kernel if backward else block_attention.forward_kernel
    constants = {
        **block_attention._constants(width, dtype == torch.float32, columns, 64),
        "HEADS": 4,
        "GROUP": group,
        "ROUNDS": 2,
    }
    if not columns:
        constants |= {"POSITIONS": None, "FREQUENCIES": None}
    return build(kernel, constants, arch, dtype, num_warps=block_attention.default_warps(width, group))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("width", "columns", "group", "dtype", "arch"),
    [
        (128, 0, 1, torch.bfloat16, 90), (128, 2, 1, torch.bfloat16, 90), (64, 1, 2, torch.float16, 90),
        (256, 0, 1, torch.bfloat16, 90), (128, 0, 2, torch.bfloat16, 100), (128, 1, 1, torch.bfloat16, 100),
    ],
)  # fmt: skip
def test_block_attention(backward: bool, width: int, columns: int, group: int, dtype: torch.dtype, arch: int) -> None:
    compiled = built_block(backward, width, columns, group, dtype, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] < 512
