"""Cases of chapter 23's exercises, drawn by a seed."""

from random import Random
from typing import Any

from minigen_course.ch23_prefix.exercises import Harness, Owned
from minigen_course.ch23_prefix.lesson import WithoutEviction
from minigen_course.grading.varied import Varied

MOST_BLOCKS = 3  # of a text, so that all texts fit into the harness's memory

Text = tuple[str, str | None]  # tokens and salt


def _texts(random: Random, count: int, size: int, num_parts: int) -> list[Text]:
    """Return texts with a salt, which often begin alike; each letter is a token."""
    parts = ["".join(random.choice("abc") for _ in range(size)) for _ in range(num_parts)]
    found = []
    for _ in range(count):
        blocks = [random.choice((parts[0], *parts)) for _ in range(random.randint(1, MOST_BLOCKS))]
        tail = "x" * random.choice((0, 0, 1)) if len(blocks) < MOST_BLOCKS else ""
        found.append(("".join(blocks) + tail, random.choice((None, None, None, "ann"))))
    return found


def _token_ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _prefix_tree(random: Random) -> dict[str, Any]:
    size = random.choice((2, 3))
    return {"block_size": size, "texts": _texts(random, 6, size, 2)}


def _without_eviction(part: Any) -> Any:
    return lambda allocator, size: WithoutEviction(part(allocator, size))


def _kept(part: Any, block_size: int, texts: list[Text]) -> Any:
    """Serve these texts, each with its salt or None, two at a time; each letter is a token.

    Two requests start together: both match, then both insert their full blocks. The result has
    the number of blocks that each request found, the owners of its blocks then, and the free
    blocks, of 20, when all requests have ended.
    """
    harness = Harness(_without_eviction(part), block_size)
    started: list[Owned] = []
    found, owners = [], []
    for first in range(0, len(texts), 2):
        pair = [(_token_ids(text), salt) for text, salt in texts[first : first + 2]]
        matched = [harness.match(*each) for each in pair]
        for (token_ids, salt), blocks in zip(pair, matched, strict=True):
            started.append(harness.compute(token_ids, blocks, salt))
            found.append(len(blocks))
        owners += [harness.owners(each.block_ids) for each in started[-2:]]
    for each in started:
        harness.finish(each)
    return {"found": found, "owners": owners, "free": harness.allocator.num_free}


def _radix_cache(random: Random) -> dict[str, Any]:
    size = random.choice((2, 3))
    return {
        "block_size": size,
        "texts": _texts(random, 5, size, 3),
        "forked": random.randrange(3),
        "evicted": random.randint(1, 4),
    }


def _evicted(part: Any, block_size: int, texts: list[Text], forked: int, evicted: int) -> Any:
    """Serve these texts, each with its salt or None, one after another; each letter is a token.

    A request starts by match and insert. When the next but one starts, it ends. Request `forked`
    is forked when it starts, and the fork never ends. After the last start, `evict(evicted)` is
    called. The result has the number of blocks that each request found, `num_evictable` after each
    start, the numbers of blocks that were evicted and that are free then, of 20, and how many
    blocks of each text are found after that.
    """
    harness = Harness(part, block_size)
    started: list[Owned] = []
    found, evictable = [], []
    for number, (text, salt) in enumerate(texts):
        if number >= 2:
            harness.finish(started[number - 2])
        blocks = harness.match(_token_ids(text), salt)
        owned = harness.compute(_token_ids(text), blocks, salt)
        if number == forked:
            harness.acquire(owned.block_ids[: owned.num_cached])
        started.append(owned)
        found.append(len(blocks))
        evictable.append(harness.cache.num_evictable)
    gone = len(harness.cache.evict(evicted))
    free = harness.allocator.num_free
    left = [harness.num_found(_token_ids(text), salt) for text, salt in texts]
    return {"found": found, "evictable": evictable, "gone": gone, "free": free, "left": left}


VARIED = {
    "PrefixTree": Varied("block size, and six texts with salts", _prefix_tree, _kept, num_cases=6),
    "RadixPrefixCache": Varied(
        "block size, five texts with salts, the fork, and the count to evict",
        _radix_cache,
        _evicted,
        num_cases=8,
    ),
}
