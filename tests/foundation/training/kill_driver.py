"""Trains in processes that are killed with SIGKILL, again and again, and writes down what each of them did.

`main` runs in a process that has imported everything, and only that; each attempt is a fork of it. FOLDER/result.json
says per attempt which checkpoint it went on from, which rows it saw in which step, and how it ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundation.training import checkpoint_files, checkpoint_writer, hashing_writer, train
from foundation.training.checkpoint_writer import CheckpointConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.loop import Loop
from tests.foundation.training import small_run

EVERY = 3
"""Steps between saves."""

Moment = tuple[str, int]
"""("write", 7): at the 7th write to a checkpoint's files. ("step", 7): when the 7th step is heard of, from outside."""


class Child:
    """What happens in a forked process: a run whose hooks tell the parent, and kill at the chosen moment."""

    def __init__(self, pipe: int, moment: Moment | None) -> None:
        self._pipe, self._moment = pipe, moment
        self._count: dict[str, int] = {}

    def tell(self, **what: Any) -> None:
        """One line to the parent; short enough to arrive whole."""
        os.write(self._pipe, (json.dumps(what) + "\n").encode())

    def at(self, what: str) -> None:
        """Counts a moment, and dies if it is the one."""
        self._count[what] = self._count.get(what, 0) + 1
        if self._moment == (what, self._count[what]):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, module: Any, name: str, what: str) -> None:
        """Makes a function count before it runs."""
        function = getattr(module, name)

        def call(*args: Any, **rest: Any) -> Any:
            self.at(what)
            return function(*args, **rest)

        setattr(module, name, call)

    def run(self, data: Path, out: Path, epochs: int) -> None:
        """The command that is always the same."""
        step, resume = Loop._step, train.resume_from

        def told_step(loop: Loop, delivered: Any) -> None:
            self.tell(step=loop.state.progress.step + 1, ids=delivered.batch.impression_id.tolist())
            step(loop, delivered)

        def told_resume(checkpoint: Path, *rest: Any) -> Any:
            answer = resume(checkpoint, *rest)
            self.tell(loaded=checkpoint.name)
            return answer

        Loop._step, train.resume_from = told_step, told_resume  # type: ignore[method-assign]
        self.before(hashing_writer._HashingFile, "write", "write")
        self.before(checkpoint_files, "commit", "commit")
        self.before(checkpoint_files.os, "rename", "rename")
        self.before(checkpoint_files, "atomic_write", "pointer")
        self.before(checkpoint_writer, "prune", "prune")
        config = small_run.config(
            data,
            out,
            epochs=epochs,
            resume=True,
            checkpoint=CheckpointConfig(every=EVERY, keep=2),
            evaluation=EvaluationConfig(every=4 * EVERY, batch_size=128),
        )
        train.train(config)
        self.tell(counts=self._count)


def in_fork(function: Callable[[int], None], log: Path, watch: Callable[[dict[str, Any], int], None]) -> int:
    """Runs a function in a fork of this process; the answer is its exit status, negative for a signal."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reads)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            function(writes)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads) as lines:
        for line in lines:
            watch(json.loads(line), pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def unfinished(out: Path) -> set[tuple[str, int]]:
    """Name and inode of the checkpoints that are not whole."""
    return {(path.name, path.stat().st_ino) for path in (out / "checkpoints").glob("step-*.tmp")}


def attempt(folder: Path, out: Path, epochs: int, moment: Moment | None) -> dict[str, Any]:
    """One process on the run, and what it told."""
    told: dict[str, Any] = {"out": out.name, "moment": moment, "loaded": None, "steps": []}

    def watch(line: dict[str, Any], pid: int) -> None:
        if "step" in line:
            told["steps"].append([line["step"], line["ids"]])
            if moment == ("step", len(told["steps"])):
                os.kill(pid, signal.SIGKILL)
        told.update({key: value for key, value in line.items() if key in ("loaded", "counts")})

    data, before = folder / "data", unfinished(out)
    told["ended"] = in_fork(lambda pipe: Child(pipe, moment).run(data, out, epochs), folder / f"{out.name}.log", watch)
    told["unfinished"] = sorted(name for name, _ in unfinished(out) - before)
    latest = out / "checkpoints" / "latest"
    told["latest"] = latest.read_text() if latest.is_file() else None
    if told["latest"]:
        whole = checkpoint_files.find_checkpoint(out / "checkpoints")
        checkpoint_files.verify_files(whole, checkpoint_files.read_manifest(whole))
    return told


def write_data(path: Path, requests: int) -> None:
    """The dataset; in a fork too, since Arrow starts threads."""
    small_run.dataset(path, train_requests=requests)


def main(folder: Path, kills: int, requests: int, epochs: int, seed: int) -> None:
    """A run that is left alone, then runs that are killed until there were so many kills, each taken to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    in_fork(lambda _: write_data(folder / "data", requests), folder / "data.log", lambda *_: None)
    attempts = [attempt(folder, folder / "whole", epochs, None)]
    counts = attempts[0]["counts"]
    saves, steps = counts["commit"], len(attempts[0]["steps"])
    span = 2 * steps // kills + EVERY  # so that the kills are spread over the run
    draw = random.Random(seed)
    killed, number = 0, 0
    while killed < kills or attempts[-1]["ended"] != 0:
        what = draw.choice(["step", "step", "write", "write", "commit", "rename", "pointer", "prune"])
        within = span if what == "step" else max(1, counts[what] * span // EVERY // saves)
        moment = (what, draw.randint(1, within)) if killed < kills else None
        number += attempts[-1]["ended"] == 0
        attempts.append(attempt(folder, folder / f"killed-{number}", epochs, moment))
        assert attempts[-1]["ended"] in (0, -signal.SIGKILL), (folder / f"killed-{number}.log").read_text()[-3000:]
        killed += attempts[-1]["ended"] == -signal.SIGKILL
    (folder / "result.json").write_text(json.dumps(attempts))
