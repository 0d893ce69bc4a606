"""Only a configuration whose result is that of the reference can win, however fast another is; what of it ships."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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

SPEED = {"right": 3.0, "slow": 9.0, "off": 1.0, "row": 0.7, "nan": 0.5, "crash": 0.1}
"""Milliseconds of kernels that are right, right and slower, off by 1%, off in the last row alone, not finite
in one element, and do not run."""

WRONG = [{"name": name} for name in ("off", "row", "nan", "crash")]


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
        if config["name"] == "row":
            last[-1] *= 2
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


def tiny(act: str) -> tuple[Case, Inputs]:
    """Sequences of 0 and of 2 to 9 rows, so many that one row is lost among all, with two heads of 8."""
    torch.manual_seed(0)
    lengths = torch.randint(2, 10, (200,))
    lengths[5:-1:10] = 0
    offsets = offsets_from_lengths(lengths)
    q, k, v, grad = torch.randn(int(offsets[-1]), 4, 2, 8).bfloat16().unbind(1)
    inputs = Inputs(q, k, v, grad, offsets, offsets, 9, 9, 0)
    return Case(name="tiny", batch=200, width=8, queries=9, heads=2, act=act), inputs


@pytest.mark.parametrize("act", ["silu", "softmax"])
def test_attention_is_tuned_among_right_kernels(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = tiny(act)
    q, k, v, offsets = inputs.q, inputs.k, inputs.v, inputs.q_offsets
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
    want = tune.expected(call, inputs.grad)
    for choices in orders():
        best = tune._fastest(case, call, inputs, want, {"forward": choices, "backward": choices})
        assert best == {"forward": (3.0, {"name": "right"}), "backward": (3.0, {"name": "right"})}
    assert tune._fastest(case, call, inputs, want, {"forward": WRONG, "backward": WRONG}) == {}


@pytest.mark.parametrize("act", ["silu", "softmax"])
def test_all_sequences_are_compared(act: str) -> None:
    case, inputs = tiny(act)
    call = tune.to_call(case, inputs)
    exact = [x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.grad)]
    whole = tune._expected(call, *exact, inputs.q_offsets, inputs.kv_offsets)
    for got, want in zip(tune.expected(call, inputs.grad), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    ends = [inputs.q_offsets]
    for row in (0, int(inputs.q_offsets[100]), -1):
        spoiled = whole[0].clone()
        spoiled[row] *= 2
        assert tune.error([whole[0]], whole[:1], ends) == 0
        assert tune.error([spoiled], whole[:1], ends) > tune.TOLERANCE[case.dtype]
        spoiled[row] = torch.inf
        assert tune.error([spoiled], whole[:1], ends) == torch.inf


def test_what_is_not_zero_where_nothing_is_wanted_is_wrong() -> None:
    rows, ends = torch.zeros(8, 2, 4), offsets_from_lengths(torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 4]))
    assert tune.error([rows], [rows.double()], [ends]) == 0
    assert tune.error([rows + 1e-9], [rows.double()], [ends]) == torch.inf


def test_movement_is_tuned_among_right_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor([5, 0, 4, 3]).repeat(30_000))  # one row is lost among so many
    x = torch.randn(int(offsets[-1]), 8).bfloat16()
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
    monkeypatch.setattr(tune_memory, "candidates", lambda job: WRONG)
    assert tune_memory.tune(job) is None


class Tuner:
    """A command that tunes, in which nothing is compiled or run: every case and kernel finds the row ``self.row``."""

    def __init__(self, module: Any, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.row, self.compiled = module, "new/fake/bfloat16", False
        table = {"configurations": {"old/fake/bfloat16": {"ROWS": 1}}, "sources": {"fake": "before"}}
        shipped.write_text(json.dumps(table))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(module.multiprocessing, "get_context", lambda kind: self)
        monkeypatch.setattr(module, "runs_kernels_by_hand", lambda: True)
        monkeypatch.setattr(tuning, "TUNED", shipped)
        monkeypatch.setattr(memory_tuning, "TUNED", shipped)
        if module is tune:
            monkeypatch.setattr(tune, "tune_case", lambda case: {self.row: {"ROWS": 2}} if self.row else {})
        else:
            monkeypatch.setattr(tune_memory, "tune", lambda job: (self.row, {"ROWS": 2}) if self.row else None)

    def Pool(self, count: int) -> Any:
        """Of no processes."""
        return nullcontext(self)

    def map(self, *arguments: Any, **options: Any) -> None:
        """Compiles nothing."""
        self.compiled = True


@pytest.fixture(params=[tune, tune_memory], ids=["tune", "tune_memory"])
def tuner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    return Tuner(request.param, tmp_path / "shipped.json", monkeypatch)


def test_rows_keep_the_source_they_have(tuner: Tuner, tmp_path: Path) -> None:
    for _ in range(2):
        tuner.module.main(["--output", str(tmp_path / "shipped.json")])
        table = json.loads((tmp_path / "shipped.json").read_text())
        assert table["configurations"] == {"old/fake/bfloat16": {"ROWS": 1}, "new/fake/bfloat16": {"ROWS": 2}}
        assert table["sources"].pop("new/fake/bfloat16").startswith(f"torch {torch.__version__}, triton ")
        assert table["sources"] == {"fake": "before"}
        assert set(table) == {"configurations", "sources"}


def test_a_file_of_one_s_own_keeps_what_an_earlier_run_found(tuner: Tuner, tmp_path: Path) -> None:
    for row in ("new/fake/bfloat16", "newer/fake/bfloat16"):
        tuner.row = row
        tuner.module.main(["--output", str(tmp_path / "own.json")])
    rows = json.loads((tmp_path / "own.json").read_text())["configurations"]
    assert set(rows) == {"old/fake/bfloat16", "new/fake/bfloat16", "newer/fake/bfloat16"}


def test_candidates_of_both_kinds_of_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_memory, "runs_kernels_by_hand", lambda: True)
    job = tune_memory.Job("block_forward", 128)
    found = [config for _, config in tune_memory.to_compile([job])]
    assert {"num_warps": 4} in found
    assert any("STAY" in config and config["num_warps"] == 4 for config in found)


@pytest.mark.parametrize("why", ["nothing is right", "no time"])
def test_a_table_is_written_only_if_something_was_found(tuner: Tuner, why: str, tmp_path: Path) -> None:
    before = (tmp_path / "shipped.json").read_text()
    tuner.row = "" if why == "nothing is right" else tuner.row
    seconds = [] if why == "nothing is right" else ["--seconds", "-1"]
    for output in ("shipped.json", "other.json"):
        with pytest.raises(SystemExit, match="nothing was found"):
            tuner.module.main(["--output", str(tmp_path / output), *seconds])
    assert (tmp_path / "shipped.json").read_text() == before
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize("module", [tune, tune_memory])
def test_tuners_refuse_names_that_are_not_there(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner = Tuner(module, tmp_path / "shipped.json", monkeypatch)
    option, known = ("--cases", "short 64, fp16") if module is tune else ("--kernels", "norm_backward")
    with pytest.raises(SystemExit) as left:
        module.main([option, known, "nope"])
    assert left.value.code == 2
    assert not tuner.compiled
    line = capsys.readouterr().err.splitlines()[-1]
    assert "nope" in line.split("there are")[0] and known not in line.split("there are")[0]
    assert known in line.split("there are")[1]


@pytest.mark.parametrize("table", [tuning.TUNED, memory_tuning.TUNED], ids=lambda path: path.stem)
def test_every_row_that_ships_has_a_source(table: Path) -> None:
    shipped = json.loads(table.read_text())
    assert set(shipped) == {"configurations", "sources"}
    for row in shipped["configurations"]:
        source = shipped["sources"].get(row) or shipped["sources"][row.split("/")[1]]
        assert re.match(r"torch \S+, triton \S+, 20\d\d-\d\d-\d\d", source)


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
