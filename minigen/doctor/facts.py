"""Examines this machine: everything that determines minigen's results and speed on it."""

import locale
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minigen import __version__, hub
from minigen.assembly.cpu import plan
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.config import EngineConfig
from minigen.doctor.findings import with_findings
from minigen.doctor.fingerprint import (
    TORCH_FORMS,
    compiled_forms,
    fingerprints,
    kernel_instructions,
)
from minigen.doctor.measures import matmul_rate, read_bandwidth
from minigen.doctor.report import (
    SCHEMA_VERSION,
    Code,
    Gpu,
    Kernels,
    Memory,
    Model,
    Processor,
    Report,
    Speed,
    System,
    Text,
    Threads,
    Torch,
)
from minigen.errors import MinigenError
from minigen.hardware import (
    cpu_features,
    cpu_name,
    multiplies_bfloat16,
    num_cores,
    torch_threads,
)

PACKAGES = tuple(
    """torch numpy numba llvmlite triton transformers tokenizers sentencepiece
    safetensors gguf jinja2 llguidance huggingface_hub filelock platformdirs jaxtyping
    beartype typer rich fastapi uvicorn pydantic prometheus_client aiohttp jupyterlab
    ipywidgets matplotlib jupytext nbclient nbformat latex2mathml cloudpickle psutil
    openai ollama scipy regex pytest pytest-xdist pytest-random-order import-linter
    hypothesis jsonschema nbval playwright schemathesis ruff mypy pyyaml codespell mkdocs
    mkdocs-material mkdocstrings-python nbgrader otter-grader compressed-tensors
    ml-dtypes packaging""".split()
)
VARIABLES = tuple(  # none of them contains a secret
    """OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES KMP_AFFINITY GOMP_CPU_AFFINITY
    MKL_NUM_THREADS MKL_CBWR MKL_ENABLE_INSTRUCTIONS MKL_DYNAMIC
    ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE
    NUMBA_CPU_NAME NUMBA_CPU_FEATURES NUMBA_NUM_THREADS NUMBA_DISABLE_JIT NUMBA_OPT
    TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION TRITON_F32_DEFAULT TRITON_CACHE_DIR
    NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE CUBLAS_WORKSPACE_CONFIG
    CUDA_VISIBLE_DEVICES MINIGEN_HOME MINIGEN_COMPILE_KERNELS HF_HOME HF_HUB_OFFLINE
    PYTHONHASHSEED PYTHONUTF8
    LD_PRELOAD LC_ALL LC_CTYPE LANG""".split()
)
_PACKAGE_FOLDER = Path(__file__).parent.parent


def examine() -> Report:
    """Collect all facts and measure the speed, in a few seconds."""
    num_threads = torch_threads()
    facts = Report(
        schema_version=SCHEMA_VERSION,
        minigen=Code(__version__, _commit()),
        system=System(
            python=platform.python_version(),
            implementation=platform.python_implementation(),
            platform=platform.platform(),
            compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "cl"))), None),
        ),
        processor=Processor(
            name=cpu_name(),
            architecture=platform.machine(),
            features=sorted(cpu_features()),
            multiplies_bfloat16=multiplies_bfloat16(),
            cores=num_cores(),
        ),
        threads=_threads(num_threads),
        memory=_memory(),
        torch=_torch(),
        gpu=gpu(),
        packages={each: _version(each) for each in PACKAGES},
        environment={each: os.environ.get(each) for each in VARIABLES},
        text=_text(),
        model=_default_model(),
        kernels=Kernels(compiled_forms(), compiled_forms("int8"), kernel_instructions()),
        speed=_speed(),
        fingerprints=fingerprints(num_threads),
        findings=[],
    )
    return with_findings(facts)


def gpu() -> Gpu | None:
    """Return the first GPU that torch can use, or None."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, found.total_memory, f"{found.major}.{found.minor}")


def _threads(num_threads: int) -> Threads:
    return Threads(num_threads, torch.get_num_interop_threads(), min(num_threads, num_cores()))


def _commit() -> str | None:
    """Return git's description of the checkout that contains this code, or None."""
    root = _PACKAGE_FOLDER.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    run = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, encoding="utf-8", check=False
    )
    return run.stdout.strip() or None


def _memory() -> Memory:
    total = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"MemAvailable: +(\d+) kB", _content("/proc/meminfo"))
    limit = _content("/sys/fs/cgroup/memory.max").strip()
    return Memory(
        total=total,
        available=None if found is None else int(found[1]) * 1024,
        limit=int(limit) if limit.isdecimal() else None,
    )


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _torch() -> Torch:
    build = torch.__config__.show()

    def line(pattern: str) -> str | None:
        found = re.search(pattern, build)
        return None if found is None else found[1].strip()

    return Torch(
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        git_version=str(torch.version.git_version),
        compiler=line(r"- ((?:GCC|clang|MSVC)[^\n]*)"),
        blas=line(r"BLAS_INFO=(\w+)"),
        onednn=line(r"MKL-DNN (v[\d.]+)"),
        onednn_enabled=torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        openmp=line(r"- OpenMP ([^\n]*)"),
        cuda=torch.version.cuda,
        mps=torch.backends.mps.is_available(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def _text() -> Text:
    return Text(
        locale=locale.setlocale(locale.LC_CTYPE),
        encoding=locale.getencoding(),
        file_names=sys.getfilesystemencoding(),
        utf8_mode=bool(sys.flags.utf8_mode),
    )


def _default_model() -> Model:
    name = hub.DEFAULT_MODEL
    path, sha256 = hub.verify(name), hub.SHORT_NAMES[name].sha256
    if path is None:
        pulled = hub.pulled_file(name)
        if pulled.is_file():
            return Model(name, "damaged", str(pulled), sha256, None)
        return Model(name, "missing", None, sha256, None)
    try:
        chosen = plan(open_checkpoint(path), EngineConfig(compile_kernels="never"))
    except MinigenError as error:
        return Model(name, "right", str(path), sha256, str(error))
    return Model(name, "right", str(path), sha256, f"{chosen.form}: {chosen.runner}")


def _speed() -> Speed:
    read = read_bandwidth()
    matmul = {form: matmul_rate(dtype) for form, dtype in TORCH_FORMS.items()}
    weights: dict[str, float] = {}
    for form in compiled_forms():
        from minigen.kernels.jit.code_cache import speeds

        found = speeds(form)
        weights[form] = found["compiled"]
        weights |= {f"{each}, torch": found[each] for each in TORCH_FORMS}
    return Speed(read, matmul, weights)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
