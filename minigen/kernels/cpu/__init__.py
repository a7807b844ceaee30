"""CPU kernels, compiled by Numba; the rest of minigen works without them."""
