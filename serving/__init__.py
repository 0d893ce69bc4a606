"""The ranking server: Open Inference Protocol v2 and /rank over exported model folders."""
