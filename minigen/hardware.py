"""What this machine can do, as far as torch tells, and how it gives memory back to the system."""

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

_THREADS_AT_START = torch.get_num_threads()


def cpu_features() -> frozenset[str]:
    """Names of the processor's instruction sets (`avx2`, `avx512_bf16`, ...); empty if unknown."""
    return frozenset(name for name, value in _capabilities().items() if value is True)


def cpu_name() -> str:
    """The processor's own name, or its architecture."""
    name = str(_capabilities().get("cpu_name", ""))
    if name in ("", "Unknown"):  # what torch says of some ARM processors
        return platform.processor() or platform.machine()
    return name


def _capabilities() -> dict[str, Any]:
    tell: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return tell()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products in bfloat16, so that they are fast."""
    return bool(cpu_features() & {"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"})


def torch_threads() -> int:
    """torch's thread count; where that is one, as compiled steps leave it, what torch began with.

    Whoever wants one thread says so to the engine.
    """
    now = torch.get_num_threads()
    return _THREADS_AT_START if now == 1 else now


_MADV_PAGEOUT = 21  # Linux 5.4: reclaim these pages now; they come back when they are touched


def page_out(data: UInt8[Tensor, "rows row_bytes"]) -> None:
    """Give the memory of a mapped file's bytes back to the system; they stay readable."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-data.data_ptr() // page) * page
    end = (data.data_ptr() + data.numel()) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT
        )
