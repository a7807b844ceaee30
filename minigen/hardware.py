"""What torch reports about this machine, and how to return memory to the operating system."""

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

_THREADS_AT_START = torch.get_num_threads()


def cpu_features() -> frozenset[str]:
    """Return the CPU's instruction sets (`avx2`, `avx512_bf16`, ...); empty if unknown."""
    return frozenset(name for name, value in _capabilities().items() if value is True)


def cpu_name() -> str:
    """Return the CPU's model name, or its architecture if the name is unknown."""
    name = str(_capabilities().get("cpu_name", ""))
    if name in ("", "Unknown"):  # torch reports this for some ARM processors
        return platform.processor() or platform.machine()
    return name


def _capabilities() -> Mapping[str, Any]:
    get: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return get()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 multiply instructions, so that such products are fast."""
    return bool(cpu_features() & {"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"})


def torch_threads() -> int:
    """Return torch's thread count; if it is 1, return the count when minigen was imported.

    Compiled steps leave torch at one thread. To get one thread, set the engine's `threads` option.
    """
    now = torch.get_num_threads()
    return _THREADS_AT_START if now == 1 else now


_MADV_DONTNEED = 4  # unmap these pages now; those of a file stay in the system's page cache
_MADV_PAGEOUT = 21  # Linux 5.4: reclaim these pages now; the next access reads them again


def page_out(data: UInt8[Tensor, "rows row_bytes"], is_mapped_file: bool = False) -> None:
    """Return the memory of bytes that may be mapped from a file to the operating system.

    They stay readable. With `is_mapped_file`, which must be true of all of them and of no memory
    that was written to, the file stays in the page cache, so that the next process need not read
    the disk.
    """
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-data.data_ptr() // page) * page
    end = (data.data_ptr() + data.numel()) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start),
            ctypes.c_size_t(end - start),
            _MADV_DONTNEED if is_mapped_file else _MADV_PAGEOUT,
        )
