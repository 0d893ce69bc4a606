"""How the foundation model is placed on processes and devices."""
