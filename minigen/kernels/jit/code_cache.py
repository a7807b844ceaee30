"""The machine code of the kernels on disk, which a process reuses once another has compiled it.

The folder's name is a hash of all sources, the versions, and the processor: what another version of
minigen or of Numba has compiled is never found.
"""

import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import minigen.kernels.cpu
from minigen.engine import model_runner
from minigen.hub import cache_folder
from minigen.kernels import processor
from minigen.kernels.cpu.amx.scratch import USE_TILES
from minigen.kernels.processor import cpu_name, target_features

SOURCES = Path(minigen.kernels.cpu.__path__[0])
BESIDE = (
    *(
        Path(__file__).with_name(f"{name}.py")
        for name in ("code_cache", "compiler", "machine_code")
    ),
    Path(processor.__file__),  # it chooses among the instructions
    Path(model_runner.__file__),  # it has `Packed`, an argument
)


def fingerprint() -> str:
    """Return a hash of all that the machine code depends on."""
    digest = hashlib.sha256()
    for source in (*BESIDE, *sorted(SOURCES.rglob("*.py"))):
        digest.update(source.name.encode() + source.read_bytes())
    facts = (
        *(version(package) for package in ("numba", "llvmlite", "numpy")),
        version("torch"),  # whose speed is measured beside the code's
        str(sys.implementation.cache_tag),
        cpu_name(),
        target_features(),
        f"AMX tiles: {USE_TILES}",  # the system may refuse them
    )
    for fact in facts:
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def usable_folder(wanted: Path, temporary: Path) -> Path | None:
    """Return `wanted` if it can be written; else a folder of this user below `temporary`, or None.

    The latter gets a copy of what `wanted` holds. What is read is run, so a folder that another
    user could have written is None.
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
