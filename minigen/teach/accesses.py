"""Loads and stores of a kernel's programs, and the bytes that they are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """One load or store of one program: which elements of which tensor, masked ones left out.

    `offsets` count from the tensor's first element, as it lies in memory.
    """

    program: tuple[int, int, int]
    is_store: bool
    tensor: str
    offsets: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it moves."""
        return len(self.offsets) * self.itemsize


def bytes_moved(accesses: list[Access]) -> int:
    """Bytes of all loads and stores."""
    return sum(access.num_bytes for access in accesses)


def bytes_required(accesses: list[Access]) -> int:
    """Bytes if each element were loaded at most once, and stored at most once."""
    once: dict[tuple[str, bool], set[int]] = {}
    sizes = {access.tensor: access.itemsize for access in accesses}
    for access in accesses:
        once.setdefault((access.tensor, access.is_store), set()).update(access.offsets)
    return sum(len(offsets) * sizes[tensor] for (tensor, _), offsets in once.items())
