"""Memory: a process's resident bytes, and the bytes that torch's operators read, write, allocate.

Each operator is a kernel of its own: it reads its inputs from memory and writes its results there,
and the next one reads them again.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, including mapped pages of files."""
    return int(psutil.Process().memory_info().rss)


def cost_of(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work`; return its result, its seconds, and the megabytes that became resident."""
    gc.collect()  # or memory that is freed meanwhile would hide what `work` takes
    before, started = resident_bytes(), time.perf_counter()
    made = work()
    seconds = time.perf_counter() - started
    return made, seconds, max(0, resident_bytes() - before) / 1e6


def forget_pages(path: Path) -> bool:
    """Ask the system to drop a file from its page cache, so that the disk is read again.

    Returns whether this system supports the request; pages that a process has mapped stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


_GATHERS = ("index", "index_select", "embedding", "gather")
_SCATTERS = ("index_put_", "_index_put_impl_", "index_copy_")


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
    found = []

    def see(function: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if not _returns_view(function):
            name = function.overloadpacket.__name__
            found.append(Operator(name, *_moved(name, given, made)))

    with EachOperator(see):
        run()
    return found


class EachOperator(TorchDispatchMode):
    """Calls `see(operator, input tensors, result tensors)` after each of torch's operators."""

    def __init__(self, see: Callable[[Any, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = list(_tensors((args, kwargs)))
        result = function(*args, **(kwargs or {}))
        self.see(function, given, list(_tensors(result)))
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
    watch = _Watch()
    with EachOperator(watch.see):
        run()
    return Memory(watch.peak, watch.largest, watch.moved)


class _Watch:
    """Sees every operator; an input that no operator has created existed before."""

    def __init__(self) -> None:
        self.peak = self.largest = self.moved = 0
        self.given: dict[int, UntypedStorage] = {}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(self, function: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Count an operator's inputs and results."""
        self.made = {at: each for at, each in self.made.items() if not each[0].expired()}
        for storage in map(Tensor.untyped_storage, given):
            if storage._cdata not in self.made:
                self.given[storage._cdata] = storage
        if not (_is_view(function, given, made) or "empty" in str(function)):
            self.moved += sum(each.numel() * each.itemsize for each in (*given, *made))
        for storage in map(Tensor.untyped_storage, made):
            self._count(storage)

    def _count(self, storage: UntypedStorage) -> None:
        if storage._cdata in self.given or storage._cdata in self.made:
            return
        self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.made.values()))


def _is_view(function: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Return whether the operator only returns views of its inputs."""
    old = {each.untyped_storage()._cdata for each in given}
    return not function._schema.is_mutable and all(
        each.untyped_storage()._cdata in old for each in made
    )
