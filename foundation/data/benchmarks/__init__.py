"""Benchmarks of the data stages; each is a command that prints a table."""
