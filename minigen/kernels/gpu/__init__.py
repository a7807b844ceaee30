"""Kernels in Triton, each beside its plain-torch twin; nothing else of minigen needs Triton."""
