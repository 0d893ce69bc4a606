"""Schema, encoding, datasets, reader, synthetic world and checks."""
