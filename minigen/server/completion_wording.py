"""A completion's answers in OpenAI's words; with echo, the prompt comes first."""

import json
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.answers import Answer
from minigen.server.failures import ApiError
from minigen.server.logprobs import Columns
from minigen.server.schema import CompletionRequest
from minigen.server.served import Served
from minigen.server.streams import Growth
from minigen.server.wording import EVENT_STREAM, Head, failed_event, usage_of


class CompletionWording:
    """`text_completion` and its chunks; with echo, the prompt comes first."""

    media_type = EVENT_STREAM

    def __init__(self, served: Served, answers: SequenceOf[Answer], request: CompletionRequest):
        self._answers, self._tokenizer = answers, served.llm.tokenizer
        self._n, self._echo = request.n or 1, bool(request.echo)
        self._prompts = request.prompt
        self._skips = request.skip_special_tokens is not False
        self._only_echo = request.max_tokens == 0
        self._head = Head("cmpl", served.name, request)
        self._opened = self._head.opened("text_completion")
        self._columns: dict[int, Columns] = {}  # by choice, of those who ask for logprobs

    @property
    def needs_engine(self) -> bool:
        """Whether there is more to tell than the prompt's text."""
        return not self._only_echo or self._answers[0].choice.logprobs is not None

    def whole(self) -> bytes:
        """The JSON of all choices."""
        choices = [
            {
                "index": self._index(answer),
                "text": self._echoed(answer) + ("" if self._only_echo else answer.choice.text),
                "logprobs": self._logprobs(answer),
                "finish_reason": "length" if self._only_echo else answer.choice.finish_reason,
            }
            for answer in self._answers
        ]
        return self._head.whole("text_completion", choices, self._usage())

    def begin(self) -> bytes:
        """The prompts, where they are echoed."""
        if not self._echo:
            return b""
        finish = '"length"' if self._only_echo else "null"
        return b"".join(
            self._chunk(answer, self._echoed(answer), self._prompt_columns(answer), finish)
            for answer in self._answers
        )

    def grown(self, growth: Growth) -> bytes:
        """A token's text, once it is certain, its log probability, and why that was the last."""
        answer, delta, told = growth
        if self._only_echo or not (delta.text or delta.finish_reason or told):
            return b""
        columns = None
        if told is not None:
            columns = self._columns_of(answer).of([(delta.token_id, told)])
        finish = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return self._chunk(answer, delta.text, columns, finish)

    def end(self) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        return self._head.end("text_completion", self._usage())

    def failure(self, error: ApiError) -> bytes:
        """An error in mid-stream."""
        return failed_event(error)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._answers, without_output=self._only_echo)

    def _index(self, answer: Answer) -> int:
        return answer.prompt * self._n + answer.choice.index

    def _echoed(self, answer: Answer) -> str:
        """The prompt as it was given, or as its tokens are written."""
        prompt = self._prompts[answer.prompt]
        if not self._echo:
            return ""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, self._skips)

    def _chunk(
        self, answer: Answer, text: str, columns: dict[str, Any] | None, finish: str
    ) -> bytes:
        logprobs = "null" if columns is None else json.dumps(columns)
        return (
            f'{self._opened}[{{"index":{self._index(answer)},"text":{json.dumps(text)},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]}}\n\n'
        ).encode()

    def _logprobs(self, answer: Answer) -> dict[str, list[Any]] | None:
        choice = answer.choice
        if choice.logprobs is None:
            return None
        before = self._prompt_columns(answer)
        if self._only_echo:
            return before
        own = self._columns_of(answer).of(zip(choice.token_ids, choice.logprobs, strict=True))
        return own if before is None else {name: before[name] + own[name] for name in own}

    def _prompt_columns(self, answer: Answer) -> dict[str, list[Any]] | None:
        if not self._echo or answer.choice.logprobs is None:
            return None
        first = self._answers[answer.prompt * self._n].sequence  # which knows for all n
        decoder = self._tokenizer.stream(self._skips, continues=False)
        columns = Columns(self._tokenizer, decoder)
        return columns.of(zip(first.prompt_ids, first.prompt_logprobs, strict=True))

    def _columns_of(self, answer: Answer) -> Columns:
        index = self._index(answer)
        if index not in self._columns:
            decoder = self._tokenizer.stream(self._skips)
            self._columns[index] = Columns(self._tokenizer, decoder, len(self._echoed(answer)))
        return self._columns[index]
