"""Counters of the engine's work, which only increase; they show how much work caching saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass(eq=False)
class WorkCounters:
    """Totals of the tokens and blocks that the engine processed, added up by a `Timeline`.

    Each token that a step computes counts in one total: in `tokens_recomputed` if it had already
    been computed before a preemption, otherwise in `tokens_prefilled` if it belongs to the prompt,
    and in `tokens_decoded` after the prompt. Tokens that need no computation are `tokens_cached`,
    found in the prefix cache (also after a preemption), and `tokens_shared`, which a fork gets from
    its parent. A step of a sequence with `drafts` verifies `tokens_drafted`, of which
    `tokens_accepted` were right; all of them are decoded, too.

    `kv_bytes` is the size in bytes of one token's keys and values in one layer, and `windows` has
    each layer's sliding window, in tokens. `kv_bytes_read` is the number of bytes that attention
    reads: each position that any token of a chunk attends to counts once per chunk and layer. The
    other totals count events; see `EventKind`.

    If a sequence was queued before the first event, its chunks of one token count as decoded, and
    longer chunks as prefilled.
    """

    kv_bytes: int = 0
    windows: Sequence[int | None] = ()
    steps: int = field(default=0, init=False)
    tokens_prefilled: int = field(default=0, init=False)
    tokens_decoded: int = field(default=0, init=False)
    tokens_recomputed: int = field(default=0, init=False)
    tokens_cached: int = field(default=0, init=False)
    tokens_shared: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    blocks_allocated: int = field(default=0, init=False)
    blocks_shared: int = field(default=0, init=False)
    blocks_copied: int = field(default=0, init=False)
    blocks_evicted: int = field(default=0, init=False)
    kv_bytes_read: int = field(default=0, init=False)
    drafts: int = field(default=0, init=False)
    tokens_drafted: int = field(default=0, init=False)
    tokens_accepted: int = field(default=0, init=False)

    @property
    def tokens_computed(self) -> int:
        """The tokens that went through the model."""
        return self.tokens_prefilled + self.tokens_decoded + self.tokens_recomputed

    def as_dict(self) -> dict[str, int]:
        """Return the totals by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.init}

    def count_chunk(
        self, prompt_tokens: int | None, computed: int, tokens: int, recomputed: int
    ) -> None:
        """Count a chunk of `tokens` after `computed` ones; the first `recomputed` are not new.

        `prompt_tokens` is None if the length of the prompt is unknown.
        """
        end = computed + tokens
        if prompt_tokens is None:
            prompt_tokens = end if tokens > 1 else 0
        prefilled = max(min(prompt_tokens, end) - computed - recomputed, 0)
        self.tokens_recomputed += recomputed
        self.tokens_prefilled += prefilled
        self.tokens_decoded += tokens - recomputed - prefilled
        for window in self.windows:
            # A window counts the token itself, so the chunk's first token sees `window - 1` others.
            read = end if window is None else min(end, window - 1 + tokens)
            self.kv_bytes_read += self.kv_bytes * read
