"""`minigen doctor`: what this machine can run, what it cannot, and what would help."""

import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table

from minigen import hub
from minigen.errors import MinigenError
from minigen.machine import cpu_features, cpu_name, multiplies_bfloat16, num_cores

_TELLING_FEATURES = (
    *("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    *("neon", "sve", "bf16", "i8mm"),
)
_PACKAGES = ("torch", "numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub")
_BUFFER_BYTES = 256 * 1024 * 1024  # larger than any cache, small enough for any machine


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and the remedy if it lacks."""

    topic: str
    found: str
    fine: bool = True
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything that decides what minigen can do here; takes a few seconds."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("processor", f"{cpu_name()}, {num_cores()} cores usable")
    yield _instruction_sets()
    yield Finding("memory bandwidth", f"{read_bandwidth():.1f} GB/s, reading with all threads")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield Finding(f"matmul {name}", f"{matmul_rate(dtype):,.0f} GFLOP/s")
    yield _kernels()
    yield _gpu()
    yield _compiler()
    yield _triton()
    yield Finding("packages", ", ".join(f"{each} {_version(each)}" for each in _PACKAGES))
    yield _default_model()


def print_report() -> None:
    """Print every finding as it is made, then what to do about those that lack."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    findings = []
    with console.status("measuring this machine"):
        for finding in examine():
            findings.append(finding)
            mark = "[green]ok[/green]" if finding.fine else "[yellow]--[/yellow]"
            table.add_row(mark, f"[bold]{finding.topic}[/bold]", finding.found)
    console.print(table)
    remedies = [finding for finding in findings if finding.remedy]
    if remedies:
        console.print()
    for finding in remedies:
        console.print(f"[bold]{finding.topic}[/bold]: {finding.remedy}")


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes read per second in GB/s (10^9), the best of several sums over a large buffer."""
    buffer = torch.ones(_BUFFER_BYTES // 4)
    return _BUFFER_BYTES / _best_time(buffer.sum, repeats) / 1e9


def matmul_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """GFLOP/s of a square product in `dtype`, the best of several."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / _best_time(lambda: left @ right, repeats) / 1e9


def _best_time(work: object, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _instruction_sets() -> Finding:
    features = cpu_features()
    telling = [each for each in _TELLING_FEATURES if each in features]
    found = ", ".join(telling) or "unknown to this torch"
    if multiplies_bfloat16():
        return Finding("instruction sets", found)
    remedy = "no instructions for bfloat16, so weights='auto' computes in float32"
    return Finding("instruction sets", found, fine=False, remedy=remedy)


def _kernels() -> Finding:
    if find_spec("numba") is None:
        remedy = "pip install 'minigen[cpu]' for faster kernels; torch serves without"
        return Finding("numba", "not installed", fine=False, remedy=remedy)
    from minigen.kernels.compiled import is_compiled, speeds

    compiled = {form: speeds(form) for form in ("int4", "int8", "bfloat16")}
    told = [f"{form} {found['compiled'] / 1e9:.0f}" for form, found in compiled.items() if found]
    if not told:
        remedy = "minigen compile, once; torch serves until then"
        return Finding("numba", f"{_version('numba')}, no kernels compiled", False, remedy)
    of_torch = next(found for found in compiled.values() if found)
    told += [f"torch's {form} {of_torch[form] / 1e9:.0f}" for form in ("bfloat16", "float32")]
    found = f"{_version('numba')}, billion weights multiplied a second: {', '.join(told)}"
    in_bytes = [form for form in compiled if is_compiled(form, "int8")]
    if in_bytes:
        found += f"; also for a KV cache in int8: {', '.join(in_bytes)}"
    if all(compiled.values()):
        return Finding("numba", found)
    return Finding("numba", found, fine=False, remedy="minigen compile, once, for the other forms")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", "none that torch can use; everything runs on the CPU")
    properties = torch.cuda.get_device_properties(0)
    found = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    note = "minigen computes there if told so: --device cuda"
    return Finding("gpu", f"{found}, CUDA {torch.version.cuda}; {note}")


def _compiler() -> Finding:
    found = next((each for each in ("cc", "gcc", "clang", "cl") if shutil.which(each)), None)
    if found:
        return Finding("compiler", str(shutil.which(found)))
    remedy = "a C compiler is needed for Triton on a GPU only; nothing else misses it"
    return Finding("compiler", "none", fine=False, remedy=remedy)


def _triton() -> Finding:
    if find_spec("triton") is not None:
        return Finding("triton", _version("triton"))
    if platform.system() != "Linux":
        return Finding("triton", "none; it exists for Linux only, and nothing here needs it")
    return Finding("triton", "not installed; only kernels for a GPU need it (pip install triton)")


def _default_model() -> Finding:
    try:
        path = hub.find(hub.DEFAULT_MODEL)
    except MinigenError as error:
        return Finding("default model", str(error), fine=False, remedy="minigen pull")
    if path is None:
        remedy = f"minigen pull fetches {hub.DEFAULT_MODEL}; any command that needs it does so too"
        return Finding("default model", "not pulled yet", fine=False, remedy=remedy)
    return Finding("default model", str(path))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version"
