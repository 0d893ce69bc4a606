"""Products of feature interaction."""

from kernels.interaction.op import fm_block

__all__ = ["fm_block"]
