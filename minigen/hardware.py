"""What torch and the system report about this machine, and how to give memory back to it."""

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

_THREADS_AT_START = torch.get_num_threads()
_CPUINFO = Path("/proc/cpuinfo")


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


def arm_features() -> frozenset[str]:
    """Return `neon`, `dotprod` and `i8mm` as far as this ARM processor has them, in LLVM's names.

    On a processor of another kind the result is empty. Linux and macOS say what there is (arm64's
    elf_hwcaps.rst; Apple, "Determining instruction set characteristics"); elsewhere it is `neon`.
    """
    if platform.machine().lower() not in ("arm64", "aarch64"):
        return frozenset()
    if platform.system() == "Linux":
        words = _CPUINFO.read_text(encoding="utf-8", errors="replace").split()
        has = {"dotprod": "asimddp" in words, "i8mm": "i8mm" in words}
    else:
        has = {
            "dotprod": _system_number("hw.optional.arm.FEAT_DotProd") == 1,
            "i8mm": _system_number("hw.optional.arm.FEAT_I8MM") == 1,
        }
    return frozenset({"neon", *(name for name, present in has.items() if present)})


def _system_number(name: str) -> int:
    """Return an integer that macOS knows by this name, or 0."""
    if platform.system() != "Darwin":
        return 0
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return value.value


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 multiply instructions, so that such products are fast."""
    return bool(cpu_features() & {"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"})


class _Threads:
    """Torch's thread count as the caller left it, and as minigen last set it."""

    of_caller, set_here = _THREADS_AT_START, 0

    def look(self) -> int:
        now = torch.get_num_threads()
        if now not in (1, self.set_here):
            self.of_caller = now
        return self.of_caller


_THREADS = _Threads()


def torch_threads() -> int:
    """Return torch's thread count as the program that uses minigen left it.

    Models change it: a split model to its share, and a compiled step to one thread. To get one
    thread, set the engine's `threads` option.
    """
    return _THREADS.look()


def set_torch_threads(num_threads: int) -> None:
    """Set torch's thread count for a model, and remember what it was."""
    _THREADS.look()
    _THREADS.set_here = num_threads
    torch.set_num_threads(num_threads)


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
