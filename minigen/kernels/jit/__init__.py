"""The machine code of Numba's kernels: where it is kept, and how it is compiled, once."""
