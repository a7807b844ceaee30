"""Run Triton kernels on the CPU in Triton's interpreter, and compile them before and after.

Triton decides when it is imported: under TRITON_INTERPRET=1 it interprets every kernel, otherwise
none. Here one process can do both, because the interpreter's changes to Triton's language are
undone. This module can be imported without Triton; its functions then raise `OptionError`.
"""

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from tokenize import TokenError
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from minigen.errors import OptionError
from minigen_course.grading.exercise import Wrong


def need_triton() -> None:
    """Raise `OptionError`, which says what to do, if Triton is not installed."""
    if find_spec("triton") is None:
        raise OptionError(
            "This needs Triton, which exists for Linux only: pip install 'minigen[gpu]' (on "
            "Windows inside WSL), or open the notebook on Colab. No GPU is needed. You can also "
            "just read on: the pages show every output."
        )


def triton_part(module: str) -> Any:
    """Import a module that needs Triton; raise `OptionError` if it is not installed."""
    need_triton()
    return import_module(module)


try:
    import triton.language as tl
except ImportError:
    language: Any = SimpleNamespace(constexpr=int)
    tl = language

__all__ = ["tl"]


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the elements of a tensor, without masked ones.

    `offsets` count elements in memory from the tensor's first one.
    """

    program: tuple[int, int, int]
    is_store: bool
    tensor: str
    offsets: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """The bytes that it moves."""
        return len(self.offsets) * self.itemsize


def bytes_moved(accesses: list[Access]) -> int:
    """Return the bytes of all loads and stores."""
    return sum(access.num_bytes for access in accesses)


def bytes_required(accesses: list[Access]) -> int:
    """Return the bytes if each element were loaded at most once and stored at most once."""
    once: dict[tuple[str, bool], set[int]] = {}
    sizes = {access.tensor: access.itemsize for access in accesses}
    for access in accesses:
        once.setdefault((access.tensor, access.is_store), set()).update(access.offsets)
    return sum(len(offsets) * sizes[tensor] for (tensor, _), offsets in once.items())


HAS_TRITON = find_spec("triton") is not None
_LAUNCH = RLock()  # the interpreter keeps the place in the grid in one variable of all threads

if HAS_TRITON:
    import triton
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError
    from triton.runtime.jit import JITFunction


@contextmanager
def interpreted() -> Generator[None, None, None]:
    """Run kernels in the interpreter, program by program, while the block runs.

    Their tensors must be on the CPU. Threads inside the block launch one kernel at a time. An error
    of a kernel is raised as it is. Raises `OptionError` if Triton is not installed.
    """
    need_triton()
    if JITFunction.run is _run:  # within another such block
        yield
        return
    places = _places()
    before = [(place, dict(vars(place))) for place in places]
    try:
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for name, member in dict(vars(tl.tensor)).items():
            if isinstance(member, JITFunction):
                setattr(tl.tensor, name, _method(member))
        with patch.object(JITFunction, "run", _run), patch.object(JITFunction, "__call__", _call):
            yield
    finally:
        for place, names in before:
            _put_back(place, names)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel: interpreted if its tensors are on a CPU, otherwise on their GPU.

    `kernel` may be a plain function, without `triton.jit`. Raises any error of the kernel,
    `TypeError` for what is no kernel, and `OptionError` if Triton is not installed.
    """
    kernel = inspect.unwrap(kernel)
    if not inspect.isfunction(getattr(kernel, "fn", kernel)):
        raise TypeError(f"{kernel!r} is no kernel; it should be a function.")
    if all(each.device.type == "cpu" for each in arguments if isinstance(each, Tensor)):
        with interpreted():
            _run(kernel, *arguments, grid=grid, warmup=False, **constants)
    else:
        compiled = _jit(kernel) if inspect.isfunction(kernel) else kernel
        compiled[grid](*arguments, **constants)


def record(run: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """Call `lab.programs.record_programs`; raise `OptionError` if Triton is missing."""
    need_triton()
    found: list[Access] = import_module("minigen_course.lab.programs").record_programs(
        run, **tensors
    )
    return found


def watched(run: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """Return the loads and stores of the kernel that `run` launches.

    Raises `Wrong` before an access outside its tensors, and if the kernel cannot be run here.
    """
    try:
        with np.errstate(all="ignore"):  # a GPU does not report overflows either
            return record(run, **tensors)
    except (IndexError, OptionError) as error:
        raise Wrong(str(error)) from None


def expect_numbers(found: Tensor, what: str, axes: Sequence[str]) -> None:
    """Raise `Wrong` if a result that was all nan before a kernel ran still has nan in it."""
    missing = found.isnan().nonzero()
    if len(missing):
        place = zip(axes, missing[0].tolist(), strict=True)
        where = ", ".join(f"{axis} {index}" for axis, index in place)
        raise Wrong(
            f"{what}: {len(missing)} of {found.numel()} numbers are nan, first at {where}; the "
            "kernel should store each. (Masked lanes and infinities lead to nan, too.)"
        )


def launched(
    part: Any,
    grid: tuple[int, ...],
    given: tuple[Any, ...],
    block: int,
    stored: Collection[str],
    **tensors: Tensor,
) -> list[Access]:
    """Launch a kernel that should store each element of the tensors in `stored` once, no others.

    Returns its loads and stores; raises `Wrong` for another store, or one outside the tensors.
    """
    accesses = watched(lambda: launch(part, grid, *given, BLOCK=block), **tensors)
    for name, tensor in tensors.items():
        if name in stored:
            expect_each(accesses, name, True, range(tensor.numel()))
        else:
            expect_only(accesses, name, True, ())
    return accesses


def expect_only(
    accesses: Iterable[Access], tensor: str, is_store: bool, allowed: Iterable[int]
) -> None:
    """Raise `Wrong` if another element of a tensor than these is loaded, or stored."""
    verb, left = "stores" if is_store else "loads", set(allowed)
    for access in accesses:
        if access.tensor == tensor and access.is_store == is_store:
            for offset in access.offsets:
                if offset not in left:
                    raise Wrong(
                        f"program {access.program} {verb} element {offset} of {tensor}; it should "
                        "not touch it."
                    )


def expect_each(
    accesses: Iterable[Access], tensor: str, is_store: bool, expected: Iterable[int], times: int = 1
) -> None:
    """Raise `Wrong` unless each of these elements is loaded, or stored, `times` times."""
    done, counts = "stored" if is_store else "loaded", Counter[int]()
    for access in accesses:
        if access.tensor == tensor and access.is_store == is_store:
            counts.update(access.offsets)
    for offset in expected:
        if counts[offset] != times:
            raise Wrong(
                f"element {offset} of {tensor} is {done} {_often(counts[offset])}; it should be "
                f"{done} {_often(times)}."
            )


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _places() -> tuple[Any, ...]:
    """Return the objects whose attributes the interpreter changes."""
    core = tl.core
    return tl, core, tl.math, tl.tensor, tl.dtype, tl.condition, core.tensor_descriptor_base


def _run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Replace `JITFunction.run`, which would look for a GPU."""
    function = kernel if inspect.isfunction(kernel) else kernel.fn
    try:
        with _LAUNCH:
            _interpretable(function).run(*arguments, grid=grid, warmup=warmup, **named)
    except InterpreterError as error:
        raise _cause(error) from None


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    """Replace the call of one jit function by another."""
    return _interpretable(function.fn).rewrite()(*arguments, **named)


@cache
def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@cache
def _interpretable(function: Callable[..., Any]) -> Any:
    return InterpretedFunction(_with_its_source(function))


def _with_its_source(function: Any) -> Any:
    """Return the function, or a copy without a file name if its source is not available.

    The interpreter rewrites the source that it finds. For a function from another process, or from
    a text, it would find the source of another function.
    """
    if _has_source(function):
        return function
    code = function.__code__.replace(co_filename="<kernel>")
    names = {"tl": tl, **function.__globals__}  # an empty kernel arrives without it
    own = function.__name__, function.__defaults__, function.__closure__
    alone = FunctionType(code, names, *own)
    alone.__annotations__, alone.__module__ = function.__annotations__, ""
    return alone


def _has_source(function: FunctionType) -> bool:
    """Return whether the source that Python finds for the function compiles to its code."""
    try:
        found = compile(textwrap.dedent(inspect.getsource(function)), "source", "exec")
    except (OSError, SyntaxError, TokenError):
        return False
    own = function.__code__
    codes = [each for each in found.co_consts if isinstance(each, CodeType)]
    return any((each.co_code, each.co_consts) == (own.co_code, own.co_consts) for each in codes)


def _method(function: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*arguments, **named)


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _put_back(place: Any, names: dict[str, Any]) -> None:
    for name in vars(place).keys() - names.keys():
        delattr(place, name)
    for name, value in names.items():
        if vars(place).get(name) is not value:
            setattr(place, name, value)
