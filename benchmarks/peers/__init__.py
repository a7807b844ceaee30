"""minigen and other engines, on one model and one machine: `python -m benchmarks.peers`."""
