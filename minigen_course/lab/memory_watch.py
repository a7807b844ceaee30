"""Count the bytes that kernels and torch's operators read, write and allocate while they run.

Each operator is a kernel of its own: it reads its inputs from memory and writes its results there,
and the next one reads them again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigen.errors import OptionError
from minigen_course.grading.messages import Wrong
from minigen_course.lab.triton_interpreter import Access, record


def watched(run: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """What the kernel that `run` launches loads and stores.

    Raises `Wrong` where it reaches outside of its tensors, before it does, or cannot be run here.
    """
    try:
        with np.errstate(all="ignore"):  # a GPU says nothing of overflows either
            return record(run, **tensors)
    except (IndexError, OptionError) as error:
        raise Wrong(str(error)) from None


def expect_numbers(found: Tensor, what: str, axes: Sequence[str]) -> None:
    """What was all nan before a kernel ran must be numbers after it."""
    missing = found.isnan().nonzero()
    if len(missing):
        place = zip(axes, missing[0].tolist(), strict=True)
        where = ", ".join(f"{axis} {index}" for axis, index in place)
        raise Wrong(
            f"{what}: {len(missing)} of {found.numel()} numbers are nan, first at {where}; each "
            "should be stored. (nan comes of lanes that a mask left out, too, and of infinities.)"
        )


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
        if not _returns_view(function):
            name = function.overloadpacket.__name__
            given, made = list(_tensors((args, kwargs))), list(_tensors(result))
            self.found.append(Operator(name, *_moved(name, given, made)))
        return result


def _returns_view(function: Any) -> bool:
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


@dataclass(frozen=True)
class Memory:
    """What a run took, in bytes: `peak` at once, `largest` of one tensor, `moved` altogether.

    `moved` is what its operators were given and made, each as often as an operator read or wrote
    it; views move nothing. What an operator takes inside of itself is not seen.
    """

    peak: int
    largest: int
    moved: int


def count_memory(run: Callable[[], object]) -> Memory:
    """Count the tensors that `run` makes; those that were there before count as moved alone."""
    with _Watch() as watch:
        run()
    return Memory(watch.peak, watch.largest, watch.moved)


class _Watch(TorchDispatchMode):
    """Sees every operator; what was given to one before any had made it was there already."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self.moved = 0
        self.given: dict[int, UntypedStorage] = {}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.made = {at: each for at, each in self.made.items() if not each[0].expired()}
        given = list(_tensors((args, kwargs)))
        for storage in map(Tensor.untyped_storage, given):
            if storage._cdata not in self.made:
                self.given[storage._cdata] = storage
        result = func(*args, **(kwargs or {}))
        made = list(_tensors(result))
        if not (_is_view(func, given, made) or "empty" in str(func)):
            self.moved += sum(each.numel() * each.itemsize for each in (*given, *made))
        for storage in map(Tensor.untyped_storage, made):
            self._count(storage)
        return result

    def _count(self, storage: UntypedStorage) -> None:
        if storage._cdata in self.given or storage._cdata in self.made:
            return
        self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.made.values()))


def _is_view(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether the operator only looks at what it was given in another way."""
    old = {each.untyped_storage()._cdata for each in given}
    return not func._schema.is_mutable and all(
        each.untyped_storage()._cdata in old for each in made
    )
