"""Products of feature interaction."""

from kernels.interaction.op import fm_block
from kernels.interaction.reference import products_first

__all__ = ["fm_block", "products_first"]
