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
from minigen_course.grading.exercise import Wrong
from minigen_course.lab.triton_interpreter import Access, record


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
        """The bytes that it moves."""
        return self.bytes_read + self.bytes_written


@torch.no_grad()
def record_operators(run: Callable[[], object]) -> list[Operator]:
    """Return the operators of `run` in order, without views, which move nothing.

    If an operator picks rows by index, these rows are counted, not the whole table.
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
    """Return the bytes read and written."""
    read, written = sum(map(_num_bytes, given)), sum(map(_num_bytes, made))
    if name in _GATHERS:
        return read - _num_bytes(given[0]) + written, written
    if name in _SCATTERS:
        return read - _num_bytes(given[0]), _num_bytes(given[-1])
    return read, written


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers in memory; an expanded axis counts once."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(size for size, stride in axes if stride != 0)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, Tensor))


@dataclass(frozen=True)
class Memory:
    """The memory of a run, in bytes: `peak` at one time, `largest` tensor, `moved` in total.

    `moved` counts each input and result of an operator as often as operators read or wrote it;
    views move nothing. Memory that an operator uses internally is not seen.
    """

    peak: int
    largest: int
    moved: int


def count_memory(run: Callable[[], object]) -> Memory:
    """Count the tensors that `run` creates; tensors that existed before count only as moved."""
    with _Watch() as watch:
        run()
    return Memory(watch.peak, watch.largest, watch.moved)


class _Watch(TorchDispatchMode):
    """Sees every operator; an input that no operator has created existed before."""

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
    """Return whether the operator only returns views of its inputs."""
    old = {each.untyped_storage()._cdata for each in given}
    return not func._schema.is_mutable and all(
        each.untyped_storage()._cdata in old for each in made
    )
