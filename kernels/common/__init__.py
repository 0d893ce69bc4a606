"""What the attention kernels share: activations, the kernels themselves, and their tuned configurations."""
