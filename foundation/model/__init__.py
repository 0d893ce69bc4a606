"""The foundation model: embeddings, tokens, layers and heads."""
