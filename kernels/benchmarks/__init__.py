"""Speed of the kernels on a GPU, beside what PyTorch offers: ``python -m kernels.benchmarks.gdpa`` and others."""
