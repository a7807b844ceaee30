"""Kernels in Triton, each beside its twin in plain PyTorch."""
