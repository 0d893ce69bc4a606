"""What all tests share: one thread per process, and reasons for the tests that do not run here."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

from foundation.data.onnx_runtime import SWITCH

# Before numpy and torch are imported: the tests run in several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before onnxruntime is, which tests do themselves.
os.environ.setdefault(SWITCH, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure() -> None:
    """Takes the clock out of Hypothesis, and lets Ctrl-C reach the processes that tests start.

    A shell that starts pytest in the background ignores the signal for its children, and what is ignored stays ignored
    in theirs.
    """
    # How long an example takes says how busy the machine is, not whether the code is right.
    hypothesis.settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what the imports leave, a million objects, out of every later collection of garbage.

    Training collects when it begins and ends, and each of the tests that train would look at all of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips slow tests without --slow and gpu tests without a CUDA device, each with its reason."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with `make test PYTEST_ARGS=--slow`"))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="gpu: there is no CUDA device"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Lets go of the GPU memory that a test took, since other processes of the run may need it."""
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()
