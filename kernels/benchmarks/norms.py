"""The speed of norms: ``python -m kernels.benchmarks.norms``.

Baselines: PyTorch's fused norm with gate and residual around it, eagerly and through ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import Pass, host_cost, measure_copy, print_table, size_of
from kernels.norms import add_rms_norm, layer_norm, rms_norm
from kernels.norms.op import _norm, _norm_backward

ROWS = {128: 1_000_000, 256: 500_000, 1024: 131_072, 4096: 32_768}
"""Rows by width; bf16."""


def layer(x: Tensor, other: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's layer norm."""
    return F.layer_norm(x, weight.shape, weight, bias)


def gated_rms(x: Tensor, other: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's RMS norm, gated."""
    return F.rms_norm(x, weight.shape, weight, 1e-6) * torch.sigmoid(gate)


def added_rms(x: Tensor, other: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's RMS norm of a sum, and the sum."""
    z = x + other
    return F.rms_norm(z, weight.shape, weight, 1e-6), z


FORMS: list[tuple[str, Callable[..., Tensor | tuple[Tensor, Tensor]], bool, bool, bool]] = [
    ("layer norm", layer, True, False, False),
    ("RMS norm, gate", gated_rms, False, True, False),
    ("RMS norm, residual", added_rms, False, False, True),
]
"""Name, PyTorch's form, and whether it has mean and bias, gate, residual."""


def passes(width: int, compiled: bool) -> list[Pass]:
    """Forward and backward of every form."""
    rows = ROWS[width]
    x, other, gate, grad, grad_z = torch.randn(5, rows, width, device="cuda").bfloat16()
    weight, bias = torch.rand(2, width, device="cuda").bfloat16()
    found = []
    for name, torch_form, center, gated, added in FORMS:
        parts = (other if added else None, gate if gated else None, weight, bias if center else None)
        options = (1e-5 if center else 1e-6, center, "sigmoid")
        leaves = [t.detach().requires_grad_() for t in (x, other, gate, weight, bias)]
        mine = [leaves[0], *(None if p is None else leaf for p, leaf in zip(parts, leaves[1:], strict=True))]
        used = [leaf for leaf in mine if leaf is not None]
        grads = (grad, grad_z) if added else (grad,)
        y, z = _norm(*mine, *options, torch.bfloat16)
        forms = {"torch": torch_form, **({"compiled": torch.compile(torch_form)} if compiled else {})}
        outputs = {key: form(*leaves) for key, form in forms.items()}
        results = (y, z) if added else (y,)
        saved = (z if added else x).detach()

        def forward(parts: tuple[Tensor | None, ...] = parts, options: tuple[object, ...] = options) -> object:
            return _norm(x, *parts, *options, torch.bfloat16)

        def backward(
            parts: tuple[Tensor | None, ...] = parts, options: tuple[object, ...] = options, saved: Tensor = saved,
            after: Tensor | None = grad_z if added else None,
        ) -> object:  # fmt: skip
            return _norm_backward(grad, after, saved, *parts[1:], *options)

        def gradients(outputs: object, used: list[Tensor] = used, grads: tuple[Tensor, ...] = grads) -> object:
            return torch.autograd.grad(outputs, used, grads, retain_graph=True)  # type: ignore[call-overload]

        def plain(form: Callable[..., object]) -> Callable[[], object]:
            def call() -> object:
                with torch.no_grad():
                    return form(x, other, gate, weight, bias)

            return call

        def back(outputs: object, gradients: Callable[[object], object] = gradients) -> Callable[[], object]:
            return lambda: gradients(outputs)

        case = f"{rows} rows of {width}, {name}"
        size = size_of(x, y, gate if gated else None, *((other, z) if added else ()))
        found.append(
            Pass(
                case=case, name="forward", size=size, eager=forward,
                baselines={key: plain(form) for key, form in forms.items()},
            )
        )  # fmt: skip
        size = size_of(grad, x, x, *((gate, gate) if gated else ()), *((grad_z,) if added else ()))
        found.append(
            Pass(
                case=case, name="backward", size=size, eager=back(results), kernels=backward,
                baselines={key: back(out) for key, out in outputs.items()},
            )
        )  # fmt: skip
    return found


def main() -> None:
    """Prints the table."""
    print_table((passes(width, compiled=width == 256) for width in ROWS), measure_copy())
    x, weight = torch.randn(8, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda")
    leaf = x.detach().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return rms_norm(x, weight)

    host_cost(
        [
            ("RMS norm, no gradients", forward),
            ("RMS norm, forward and backward", lambda: torch.autograd.grad(rms_norm(leaf, weight), leaf, x)),
            ("layer norm, no gradients", lambda: layer_norm(x, weight)),
            ("RMS norm of a sum", lambda: add_rms_norm(x, x, weight)),
        ]
    )


if __name__ == "__main__":
    command.run("norms", __doc__, main)
