"""Assembly: a model's name becomes an engine, prompts become answers.

This is the one place that chooses implementations; everything below receives them.
"""

import operator
import secrets
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from minigen import hub
from minigen.cache.dense import DenseRunner
from minigen.checkpoint import Checkpoint, open_checkpoint
from minigen.config import ModelConfig
from minigen.engine.engine import Engine
from minigen.errors import (
    ChatTemplateError,
    ContextLengthError,
    OptionError,
    ParamsError,
    PromptError,
)
from minigen.machine import multiplies_bfloat16
from minigen.model.transformer import build_transformer, dense_linear
from minigen.outputs import Choice, Delta, Output
from minigen.params import SamplingParams
from minigen.sampling import BatchSampler
from minigen.sequence import SampledToken, Sequence
from minigen.text.chat import ChatTemplate
from minigen.text.stops import StopWatcher
from minigen.text.tokenizer import Tokenizer

Prompt = str | SequenceOf[int]

WEIGHTS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LLM:
    """A loaded model that continues prompts and answers chats."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        engine: Engine,
        choices: Mapping[str, str],
    ):
        self.config, self.tokenizer, self.chat_template = config, tokenizer, chat_template
        self.engine = engine
        self._choices = dict(choices)
        self._num_sequences = 0

    @classmethod
    def load(
        cls,
        name: str | Path = hub.DEFAULT_MODEL,
        *,
        weights: str = "auto",
        threads: int | None = None,
        max_sequences: int = 16,
        max_batch_tokens: int = 2048,
        progress: hub.Progress | None = None,
    ) -> "LLM":
        """Load a model by short name, directory, GGUF file or Hugging Face id; pull it if need be.

        `weights` is the type that products are done in: "float32", "bfloat16", or "auto" for the
        faster of the two on this processor. `threads` is torch's thread count (its own default if
        None); at most `max_sequences` run at once, and a step begins prompts of at most
        `max_batch_tokens` in all. Raises a `MinigenError` that says what to do.
        """
        if weights not in ("auto", *WEIGHTS):
            raise OptionError(
                f"weights must be auto or one of {', '.join(WEIGHTS)}, not {weights!r}."
            )
        for option, value in (
            ("threads", 1 if threads is None else threads),
            ("max_sequences", max_sequences),
            ("max_batch_tokens", max_batch_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{option} must be a whole number above 0, not {value!r}.")
        if threads is not None:
            torch.set_num_threads(threads)
        checkpoint = open_checkpoint(hub.resolve(str(name), progress=progress))
        return cls._assemble(checkpoint, weights, max_sequences, max_batch_tokens)

    @classmethod
    def _assemble(
        cls, checkpoint: Checkpoint, weights: str, max_sequences: int, max_batch_tokens: int
    ) -> "LLM":
        config = checkpoint.config
        tokenizer = checkpoint.tokenizer()
        form, reason = _choose_weights(weights)
        dtype = WEIGHTS[form]
        model = build_transformer(config, checkpoint.tensors, dtype, dense_linear(dtype))
        runner = DenseRunner(model, config.kv_heads, config.sliding_windows, dtype)
        engine = Engine(runner, BatchSampler(), max_sequences, max_batch_tokens)
        choices = {
            "model": f"{config.family}, {checkpoint.form}, from {checkpoint.path}",
            "weights": f"{form} ({reason})",
            "linear": "torch",
            "attention": "torch scaled_dot_product_attention over a dense cache per sequence",
            "sampler": "BatchSampler",
            "threads": str(torch.get_num_threads()),
        }
        return cls(config, tokenizer, checkpoint.chat_template(), engine, choices)

    def describe(self) -> dict[str, str]:
        """Which implementation was chosen for each part, and why."""
        return dict(self._choices)

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = ...) -> Output: ...

    @overload
    def generate(
        self,
        prompts: SequenceOf[str] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = ...,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Output | list[Output]:
        """Continue one prompt (text or token ids), or each of a list of them.

        One prompt returns one `Output`, a list returns a list in the same order. `params` is for
        all prompts, or a list with one for each. Raises `PromptError` or `ParamsError`.
        """
        if _is_one_prompt(prompts):
            return self.generate([prompts], params)[0]  # type: ignore[list-item]
        answers = self._answers(prompts, params)  # type: ignore[arg-type]
        for _ in self._run(answers):
            pass
        return _gather(answers)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, and yield the answer's text as it comes; concatenated it is whole.

        Closing the iterator gives the rest of the answer up.
        """
        if not _is_one_prompt(prompt):
            raise PromptError("stream takes one prompt; stream_deltas takes several.")
        if params is not None and params.n != 1:
            raise ParamsError("stream yields one answer; n above 1 needs stream_deltas.")
        return (delta.text for delta in self.stream_deltas([prompt], params) if delta.text)

    def stream_deltas(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Continue several prompts at once, and yield every token of every answer as it comes."""
        return self._run(self._answers(prompts, params))

    def chat(
        self, messages: SequenceOf[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Output:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: SequenceOf[Mapping[str, Any]], **variables: Any) -> list[int]:
        """A conversation as the token ids that the model's chat template makes of it.

        `variables` go to the template. Raises `ChatTemplateError` for a model without one.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "This model has no chat template: it continues text, so use generate."
            )
        text = self.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _run(self, answers: SequenceOf["_Answer"]) -> Iterator[Delta]:
        """Step the engine until the answers are whole; those left when closed are given up."""
        by_sequence = {answer.sequence: answer for answer in answers}
        for answer in answers:
            self.engine.add(answer.sequence)
        try:
            while any(answer.choice.finish_reason is None for answer in answers):
                for sequence, token in self.engine.step():
                    answer = by_sequence[sequence]
                    yield answer.push(token)
                    if answer.stops.stopped:
                        self.engine.abort(sequence)
        finally:
            for answer in answers:
                self.engine.abort(answer.sequence)

    def _answers(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list["_Answer"]:
        """All answers to be made, every prompt and setting checked before any work begins."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ParamsError(f"{len(prompts)} prompts need as many params, not {len(params)}.")
        answers = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            prompt_ids = self._prompt_ids(
                prompt, f"prompt {index}" if len(prompts) > 1 else "prompt"
            )
            self._check_ids(own)
            seed = secrets.randbits(63) if own.seed is None else own.seed
            for choice in range(own.n):
                sequence = self._sequence(prompt_ids, own, seed, choice)
                stream = self.tokenizer.stream(own.skip_special_tokens)
                stops = StopWatcher(own.stops, own.include_stop_str_in_output)
                logprobs = None if own.logprobs is None else []
                answers.append(
                    _Answer(index, sequence, stream, stops, Choice(choice, logprobs=logprobs))
                )
        return answers

    def _sequence(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, seed: int, choice: int
    ) -> Sequence:
        room = self.config.max_positions - len(prompt_ids)
        self._num_sequences += 1
        return Sequence(
            sequence_id=self._num_sequences,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            choice=choice,
            max_output=room if params.max_tokens is None else min(params.max_tokens, room),
            end_ids=frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids),
        )

    def _prompt_ids(self, prompt: Prompt, which: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = _whole_numbers(prompt, which)
            strange = [each for each in token_ids if not 0 <= each < self.config.vocab_size]
            if strange:
                raise PromptError(
                    f"The {which} holds the token id {strange[0]}; this model knows 0 to "
                    f"{self.config.vocab_size - 1}."
                )
        if not token_ids:
            raise PromptError(f"The {which} is empty; a model needs at least one token to go on.")
        if len(token_ids) >= self.config.max_positions:
            raise ContextLengthError(
                f"The {which} has {len(token_ids)} tokens, which leaves no room for an answer: "
                f"this model's context holds {self.config.max_positions}."
            )
        return tuple(token_ids)

    def _check_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= self.config.vocab_size:
                    raise ParamsError(
                        f"{name} names the token {token_id}; this model knows 0 to "
                        f"{self.config.vocab_size - 1}."
                    )


@dataclass
class _Answer:
    """An answer in the making: its sequence, and how its tokens become text."""

    prompt: int
    sequence: Sequence
    stream: Any
    stops: StopWatcher
    choice: Choice

    def push(self, token: SampledToken) -> Delta:
        """Take a token; returns the text that is certain by now."""
        params, reason = self.sequence.params, self.sequence.finish_reason
        self.choice.token_ids.append(token.token_id)
        if self.choice.logprobs is not None and token.logprobs is not None:
            self.choice.logprobs.append(token.logprobs)
        silent = reason == "stop" and not params.include_stop_str_in_output
        text = "" if silent else self.stream.push(token.token_id)
        if reason is not None:
            text += self.stream.finish()
        if len(self.choice.token_ids) > params.min_tokens:
            text = self.stops.push(text)
        if self.stops.stopped:
            reason = "stop"
        elif reason is not None:
            text += self.stops.finish()
        self.choice.text += text
        self.choice.finish_reason = reason
        return Delta(self.prompt, self.choice.index, text, token.token_id, reason)


def _gather(answers: SequenceOf[_Answer]) -> list[Output]:
    outputs: dict[int, Output] = {}
    for answer in answers:
        output = outputs.setdefault(answer.prompt, Output(answer.sequence.prompt_ids, []))
        output.choices.append(answer.choice)
    return list(outputs.values())


def _is_one_prompt(prompts: object) -> bool:
    """Whether this is text or a list of ids, rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, SequenceOf):
        raise PromptError(f"A prompt is text or a list of token ids, not {type(prompts).__name__}.")
    return len(prompts) > 0 and not isinstance(prompts[0], str | SequenceOf)


def _whole_numbers(prompt: object, which: str) -> list[int]:
    if not isinstance(prompt, SequenceOf) or isinstance(prompt, bytes):
        raise PromptError(
            f"The {which} must be text or a list of token ids, not {type(prompt).__name__}."
        )
    try:
        if any(isinstance(each, bool) for each in prompt):
            raise TypeError
        return [operator.index(each) for each in prompt]
    except TypeError:
        raise PromptError(
            f"The {which} must be text or a list of whole numbers, and not hold anything else."
        ) from None


def _choose_weights(weights: str) -> tuple[str, str]:
    """The form of the weights, and the reason for it."""
    if weights != "auto":
        return weights, "as asked"
    if multiplies_bfloat16():
        return "bfloat16", "auto: this processor multiplies bfloat16"
    return "float32", "auto: this processor has no instructions for bfloat16"
