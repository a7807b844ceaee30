"""Check prompts and sampling parameters, and turn them into sequences for the engine."""

import operator
import reprlib
import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import count

from minigen.errors import CapacityError, ContextLengthError, ParamsError, PromptError
from minigen.outputs import CompletionOutput, RequestState
from minigen.protocols import LogitsProcessor
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.tokenizer.stop_strings import StopWatcher
from minigen.tokenizer.tokenizer import Tokenizer

Prompt = str | SequenceOf[int]
MakeProcessors = Callable[[SamplingParams, tuple[int, ...]], tuple[LogitsProcessor, ...]]


class RequestProcessor:
    """Checks requests against one model, and creates the states of their answers, in any thread.

    `end_ids` are the model's end tokens. `pool_tokens` is the KV pool's capacity in tokens, and
    `max_num_seqs` the most sequences that run at once. `make_processors(params, prompt_ids)`
    creates the logits processors of an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_positions: int,
        end_ids: frozenset[int],
        pool_tokens: int,
        max_num_seqs: int,
        make_processors: MakeProcessors = lambda params, prompt_ids: (),
    ):
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.pool_tokens, self.max_num_seqs = pool_tokens, max_num_seqs
        self._make_processors = make_processors
        self._sequence_ids = count(1)

    def process(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
        priority: int = 0,
        cache_salt: str | None = None,
        predicted_ids: SequenceOf[int] = (),
    ) -> list[RequestState]:
        """Return the state of every requested answer, after checking all prompts and parameters.

        `predicted_ids` are what the answers are expected to be, from which drafts are taken.
        Raises `PromptError` or `ParamsError`, before any work starts, if one of them is invalid.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        _check_params(params)
        if len(params) != len(prompts):
            raise ParamsError(
                f"params must have one entry per prompt, {len(prompts)} in all, not {len(params)}."
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ParamsError(f"priority must be a whole number, not {priority!r}.")
        if not isinstance(cache_salt, str | None):
            raise ParamsError(f"cache_salt must be text or None, not {cache_salt!r}.")
        predicted = tuple(predicted_ids[: self.max_positions])  # no answer is longer
        answers: list[RequestState] = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            prompt_ids = self._prompt_ids(
                prompt, f"prompt {index}" if len(prompts) > 1 else "prompt"
            )
            self._check_ids(own)
            answers += [
                RequestState(
                    index,
                    sequence,
                    self.tokenizer.stream(own.skip_special_tokens),
                    StopWatcher(own.stops, own.include_stop_str_in_output),
                    CompletionOutput(
                        sequence.choice, logprobs=None if own.logprobs is None else []
                    ),
                )
                for sequence in self._sequences(prompt_ids, own, priority, cache_salt, predicted)
            ]
        return answers

    def _sequences(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        predicted_ids: tuple[int, ...],
    ) -> list[Sequence]:
        """Return the sequences of the `n` answers; the others are siblings of the first."""
        first_id, *other_ids = (next(self._sequence_ids) for _ in range(params.n))
        create = partial(
            Sequence,
            prompt_ids=prompt_ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_output=self._max_output(prompt_ids, params),
            end_ids=self.end_ids,
            priority=priority,
            cache_salt=cache_salt,
            predicted_ids=predicted_ids,
        )
        processors = self._make_processors(params, prompt_ids)
        others = [
            create(each, choice=choice, processors=tuple(own.fork() for own in processors))
            for choice, each in enumerate(other_ids, start=1)
        ]
        fork = params.n <= self.max_num_seqs  # otherwise each computes the prompt itself
        siblings = tuple(others) if fork else ()
        return [create(first_id, siblings=siblings, processors=processors), *others]

    def _max_output(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> int:
        """Return the most tokens of an answer. Raises `CapacityError` if the pool is too small."""
        num_left = self.max_positions - len(prompt_ids)
        max_output = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        if params.max_tokens is None:
            max_output = min(max_output, self.pool_tokens - len(prompt_ids))
        if max_output < 1 or len(prompt_ids) + max_output > self.pool_tokens:
            raise CapacityError(
                f"A prompt of {len(prompt_ids)} tokens and an answer of {max(max_output, 1)} do "
                f"not fit into the KV cache, which holds {self.pool_tokens} tokens; load the model "
                "with more kv_cache_memory or num_blocks, or send a shorter request."
            )
        return max_output

    def _prompt_ids(self, prompt: Prompt, which: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = whole_numbers(prompt, which)
            unknown = [each for each in token_ids if not 0 <= each < self.vocab_size]
            if unknown:
                raise PromptError(
                    f"The {which} contains the token id {unknown[0]}; this model's ids are 0 to "
                    f"{self.vocab_size - 1}."
                )
        if not token_ids:
            raise PromptError(f"The {which} is empty; a model needs at least one token.")
        if len(token_ids) >= self.max_positions:
            raise ContextLengthError(
                f"The {which} has {len(token_ids)} tokens, which leaves no space for an answer: "
                f"this model's context holds {self.max_positions} tokens."
            )
        return tuple(token_ids)

    def _check_ids(self, params: SamplingParams) -> None:
        ends = self.end_ids.union(params.stop_token_ids)
        if params.min_tokens > 0 and len(ends) >= self.vocab_size:
            raise ParamsError(
                "stop_token_ids contains every token that does not end an answer, so min_tokens "
                "cannot be reached."
            )
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= self.vocab_size:
                    raise ParamsError(
                        f"{name} contains the token id {token_id}; this model's ids are 0 to "
                        f"{self.vocab_size - 1}."
                    )


def _check_params(params: object) -> None:
    for each in params if isinstance(params, SequenceOf) else [params]:
        if not isinstance(each, SamplingParams):
            raise ParamsError(
                "params must be a SamplingParams, as in SamplingParams(temperature=0), or a list "
                f"with one per prompt, not {reprlib.repr(each)}."
            )


def is_one_prompt(prompts: object) -> bool:
    """Return whether this is one prompt (text or token ids) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, SequenceOf):
        raise PromptError(f"A prompt is text or a list of token ids, not {type(prompts).__name__}.")
    return len(prompts) > 0 and not isinstance(prompts[0], str | SequenceOf)


def whole_numbers(prompt: object, which: str) -> list[int]:
    """Return a prompt's token ids as ints; raise a `PromptError` about `which` if it has others."""
    if not isinstance(prompt, SequenceOf) or isinstance(prompt, bytes):
        raise PromptError(
            f"The {which} must be text or a list of token ids, not {type(prompt).__name__}."
        )
    try:
        if any(isinstance(each, bool) for each in prompt):
            raise TypeError
        return [operator.index(each) for each in prompt]
    except TypeError:
        raise PromptError(f"The {which} must be text or a list of whole numbers only.") from None
