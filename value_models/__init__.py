"""The value models: small rankers, one per surface. Imports kernels and foundation.data."""
