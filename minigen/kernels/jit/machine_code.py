"""Compiled functions that Python calls, loaded from the disk without starting the compiler.

To import Numba takes time and tens of megabytes, and a process that only runs machine code needs
neither its types nor its wrappers. So a function here takes one argument, a pointer to 64-bit
words: every number and every array of its arguments in order, an array as its address and its
shape. `Flat` writes the words; `minigen.kernels.jit.compiler` compiles the code that reads them.
LLVM links the code, which calls nothing but the C library and `SYMBOLS`.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from minigen.kernels.jit import code_cache

if os.name == "nt":
    _SLEEP = ctypes.windll.kernel32.Sleep  # type: ignore[attr-defined]
else:
    _SLEEP = ctypes.CDLL(None).usleep
SYMBOLS = {"minigen_sleep": ctypes.cast(_SLEEP, ctypes.c_void_p).value}
Entry = Callable[[Any, Any, bytes], int]
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_RETURNED_NOTHING = (0, -2)  # Numba's status codes of a function without a result
_UNUSED = ctypes.create_string_buffer(16)  # where it would write a result, or an exception


class Flat:
    """Arguments as 64-bit words, with a text that describes their types; made once, passed often.

    `values` are numbers, contiguous arrays, named tuples of them, or other `Flat` objects. Arrays
    are read and written in place, and live as long as this object.
    """

    __slots__ = ("layout", "values", "words")

    values: list[Any]
    layout: str
    words: bytes

    def __init__(self, *values: Any):
        words: list[int] = []
        layout: list[str] = []
        parts: list[bytes] = []
        self.values = []
        for value in values:
            if type(value) is Flat:
                parts += [_packed(words), value.words]
                words = []
                layout.append(value.layout)
                self.values += value.values
            else:
                _flatten(value, words, layout)
                self.values.append(value)
        self.layout = "".join(layout)
        self.words = b"".join((*parts, _packed(words)))


def _packed(words: list[int]) -> bytes:
    return struct.pack(f"{len(words)}q", *words)


def _flatten(value: Any, words: list[int], layout: list[str]) -> None:
    kind = type(value)
    if kind is np.ndarray:
        if not value.flags.c_contiguous:
            raise TypeError("a compiled function takes contiguous arrays: use np.ascontiguousarray")
        words.append(_address(value))
        words.extend(value.shape)
        layout.append(f"{value.dtype.str}[{value.ndim}]")
    elif kind is int or kind is np.int64:
        words.append(int(value))
        layout.append("i")
    elif isinstance(value, tuple):
        layout.append(f"{kind.__name__}(")
        for each in value:
            _flatten(each, words, layout)
        layout.append(")")
    elif kind is bool or kind is np.bool_:
        words.append(int(value))
        layout.append("b")
    elif kind is float or kind is np.float32:
        code = "d" if kind is float else "f"
        words.append(int.from_bytes(struct.pack(code, value), sys.byteorder))
        layout.append(code)
    else:
        raise TypeError(f"a compiled function takes numbers and arrays, not {kind.__name__}")


def _address(array: np.ndarray) -> int:
    """Return where an array begins; a buffer knows that five times as fast as the array."""
    buffer: Any = array  # its type hints lack that it is one
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # it is read-only, or empty
        return array.ctypes.data


class CompiledFunction:
    """A function of `module` that a kernel's compiler understands, called from Python.

    Its arguments are numbers, arrays, named tuples of them, or a `Flat` of any of these; it returns
    nothing. It runs without Python's global lock. For new types of arguments its machine code is
    loaded from `code_cache.FOLDER`, or compiled and stored there, so its source must be among those
    that give this folder its name.
    """

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> None:
        """Run the function; a `RuntimeError` says that it raised an exception."""
        flat = Flat(*arguments)
        entry = self._entries.get(flat.layout) or self._load(flat)
        status = entry(_UNUSED, _UNUSED, flat.words)
        if status not in _RETURNED_NOTHING:
            raise RuntimeError(f"{self.module}.{self.name} raised an exception (status {status})")

    def path(self, layout: str) -> Path | None:
        """Return the file of the machine code for these types; None if no folder can be written."""
        if code_cache.FOLDER is None:
            return None
        types = sha256(layout.encode()).hexdigest()[:16]
        return code_cache.FOLDER / f"{self.module.rpartition('.')[2]}.{self.name}-{types}.code"

    def _load(self, flat: Flat) -> Entry:
        layout = flat.layout
        with self._lock:
            if layout not in self._entries:
                path = self.path(layout)
                stored = None if path is None else read_code(path)
                if stored is None:
                    from minigen.kernels.jit.compiler import compile_function

                    stored = compile_function(self.module, self.name, flat.values)
                    if path is not None:
                        write_code(path, *stored)
                self._entries[layout] = linked(*stored)
        return self._entries[layout]


def read_code(path: Path) -> tuple[str, bytes] | None:
    """Return a symbol and its object code; None if the file is missing or damaged."""
    try:
        symbol, digest, code = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    return (symbol.decode(), code) if sha256(code).hexdigest().encode() == digest else None


def write_code(path: Path, symbol: str, code: bytes) -> None:
    """Write what `read_code` returns; other processes see all of the file or nothing.

    A full or read-only disk is no error: then the next process compiles again.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(b"\n".join((symbol.encode(), sha256(code).hexdigest().encode(), code)))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)


_ENGINES: list[Any] = []  # of the code that is in use, to the end of the process


def linked(symbol: str, code: bytes) -> Entry:
    """Return the function `symbol` of some object code, ready to be called."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    entry: Entry = _ENTRY(engine.get_function_address(symbol))
    return entry


@cache
def add_symbols() -> None:
    """Let machine code of this process call `SYMBOLS`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in SYMBOLS.items():
        llvm.add_symbol(name, address)


def _target_machine() -> Any:
    add_symbols()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(jit=True, codemodel="jitdefault")
