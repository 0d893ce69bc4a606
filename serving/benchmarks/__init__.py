"""Benchmarks of the server, each a command."""
