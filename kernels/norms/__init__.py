"""RMS norm and layer norm over the last dim, with gate and residual."""

from kernels.norms.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
