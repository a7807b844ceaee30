"""What flows through the engine: one sequence of tokens for each answer that is asked for."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from minigen.sampling.params import SamplingParams

# Tokens of a prompt that a step computes at most where their logprobs are asked for: each of them
# takes a row of logits, 200 KB for a vocabulary of 50,000.
LOGPROBS_A_STEP = 32


@dataclass(frozen=True)
class Logprob:
    """How likely the model held a token: natural log of its probability, and its rank from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class SampledToken:
    """A chosen token; `logprobs` holds it and the likeliest ones, by id, where asked for."""

    token_id: int
    logprobs: Mapping[int, Logprob] | None = None


@dataclass(eq=False)
class Sequence:
    """One answer in the making: a prompt, and the tokens chosen so far.

    `choice` counts the n answers to one prompt; `seed` is never None, so that every draw can be
    made again; `max_output` already heeds the model's context; `end_ids` are the tokens that end
    an answer. Lower `priority` goes first. Only sequences of the same `cache_salt` share a prefix.
    `finish_reason` is "stop" or "length" once done, "abort" if it was given up, and "error" if a
    step failed, by `error`.

    `num_computed` tokens have their keys and values in `block_ids`, of which the first
    `num_cached_blocks` are known to the prefix cache. `num_cached` tokens of the prompt were found
    there when it first ran (None before that). `prompt_logprobs`, where asked for, grows to an
    entry for each token of the prompt, the first None; the first of n answers has them.
    `siblings` are other choices that will fork from this one after its prompt. `arrival_ns` is when it
    came to be, by `time.perf_counter_ns`: its request's arrival.
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
    siblings: list["Sequence"] = field(default_factory=list)
    arrival_ns: int = field(default_factory=time.perf_counter_ns)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        if self.params.prompt_logprobs is not None and self.choice == 0:
            self.prompt_logprobs.append(None)  # nothing comes before the first token

    def __len__(self) -> int:
        """Tokens in all, prompt and output."""
        return len(self.token_ids)

    @property
    def new_ids(self) -> list[int]:
        """The tokens that are not computed yet: the prompt at first, then one a step."""
        return self.token_ids[self.num_computed :]

    @property
    def num_wanted(self) -> int:
        """How many tokens it would have the next step compute: all that are new, or fewer."""
        num_new = len(self) - self.num_computed
        return num_new if self.num_pending_prompt_logprobs == 0 else min(num_new, LOGPROBS_A_STEP)

    @property
    def num_pending_prompt_logprobs(self) -> int:
        """Tokens of the prompt whose logprobs are asked for and not known yet."""
        return len(self.prompt_ids) - len(self.prompt_logprobs) if self.prompt_logprobs else 0

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end this answer: its own stop tokens, and the model's if heeded."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.end_ids

    @property
    def banned_ids(self) -> frozenset[int]:
        """The tokens that must not come yet: those that would end it too soon."""
        too_soon = len(self.output_ids) < self.params.min_tokens
        return self.stop_ids if too_soon else frozenset()

    def append(self, token_id: int) -> None:
        """Take the next token, and finish if it was a stop token or the last that fits."""
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and len(self.output_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_output:
            self.finish_reason = "length"


@dataclass(frozen=True)
class ScheduledChunk:
    """What one step computes of one sequence: its next `num_tokens` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def prompt_logprob_rows(self) -> range:
        """Which of its tokens tell how likely a next token of the prompt is, if that is asked for.

        Token p tells of token p + 1; what is known already, from before a preemption, is not asked
        for again.
        """
        sequence = self.sequence
        if sequence.num_pending_prompt_logprobs == 0:
            return range(0)
        first = len(sequence.prompt_logprobs) - 1 - sequence.num_computed
        return range(first, min(self.num_tokens, first + sequence.num_pending_prompt_logprobs))

    @property
    def samples(self) -> list[Sequence]:
        """Who gets a token from this chunk: nobody before its sequence is computed to the end."""
        sequence = self.sequence
        if sequence.num_computed + self.num_tokens < len(sequence):
            return []
        return [sequence, *sequence.siblings]


def samples_of(chunks: Iterable[ScheduledChunk]) -> list[Sequence]:
    """Who gets a token from these chunks, in order: the rows of the step's logits."""
    return [sample for chunk in chunks for sample in chunk.samples]
