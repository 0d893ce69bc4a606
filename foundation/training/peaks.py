"""Peak rates of matrix products by device and precision: what MFU is a share of.

Dense rates (no structured sparsity) at the vendor's boost clock, in TFLOP/s, from NVIDIA's datasheets: A100 (2021),
H100 (2023), H200 (2023), L4 and L40S (2023), HGX B200 (2024). Datasheets that print rates with sparsity are halved.
"""

from __future__ import annotations

import torch

_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"fp32": 75.0, "bf16": 2250.0, "fp8": 4500.0, "mxfp8": 4500.0}),
    ("H200 NVL", {"fp32": 60.0, "bf16": 835.5, "fp8": 1671.0}),
    ("H200", {"fp32": 66.9, "bf16": 989.4, "fp8": 1978.9}),
    ("H100 PCIe", {"fp32": 51.2, "bf16": 756.4, "fp8": 1512.9}),
    ("H100 NVL", {"fp32": 60.0, "bf16": 835.5, "fp8": 1671.0}),
    ("H100", {"fp32": 66.9, "bf16": 989.4, "fp8": 1978.9}),
    ("A100", {"fp32": 19.5, "bf16": 312.0}),
    ("L40S", {"fp32": 91.6, "bf16": 362.1, "fp8": 733.0}),
    ("L4", {"fp32": 30.3, "bf16": 121.0, "fp8": 242.5}),
)
"""Part of the device's name, as `torch.cuda.get_device_name` gives it, and its rates; the first match counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak operations per second of one device.

    Args:
        device_name: `torch.cuda.get_device_name()`.
        precision: fp32, bf16, fp8 or mxfp8.

    Returns:
        None for a device or a precision that the table does not have.
    """
    words = device_name.replace("-", " ").split()
    for name, rates in _TFLOPS:
        if all(word in words for word in name.split()):
            return rates[precision] * 1e12 if precision in rates else None
    return None


def device_peak(device: torch.device, precision: str) -> float | None:
    """`peak_flops` of a device of this machine; None for a CPU, whose rate is not in the table."""
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
