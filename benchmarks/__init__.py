"""Times; each benchmark runs alone, or all with `python -m benchmarks`."""
