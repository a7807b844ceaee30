"""How fast this machine reads memory and multiplies matrices, taken in a second."""

import time
from collections.abc import Callable

import torch

_PATIENCE_SECONDS = 2.0
_BUFFER_BYTES = 256 * 1024 * 1024  # larger than any cache, small enough for any machine


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes read per second in GB/s (10^9), the best of several sums over a large buffer."""
    buffer = torch.ones(_BUFFER_BYTES // 4)
    return _BUFFER_BYTES / _best_time(buffer.sum, repeats) / 1e9


def matmul_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """GFLOP/s of a square product in `dtype`, the best of several."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / _best_time(lambda: left @ right, repeats) / 1e9


def _best_time(work: Callable[[], object], repeats: int) -> float:
    """The shortest time but the first; one is enough where it takes seconds, as bfloat16 may."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= repeats and sum(times) < _PATIENCE_SECONDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])
