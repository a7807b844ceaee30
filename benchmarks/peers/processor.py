"""What the processor is and has, from /proc/cpuinfo, and how to pretend an older one.

The names of instruction sets are those of Linux (/proc/cpuinfo). A benchmark's results are stored
per processor, under a short name such as "amd-epyc-avx512bf16" or "intel-xeon-amx".
"""

import re
from dataclasses import dataclass
from pathlib import Path

from minigen.hardware import cpu_name
from tools.portability.environments import AVX2_ALONE, SSE4_ALONE, WITH_VNNI, WITH_VNNI_512

CPUINFO = Path("/proc/cpuinfo")
SHOWN = {  # as /proc/cpuinfo names it -> as the tables do, the best first
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
    "asimddp": "NEON dotprod",
    "i8mm": "NEON i8mm",
    "bf16": "NEON bf16",
}
LEVEL_OF = {  # the first that a processor has ends its short name (table.py shows it)
    "amx_int8": "amx",
    "avx512_bf16": "avx512bf16",
    "avx512f": "avx512",
    "avx2": "avx2",
    "i8mm": "i8mm",
    "asimddp": "dotprod",
    "asimd": "neon",
}
NO_NAMES = {"processor", "cpu", "gen"}
_AVX2 = {"avx", "avx2", "fma", "f16c", "bmi2"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PRETENDED = {
    "sse4": {"ssse3", "sse4_1", "sse4_2", "popcnt"},
    "avx2": _AVX2,
    "avx2-vnni": {*_AVX2, "avx_vnni"},
    "avx512": {*_AVX512, "avx512_vnni", "avx512_bf16"},
}
VARIABLES = {  # with which minigen's processes pretend
    "sse4": SSE4_ALONE,
    "avx2": AVX2_ALONE,
    "avx2-vnni": WITH_VNNI,
    "avx512": WITH_VNNI_512,
}


@dataclass(frozen=True)
class Processor:
    """A name, the instruction sets, and which processor is pretended instead, if any."""

    name: str
    features: frozenset[str]
    pretended: str | None = None

    @classmethod
    def present(cls, pretended: str | None = None) -> "Processor":
        """Return the processor of this machine; it has no known features without /proc/cpuinfo."""
        return cls(cpu_name(), features_in(_cpuinfo()), pretended)

    @property
    def can_pretend(self) -> bool:
        """Whether this processor has all that the pretended one has; true if none is pretended."""
        return self.pretended is None or PRETENDED[self.pretended] <= self.features

    @property
    def usable(self) -> frozenset[str]:
        """The instruction sets that an engine may use: fewer if a processor is pretended."""
        if self.pretended is None:
            return self.features
        return self.features & PRETENDED[self.pretended]

    @property
    def short_name(self) -> str:
        """The name of the files of results.

        >>> Processor("Intel(R) Xeon(R) Processor", frozenset({"avx2", "amx_int8"})).short_name
        'intel-xeon-amx'
        >>> Processor("AMD EPYC 9R14", frozenset({"avx2", "avx512f"}), "avx2").short_name
        'amd-epyc-avx512-avx2'
        """
        words = re.findall(r"[a-z]{3,}\d*", self.name.lower())
        named = [word for word in words if word not in NO_NAMES][:2]
        level = next((short for has, short in LEVEL_OF.items() if has in self.features), None)
        parts = [*(named or ["processor"]), level, self.pretended]
        return "-".join(part for part in parts if part)

    @property
    def instructions(self) -> list[str]:
        """The usable instruction sets that matter here, as the tables name them."""
        return [shown for name, shown in SHOWN.items() if name in self.usable]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which minigen pretends."""
        return {} if self.pretended is None else dict(VARIABLES[self.pretended])


def features_in(cpuinfo: str) -> frozenset[str]:
    """Return the features of the first processor in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, listed = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86; ARM
            return frozenset(listed.split())
    return frozenset()


def _cpuinfo() -> str:
    return CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
