"""Equality and speed of spread models."""
