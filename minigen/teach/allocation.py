"""Bytes of the tensors that torch's operators make, counted while they run: at once, and moved."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))
