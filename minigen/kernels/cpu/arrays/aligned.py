"""Arrays that start at a cache line, so that no vector is loaded from two lines."""

import math
from typing import Any

import numpy as np

NUM_LANES = 16  # numbers of 32 bits in a vector: as long as a cache line
CACHE_LINE = 64


def zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros that start at a cache line; `np.zeros` mostly starts 16 bytes after one."""
    num_bytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    buffer = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    first = -buffer.ctypes.data % CACHE_LINE
    return buffer[first : first + num_bytes].view(dtype).reshape(shape)
