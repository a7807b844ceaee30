"""Triton kernels, each next to its twin in plain PyTorch."""
