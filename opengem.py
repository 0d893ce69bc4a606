"""The command line: one subcommand per stage.

A stage is a function that takes one config dataclass, whose fields are its options (`foundation.data.options`).
Nothing of a stage is imported before that stage is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OWN_PACKAGES = ("kernels", "foundation", "value_models", "transfer", "serving")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One row of the command table.

    Args:
        stage: "module:function"; the function takes one config and returns a result.
        config: name of the config dataclass in the same module.
        help: one line.
        torch: the stage imports torch, so the installation is checked first.
        positional: options that may be given in this order without their names.
    """

    stage: str
    config: str
    help: str
    torch: bool = True
    positional: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "demo": Command(
        stage="transfer.demo:demo",
        config="DemoConfig",
        help="the whole pipeline on a small synthetic world, ending in a report page",
    ),
    "world": Command(
        stage="foundation.data.world:world",
        config="WorldConfig",
        help="write the raw logs of a synthetic world whose true probabilities are known",
        torch=False,
    ),
    "prepare logs": Command(
        stage="foundation.data.prepare:prepare",
        config="PrepareConfig",
        help="raw logs and a schema to a dataset with point-in-time histories",
        torch=False,
    ),
    "prepare kuairand": Command(
        stage="foundation.data.kuairand:prepare_kuairand",
        config="KuaiRandConfig",
        help="the KuaiRand data set, full download or slice, to a dataset",
        torch=False,
    ),
    "doctor": Command(
        stage="foundation.data.doctor:doctor",
        config="DoctorConfig",
        help="check a dataset, or without one the installation",
        torch=False,
    ),
    "plan": Command(
        stage="foundation.parallel.preview.plan:plan",
        config="PlanConfig",
        help="memory, traffic and time of a training step on a cluster; launches nothing",
    ),
    "train": Command(
        stage="foundation.training.train:train",
        config="TrainConfig",
        help="train the foundation model",
    ),
    "report": Command(
        stage="foundation.training.ledger_report:report",
        config="ReportConfig",
        help="where a run's time went, as `report RUN` or beside another's as `report RUN RUN`",
        positional=("run", "against"),
    ),
    "checkpoint inspect": Command(
        stage="foundation.training.checkpoint_inspect:inspect_checkpoint",
        config="InspectConfig",
        help="print what a checkpoint holds and who wrote it, and verify its files",
    ),
    "checkpoint reshard": Command(
        stage="foundation.training.checkpoint_reshard:reshard",
        config="ReshardConfig",
        help="write a checkpoint again in another number of files",
    ),
    "checkpoint export": Command(
        stage="foundation.training.checkpoint_export:export_weights",
        config="WeightsConfig",
        help="write a checkpoint's weights as safetensors",
    ),
    "predict": Command(
        stage="foundation.training.predict:predict",
        config="PredictConfig",
        help="write a trained model's predictions for a split as Parquet",
    ),
    "score": Command(
        stage="transfer.score:score",
        config="ScoreConfig",
        help="write the label store: teacher logits and embeddings per impression",
    ),
    "distill": Command(
        stage="transfer.distill:distill",
        config="DistillConfig",
        help="train the value model of one surface, with a teacher or alone",
    ),
    "export": Command(
        stage="value_models.export:export",
        config="ExportConfig",
        help="write a value model as ONNX with its parity proof",
    ),
    "serve": Command(
        stage="serving.app:serve",
        config="ServeConfig",
        help="serve exported models over REST, gRPC and /rank",
        torch=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 for a user's error, 130 after Ctrl-C.

    Args:
        argv: arguments without the program's name; those of the process when None.
    """
    from foundation.data.commands import run_command

    return run_command(_dispatch, list(sys.argv[1:] if argv is None else argv))


def help_text(group: str = "") -> str:
    """What `opengem --help` prints, or `opengem GROUP --help` for commands of two words. Imports no stage."""
    names = _group(group) if group else list(COMMANDS)
    width = max(map(len, names))
    rows = "\n".join(f"  {name:<{width}}  {COMMANDS[name].help}" for name in names)
    return (
        "usage: opengem COMMAND [--config FILE] [--OPTION VALUE ...]\n\n"
        "From impression logs to a served, calibrated ranking.\n\n"
        f"commands:\n{rows}\n\n"
        "`opengem COMMAND --help` lists a command's options.\n"
    )


def load(command: Command) -> tuple[Callable[[Any], Any], type]:
    """Imports a command's stage: its function and its config dataclass.

    Raises:
        InstallationError: the stage needs torch, and torch, fbgemm and torchrec do not belong together.
        ValueError: a package that the stage needs is not installed.
    """
    from foundation.data.commands import nothing_to_tidy

    if command.torch:
        from foundation.data.installation import require_installation

        require_installation()
    module_name, function = command.stage.split(":")
    try:
        with nothing_to_tidy():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OWN_PACKAGES:
            raise
        raise ValueError(
            f"this command needs the package {error.name}, which is not installed;"
            " see the README, Installation (`make setup` installs everything)"
        ) from error
    return getattr(module, function), getattr(module, command.config)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text(), end="")
        return 0
    if len(arguments) == 2 and arguments[1] in ("-h", "--help") and _group(arguments[0]):
        print(help_text(arguments[0]), end="")
        return 0
    name, rest = _split_command(arguments)
    from foundation.data.options import parse_config

    function, config_class = load(COMMANDS[name])
    result = function(parse_config(config_class, _named(COMMANDS[name], rest), name=name))
    return int(getattr(result, "exit_code", 0))


def _named(command: Command, arguments: list[str]) -> list[str]:
    """Puts the names of positional options before the arguments that come without one at the start."""
    values = arguments[: len(command.positional)]
    count = next((place for place, value in enumerate(values) if value.startswith("-")), len(values))
    named = zip(command.positional, values[:count], strict=False)
    return [text for name, value in named for text in (f"--{name}", value)] + arguments[count:]


def _group(word: str) -> list[str]:
    """Commands of two words that begin with this one."""
    return [name for name in COMMANDS if name.split()[0] == word != name]


def _split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Finds the longest command name, one word or two, that the arguments start with."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    group = _group(arguments[0])
    if group:
        raise ValueError(f"`opengem {arguments[0]}` needs one of: {', '.join(group)}")
    raise ValueError(f"there is no command {arguments[0]!r}; commands are: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    sys.exit(main())
