"""Bug hunt of chapter 23: a prefix cache that has all tokens of a prompt."""

from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.protocols import BlockAllocator as Allocator
from minigen_course.ch23_prefix import exercises as prefix_checks
from minigen_course.grading.exercise import expect_equal
from minigen_course.grading.hunt import Hunt
from minigen_course.lab.toy_engine import serve_toy

Name = tuple[str | None, tuple[int, ...]]


class ChainedPrefixCache:
    """A prefix cache without a tree: a block's name is its salt and all tokens up to its end."""

    def __init__(self, allocator: Allocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self.block_of: dict[Name, int] = {}
        self.name_of: dict[int, Name] = {}
        self.num_users: dict[int, int] = {}
        self.unused: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self.unused)

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        matched: list[int] = []
        for end in self.ends(token_ids):
            name = (salt, tuple(token_ids[:end]))
            if name not in self.block_of:
                break
            matched.append(self.block_of[name])
        self.allocator.share(matched)
        self.acquire(matched)
        return matched

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        exchanged = []
        for index, end in list(enumerate(self.ends(token_ids)))[first:]:
            name, own = (salt, tuple(token_ids[:end])), block_ids[index]
            if name not in self.block_of:
                self.block_of[name], self.name_of[own] = own, name
                self.num_users[own] = 0
                self.allocator.share([own])
            elif self.block_of[name] != own:
                self.allocator.share([self.block_of[name]])
                self.allocator.release([own])
                exchanged.append((index, self.block_of[name]))
            self.acquire([self.block_of[name]])
        return exchanged

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        for block_id in block_ids:
            self.unused.pop(block_id, None)
            self.num_users[block_id] += 1

    def release(self, block_ids: SequenceOf[int]) -> None:
        for block_id in reversed(block_ids):
            self.num_users[block_id] -= 1
            if self.num_users[block_id] == 0:
                self.unused[block_id] = None

    def evict(self, count: int) -> list[int]:
        evicted = list(self.unused)[:count]
        for block_id in evicted:
            del self.block_of[self.name_of.pop(block_id)]
            del self.unused[block_id], self.num_users[block_id]
        self.allocator.release(evicted)
        return evicted

    def ends(self, token_ids: SequenceOf[int]) -> range:
        """Return the positions where the full blocks of a text end."""
        return range(self.block_size, len(token_ids) + 1, self.block_size)


def test_prefix_cache(PrefixCache: Any) -> None:
    """Assert what every correct prefix cache does, and the one above does not.

    Create it as PrefixCache(BlockAllocator(num_blocks), block_size).
    """
    for num_blocks in (1, 2, 5):
        cache = PrefixCache(BlockAllocator(20), 4)
        token_ids = list(range(4 * num_blocks))
        cache.insert(token_ids, cache.allocator.allocate(num_blocks), 0)
        for length in range(len(token_ids) + 1):
            assert 4 * len(cache.match(token_ids[:length])) <= max(length - 1, 0)


class _Mended(ChainedPrefixCache):
    """Correct: looks only at blocks that end before the last token."""

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        return super().match(token_ids[:-1], salt)


class _ReleasesTheLast(ChainedPrefixCache):
    """Also correct: matches all blocks, then releases the last one."""

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        matched = super().match(token_ids, salt)
        if matched and len(matched) * self.block_size == len(token_ids):
            self.release(matched[-1:])
            self.allocator.release(matched[-1:])
            matched.pop()
        return matched


class _FullHitOfOneBlock(_ReleasesTheLast):
    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        if len(token_ids) == self.block_size:
            return ChainedPrefixCache.match(self, token_ids, salt)
        return super().match(token_ids, salt)


class _FullHitOfMany(ChainedPrefixCache):
    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        if len(token_ids) == self.block_size:
            return []
        return super().match(token_ids, salt)


class _FullHitOfAPrefix(ChainedPrefixCache):
    """Leaves a token to compute only if no longer text is cached."""

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        whole = (salt, tuple(token_ids))
        longer = any(len(name[1]) > len(token_ids) for name in self.block_of)
        if whole in self.block_of and not longer:
            return super().match(token_ids[:-1], salt)
        return super().match(token_ids, salt)


def the_engine_serves_prompts_again(part: Any) -> None:
    """the same prompts three times in the toy engine:"""
    prompts = [[5, 3, 8, 1], [5, 3, 8, 1, 9, 9, 2, 2], [5, 3, 8, 1, 4]] * 3
    alone = [serve_toy([prompt], max_tokens=3).answers[0] for prompt in prompts]
    found = serve_toy(prompts, prefix_cache=part, max_tokens=3, max_num_seqs=2).answers
    expect_equal(found, alone, "the answers to nine requests, six of which repeat a prompt")


HUNT = Hunt(
    "full_hit",
    ChainedPrefixCache,
    test_prefix_cache,
    _Mended,
    {
        "minigen's radix tree": RadixPrefixCache,
        "one that releases the last block": _ReleasesTheLast,
    },
    {
        "finds a whole prompt if it is one block long": _FullHitOfOneBlock,
        "finds a whole prompt if it is several blocks long": _FullHitOfMany,
        "finds a whole prompt if it is the prefix of a longer, cached one": _FullHitOfAPrefix,
    },
    (*prefix_checks.CHECKS["RadixPrefixCache"], the_engine_serves_prompts_again),
    (
        "Ask for the same prompt twice, with lengths around a whole number of blocks.",
        "How many tokens are left for the model to compute? Which token's logits choose the next "
        "token?",
        "Try prompts of one block and of several blocks, and a prompt that is the prefix of a "
        "longer, cached one.",
    ),
    "**The report.** *The server ran for weeks. Then a monitor was set up that sends the same "
    "question every minute, and the second request crashes the server. But this happens only with "
    "some questions: with one word more, everything works.* nano-vllm crashed on prompts of "
    "exactly one block (issue 114): all tokens were cached, and the model ran on no token. "
    "InfiniLM fixed the same bug (pull request 381), and names SGLang's rule for it; vLLM computes "
    "the whole last block again (pull request 11186).",
    minutes=25,
)
