"""Where compiled kernels are kept, so that a process starts with what an earlier one compiled.

Numba's own cache asks where the file of the outermost function stands and whether it changed; a
folder's name here tells of that, of all sources, of the versions, and of the processor.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba

from minigen.hub import cache_folder
from minigen.kernels import sample, step
from minigen.kernels.llvm import target_features


def _state() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
        digest.update(f"{source} {source.stat().st_mtime_ns}".encode())
    for fact in (version("numba"), version("llvmlite"), version("numpy"), target_features()):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


FOLDER = cache_folder() / "kernels" / _state()


def _compiled_once(function: Callable[..., Any]) -> Any:
    """`numba.njit` that keeps its machine code in `FOLDER` and lets go of Python's lock."""
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(FOLDER)
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        settings.CACHE_DIR = before


run_step = _compiled_once(step.run_step)
choose_rows = _compiled_once(sample.choose_rows)
likeliest_rows = _compiled_once(sample.likeliest_rows)


def is_compiled(form: str, kv_dtype: str = "bfloat16") -> bool:
    """Whether the step for weights of this form, and for such a cache, starts without compiling."""
    return _mark(form, kv_dtype).exists()


def speeds(form: str) -> dict[str, float]:
    """Weights a second that one token was multiplied with, when the step was compiled here.

    By "compiled", this form, and by torch's "bfloat16" and "float32"; empty before that.
    """
    if not is_compiled(form):
        return {}
    found: dict[str, float] = json.loads(_mark(form, "bfloat16").read_text("utf-8"))
    return found


def tell_compiled(form: str, kv_dtype: str, measured: Mapping[str, float]) -> None:
    """Remember that the step for these forms lies in `FOLDER`, and how fast it is."""
    if FOLDER.exists():  # it does not where nothing can be written
        _mark(form, kv_dtype).write_text(json.dumps(measured), encoding="utf-8")


def _mark(form: str, kv_dtype: str) -> Path:
    cache = "" if kv_dtype == "bfloat16" else f".{kv_dtype}-cache"
    return FOLDER / f"{form}{cache}.compiled.json"
