"""Benchmarks of training: commands that print a table."""
