"""Energy that a CUDA device has used, from the counter that its driver keeps (NVML)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


class EnergyMeter:
    """Reads the device's counter, which runs whether it is read or not: a reading costs well below a millisecond.

    Args:
        device: of this rank.

    Attributes:
        unknown: why there is no reading; empty where there is one.
    """

    def __init__(self, device: torch.device) -> None:
        self.unknown = ""
        self._handle: Any = None
        self._last = 0.0
        if device.type != "cuda":
            self.unknown = "there is no meter for a CPU"
            return
        if importlib.util.find_spec("pynvml") is None:
            self.unknown = "the package nvidia-ml-py is not installed"
            return
        self._nvml = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._last = self._read()
        except self._nvml.NVMLError as error:  # no driver, a device without a counter, or no right to read it
            self._handle, self.unknown = None, f"NVML: {error}"

    def joules(self) -> float | None:
        """Since the last call, or since the meter was made; None where it is not known."""
        if self._handle is None:
            return None
        try:
            now = self._read()
        except self._nvml.NVMLError as error:
            self._handle, self.unknown = None, f"NVML: {error}"
            return None
        used, self._last = now - self._last, now
        return used

    def _read(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
