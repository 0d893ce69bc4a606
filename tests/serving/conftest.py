"""A live server for the tests of this folder, with two versions of one model and a second model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.app import Addresses, ServeConfig, running
from serving.model import ModelLimits
from tests.serving.model_folder import write_model

# A proxy of the environment has no business between two ends of one machine.
os.environ["no_grpc_proxy"] = "127.0.0.1,::1,localhost"  # noqa: SIM112 - gRPC reads the small letters


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """feed/1, feed/2 and reels/1, whose value needs a bid. Do not change these folders."""
    root = tmp_path_factory.mktemp("models")
    write_model(root, version=1, seed=1)
    write_model(root, version=2, seed=2)
    write_model(root, name="reels", seed=3, value="click * bid")
    return root


@pytest.fixture(scope="session")
def server(models: Path) -> Iterator[Addresses]:
    """Serves `models`; tests that load, unload or stop start one of their own."""
    config = ServeConfig(
        models=models,
        http_port=0,
        grpc_port=0,
        keep_versions=2,
        limits=ModelLimits(max_candidates=600, max_requests=8),
    )
    with running(config) as addresses:
        yield addresses
