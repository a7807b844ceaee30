"""Checks of the Triton kernels: on a GPU, or in Triton's interpreter (`TRITON_INTERPRET=1`)."""
