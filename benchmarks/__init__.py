"""Benchmarks; each runs alone, or all run with `python -m benchmarks`."""
