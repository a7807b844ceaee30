"""How llama.cpp is compiled for a processor.

Its options are those of its ggml/CMakeLists.txt; what a build has in it stands in its system info.
"""

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
}
AMX = "AMX_INT8"
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
        return {"CMAKE_ARGS": " ".join(f"-D{option}" for option in (*COMMON, *self.options))}

    def problem(self, report: str) -> str:
        """Return what is wrong with a build that reports this about itself, or an empty string."""
        has = {part.split(" = ")[0].strip() for part in report.replace(":", "|").split("|")}
        if missing := [each for each in self.wanted if each not in has]:
            return f"the build lacks {', '.join(missing)}"
        if excess := [each for each in self.unwanted if each in has]:
            return f"the build has {', '.join(excess)}"
        return ""


def llama_cpp_build(processor: Processor) -> Build:
    """Return the build that is the fastest of those that work on this processor."""
    usable = tuple(shown for name, shown in FEATURES.items() if name in processor.usable)
    by_hand = ("GGML_NATIVE=OFF", "GGML_SSE42=ON", *(f"GGML_{each}=ON" for each in usable))
    if processor.pretended is not None:
        beyond = tuple(each for each in FEATURES.values() if each not in usable)
        about = "compiled for AVX2 and no more (GGML_NATIVE=OFF)"
        return Build(processor.pretended, by_hand, usable, (*beyond, AMX), about)
    if "amx_int8" in processor.usable:
        about = (
            "compiled with AVX-512, but without AMX (GGML_NATIVE=OFF, the AVX-512 options by "
            "hand), because its AMX code ends with a signal on quantized weights"
        )
        return Build("without-amx", by_hand, usable, (AMX,), about)
    return Build("native", ("GGML_NATIVE=ON",), usable, (), "compiled natively (GGML_NATIVE=ON)")
