"""Bug hunt full_hit of chapter 23 (core, 10 points, about 25 minutes).

**The report.** *The server ran for weeks. Then a monitor was set up that sends the same
question every minute, and the second request crashes the server. But this happens only with
some questions: with one word more, everything works.* nano-vllm crashed on prompts of exactly
one block (issue 114): all tokens were cached, and the model ran on no token. InfiniLM fixed the
same bug (pull request 381), and names SGLang's rule for it; vLLM computes the whole last block
again (pull request 11186).

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/23_prefix/hunt_full_hit.py
"""

# hunt: minigen_course.ch23_prefix.hunt
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.protocols import BlockAllocator as Allocator
from minigen_course.ch23_prefix.hunt import Name


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
    raise NotImplementedError  # your turn
