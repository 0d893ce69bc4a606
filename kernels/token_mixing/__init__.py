"""Linear maps over the tokens of each row of a batch, and sums of Kronecker products."""

from kernels.token_mixing.op import mix_tokens, sum_kron

__all__ = ["mix_tokens", "sum_kron"]
