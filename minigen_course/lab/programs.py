"""The loads and stores of each program instance of a kernel, from Triton's interpreter.

Needs tensors on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from minigen_course.lab.memory_watch import EachOperator
from minigen_course.lab.triton_interpreter import Access, interpreted

_MAKERS = ("empty", "empty_like", "zeros", "zeros_like", "full", "full_like")


def record_programs(launch: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """Run `launch` in the interpreter; return its accesses in order.

    `tensors` names all tensors that the kernel touches; a tensor that `launch` creates is "result",
    the next one "result 2". Raises `IndexError` before a program accesses anything outside of them,
    which on a GPU would be the memory of other data. If a load has a mask but no `other`, its
    masked lanes hold NaN or -1, because Triton does not define what they hold.
    """
    accesses: list[Access] = []
    known, num_made = dict(tensors), count(1)

    def name(function: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if function.overloadpacket.__name__ in _MAKERS:
            number = next(num_made)
            known["result" if number == 1 else f"result {number}"] = made[0]

    with interpreted(), _watching(accesses, known), EachOperator(name):
        launch()
    return accesses


@contextmanager
def _watching(accesses: list[Access], tensors: dict[str, Tensor]) -> Iterator[None]:
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def watched_load(ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        accesses.extend(_accesses(ptrs, mask, False, tensors))
        loaded = load(ptrs, mask, other, *rest, **named)
        if other is None and loaded.data.size > 1:  # one lane gets no 0 in Triton either
            loaded.data = _with_anything(loaded.data, mask.data)
        return loaded

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.extend(_accesses(ptrs, mask, True, tensors))
        return store(ptrs, value, mask, *rest)

    with (
        patch.object(interpreter_builder, "create_masked_load", watched_load),
        patch.object(interpreter_builder, "create_masked_store", watched_store),
    ):
        yield


def _with_anything(data: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the loaded data, with NaN or -1 where the mask left it out."""
    missing = np.nan if np.issubdtype(data.dtype, np.floating) else -1
    return np.where(mask.astype(bool), data, np.array(missing).astype(data.dtype))


def _accesses(ptrs: Any, mask: Any, is_store: bool, tensors: dict[str, Tensor]) -> list[Access]:
    """Return one access for each tensor that contains some of the unmasked addresses."""
    wanted = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
    addresses = ptrs.data[wanted].astype(np.int64)
    program, found, num_known = tuple(interpreter_builder.grid_idx), [], 0
    for name, tensor in tensors.items():
        places = addresses - tensor.data_ptr()
        inside = (places >= 0) & (places < _num_bytes(tensor))
        num_known += int(inside.sum())
        if inside.any():
            offsets = tuple((places[inside] // tensor.itemsize).tolist())
            found.append(Access(program, is_store, name, offsets, tensor.itemsize))
    if num_known < len(addresses):
        verb, beyond = "stores" if is_store else "loads", len(addresses) - num_known
        raise IndexError(
            f"Program {program} {verb} {beyond} elements outside of {', '.join(tensors)}: its mask "
            "must leave them out."
        )
    return found


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
