"""Softmax attention over packed sequences."""

from kernels.jagged_attention.op import jagged_attention

__all__ = ["jagged_attention"]
