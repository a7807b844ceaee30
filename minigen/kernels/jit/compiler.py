"""Compile a function for Python's use: an entry reads its arguments from words and calls it.

The words are those of `minigen.kernels.jit.machine_code.Flat`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, typeof, types
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from minigen.kernels.cpu.simd import kernel

_WORD = ir.IntType(64)


def compile_function(module: str, name: str, values: Sequence[Any]) -> tuple[str, bytes]:
    """Return the entry's symbol and object code for arguments of the types of `values`."""
    function = getattr(import_module(module), name)
    if not isinstance(function, Dispatcher):
        function = kernel(function)
    arguments = _reader(types.Tuple([type_of(each) for each in values]))

    def entry(words):
        function(*arguments(words))

    options: Any = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Any = njit(types.void(types.CPointer(types.int64)), **options)(entry)
    (result,) = compiled.overloads.values()
    _, _, (code, _) = result.library.serialize_using_object_code()
    return result.fndesc.llvm_func_name, code


def type_of(value: Any) -> Any:
    """Return Numba's type of an argument; arrays are contiguous and can be written."""
    if isinstance(value, np.ndarray):
        return types.Array(from_dtype(value.dtype), value.ndim, "C")
    if isinstance(value, tuple):
        return types.BaseTuple.from_types([type_of(each) for each in value], type(value))
    return typeof(value)


def _reader(whole: Any) -> Any:
    """Return an intrinsic that reads a tuple of this type from a pointer to words."""

    @intrinsic
    def arguments(typingctx: Any, words: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _Words(context, builder, args[0]).read(whole)

        return whole(words), codegen

    return arguments


class _Words:
    """Emits the code that reads values of any type from words, one after the other."""

    def __init__(self, context: Any, builder: Any, pointer: Any):
        self.context, self.builder, self.pointer = context, builder, pointer
        self.next = 0

    def read(self, kind: Any) -> Any:
        if isinstance(kind, types.BaseTuple):
            kinds: Any = kind  # its type hints lack this
            values = [self.read(each) for each in kinds.types]
            return self.context.make_tuple(self.builder, kind, values)
        if isinstance(kind, types.Array):
            return self._array(kind)
        word, target = self._word(), self.context.get_value_type(kind)
        if isinstance(target, ir.IntType):
            return word if target.width == _WORD.width else self.builder.trunc(word, target)
        if isinstance(target, ir.FloatType):
            word = self.builder.trunc(word, ir.IntType(32))
        return self.builder.bitcast(word, target)

    def _word(self) -> Any:
        self.next += 1
        return self.builder.load(self.builder.gep(self.pointer, [_WORD(self.next - 1)]))

    def _array(self, kind: Any) -> Any:
        array = self.context.make_array(kind)(self.context, self.builder)
        data = self.builder.inttoptr(self._word(), array.data.type)
        shape = [self._word() for _ in range(kind.ndim)]
        itemsize = self.context.get_abi_sizeof(self.context.get_data_type(kind.dtype))
        strides = [_WORD(itemsize)]
        for size in reversed(shape[1:]):
            strides.insert(0, self.builder.mul(strides[0], size))
        populate_array(
            array,
            data=data,
            shape=shape,
            strides=strides,
            itemsize=_WORD(itemsize),
            meminfo=None,
        )
        return array._getvalue()
