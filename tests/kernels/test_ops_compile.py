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
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from kernels.block_attention import persistent  # noqa: E402
from kernels.block_attention import triton as block_attention  # noqa: E402
from kernels.common import memory_tuning  # noqa: E402
from kernels.jagged import offsets_triton, short_sums_triton, sums_triton, tables_hopper, tables_triton  # noqa: E402
from kernels.jagged import triton as jagged  # noqa: E402
from kernels.norms import triton as norms  # noqa: E402
from tests.kernels.compiled import resources  # noqa: E402

SHARED_MEMORY = 232448
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LONG = (
    "OFFSETS", "NEW_OFFSETS", "A_OFFSETS", "B_OFFSETS", "INDEX", "ORDER", "STARTS", "BIG", "LITTLE", "TAKEN",
)  # fmt: skip
WHOLE = ("ENDED", "KEYS", "COUNTS", "TOTALS", "ENDS")
SINGLE = ("POSITIONS", "FREQUENCIES", "PARTIAL", "LEAST")
ODD = ("B", "N", "R", "rows", "length", "blocks", "chunk", "programs", "big_first", "small_first")
"""Arguments that are rarely multiples of 16; lower-case names that begin with s are strides, and ``scale`` a float."""


def build(kernel: Any, constants: dict[str, Any], arch: int, dtype: torch.dtype, **options: int) -> Any:
    """Upper-case arguments are tensors of ``dtype`` unless their names say otherwise, lower-case ones integers."""
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in ODD:
            numbers = {**dict.fromkeys(LONG, "*i64"), **dict.fromkeys(WHOLE, "*i32"), **dict.fromkeys(SINGLE, "*fp32")}
            numbers["REAL"] = "*i1"
            signature[name] = numbers.get(name, f"*{NAMES[dtype]}")
        else:
            signature[name] = "fp32" if name in ("scale", "eps", "padding") else "i32"
        if name not in ODD and signature[name] not in ("fp32", "constexpr"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
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


@pytest.mark.parametrize(
    ("backward", "width", "columns", "dtype", "stack"),
    [
        (False, 256, 0, torch.bfloat16, 0), (True, 256, 0, torch.bfloat16, 0), (True, 128, 2, torch.bfloat16, 0),
        pytest.param(False, 128, 1, torch.bfloat16, 0, marks=pytest.mark.slow),
        pytest.param(False, 256, 2, torch.float16, 40, marks=pytest.mark.slow),
        pytest.param(True, 256, 1, torch.float16, 0, marks=pytest.mark.slow),
        pytest.param(True, 128, 0, torch.bfloat16, 16, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_block_attention_of_programs_that_stay(
    backward: bool, width: int, columns: int, dtype: torch.dtype, stack: int
) -> None:
    """As it is tuned: all that are to stay have room on a multiprocessor, and little is spilled."""
    name = f"block_{'backward' if backward else 'forward'}{'_rotary' if columns else ''}"
    config = dict(memory_tuning.tuned()[memory_tuning.key(name, "NVIDIA H200", torch.bfloat16, width, 1)])
    stay, _ = config.pop("STAY"), config.pop("plain")
    options = {key: config.pop(key) for key in ("num_warps", "maxnreg") if key in config}
    kernel = persistent.backward_kernel if backward else persistent.forward_kernel
    constants = {"HEADS": 4, "D": width, "COLUMNS": columns, "ROUNDS": 2, **config}
    if not backward:
        constants["GROUP"] = 2
    if not columns:
        constants |= {"POSITIONS": None, "FREQUENCIES": None}
    compiled = build(kernel, constants, 90, dtype, **options)
    used = resources(compiled)
    assert stay * (compiled.metadata.shared + 1024) <= SHARED_MEMORY + 1024
    assert stay * 32 * options["num_warps"] * used["registers"] <= 65536
    assert used["stack"] <= stack
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "16 bytes at a time"


MOVED = [
    ("pad_kernel", {"RIGHT": True}),
    ("pad_kernel", {"RIGHT": False, "REAL": None}),
    ("unpad_kernel", {"RIGHT": False, "ROUNDS": 2}),
    ("gather_kernel", {"CHOICES": 1, "ADD": None}),
    ("gather_kernel", {"CHOICES": 2}),
    ("spread_kernel", {"MEAN": True, "ROUNDS": 2, "ADD": None}),
    ("spread_kernel", {"MEAN": False, "ROUNDS": 2}),
    ("concat_kernel", {"ROUNDS": 2}),
    ("split_kernel", {"ROUNDS": 2}),
    ("sequences_kernel", {"ROUNDS": 2}),
    ("copies_kernel", {"ROUNDS": 2}),
]

SUMS: list[dict[str, Any]] = [
    {"MEAN": True, "CHOICES": 1, "ORDER": None},
    {"MEAN": False, "CHOICES": 2, "PARTIAL": None, "ENDED": None},
]


@pytest.mark.parametrize("arch", [90, 100])
def test_gradients_of_two_tables(arch: int) -> None:
    config = {**tables_triton.DEFAULT, "GROUPS": 32, "WIDTH": 256}
    warps, _ = config.pop("num_warps"), config.pop("PROGRAMS")
    compiled = build(tables_triton.sum_kernel, config, arch, torch.bfloat16, num_warps=warps)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] <= 72


@pytest.mark.parametrize(
    ("name", "groups", "registers"),
    [
        ("count_kernel", 32, 64), ("order_kernel", 32, 80), ("finish_kernel", 32, 96),
        ("by hand: count_kernel", 32, 64), ("by hand: order_kernel", 32, 168),
        pytest.param("order_kernel", 256, 128, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_rows_of_two_tables_are_grouped_in_registers(name: str, groups: int, registers: int) -> None:
    """So that other programs fit beside one that waits, two of 8 warps and three of 4."""
    rest = {"TILE": 64, "ROWS": tables_triton.AT_ONCE, "GROUPS": groups}
    module: Any = tables_triton
    warps = 8
    if name.startswith("by hand"):
        rest = {"TILE": 64, "COUNTED": tables_triton.CHUNKS, "PARTS": tables_triton.PARTS}
        module, warps = tables_hopper, tables_triton.WARPS
    if name == "finish_kernel":
        rest |= {"WIDTH": 256, "BIG": 64 * groups}
    kernel = getattr(module, name.split()[-1])
    constants = {key: value for key, value in rest.items() if key in kernel.arg_names}
    options = {"num_warps": 4 if name == "finish_kernel" else warps}
    if name == "by hand: order_kernel":
        options["maxnreg"] = registers
    compiled = build(kernel, constants, 90, torch.bfloat16, **options)
    used = resources(compiled)
    assert used["stack"] == 0
    assert used["registers"] <= registers
    if name == "by hand: order_kernel":
        assert "shfl.sync.idx" in compiled.asm["ptx"], "places are asked of other lanes"


@pytest.mark.parametrize(
    ("name", "width", "dtype", "stack"),
    [
        ("sequences_kernel", 64, torch.bfloat16, 8), ("sequences_kernel", 256, torch.bfloat16, 0),
        ("tables", 64, torch.bfloat16, 0), ("tables", 256, torch.bfloat16, 0),
        ("tables", 64, torch.float16, 0), ("tables", 256, torch.float16, 0),
    ],
)  # fmt: skip
def test_what_ships_spills_no_more_than_when_it_was_chosen(
    name: str, width: int, dtype: torch.dtype, stack: int
) -> None:  # fmt: skip
    config = dict(memory_tuning.tuned()[memory_tuning.key(name, "NVIDIA H200", dtype, width, 1)])
    options = {option: config.pop(option) for option in ("num_warps", "maxnreg") if option in config}
    stay, _ = config.pop("STAY", 1), config.pop("plain", None)
    kernel, constants = tables_hopper.sum_kernel, {"WIDTH": width, **config}
    if name != "tables":
        kernel, constants = jagged.sequences_kernel, {"ROUNDS": 3, "WIDTH": width, "BLOCK": width, **config}
    compiled = build(kernel, constants, 90, dtype, **options)
    assert stay * (compiled.metadata.shared + 1024) <= SHARED_MEMORY + 1024
    found = resources(compiled)
    assert found["stack"] <= stack
    assert stay * 32 * options["num_warps"] * found["registers"] <= 65536
    assert found["registers"] <= options.get("maxnreg", 255)
    if name == "tables":
        ptx, halves = compiled.asm["ptx"], {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
        assert "wgmma.mma_async" in ptx
        assert f"set.eq.{halves}.{halves}" in ptx, "two elements of the 0/1 matrices an instruction"
        assert "cp.async.cg.shared.global" in ptx
        assert "cp.async.ca" not in ptx, "16 bytes at a time"


@pytest.mark.parametrize("arch", [90, 100])
def test_short_sums_have_wide_accesses(arch: int) -> None:
    config = dict(short_sums_triton.default(64))
    warps = config.pop("num_warps")
    constants = {"MEAN": True, "WIDTH": 64, "BLOCK": 64, "LIMIT": 64, **config}
    compiled = build(short_sums_triton.short_sum_kernel, constants, arch, torch.bfloat16, num_warps=warps)
    assert "ld.global.v4" in compiled.asm["ptx"], "rows are read 16 bytes at a time"
    if arch == 90:
        assert resources(compiled)["stack"] == 0
    build(
        short_sums_triton.starts_kernel,
        {"ENTRIES": 1024, "STEPS": 11, "AT_ONCE": 256},
        arch,
        torch.bfloat16,
        num_warps=4,
    )


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("scan", [False, True])
def test_offsets_of_an_index_stop_at_one_that_is_not_there(scan: bool, arch: int) -> None:
    constants = {"SCAN": scan, "BLOCK": offsets_triton.BLOCK}
    compiled = build(offsets_triton.lengths_kernel, constants, arch, torch.bfloat16, num_warps=4, debug=True)
    assert compiled.asm["ptx"].count("__assertfail") >= 2, "declared and called"


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("name", "constants"), MOVED)
def test_movement_has_wide_accesses(name: str, constants: dict[str, Any], arch: int) -> None:
    width = 128
    block = {"WIDTH": width, "BLOCK": width}
    config = dict(jagged.default(width, 2, "STAGES" in getattr(jagged, name).arg_names))
    warps = config.pop("num_warps")
    compiled = build(getattr(jagged, name), {**constants, **block, **config}, arch, torch.bfloat16, num_warps=warps)
    text = compiled.asm["ptx"]
    assert "ld.global.v4" in text, "rows are read 16 bytes at a time"
    assert "st.global.v4" in text, "and so written"
    if arch == 90:
        assert resources(compiled)["stack"] == 0


@pytest.mark.parametrize(("arch", "warps"), [(90, 4), (90, 1), (100, 4)])
@pytest.mark.parametrize("constants", SUMS)
def test_sums_have_wide_accesses(constants: dict[str, Any], arch: int, warps: int) -> None:
    fixed = {"ROUNDS": 2, "WIDTH": 128, "BLOCK": 128, "num_warps": warps}
    config = {**sums_triton.default(128), **constants, **fixed}
    compiled = build(sums_triton.sum_kernel, config, arch, torch.bfloat16, num_warps=config.pop("num_warps"))
    text = compiled.asm["ptx"]
    assert "ld.global.v4" in text, "rows are read 16 bytes at a time"
    if "ENDED" not in constants:
        store, count = text.index("st.global"), text.index("atom.global.gpu.acq_rel.add")
        assert store < text.index("bar.sync", store) < count, "all threads have written before one says so"
        assert "ld.global.cg" in text, "what other programs wrote is not read from L1"
    if arch == 90:
        assert resources(compiled)["stack"] == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("width", "absent"), [(256, ()), (1000, ("RES", "GATE", "DZ_IN", "DGATE"))])
def test_norms(width: int, absent: tuple[str, ...], backward: bool, arch: int) -> None:
    kernel = norms.backward_kernel if backward else norms.forward_kernel
    config = dict(norms.default("norm_backward" if backward else "norm_forward", width))
    warps, _ = config.pop("num_warps"), config.pop("PROGRAMS", None)
    constants = {"CENTER": True, "SILU": True, "WIDTH": width, "BLOCK": triton.next_power_of_2(width), **config}
    constants |= {name: None for name in absent if name in kernel.arg_names}
    compiled = build(kernel, constants, arch, torch.bfloat16, num_warps=warps)
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]
    if arch == 90:
        assert resources(compiled)["stack"] == 0
