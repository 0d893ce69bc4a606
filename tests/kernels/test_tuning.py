"""Only a configuration whose result is that of the reference can win, however fast another is; what of it ships."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.benchmarks import tune, tune_memory
from kernels.benchmarks.cases import Case, Inputs
from kernels.common import memory_tuning, tuning
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged import offsets_from_lengths, tables_triton
from kernels.jagged import reference as jagged_reference
from kernels.jagged import triton as jagged_triton
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
    monkeypatch.setattr(tune_memory, "inputs", lambda job, small: [given])
    monkeypatch.setattr(tune_memory, "milliseconds", kernel.milliseconds)
    monkeypatch.setattr(tune_memory, "device_name", lambda device: "fake")
    for choices in orders():
        monkeypatch.setattr(tune_memory, "candidates", lambda job, choices=choices: choices)
        assert tune_memory.tune(job) == ("sum/fake/bfloat16/w8/n4", {"name": "right"})
    monkeypatch.setattr(tune_memory, "candidates", lambda job: [{"name": name} for name in ("off", "nan", "crash")])
    assert tune_memory.tune(job) is None


@pytest.mark.parametrize("job", tune_memory.JOBS, ids=str)
def test_what_ships_for_kernels_that_memory_bounds_may_win(job: tune_memory.Job) -> None:
    width, length = memory_tuning.bucket(job.width), memory_tuning.bucket(job.length)
    row = memory_tuning.key(job.kernel, "NVIDIA H200", job.dtype, width, length)
    found = dict(memory_tuning.tuned()[row])
    plain = found.pop("plain", None)
    assert found in tune_memory.candidates(job)
    assert ("STAY" in found) == (plain is not None)
    assert plain is None or plain in [c for c in tune_memory.candidates(job) if "STAY" not in c]


def test_time_on_all_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three configurations that wins whose sum over two batches is least, whichever is fastest on one of them."""
    times = {"first": (1.0, 9.0), "second": (6.0, 2.0), "both": (3.0, 4.0)}
    job, ran = tune_memory.Job("sum", 8, 4), [""]

    def own(case: int, x: Tensor) -> Tensor:
        config = memory_tuning.find("sum", x.device, x.dtype, 8, 4)
        assert config is not None
        ran[0] = config["name"]
        return x

    def milliseconds(call: Any, **options: Any) -> float:
        call()
        return times[ran[0]][call.args[0]]

    given = [(own, lambda case, x: x, (case, torch.ones(3))) for case in range(2)]
    monkeypatch.setattr(tune_memory, "inputs", lambda job, small: given)
    monkeypatch.setattr(tune_memory, "candidates", lambda job: [{"name": name} for name in times])
    monkeypatch.setattr(tune_memory, "milliseconds", milliseconds)
    monkeypatch.setattr(tune_memory, "device_name", lambda device: "fake")
    assert tune_memory.tune(job) == ("sum/fake/bfloat16/w8/n4", {"name": "both"})


class Started:
    """In place of a ``Launch``: notes its constants and starts nothing."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.constants = constants
        self.made.append(constants)

    def start(self, *arguments: Any) -> None:
        """Nothing: there is no device."""


@pytest.mark.parametrize(("width", "dtype", "kept"), [
    (64, torch.bfloat16, True), (8, torch.bfloat16, True), (50, torch.bfloat16, False), (4, torch.float32, True),
    (7, torch.float32, False),
])  # fmt: skip
def test_registers_are_limited_where_rows_are_moved_16_bytes_at_a_time(
    width: int, dtype: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jagged_triton, "Launch", Started)
    offsets, index = torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1])
    config = {"ROWS": 4, "num_warps": 4, "maxnreg": 96}
    with memory_tuning.forced("sequences_kernel", config):
        jagged_triton.gather_sequences(torch.ones(3, width, dtype=dtype), offsets, index, torch.tensor([0, 2, 4, 5]), 5)
    assert (Started.made[-1].get("maxnreg") == 96) is kept
    assert config["maxnreg"] == 96, "what was found is shared"


@pytest.mark.parametrize(("width", "row", "columns"), [(7, 64, 64), (64, 64, 64), (65, 256, 128), (1000, 256, 128)])
def test_two_tables_take_the_row_of_their_tile(
    width: int, row: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def find(kernel: str, device: torch.device, dtype: torch.dtype, width: int, length: int) -> Config:
        asked.append(width)
        return {"PROGRAMS": 2, "TILE": 128, "BLOCK": 128, "STAGES": 3, "num_warps": 4}

    monkeypatch.setattr(memory_tuning, "find", find)
    monkeypatch.setattr(tables_triton, "Launch", Started)
    memory_tuning._forget()
    try:
        sums = tables_triton._launches(torch.device("cpu"), torch.bfloat16, width, 32, 2048, True)[0][2]
        assert asked == [row]
        assert (sums.constants["TILE"], sums.constants["BLOCK"]) == (128, columns)
    finally:
        memory_tuning._forget()


@pytest.mark.parametrize(
    ("name", "capability", "names"),
    [
        ("NVIDIA H200", (9, 0), ("NVIDIA H200",)),
        ("NVIDIA H100 80GB HBM3", (9, 0), ("NVIDIA H100 80GB HBM3", "NVIDIA H200")),
        ("NVIDIA A100-SXM4-80GB", (8, 0), ("NVIDIA A100-SXM4-80GB",)),
        ("NVIDIA B200", (10, 0), ("NVIDIA B200",)),
    ],
)
def test_a_gpu_runs_with_rows_of_one_with_the_same_multiprocessors(
    name: str, capability: tuple[int, int], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tuning.row_names.__wrapped__(torch.device("cuda", 0)) == names
    assert tuning.row_names.__wrapped__(torch.device("cpu")) == (name,)


def test_own_rows_come_before_those_of_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = {"BLOCK_Q": 64, "num_warps": 2}, {"BLOCK_Q": 128, "num_warps": 8}
    attention = {
        tuning.key("forward_general", "own", "bfloat16", 128, 64, 64): own,
        tuning.key("forward_general", "other", "bfloat16", 128, 1024, 1024): other,
        tuning.key("forward_softmax", "other", "bfloat16", 128, 1024, 1024): other,
    }
    monkeypatch.setattr(tuning, "tuned", lambda: attention)
    choose = partial(
        tuning._choose.__wrapped__, devices=("own", "other"), dtype="bfloat16", q_bucket=512, kv_bucket=512
    )
    assert choose("forward_general", width=128) == own
    assert choose("forward_softmax", width=128) == other
    assert choose("forward_softmax", width=64) == tuning.default("forward_softmax", "bfloat16", 64, 512)
    memory = {
        memory_tuning.key("sum", "own", torch.bfloat16, 64, 8): own,
        memory_tuning.key("sum", "other", torch.bfloat16, 256, 8): other,
        memory_tuning.key("pad_kernel", "other", torch.bfloat16, 256, 1): other,
    }
    monkeypatch.setattr(memory_tuning, "tuned", lambda: memory)
    monkeypatch.setattr(memory_tuning, "row_names", lambda device: ("own", "other"))
    monkeypatch.setattr(memory_tuning, "_find", memory_tuning._find.__wrapped__)
    find = partial(memory_tuning.find, device=torch.device("cpu"), dtype=torch.bfloat16, width=256)
    assert find("sum", length=8) == own
    assert find("pad_kernel", length=1) == other
    assert find("norm_forward", length=1) is None


@pytest.mark.parametrize(("groups", "wide", "tile"), [(32, True, 64), (32, False, 128), (64, True, 128)])
def test_two_tables_by_hand_take_wide_rows_and_one_group_a_lane(
    groups: int, wide: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"PROGRAMS": 2, "TILE": 128, "BLOCK": 64, "STAGES": 3, "num_warps": 4}
    config = {"STAY": 3, "TILE": 64, "BLOCK": 64, "STAGES": 4, "num_warps": 4, "plain": plain}
    monkeypatch.setattr(tables_triton, "Launch", Started)
    with memory_tuning.forced("tables", config):
        launches, _, most = tables_triton._launches(torch.device("cpu"), torch.bfloat16, 64, groups, 64 * groups, wide)
    count, order, total, _ = launches
    assert total.constants["TILE"] == order.constants["TILE"] == tile, "what is filled is what is read"
    assert ("PARTS" in count.constants) == (tile == 64)
    assert most == (9 if tile == 64 else 6), "of three multiprocessors"
    assert config["plain"] is plain, "what was found is shared"
