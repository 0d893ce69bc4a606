"""Memory of GPUs: how much there is and how fast it is, from NVIDIA's datasheets (see `foundation.training.peaks`)."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY: tuple[tuple[str, float, float], ...] = (
    ("B200", 180.0, 7700.0),
    ("H200 NVL", 141.0, 4800.0),
    ("H200", 141.0, 4800.0),
    ("H100 PCIe", 80.0, 2000.0),
    ("H100 NVL", 94.0, 3900.0),
    ("H100", 80.0, 3350.0),
    ("A100 40GB", 40.0, 1555.0),
    ("A100", 80.0, 2039.0),
    ("L40S", 48.0, 864.0),
    ("L4", 24.0, 300.0),
)
"""Part of the device's name, GB, and GB/s; the first match counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU's memory, and bytes per second that it reads and writes at best."""

    bytes: float
    speed: float

    @staticmethod
    def of(name: str) -> DeviceMemory:
        """Looks a device up.

        Raises:
            ValueError: it is not in the table; the message lists what is.
        """
        words = name.replace("-", " ").split()
        for known, gb, gbs in _MEMORY:
            if all(word in words for word in known.split()):
                return DeviceMemory(bytes=gb * 1e9, speed=gbs * 1e9)
        raise ValueError(f"gpu: nothing is known of {name!r}; known: {', '.join(known for known, *_ in _MEMORY)}")
