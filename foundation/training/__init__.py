"""The training loop, metrics and checkpoints."""
