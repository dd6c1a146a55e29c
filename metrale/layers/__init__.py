"""Layers: weights and op calls through the backend contract. Nothing here allocates or computes inside a step."""
