"""What a caller receives: the deltas of a streamed answer, and complete answers."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minigen.sequence import Logprob, SampledToken, Sequence
from minigen.tokenizer.stop_strings import StopWatcher
from minigen.tokenizer.tokenizer import StreamDecoder


@dataclass(frozen=True)
class TokenDelta:
    """What one step added to one answer: a token, and the text that is final now.

    `prompt` and `choice` are the indices of the answer. `text` may be empty, for a token can end
    inside a character or a possible stop string. `finish_reason` is set in an answer's last delta.
    `logprobs`, if requested, are those of the token, as in `CompletionOutput`.
    """

    prompt: int
    choice: int
    text: str
    token_id: int
    finish_reason: str | None = None
    logprobs: Mapping[int, Logprob] | None = None


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt.

    `finish_reason` is "stop" (an end token, a stop token or a stop string) or "length".
    `logprobs`, if requested, has one entry per token: by token id, the log probabilities of the
    sampled token and of the most likely ones.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """All answers to one prompt; `text`, `token_ids` and so on are those of the first answer.

    `prompt_logprobs`, if requested, has one entry per prompt token, of which the first is None.
    """

    prompt_token_ids: tuple[int, ...]
    choices: list[CompletionOutput]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens, including a stop token."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Mapping[int, Logprob]] | None:
        """The first answer's log probabilities."""
        return self.choices[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens in all answers together."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass
class RequestState:
    """The state of one unfinished answer: its sequence, and how its tokens become text.

    The times of its first and last token are in nanoseconds of `time.perf_counter_ns`.
    """

    prompt: int
    sequence: Sequence
    stream: StreamDecoder
    stops: StopWatcher
    choice: CompletionOutput
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    @property
    def is_cut_off(self) -> bool:
        """Whether the limit of tokens or a stop string ended the answer, wherever the model was."""
        return self.choice.finish_reason == "length" or self.stops.stopped

    def push(self, token: SampledToken) -> TokenDelta:
        """Add a token to the answer; return it with the text that is final now."""
        self.last_token_ns = time.perf_counter_ns()
        self.first_token_ns = self.first_token_ns or self.last_token_ns
        self.choice.token_ids.append(token.token_id)
        params, sequence = self.sequence.params, self.sequence
        # A step may give several tokens; the sequence's reason is that of the last one.
        is_last = len(self.choice.token_ids) >= len(sequence.output_ids)
        reason = sequence.finish_reason if is_last else None
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
        return TokenDelta(
            self.prompt, self.choice.index, text, token.token_id, reason, token.logprobs
        )


def gather(answers: SequenceOf[RequestState]) -> list[RequestOutput]:
    """Group finished answers by prompt, in the order of the prompts."""
    outputs: dict[int, RequestOutput] = {}
    for answer in answers:
        prompt_logprobs = answer.sequence.prompt_logprobs or None
        output = outputs.setdefault(
            answer.prompt, RequestOutput(answer.sequence.prompt_ids, [], prompt_logprobs)
        )
        output.choices.append(answer.choice)
    return list(outputs.values())
