"""Answers to the exercises of chapter 21."""

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from minigen.errors import OutOfBlocksError
from tests.answers import Answers


class CountedAllocator:
    """Wrong: owners in a counter; free blocks are counted and found by a search."""

    def __init__(self, num_blocks: int):
        self.blocks, self.owners = range(1, num_blocks + 1), Counter[int]()

    @property
    def num_free(self) -> int:
        return sum(self.owners[each] == 0 for each in self.blocks)

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocksError("too many")
        taken = [each for each in reversed(self.blocks) if self.owners[each] == 0][:count]
        self.owners.update(taken)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        for each in block_ids:
            if not self.owners[each]:
                raise ValueError("free")
            self.owners[each] += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        freed = []
        for each in block_ids:
            if not self.owners[each]:
                raise ValueError("free")
            self.owners[each] -= 1
            freed += [each] * (self.owners[each] == 0)
        return freed

    def num_owners(self, block_id: int) -> int:
        return self.owners[block_id]


class LowestFirst:
    """Right: free blocks in a heap; reference counts only for owned blocks."""

    def __init__(self, num_blocks: int):
        self.free, self.owners = list(range(1, num_blocks + 1)), dict[int, int]()

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int]:
        if len(self.free) < count:
            raise OutOfBlocksError(f"{count}")
        taken = [heapq.heappop(self.free) for _ in range(count)]
        self.owners |= dict.fromkeys(taken, 1)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        for each in block_ids:
            self.owners[each] = self.owners[each] + 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        freed = []
        for each in block_ids:
            if self.owners[each] > 1:
                self.owners[each] -= 1
                continue
            del self.owners[each]
            heapq.heappush(self.free, each)
            freed.append(each)
        return freed

    def num_owners(self, block_id: int) -> int:
        return self.owners.get(block_id, 0)


SHARED_FREE_LIST: deque[int] = deque([1, 2, 3, 4, 5])


def wrong_allocator(name: str) -> type:
    class Allocator:
        def __init__(self, num_blocks: int):
            first = 0 if name == "allocates block 0" else 1
            end = num_blocks if name == "one block too few" else num_blocks + 1
            self.free = deque(range(first, end + (name == "one block too many")))
            if name == "one pool for all":
                self.free = SHARED_FREE_LIST
            self.owners = [0] * (num_blocks + 2)
            self.taken: list[int] = []

        @property
        def num_free(self) -> int:
            if name == "counts over all blocks":
                return len(self.owners) - 2 - sum(each > 0 for each in self.owners)
            if name == "counts owned blocks":
                return sum(each > 0 for each in self.owners)
            return len(self.free)

        def allocate(self, count: int) -> Any:
            enough = (
                count < len(self.free) if name == "never the last one" else count <= self.num_free
            )
            if not enough and name == "returns None":
                return None
            if not enough and name == "ValueError":
                raise ValueError("too many")
            if not enough and name not in ("allocates fewer blocks", "allocates, then raises"):
                raise OutOfBlocksError("too many")
            taken = [self.free.popleft() for _ in range(min(count, len(self.free)))]
            if not enough and name == "allocates, then raises":
                raise OutOfBlocksError("too many")
            for each in taken:
                self.owners[each] = 0 if name == "no owner at first" else 1
                if name == "owners add up":
                    self.owners[each] += 1
            if name == "returns a tuple":
                return tuple(taken)
            if name == "the same list again":
                self.taken[:] = taken
                return self.taken
            return taken

        def share(self, block_ids: Iterable[int]) -> None:
            for each in block_ids:
                if self.owners[each] == 0 and name != "shares free blocks":
                    raise ValueError("free")
                if name != "share does nothing":
                    self.owners[each] += 2 if name == "share adds two" else 1

        def release(self, block_ids: Iterable[int]) -> Any:
            freed = []
            for each in block_ids if name != "releases the first only" else list(block_ids)[:1]:
                if self.owners[each] == 0 and name == "releases free blocks":
                    continue
                if self.owners[each] == 0:
                    raise ValueError("free")
                self.owners[each] -= 1
                if name == "frees at once":
                    self.owners[each] = 0
                if self.owners[each] == 0 or name == "returns all":
                    freed.append(each)
            if name == "frees what is shared":
                self.free.extend(block_ids)
            elif name != "leaks":
                self.free.extend(each for each in freed if self.owners[each] == 0)
            if name == "free list is what it returns":
                return self.free
            return None if name == "release returns None" else freed

        def num_owners(self, block_id: int) -> int:
            if name == "owned or not":
                return int(self.owners[block_id] > 0)
            return self.owners[block_id]

    return Allocator


WRONG_ALLOCATORS = [
    *("allocates block 0", "one block too few", "one block too many", "one pool for all"),
    *("counts owned blocks", "never the last one", "returns None", "ValueError"),
    *("allocates fewer blocks", "allocates, then raises", "no owner at first", "owners add up"),
    "returns a tuple",
    *("shares free blocks", "share does nothing", "share adds two", "releases the first only"),
    *("releases free blocks", "frees at once", "returns all", "frees what is shared", "leaks"),
    *("release returns None", "owned or not", "the same list again", "counts over all blocks"),
]


def checks_the_pool_first(allocator: Any, table: list[int], index: int) -> Any:
    """Right: raises the error itself."""
    old = table[index]
    if allocator.num_owners(old) <= 1:
        return None
    if allocator.num_free < 1:
        raise OutOfBlocksError("no block is free")
    [new] = allocator.allocate(1)
    allocator.release(iter([old]))
    table[index : index + 1] = [new]
    return (old, new)


def takes_first(allocator: Any, table: list[int], index: int) -> Any:
    """Right: the two cases in the opposite order."""
    shared = allocator.num_owners(table[index]) != 1
    if shared:
        pair = table[index], allocator.allocate(1)[0]
        allocator.release(pair[:1])
        table[index] = pair[1]
        return pair
    return None


def wrong_copy(name: str) -> Any:
    def copy_on_write(allocator: Any, table: list[int], index: int) -> Any:
        place = len(table) - 1 if name == "always the last block" else index
        source = table[place]
        if name == "changes first":
            table[place] = 0
        if name == "releases first" and allocator.num_owners(source) > 1:
            allocator.release([source])
            (target,) = allocator.allocate(1)
            table[place] = target
            return source, target
        limit = 2 if name == "copies from three owners on" else 1
        if allocator.num_owners(source) <= limit and name != "always copies":
            return False if name == "returns False" else None
        if name == "writes in place when full" and allocator.num_free == 0:
            return None
        (target,) = allocator.allocate(1)
        if name == "table forgotten":
            allocator.release([source])
            return source, target
        table[place] = target
        if name == "new block at the end":
            table[place] = source
            table.append(target)
        if name == "old block leaked":
            return source, target
        allocator.release([target] if name == "releases the new one" else [source])
        if name == "shares the new one":
            allocator.share([target])
        if name == "pair in the wrong order":
            return target, source
        if name == "returns the new block":
            return target
        return None if name == "returns None" else (source, target)

    return copy_on_write


WRONG_COPIES = [
    *("always the last block", "changes first", "releases first", "copies from three owners on"),
    *("always copies", "returns False", "writes in place when full", "table forgotten"),
    *("new block at the end", "old block leaked", "releases the new one", "shares the new one"),
    *("pair in the wrong order", "returns the new block", "returns None"),
]


def in_tokens(
    memory_bytes: int, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int, block_size: int
) -> int:
    """Right: rounds the tokens of a sequence up to a block, with the other way to round."""
    if weight_bytes >= memory_bytes:
        return 0
    block_bytes = block_size * kv_bytes_per_token
    per_sequence = (num_tokens + block_size - 1) // block_size
    return (memory_bytes - weight_bytes) // block_bytes // per_sequence


def by_bytes(
    memory_bytes: int, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int, block_size: int
) -> int:
    """Right: blocks and sequences in one division, since whole blocks fill a whole sequence."""
    blocks, rest = divmod(num_tokens, block_size)
    sequence_bytes = (blocks + bool(rest)) * block_size * kv_bytes_per_token
    return max(memory_bytes - weight_bytes, 0) // sequence_bytes


def wrong_capacity(name: str) -> Any:
    def sequences_that_fit(memory: int, weights: int, kv: int, tokens: int, size: int) -> Any:
        left = memory if name == "weights forgotten" else memory - weights
        if name == "weights added":
            left = memory + weights
        if name == "a negative number":
            return left // (kv * size) // -(-tokens // size)
        left = max(left, 0)
        blocks = left / (kv * size) if name == "a float" else left // (kv * size)
        match name:
            case "tokens, not blocks":
                return left // (kv * tokens)
            case "rounded down":
                return blocks // max(1, tokens // size)
            case "one block too many":
                return blocks // (tokens // size + 1)
            case "rounded up":
                return -(-blocks // -(-tokens // size))
            case "blocks, not sequences":
                return blocks
            case "block size forgotten":
                return left // kv // -(-tokens // size)
            case "always blocks of 16":
                return left // (kv * 16) // -(-tokens // 16)
            case "keys only":
                return 2 * blocks // -(-tokens // size)
        return blocks // -(-tokens // size)

    return sequences_that_fit


WRONG_CAPACITIES = [
    *("weights forgotten", "weights added", "a negative number", "a float", "tokens, not blocks"),
    *("rounded down", "one block too many", "rounded up", "blocks, not sequences"),
    *("block size forgotten", "always blocks of 16", "keys only"),
]


def by_differences(free: list[int], count: int) -> list[int]:
    """Right: groups blocks by their difference to their place."""
    groups: dict[int, list[int]] = {}
    for place, block in enumerate(sorted(free)):
        groups.setdefault(block - place, []).append(block)
    runs = sorted(groups.values(), key=lambda run: (len(run), run[0]))
    for run in runs:
        if len(run) >= count:
            return run[:count]
    longest = sorted(runs, key=lambda run: (-len(run), run[0]))
    return sorted([block for run in longest for block in run][:count])


def one_after_another(free: list[int], count: int) -> list[int]:
    """Right: looks for the best run again and again."""
    left, chosen = set(free), list[int]()
    while len(chosen) < count:
        runs = []
        for block in sorted(left):
            if block - 1 not in left:
                end = block
                while end in left:
                    end += 1
                runs.append(list(range(block, end)))
        missing = count - len(chosen)
        fitting = [run for run in runs if len(run) >= missing] if not chosen else []
        run = min(fitting, key=len) if fitting else max(runs, key=len)
        chosen += run[:missing]
        left -= set(run)
    return sorted(chosen)


def wrong_choice(name: str) -> Any:
    def choose_adjacent(free: list[int], count: int) -> list[int]:
        if name == "the first ones":
            return sorted(free)[:count]
        if name == "the last ones":
            return sorted(free[len(free) - count :])
        if name == "sorts in place":
            free.sort()
        if name == "takes them out":
            free[:] = free[count:]
        runs: list[list[int]] = []
        for block in free if name == "unsorted" else sorted(free):
            if not runs or runs[-1][-1] + 1 != block:
                runs.append([])
            runs[-1].append(block)
        least = count + 1 if name == "never a whole run" else count
        fitting = [run for run in runs if len(run) >= least]
        if name == "of equal ones the last":
            fitting.reverse()
        if fitting:
            best = min(fitting, key=len)
            if name == "first fit":
                best = fitting[0]
            if name == "the longest run":
                best = max(fitting, key=len)
            return best[-count:] if name == "from the end of a run" else best[:count]
        ordered = sorted(runs, key=len, reverse=name != "shortest runs first")
        if name == "runs in order":
            ordered = runs
        chosen = [block for run in ordered for block in run]
        return chosen[:count] if name == "not sorted" else sorted(chosen[:count])

    return choose_adjacent


WRONG_CHOICES = [
    *("the first ones", "the last ones", "sorts in place", "takes them out", "unsorted"),
    *("never a whole run", "of equal ones the last", "first fit", "the longest run"),
    *("from the end of a run", "shortest runs first", "runs in order", "not sorted"),
]

ANSWERS = {
    "sequences_that_fit": Answers(
        right=(in_tokens, by_bytes, wrong_capacity("nothing")),
        wrong={name: wrong_capacity(name) for name in WRONG_CAPACITIES},
        equivalent={},
    ),
    "BlockAllocator": Answers(
        right=(LowestFirst, wrong_allocator("nothing")),
        wrong={
            **{name: wrong_allocator(name) for name in WRONG_ALLOCATORS},
            "searches the pool": CountedAllocator,
        },
        equivalent={"1 -> 2 #4": "one count more than there are blocks; it is never read"},
    ),
    "copy_on_write": Answers(
        right=(checks_the_pool_first, takes_first, wrong_copy("nothing")),
        wrong={name: wrong_copy(name) for name in WRONG_COPIES},
        equivalent={},
    ),
    "choose_adjacent": Answers(
        right=(by_differences, one_after_another, wrong_choice("nothing")),
        wrong={name: wrong_choice(name) for name in WRONG_CHOICES},
        equivalent={},
    ),
}
