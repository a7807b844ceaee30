"""Kernels for matrix products, attention and sampling: one backend per kind of processor."""
