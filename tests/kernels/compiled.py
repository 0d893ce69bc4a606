"""Compiles Triton kernels for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_POINTERS = {"LSE": "*fp32", "DELTA": "*fp32", "SUM": "*fp32", "QO": "*i64", "KO": "*i64", "COUNTER": "*i32"}
_TENSORS = ("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV", "PART")
_FLOATS = ("s_in", "s_out")


def compile_for(kernel: Any, constants: dict[str, Any], options: dict[str, int], arch: int, dtype: str = "bf16") -> Any:
    """The compiled kernel; ``constants`` are its ``constexpr`` arguments, all else is a tensor or a number."""
    signature: dict[str, str] = {}
    attributes = {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in _TENSORS:
            signature[name] = f"*{dtype}"
        else:
            signature[name] = _POINTERS.get(name, "fp32" if name in _FLOATS else "i32")
        if signature[name] != "fp32" and name not in ("B", "HEADS", "window", "q_length", "kv_length", "total", "keys"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers per thread and bytes of stack (spills) of a compiled kernel."""
    import triton.backends.nvidia as backend

    tool = Path(next(iter(backend.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None
    return {"registers": int(found[1]), "stack": int(found[2])}
