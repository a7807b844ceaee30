"""Compile a function and all that it calls, with machine code for the outermost function only.

Numba makes each function that another one calls ready for Python, too: it adds two wrappers,
optimises the function with all its callees in it, and writes machine code. The outermost function's
machine code contains its callees already, so most of that is done again and again and never used.
Without it the kernels compile in half the time.

Numba has no option for this, so this module replaces parts of Numba. It is for a process that does
nothing else than compile: a function that was compiled as a callee cannot be called from Python
there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import PYFUNCTYPE, c_void_p, cast
from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target


@contextmanager
def only_outermost_code() -> Iterator[None]:
    """Give machine code only to functions that Python calls, while the block runs."""
    context = cpu_target.target_context
    codegen = context.codegen()
    depth = _Depth()
    replaced = {
        "create_cpython_wrapper": _unless_inner(depth, context.create_cpython_wrapper),
        "create_cfunc_wrapper": _unless_inner(depth, context.create_cfunc_wrapper),
        "get_executable": _uncallable_if_inner(depth, context.get_executable),
    }

    class Library(_Library):
        depth_of_compiler = depth

    codegen._library_class = Library
    vars(context).update(replaced)
    try:
        with event.install_listener("numba:compile", depth):
            yield
    finally:
        for name in replaced:
            del vars(context)[name]
        del codegen._library_class


class _Depth(event.Listener):
    """Counts the functions that are being compiled, each because the one before calls it."""

    depth = 0

    def on_start(self, event: Any) -> None:
        self.depth += 1

    def on_end(self, event: Any) -> None:
        self.depth -= 1

    @property
    def inner(self) -> bool:
        """Whether the function that is being compiled is called by another one."""
        return self.depth > 1


class _Library(JITCodeLibrary):
    """A function's code with its callees; the code of an inner function is only linked."""

    depth_of_compiler: _Depth

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inner = self.depth_of_compiler.inner

    def _optimize_final_module(self) -> None:
        if not self._inner:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self._inner:
            self._finalized = True
        else:
            super()._finalize_final_module()


def _unless_inner(depth: _Depth, create: Any) -> Any:
    return lambda *args, **named: None if depth.inner else create(*args, **named)


def _refuse(*_: object) -> None:
    """Return no object, which is a SystemError in Python."""


_REFUSE = PYFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p)(_refuse)


def _uncallable_if_inner(depth: _Depth, get_executable: Any) -> Any:
    def get(library: Any, fndesc: Any, env: Any) -> Any:
        if not depth.inner:
            return get_executable(library, fndesc, env)
        library._ensure_finalized()
        pointer = cast(_REFUSE, c_void_p).value
        about = fndesc.lookup_module(), fndesc.qualname.split(".")[-1], "a callee"
        return _dynfunc.make_function(*about, pointer, env, (library,))

    return get
