"""What this processor can do for the kernels, found out without starting their compiler.

`NEEDS` lists the ways to multiply bytes, the fastest first, with the instructions that each needs.
`minigen.kernels.cpu.dots` has the machine code for each.
"""

import os
from collections.abc import Collection
from platform import machine

from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from minigen.hardware import arm_features

IS_X86 = machine().lower() in ("x86_64", "amd64")
NEEDS = {
    "AVX-512 VNNI": "avx512vnni",
    "AVX-VNNI": "avxvnni",
    "AVX2": "avx2",
    "NEON i8mm": "neon dotprod i8mm",
    "NEON dotprod": "neon dotprod",
    "SSSE3": "ssse3",
    "SSE2": "x86-64",
    "plain vectors": "",
}
_WITHOUT_AVX = ("corei7-avx", "core-avx-i", "sandybridge", "ivybridge")  # Numba distrusts theirs


def cpu_name() -> str:
    """Return the processor's name in LLVM, or the one that NUMBA_CPU_NAME asks for."""
    return os.environ.get("NUMBA_CPU_NAME") or get_host_cpu_name()


def target_features() -> str:
    """Return the instruction sets that Numba compiles for, as LLVM writes them: "+avx2,-sse4a".

    They are those of this processor, unless NUMBA_CPU_FEATURES, NUMBA_CPU_NAME=generic or
    NUMBA_ENABLE_AVX=0 asks Numba for others. LLVM does not report all that the system knows of an
    ARM processor: its Host.cpp knows neither `dotprod` nor `i8mm`, and on macOS nothing.
    """
    requested = os.environ.get("NUMBA_CPU_FEATURES")
    if requested is not None:
        return requested
    if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        return ""
    try:
        features = get_host_cpu_features()
    except RuntimeError:
        found = ""
    else:
        default = "0" if cpu_name() in _WITHOUT_AVX else "1"
        if not int(os.environ.get("NUMBA_ENABLE_AVX", default)):
            for name in features:
                features[name] = features[name] and not name.startswith("avx")
        found = features.flatten()
    return ",".join(filter(None, [found, *(f"+{each}" for each in sorted(arm_features()))]))


def names_of(features: str) -> set[str]:
    """Return the names of the instruction sets in a text such as "+avx2,-sse4a"."""
    found = {each[1:] for each in features.split(",") if each.startswith("+")}
    return found | {"x86-64"} if IS_X86 else found  # every such processor has SSE2


def fastest_of(features: Collection[str]) -> str:
    """Return the name in `NEEDS` of the fastest way for these instructions."""
    return next(name for name, needs in NEEDS.items() if set(needs.split()) <= set(features))
