"""ONNX Runtime without its telemetry: from 1.29 on, its Linux packages tell Microsoft what they load.

That begins when the package is imported, and an environment variable is the only switch by then; so it is imported
here alone.
"""

from __future__ import annotations

import os
from types import ModuleType

SWITCH = "ORT_DISABLE_TELEMETRY"


def onnx_runtime() -> ModuleType:
    """The package `onnxruntime`. Nobody is told of its use, and nothing is written below the home folder.

    Raises:
        ValueError: it is not installed.
    """
    os.environ.setdefault(SWITCH, "1")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs the package {error.name}, which is not installed; see the README, Installation"
        ) from error
    return onnxruntime
