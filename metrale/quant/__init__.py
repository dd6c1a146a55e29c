"""Quantized formats as data, and slow, obvious references of their arithmetic."""
