"""Benchmarks of the model: commands that print a table."""
