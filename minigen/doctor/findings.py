"""Derives findings from a report's facts: one line per topic, with a remedy for each problem."""

from collections.abc import Iterator
from dataclasses import replace

from minigen.doctor.report import Finding, Report

_RELEVANT_FEATURES = (
    *("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    *("neon", "sve", "bf16", "i8mm"),
)
_PACKAGES = ("torch", "numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub")
_FORMS = ("int4", "int8", "bfloat16")


def with_findings(report: Report) -> Report:
    """Return the report with its findings."""
    return replace(report, findings=list(findings(report)))


def findings(report: Report) -> Iterator[Finding]:
    """Yield the findings of a report, topic by topic."""
    processor, system = report.processor, report.system
    yield Finding("python", f"{system.python} on {system.platform}")
    yield Finding("processor", f"{processor.name}, {processor.cores} cores usable")
    yield _instruction_sets(report)
    yield _memory(report)
    yield Finding("memory bandwidth", f"{report.speed.read:.1f} GB/s, reading with all threads")
    for form, rate in report.speed.matmul.items():
        yield Finding(f"matmul {form}", f"{rate:,.0f} GFLOP/s")
    yield _kernels(report)
    yield _gpu(report)
    yield _compiler(report)
    yield _triton(report)
    packages = (f"{each} {report.packages[each] or 'missing'}" for each in _PACKAGES)
    yield Finding("packages", ", ".join(packages))
    yield _variables(report)
    yield _default_model(report)
    yield _fingerprints(report)


def _instruction_sets(report: Report) -> Finding:
    relevant = [each for each in _RELEVANT_FEATURES if each in report.processor.features]
    found = ", ".join(relevant) or "unknown to this torch"
    if report.processor.multiplies_bfloat16:
        return Finding("instruction sets", found)
    remedy = "no bfloat16 instructions: where torch computes, weights='auto' takes float32"
    return Finding("instruction sets", found, fine=False, remedy=remedy)


def _memory(report: Report) -> Finding:
    names = ("total", "available", "limit")
    sizes = {name: getattr(report.memory, name) for name in names}
    known = [f"{size / 1e9:.1f} GB {name}" for name, size in sizes.items() if size is not None]
    return Finding("memory", ", ".join(known) or "not reported by this system")


def _kernels(report: Report) -> Finding:
    numba, speeds = report.packages["numba"], report.speed.weights
    if numba is None:
        remedy = "run pip install 'minigen[cpu]' for faster kernels; torch is used until then"
        return Finding("numba", "not installed", fine=False, remedy=remedy)
    by = f"prompts are multiplied by {report.kernels.instructions}"
    rates = [f"{form} {speeds[form] / 1e9:.0f}" for form in _FORMS if form in speeds]
    if not rates:
        remedy = "the first model that needs kernels compiles them; minigen compile does so now"
        return Finding("numba", f"{numba}, {by}, no kernels compiled", False, remedy)
    for form in ("bfloat16", "float32"):
        rates.append(f"torch's {form} {speeds[f'{form}, torch'] / 1e9:.0f}")
    found = f"{numba}, {by}, billion weights multiplied per second: {', '.join(rates)}"
    if report.kernels.compiled_for_int8_cache:
        in_bytes = ", ".join(report.kernels.compiled_for_int8_cache)
        found += f"; also compiled for an int8 KV cache: {in_bytes}"
    if set(_FORMS) <= set(speeds):
        return Finding("numba", found)
    remedy = "the first model in another weight format compiles it; minigen compile does so now"
    return Finding("numba", found, fine=False, remedy=remedy)


def _gpu(report: Report) -> Finding:
    gpu = report.gpu
    if report.torch.mps:
        return Finding("gpu", "an Apple GPU (MPS); minigen uses it with --device mps")
    if gpu is None:
        return Finding("gpu", "none that torch can use; everything runs on the CPU")
    note = "minigen uses it with --device cuda"
    found = f"{gpu.name}, {gpu.memory / 1e9:.0f} GB, CUDA {report.torch.cuda}"
    return Finding("gpu", f"{found}; {note}")


def _compiler(report: Report) -> Finding:
    if report.system.compiler is not None:
        return Finding("compiler", report.system.compiler)
    remedy = "only Triton on a GPU needs a C compiler, nothing else does"
    return Finding("compiler", "none", fine=False, remedy=remedy)


def _triton(report: Report) -> Finding:
    triton = report.packages["triton"]
    if triton is not None:
        return Finding("triton", triton)
    if "Linux" not in report.system.platform:
        return Finding("triton", "none; it exists only for Linux, and nothing here needs it")
    return Finding("triton", "not installed; only kernels for a GPU need it (pip install triton)")


def _variables(report: Report) -> Finding:
    given = {name: value for name, value in report.environment.items() if value is not None}
    return Finding("variables", ", ".join(f"{name}={given[name]}" for name in given) or "none set")


def _default_model(report: Report) -> Finding:
    model = report.model
    if model.status == "right":
        return Finding("default model", f"{model.path}, sha256 as published")
    if model.status == "damaged":
        found = f"{model.path} is damaged: its sha256 is not the published one"
        remedy = "minigen pull replaces it, and so does any command that needs it"
        return Finding("default model", found, fine=False, remedy=remedy)
    remedy = f"minigen pull fetches {model.name}, and so does any command that needs it"
    return Finding("default model", "not pulled yet", fine=False, remedy=remedy)


def _fingerprints(report: Report) -> Finding:
    hashes = [
        f"{form} {list(stages.values())[-1][:6]}"
        for form, stages in report.fingerprints.items()
        if stages
    ]
    return Finding("fingerprints", f"{'; '.join(hashes)} (two machines: --compare)")
