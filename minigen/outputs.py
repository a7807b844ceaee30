"""What a caller gets back: answers as they grow, and answers whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from minigen.sequence import Logprob


@dataclass(frozen=True)
class Delta:
    """What one step added to one answer: text that is whole by now, and why it ended, if it did.

    `prompt` and `choice` say which answer; `token_id` is the step's token.
    """

    prompt: int
    choice: int
    text: str
    token_id: int
    finish_reason: str | None = None


@dataclass
class Choice:
    """One of the n answers to a prompt.

    `finish_reason` is "stop" (the model's end, a stop token or a stop string) or "length".
    `logprobs`, where asked for, has an entry per token: by id, the chosen token and the likeliest.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None


@dataclass
class Output:
    """The answers to one prompt; the short names speak of the first.

    `prompt_logprobs`, where asked for, has an entry per token of the prompt, the first None.
    """

    prompt_token_ids: tuple[int, ...]
    choices: list[Choice]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens, a stop token included."""
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
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(len(choice.token_ids) for choice in self.choices)
