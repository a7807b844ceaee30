"""Kernels for the KV cache on a CPU: its layout in memory, and its formats."""
