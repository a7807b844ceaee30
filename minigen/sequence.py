"""What flows through the engine: one sequence of tokens for each answer that is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from minigen.params import SamplingParams


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
    an answer. `finish_reason` is "stop" or "length" once done, "abort" if it was given up.
    """

    sequence_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_output: int
    end_ids: frozenset[int]
    choice: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: str | None = None

    def __len__(self) -> int:
        """Tokens in all, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def new_ids(self) -> list[int]:
        """The tokens that the model has not computed yet: the prompt at first, then one a step."""
        num_prompt = len(self.prompt_ids)
        if self.num_computed < num_prompt:
            return [*self.prompt_ids[self.num_computed :], *self.output_ids]
        return self.output_ids[self.num_computed - num_prompt :]

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end this answer: its own stop tokens, and the model's if heeded."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.end_ids

    def append(self, token_id: int) -> None:
        """Take the next token, and finish if it was a stop token or the last that fits."""
        self.output_ids.append(token_id)
        if token_id in self.stop_ids and len(self.output_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_output:
            self.finish_reason = "length"
