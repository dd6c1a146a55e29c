"""Benchmarks: `python -m bench ROUTINE [--json]`."""
