"""What a training step will need, worked out without a device: memory, traffic, time."""
