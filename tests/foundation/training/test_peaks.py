from __future__ import annotations

import pytest
import torch

from foundation.training.peaks import device_peak, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA L40S", "bf16", 362.1),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA B200", "mxfp8", 4500.0),
    ],
)
def test_devices_are_known_by_their_names(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tflops * 1e12)


def test_what_is_not_in_the_table_has_no_peak() -> None:
    assert peak_flops("NVIDIA GB200", "bf16") is None  # not a B200: another clock
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert device_peak(torch.device("cpu"), "fp32") is None
