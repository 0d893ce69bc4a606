"""What the operators share: their registration, checks of inputs, launches, attention kernels, tuned configurations."""
