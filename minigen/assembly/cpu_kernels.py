"""Compiles a step's kernels before a model runs on them, unless that is switched off.

The load waits for the compiler. It could begin at once in torch, and change over when the kernels
are ready. But then the text of an answer would depend on the moment of that change, all weights
would be in memory twice, and the two would share the cores: on two of them the compiler took 43 s
instead of 21, and torch generated half as many tokens per second. So waiting is ahead from some 340
tokens on, and gives the same tokens each time.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minigen.child_process import start_module
from minigen.config import EngineConfig
from minigen.errors import OptionError, SlowPathWarning

if TYPE_CHECKING:  # a machine that checks a GPU may lack their packages
    from minigen.hub import Progress
    from minigen.kernels.jit.compile_once import Kernels

VARIABLE = "MINIGEN_COMPILE_KERNELS"
_SETTINGS = ("auto", "never")
_CHILD = "minigen.kernels.jit.compile_process"
_NOT_COMPILED = "its kernels are not compiled yet: minigen compile"


@dataclass(frozen=True)
class Obstacle:
    """Why the compiled step does not run; `costs_speed` if the user loses by it, unasked."""

    reason: str
    costs_speed: bool = False


def may_compile(options: EngineConfig) -> bool:
    """Return whether a load compiles kernels. Raises `OptionError` for an unknown setting."""
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in _SETTINGS:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(_SETTINGS)}, not {setting!r}.")
    return options.compile_kernels == setting == "auto"


@dataclass(frozen=True)
class KernelSource:
    """Where a load gets its kernels: from the disk, or, if `may_compile`, from the compiler."""

    may_compile: bool
    progress: "Progress"

    def missing(self, form: str, kv_dtype: str = "bfloat16") -> str | None:
        """Return None if the kernels for these forms are on the disk now, or why they are not."""
        from minigen.kernels.jit.code_cache import is_compiled

        if is_compiled(form, kv_dtype):
            return None
        if not self.may_compile:
            return _NOT_COMPILED
        return compile_kernels(form, kv_dtype, self.progress)

    def prepare(self, form: str, kv_dtype: str = "bfloat16") -> None:
        """Compile kernels that have no torch twin, so that this process compiles them if need be.

        A warning says why nothing can be kept for the next process.
        """
        missing = self.missing(form, kv_dtype)
        if missing is not None and self.may_compile:
            warn_of_slow_path(
                f"Each process compiles the kernels for weights={form} again, for a minute, "
                f"because {missing}."
            )

    def obstacle(self, form: str) -> Obstacle | None:
        """Return why the step cannot run on compiled kernels for this form, if so."""
        missing = self.missing(form)
        return None if missing is None else Obstacle(missing, costs_speed=self.may_compile)


def kernel_source(options: EngineConfig, progress: "Progress | None") -> KernelSource:
    """Return where a load gets its kernels; without `progress`, lines go to stderr."""
    from minigen.hub import Lines

    return KernelSource(may_compile(options), Lines() if progress is None else progress)


def compile_kernels(form: str, kv_dtype: str, progress: "Progress") -> str | None:
    """Compile a step's kernels if no process has, and return None, or why that is impossible."""
    if not sys.executable:  # another program that has Python inside
        return "no Python can be started to compile its kernels"
    kernels = _step_kernels(form, kv_dtype)
    if kernels is None:
        return "no folder can be written to keep its kernels: set MINIGEN_HOME to one that can"
    from minigen.kernels.jit.compile_once import compile_once

    return compile_once(kernels, progress)


def _step_kernels(form: str, kv_dtype: str) -> "Kernels | None":
    """Return the kernels of a step for these forms of weights and KV cache.

    None if there is no folder in which a child process could leave them.
    """
    from minigen.kernels.jit.code_cache import FOLDER, WANTED, is_compiled
    from minigen.kernels.jit.compile_once import Kernels

    if FOLDER is None:
        return None
    cache = "" if kv_dtype == "bfloat16" else f" and kv_cache_dtype={kv_dtype}"
    how_often = "once for this processor and this version of minigen"
    if FOLDER != WANTED:
        how_often = f"until {FOLDER} is emptied ({WANTED} is not writable)"
    return Kernels(
        f"the CPU kernels for weights={form}{cache}",
        how_often,
        FOLDER / ".lock",  # one lock for all forms, because they share some functions
        lambda: is_compiled(form, kv_dtype),
        lambda log: start_module(_CHILD, form, kv_dtype, stdout=log, stderr=log),
    )


def warn_of_slow_path(text: str) -> None:
    """Warn of a slower path; by Python's default filter each text is shown once per process."""
    warnings.warn(text, SlowPathWarning, stacklevel=1)
