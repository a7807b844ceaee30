"""How llama.cpp is compiled for a processor.

Its options are those of its ggml/CMakeLists.txt; what a build has in it stands in its system info.
"""

import shlex
from dataclasses import dataclass, field

from benchmarks.peers.processor import Processor

COMMON = ("LLAMA_BUILD_TESTS=OFF", "LLAVA_BUILD=OFF")
FEATURES = {  # as /proc/cpuinfo names it -> as llama.cpp's options and its system info do
    "f16c": "F16C",
    "fma": "FMA",
    "bmi2": "BMI2",
    "avx": "AVX",
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
ON_BY_DEFAULT = ("F16C", "FMA", "BMI2", "AVX", "AVX2")  # also without GGML_NATIVE
KEEP_STORES = "CMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"
SYSTEM_INFO = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"


@dataclass(frozen=True)
class Build:
    """CMake options, what the result must have and must not have, and a sentence for the table.

    `name` distinguishes the environments of several builds on one machine. `report` is Python code
    that prints what a build has.
    """

    name: str
    options: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    about: str = field(default="", repr=False)
    report: str = field(default=SYSTEM_INFO, repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which pip compiles it."""
        defined = [f"-D{option}" for option in (*COMMON, *self.options)]
        return {"CMAKE_ARGS": shlex.join(defined)}

    def problem(self, report: str) -> str:
        """Return what is wrong with a build that reports this about itself, or an empty string."""
        has = {part.split(" = ")[0].strip() for part in report.replace(":", "|").split("|")}
        if missing := [each for each in self.wanted if each not in has]:
            return f"the build lacks {', '.join(missing)}"
        if excess := [each for each in self.unwanted if each in has]:
            return f"the build has {', '.join(excess)}"
        return ""


def llama_cpp_build(processor: Processor) -> Build:
    """Return the build that is the fastest of those that work on this processor.

    llama.cpp's AMX code fills a structure and loads it with `_tile_loadconfig`. For GCC 12 this
    function reads only 8 of the 64 bytes, so an optimized build drops the other stores, and ends
    with SIGILL at the first product of quantized weights (GCC's amxtileintrin.h; llama.cpp's pull
    request 26954). Two options of GCC keep the stores.
    """
    usable = tuple(shown for name, shown in FEATURES.items() if name in processor.usable)
    has = f"its system info names {', '.join(usable) or 'no AVX'}"
    if processor.pretended is not None:
        wanted = {each: each in usable for each in (*ON_BY_DEFAULT, *usable)}
        switches = (
            f"GGML_{each}={'ON' if is_wanted else 'OFF'}" for each, is_wanted in wanted.items()
        )
        by_hand = ("GGML_NATIVE=OFF", "GGML_SSE42=ON", *switches)
        beyond = tuple(each for each in FEATURES.values() if each not in usable)
        about = f"compiled for this processor (GGML_NATIVE=OFF); {has}"
        return Build(processor.pretended, by_hand, usable, beyond, about)
    native = ("GGML_NATIVE=ON",)
    if "amx_int8" in processor.usable:
        about = (
            "compiled natively with AMX, and with -fno-tree-dse -fno-dse, because GCC otherwise "
            f"drops a part of the tile configuration and quantized weights end with SIGILL; {has}"
        )
        return Build("amx", (*native, KEEP_STORES), usable, (), about)
    return Build("native", native, usable, (), f"compiled natively; {has}")
