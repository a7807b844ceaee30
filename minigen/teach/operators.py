"""Bytes that torch's operators move, counted one by one as they run.

Each operator is a kernel of its own: it reads its inputs from memory and writes its results there,
and the next one reads them again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GATHERS = ("index", "index_select", "embedding", "gather")
_SCATTERS = ("index_put_", "_index_put_impl_")


@dataclass(frozen=True)
class Operator:
    """One operator that ran, and the bytes that it read and wrote."""

    name: str
    bytes_read: int
    bytes_written: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it moves."""
        return self.bytes_read + self.bytes_written


@torch.no_grad()
def record_operators(run: Callable[[], object]) -> list[Operator]:
    """What `run` starts, in order; views, which move nothing, are left out.

    Where an index picks rows, those rows are counted, not the table.
    """
    watching = _Watching()
    with watching:
        run()
    return watching.found


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operator] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not _is_view(function):
            name = function.overloadpacket.__name__
            given, made = list(_tensors((args, kwargs))), list(_tensors(result))
            self.found.append(Operator(name, *_moved(name, given, made)))
        return result


def _is_view(function: Any) -> bool:
    aliases = [each.alias_info for each in function._schema.returns]
    return any(each is not None and not each.is_write for each in aliases)


def _moved(name: str, given: list[Tensor], made: list[Tensor]) -> tuple[int, int]:
    """Bytes read and written."""
    read, written = sum(map(_num_bytes, given)), sum(map(_num_bytes, made))
    if name in _GATHERS:
        return read - _num_bytes(given[0]) + written, written
    if name in _SCATTERS:
        return read - _num_bytes(given[0]), _num_bytes(given[-1])
    return read, written


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's own numbers: what an axis only repeats lies there once."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(size for size, stride in axes if stride != 0)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, Tensor))
