"""Generalised dot-product attention: an element-wise activation in place of softmax."""

from kernels.gdpa.op import gdpa
from kernels.gdpa.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gdpa"]
