"""The teacher: data, model, parallelism and training. Imports kernels."""
