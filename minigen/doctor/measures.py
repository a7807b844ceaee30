"""Measures memory bandwidth and matrix multiplication on this machine, in about a second."""

import time
from collections.abc import Callable

import torch

_PATIENCE_SECONDS = 2.0
_BUFFER_BYTES = 256 * 1024 * 1024  # larger than any cache, small enough for any machine


def read_bandwidth(repeats: int = 5) -> float:
    """Return the memory bandwidth in GB/s (10^9): the best of several sums of a large buffer."""
    buffer = torch.ones(_BUFFER_BYTES // 4)
    return _BUFFER_BYTES / _best_time(buffer.sum, repeats) / 1e9


def matmul_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Return the GFLOP/s of a square matrix product in `dtype`, the best of several runs."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / _best_time(lambda: left @ right, repeats) / 1e9


def _best_time(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest time in seconds, without the first run; slow work runs only twice."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= repeats and sum(times) < _PATIENCE_SECONDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])
