"""The files that users copy to launch training are well formed, and the commands in them are accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from foundation.data.options import parse_config
from foundation.data.settings import preset
from foundation.parallel.topology import Topology, layout
from foundation.training.train import TrainConfig

LAUNCH = Path(__file__).resolve().parents[1] / "docs" / "launch"
GUIDE = LAUNCH.with_suffix(".md")


def accepted(words: list[str]) -> tuple[Any, TrainConfig]:
    """What torchrun and the command behind it make of their arguments."""
    launcher = get_args_parser().parse_args(words)
    assert launcher.module and launcher.training_script == "opengem"
    command, *arguments = launcher.training_script_args
    assert command == "train"
    config: TrainConfig = parse_config(TrainConfig, arguments, name="train")
    return launcher, config


def check(launcher: Any, config: TrainConfig) -> None:
    """The run can go on by itself, and its topology has the ranks that are started."""
    assert config.resume and config.checkpoint.every and int(launcher.max_restarts) > 0
    topology = Topology.load(config.topology)
    assert topology.ranks == int(launcher.nnodes.split(":")[-1]) * int(launcher.nproc_per_node)
    layout(config.parallel, topology)


def test_the_slurm_script() -> None:
    path = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    values = dict(re.findall(r"^([A-Z]+)=\$\{\1:-(.*)\}$", text, re.MULTILINE))
    values |= {"SLURM_NNODES": options["nodes"], "SLURM_JOB_ID": "1", "HEAD": "host"}
    line = text.split("torchrun", 2)[-1].replace("\\\n", " ")
    for name, value in values.items():
        line = line.replace(f"${name}", value)
    assert "$" not in line
    launcher, config = accepted(shlex.split(line))
    assert launcher.nproc_per_node == options["gpus-per-node"] and options["ntasks-per-node"] == "1"
    check(launcher, config)
    assert preset(values["CONFIG"]).is_file()


def test_the_kubernetes_manifest() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    launcher, config = accepted(container["args"])
    check(launcher, config)
    assert int(launcher.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(launcher.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert launcher.rdzv_endpoint == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("number", [0, 1])
def test_the_lines_of_the_guide(number: int) -> None:
    blocks = re.findall(r"```\n(torchrun .*?)\n```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    line = blocks[number].replace("\\\n", " ").replace("CONFIG", "foundation/tiny").removeprefix("torchrun")
    launcher, config = accepted(shlex.split(line))
    check(launcher, config)
