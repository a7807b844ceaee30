"""Cases of chapter 21's exercises, drawn by a seed."""

from functools import partial
from random import Random
from typing import Any

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen_course.grading.varied import Varied, outcome


def _sequences_that_fit(random: Random) -> dict[str, Any]:
    size = random.choice((4, 8, 16, 32))
    per_token = random.choice((2, 6, 10, 24))
    full = random.randint(1, 4) * size
    num_tokens = random.choice((full, full, full + random.randint(1, size - 1)))
    left = random.randint(30, 90) * per_token * size + random.randrange(per_token * size)
    weights = random.randint(3, 30) * 100
    fits = random.random() < 0.7
    return {
        "memory_bytes": weights + left if fits else weights,
        "weight_bytes": weights if fits else weights + left,
        "kv_bytes_per_token": per_token,
        "num_tokens": num_tokens,
        "block_size": size,
    }


def _block_allocator(random: Random) -> dict[str, Any]:
    num_blocks = random.randint(7, 9)
    owners: list[int] = []  # of each block, by its place in the order of allocation
    calls: list[tuple[str, Any]] = []
    for what in ("allocate", "share", *random.sample(("release", "share", "allocate"), 3)):
        if what == "allocate":
            calls.append((what, random.randint(2, 3)))
            owners += [1] * calls[-1][1]
            continue
        owned = [place for place, count in enumerate(owners) if count]
        places = sorted(random.sample(owned, random.randint(1, max(1, len(owned) - 1))))
        calls.append((what, places))
        for each in places:
            owners[each] += 1 if what == "share" else -1
    owned = [place for place, count in enumerate(owners) if count]
    calls += [
        ("allocate", num_blocks - len(owned) + 1),
        ("release", owned),
        ("release", [each for each in owned for _ in range(owners[each] - 1)]),
        ("allocate", num_blocks),
        ("release", [len(owners)]),
        (random.choice(("share", "release")), [len(owners)]),
    ]
    return {"num_blocks": num_blocks, "calls": calls}


def _called_in_turn(part: Any, num_blocks: int, calls: list[tuple[str, Any]]) -> Any:
    """Make these calls on a new allocator, and return what each has done, with `num_free` after it.

    `share` and `release` get blocks by their places, from 0, in the order of allocation. After
    `allocate` and `share` stand the owners of their blocks, and after `release` the places of the
    blocks that it returns. The last call gets a free block.
    """
    allocator, blocks, done = part(num_blocks), list[int](), list[Any]()
    for name, given in calls:
        asked = given if name == "allocate" else [blocks[place] for place in given]
        found = outcome(partial(getattr(allocator, name), asked))
        failed = isinstance(found, str)
        if failed and name != "allocate":
            done.append("an error")
            continue
        if name == "allocate" and not failed:
            blocks += found or ()
        if name == "release":
            result = sorted({place for place in given if blocks[place] in (found or ())})
        else:
            owned = found if name == "allocate" else asked
            result = found if failed else [allocator.num_owners(each) for each in owned]
        done.append((result, allocator.num_free))
    return done


def _copy_on_write(random: Random) -> dict[str, Any]:
    owners = [random.choice((1, 2, 2, 3)) for _ in range(random.randint(2, 4))]
    owners[random.randrange(len(owners))] = random.choice((2, 3))
    shared = [place for place, count in enumerate(owners) if count > 1]
    writes = [random.choice(shared), *(random.randrange(len(owners)) for _ in range(2))]
    return {"owners": owners, "num_free": random.choice((0, 1, 1, 4)), "writes": writes}


def _written(part: Any, owners: list[int], num_free: int, writes: list[int]) -> Any:
    """Write into the blocks of a table at these indexes, one after another.

    The table is 1, 2, ...; `owners` has the owners of these blocks, and `num_free` more blocks are
    free. The result is what each call returns or raises, then the table, then the owners of all
    blocks.
    """
    allocator = BlockAllocator(len(owners) + num_free)
    table = allocator.allocate(len(owners))
    for block_id, count in zip(list(table), owners, strict=True):
        allocator.share([block_id] * (count - 1))
    returned = [outcome(partial(part, allocator, table, place)) for place in writes]
    blocks = range(1, allocator.num_blocks + 1)
    return [*returned, table, [allocator.num_owners(each) for each in blocks]]


def _choose_adjacent(random: Random) -> dict[str, Any]:
    runs, block_id = [], random.randint(1, 3)
    for _ in range(random.randint(4, 5)):
        length = random.choice((1, 2, 2, 3, 3, 4))
        runs.append(list(range(block_id, block_id + length)))
        block_id += length + random.randint(1, 3)
    free = [each for run in runs for each in run]
    random.shuffle(free)
    longest = max(map(len, runs))
    count = random.choice((len(runs[-1]), len(runs[0]), longest - 1, longest + 1, longest + 2))
    return {"free": free, "count": max(1, min(count, len(free)))}


def _chosen(part: Any, free: list[int], count: int) -> Any:
    """Choose `count` of the free blocks; return them, and the list of free blocks after that."""
    return [part(free, count), free]


VARIED = {
    "sequences_that_fit": Varied(
        "bytes of memory, weights and a token; tokens per sequence; block size",
        _sequences_that_fit,
        num_cases=8,
    ),
    "BlockAllocator": Varied(
        "number of blocks, and the calls", _block_allocator, _called_in_turn, num_cases=6
    ),
    "copy_on_write": Varied(
        "owners of each block, free blocks, order of the writes",
        _copy_on_write,
        _written,
        num_cases=6,
    ),
    "choose_adjacent": Varied(
        "the free blocks, their runs and order, and the count",
        _choose_adjacent,
        _chosen,
        num_cases=8,
    ),
}
