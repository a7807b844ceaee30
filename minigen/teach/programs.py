"""What each program instance of a kernel loads and stores, recorded from Triton's interpreter.

Needs `TRITON_INTERPRET=1` before Triton is imported, and tensors on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from minigen.teach.accesses import Access


def record_programs(launch: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """Run `launch` in the interpreter; returns its accesses in order.

    All tensors that the kernel touches are named. Raises `IndexError`, before anything is touched,
    where a program reaches outside of them: on a GPU that would be somebody else's memory.
    """
    accesses: list[Access] = []
    with _watching(accesses, tensors):
        launch()
    return accesses


@contextmanager
def _watching(accesses: list[Access], tensors: dict[str, Tensor]) -> Iterator[None]:
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def watched_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        accesses.extend(_accesses(ptrs, mask, False, tensors))
        return load(ptrs, mask, *rest)

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.extend(_accesses(ptrs, mask, True, tensors))
        return store(ptrs, value, mask, *rest)

    with (
        patch.object(interpreter_builder, "create_masked_load", watched_load),
        patch.object(interpreter_builder, "create_masked_store", watched_store),
    ):
        yield


def _accesses(ptrs: Any, mask: Any, is_store: bool, tensors: dict[str, Tensor]) -> list[Access]:
    """One access for each tensor that the addresses, where the mask lets them, lie in."""
    wanted = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
    addresses = ptrs.data[wanted].astype(np.int64)
    program, found, num_known = tuple(interpreter_builder.grid_idx), [], 0
    for name, tensor in tensors.items():
        places = addresses - tensor.data_ptr()
        inside = (places >= 0) & (places < tensor.untyped_storage().nbytes())
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
