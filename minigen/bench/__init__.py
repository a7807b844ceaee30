"""Benchmarks of a model or a server under load, and their reports."""
