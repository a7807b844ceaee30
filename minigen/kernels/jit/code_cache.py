"""The machine code of the kernels on disk, which a process reuses once another has compiled it.

Numba's own cache only checks the path and the age of the outermost function's file. Here the
folder's name is a hash of all sources, the versions, and the processor: what another version of
minigen or of Numba has compiled is never found.
"""

import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import add_symbol, get_host_cpu_name, parse_assembly, parse_bitcode
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.runtime import _nrt_python  # type: ignore[attr-defined]

import minigen.kernels.cpu
from minigen.engine import model_runner
from minigen.hub import cache_folder
from minigen.kernels.cpu.amx.tiles import USE_TILES
from minigen.kernels.cpu.simd import kernel, target_features

SOURCES = Path(minigen.kernels.cpu.__path__[0])
BESIDE = (Path(__file__), Path(model_runner.__file__))  # the latter has `Packed`, an argument


def fingerprint() -> str:
    """Return a hash of all that the machine code depends on."""
    digest = hashlib.sha256()
    for source in (*BESIDE, *sorted(SOURCES.rglob("*.py"))):
        digest.update(source.read_bytes())
        digest.update(f"{source} {source.stat().st_mtime_ns}".encode())
    cpu_name: str | None = numba.config.CPU_NAME  # type: ignore[attr-defined]
    facts = (
        *(version(package) for package in ("numba", "llvmlite", "numpy")),
        version("torch"),  # whose speed is measured beside the code's
        str(sys.implementation.cache_tag),
        cpu_name or get_host_cpu_name(),
        target_features(),
        f"AMX tiles: {USE_TILES}",  # the system may refuse them
    )
    for fact in facts:
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def usable_folder(wanted: Path, temporary: Path) -> Path | None:
    """Return `wanted` if it can be written; else a folder of this user below `temporary`, or None.

    The latter gets a copy of what `wanted` holds, because Numba reads only folders that it can
    write. Numba unpickles what it reads, so a folder that another user could have written is None.
    """
    if _can_write(wanted):
        return wanted
    user = os.getuid() if hasattr(os, "getuid") else "user"
    own = temporary / f"minigen-kernels-{user}"
    if not (_can_write(own, mode=0o700) and _is_private(own)):
        return None
    copy = own / wanted.name
    if wanted.is_dir() and not copy.exists():
        _copy_at_once(wanted, copy)
    return copy if _can_write(copy) else None


def _copy_at_once(source: Path, target: Path) -> None:
    """Copy a folder so that other processes see all of it or nothing; keep one that is there."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = shutil.copytree(source, Path(folder, "copy"))
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o700)  # it may come from a read-only folder
        with suppress(OSError):  # another process was faster
            fresh.rename(target)


def _can_write(folder: Path, mode: int = 0o777) -> bool:
    try:
        if not folder.is_dir():
            folder.mkdir(mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_private(folder: Path) -> bool:
    """Return whether the folder is this user's, and no other user can write to it."""
    found = folder.lstat()
    if not hasattr(os, "getuid"):  # Windows, where each user has a temporary folder
        return stat.S_ISDIR(found.st_mode)
    alone = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and alone


WANTED = cache_folder() / "kernels" / fingerprint()
FOLDER = usable_folder(WANTED, Path(tempfile.gettempdir()))


class _CodeAlone(CompileResultCacheImpl):
    """How a compiled function is stored: as machine code, without what its callers would inline.

    Numba also stores the function's own intermediate code, for compiled functions that call it.
    Python calls all functions here; to read the intermediate code of a step takes 13 MB. In its
    place are the names that the machine code defines, as variables.
    """

    def reduce(self, cres: Any) -> Any:
        """Return what is stored of a compiled function."""
        (name, kind, (code, bitcode)), *rest = super().reduce(cres)
        module = parse_bitcode(bitcode)
        symbols = (*module.functions, *module.global_variables)
        defined = [each.name for each in symbols if not each.is_declaration]
        names = "\n".join(f'@"{each}" = global i8 0' for each in defined)
        return (name, kind, (code, parse_assembly(names).as_bitcode())), *rest

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Return a compiled function; a compiled caller of it is a `RuntimeError` of Numba's."""
        cres = super().rebuild(target_context, payload)
        cres.library._shared_module = None  # else the variables would be linked as functions
        return cres


class KernelCache(FunctionCache):
    """Numba's cache of a function's machine code, which does not start the compiler to load it.

    Numba's own registers everything that the compiler knows first, from Unicode to linear algebra,
    which takes longer than to load a whole step. It also compiles its memory management. Machine
    code that has been compiled needs only the C functions of that. If a signature is not in the
    cache, the compiler does all that itself.
    """

    _impl_class = _CodeAlone

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for this signature, or None if it is not in the cache."""
        try:
            for name, function in _nrt_python.c_helpers.items():
                add_symbol(name if name.startswith("_") else f"NRT_{name}", function)
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except AttributeError:  # another version of Numba calls these parts otherwise
            return super().load_overload(sig, target_context)


def cached_njit(function: Callable[..., Any], counts_references: bool = True) -> Any:
    """Apply `numba.njit`, with the machine code kept in `FOLDER` and without Python's lock.

    Without `counts_references`, it is a `minigen.kernels.cpu.simd.kernel`.
    """
    compiler: Any = numba.njit if counts_references else kernel
    dispatcher: Any = partial(compiler, nogil=True)(function)
    if FOLDER is not None:
        settings: Any = numba.config
        before = settings.CACHE_DIR
        settings.CACHE_DIR = str(FOLDER)
        try:
            dispatcher._cache = KernelCache(function)
        finally:
            settings.CACHE_DIR = before
    return dispatcher


def is_compiled(form: str, kv_dtype: str = "bfloat16") -> bool:
    """Return whether the step for this form of weights and of KV cache is already compiled.

    An empty mark is none: a full disk or a crash leaves one.
    """
    if FOLDER is None:
        return False
    mark = _mark(FOLDER, form, kv_dtype)
    return mark.exists() and mark.stat().st_size > 0


def speeds(form: str) -> dict[str, float]:
    """Return the weights per second measured with one token when the step was compiled here.

    The keys are "compiled" for this form, and "bfloat16" and "float32" for torch; the dictionary is
    empty if the step is not compiled yet.
    """
    if FOLDER is None or not is_compiled(form):
        return {}
    found: dict[str, float] = json.loads(_mark(FOLDER, form, "bfloat16").read_text("utf-8"))
    return found


def report_compiled(form: str, kv_dtype: str, measured: Mapping[str, float]) -> None:
    """Record in `FOLDER` that the step for these forms is compiled, and its measured speeds."""
    if FOLDER is None:
        return
    mark = _mark(FOLDER, form, kv_dtype)
    new = mark.with_name(f"{mark.name}.{os.getpid()}")  # a reader sees all of the file or none
    new.write_text(json.dumps(measured), encoding="utf-8")
    new.replace(mark)


def _mark(folder: Path, form: str, kv_dtype: str) -> Path:
    cache = "" if kv_dtype == "bfloat16" else f".{kv_dtype}-cache"
    return folder / f"{form}{cache}.compiled.json"
