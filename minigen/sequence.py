"""The unit of work of the engine: a sequence of tokens, one per requested answer."""

import copy
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

from minigen.sampling.params import SamplingParams
from minigen.sampling.processors import LogitsProcessor

# The most prompt tokens that one step computes if the request asks for their logprobs: each of them
# needs a row of logits, 200 KB for a vocabulary of 50,000.
LOGPROBS_PER_STEP = 32


@dataclass(frozen=True)
class Logprob:
    """The natural log of a token's probability, and the token's rank, counted from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class SampledToken:
    """A sampled token.

    `logprobs`, if requested, has the log probabilities of this token and the most likely ones, by
    token id.
    """

    token_id: int
    logprobs: Mapping[int, Logprob] | None = None


@dataclass(eq=False)
class Sequence:
    """One answer: its prompt, the tokens generated so far, and its state in the engine.

    `choice` is the index among the `n` answers to one prompt. `seed` is never None, so that every
    draw can be reproduced. `max_output` limits the generated tokens, and is already within the
    model's context length. `end_ids` are the model's end tokens. A lower `priority` runs first.
    Only sequences with the same `cache_salt` share a prefix. `finish_reason` is None while it is
    unfinished, then "stop", "length", "abort", or "error" if a step failed with `error`.

    `block_ids` is the block table. It holds the keys and values of the first `num_computed` tokens;
    its first `num_cached_blocks` blocks are stored in the prefix cache. `num_cached` is how many
    prompt tokens were cached when the sequence first ran (None before that). `prompt_logprobs`, if
    requested, grows to one entry per prompt token, of which the first is None; only the first of
    the `n` answers has them. `siblings` are the other answers to the prompt if they fork from this
    one once it is computed. `arrival_ns` is when the request arrived, by `time.perf_counter_ns`.
    `processors` change its logits, in this order. `drafts` are tokens proposed to follow the last
    one, which the next step verifies (speculative decoding); they are no part of the sequence.
    `num_drafted` and `num_accepted` count all drafts so far. `predicted_ids` are what the client
    expects of the answer, from which drafts are taken.
    """

    sequence_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_output: int
    end_ids: frozenset[int]
    choice: int = 0
    priority: int = 0
    cache_salt: str | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_cached: int | None = None
    prompt_logprobs: list[Mapping[int, Logprob] | None] = field(default_factory=list)
    siblings: tuple["Sequence", ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()
    drafts: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    predicted_ids: tuple[int, ...] = ()
    arrival_ns: int = field(default_factory=time.perf_counter_ns)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        if self.params.prompt_logprobs is not None and self.choice == 0:
            self.prompt_logprobs.append(None)  # nothing comes before the first token

    def __len__(self) -> int:
        """Return the number of tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def new_ids(self) -> list[int]:
        """The tokens not computed yet: first the prompt, then one token per step."""
        return self.token_ids[self.num_computed :]

    @property
    def num_wanted(self) -> int:
        """Tokens for the next step: all new ones and the drafts.

        Fewer while prompt logprobs are pending.
        """
        num_new = len(self.token_ids) - self.num_computed + len(self.drafts)
        return num_new if self.num_pending_prompt_logprobs == 0 else min(num_new, LOGPROBS_PER_STEP)

    @property
    def num_pending_prompt_logprobs(self) -> int:
        """Prompt tokens whose logprobs were requested and are not computed yet."""
        return len(self.prompt_ids) - len(self.prompt_logprobs) if self.prompt_logprobs else 0

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The request's stop tokens, and the model's end tokens unless `ignore_eos` is set."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.end_ids

    @property
    def banned_ids(self) -> frozenset[int]:
        """The stop tokens while there are fewer than `min_tokens` output tokens, else none."""
        too_soon = len(self.output_ids) < self.params.min_tokens
        return self.stop_ids if too_soon else frozenset()

    def after(self, drafts: SequenceOf[int]) -> "Sequence":
        """Return a copy as it would be after these drafts, to sample the token that follows them.

        It shares the processors, and owns no blocks.
        """
        ahead = copy.copy(self)
        ahead.output_ids = [*self.output_ids, *drafts]
        ahead.token_ids = [*self.token_ids, *drafts]
        ahead.block_ids, ahead.drafts = [], ()
        return ahead

    def append(self, token_id: int) -> None:
        """Append an output token; set `finish_reason` if it is a stop token or the last allowed."""
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and len(self.output_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_output:
            self.finish_reason = "length"


@dataclass(frozen=True)
class ScheduledChunk:
    """The next `num_tokens` tokens of one sequence, which one step computes; the last are drafts.

    `siblings` are those that have not forked from the sequence yet.
    """

    sequence: Sequence
    num_tokens: int
    siblings: tuple[Sequence, ...] = ()

    @property
    def prompt_logprob_rows(self) -> range:
        """The chunk's tokens whose logits give pending prompt logprobs; empty if there are none.

        The logits at token p give the logprob of token p + 1. Logprobs that are known from before a
        preemption are not computed again.
        """
        sequence = self.sequence
        if sequence.num_pending_prompt_logprobs == 0:
            return range(0)
        first = len(sequence.prompt_logprobs) - 1 - sequence.num_computed
        return range(first, min(self.num_tokens, first + sequence.num_pending_prompt_logprobs))

    @property
    def drafts(self) -> tuple[int, ...]:
        """The proposed tokens at the chunk's end; usually none."""
        sequence = self.sequence
        if not sequence.drafts:
            return ()
        known = len(sequence) - sequence.num_computed
        return sequence.drafts[: max(self.num_tokens - known, 0)]

    @property
    def samples(self) -> list[Sequence]:
        """The sequences that get a token from this chunk; empty until all tokens are computed."""
        sequence = self.sequence
        if sequence.num_computed + self.num_tokens < len(sequence.token_ids):
            return []
        return [sequence, *self.siblings]


def samples_of(chunks: Iterable[ScheduledChunk]) -> list[Sequence]:
    """Return the sequences that get a token from these chunks, in the order of the logits' rows.

    Each of a chunk's drafts has one more row, behind its sequence's own (`rows_of`).
    """
    return [sample for chunk in chunks for sample in chunk.samples]


def rows_of(chunks: Iterable[ScheduledChunk]) -> list[Sequence]:
    """Return what each row of the logits is sampled for: samples, and samples after drafts.

    Without drafts these are `samples_of(chunks)`. A chunk with k drafts has k + 1 rows: of the
    sequence itself, and of `sequence.after` its first 1, 2, ... k drafts.
    """
    rows: list[Sequence] = []
    for chunk in chunks:
        rows += chunk.samples
        if drafts := chunk.drafts:
            rows += [chunk.sequence.after(drafts[: count + 1]) for count in range(len(drafts))]
    return rows


def num_matching(drafts: SequenceOf[int], token_ids: SequenceOf[int]) -> int:
    """Return how many drafts are right: as many leading ones as equal the sampled tokens."""
    count = 0
    for draft, token_id in zip(drafts, token_ids, strict=False):
        if draft != token_id:
            break
        count += 1
    return count


def is_decoding(sequence: Sequence) -> bool:
    """Return whether only the sequence's last token is left to compute."""
    return bool(sequence.output_ids) and len(sequence) - sequence.num_computed == 1


@dataclass
class DraftCounts:
    """Counts since the start: sequences' steps with drafts, and tokens drafted and accepted.

    `accepted_at` counts the accepted tokens by their place among the drafts, from the first on.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
