"""Softmax attention inside blocks of 64 tokens."""

from kernels.block_attention.op import BLOCK, block_attention

__all__ = ["BLOCK", "block_attention"]
