"""GPU kernels, each with its plain-PyTorch reference. Imports nothing of the project."""
