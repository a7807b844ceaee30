"""A chat's answers in OpenAI's words."""

import json
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.answers import Answer
from minigen.server.failures import ApiError
from minigen.server.logprobs import chat_entry
from minigen.server.schema import ChatRequest
from minigen.server.served import Served
from minigen.server.streams import Growth
from minigen.server.wording import EVENT_STREAM, Head, failed_event, usage_of


class ChatWording:
    """`chat.completion` and its chunks."""

    media_type = EVENT_STREAM

    def __init__(self, served: Served, answers: SequenceOf[Answer], request: ChatRequest):
        self._answers, self._tokenizer = answers, served.llm.tokenizer
        self._num_top = request.top_logprobs or 0
        self._head = Head("chatcmpl", served.name, request)
        self._opened = self._head.opened("chat.completion.chunk")

    def whole(self) -> bytes:
        """The JSON of all choices."""
        choices = [
            {
                "index": answer.choice.index,
                "message": {"role": "assistant", "content": answer.choice.text, "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.choice.finish_reason,
            }
            for answer in self._answers
        ]
        return self._head.whole("chat.completion", choices, usage_of(self._answers))

    def begin(self) -> bytes:
        """Each choice's role."""
        role = '{"role":"assistant","content":"","refusal":null}'
        return b"".join(self._chunk(each.choice.index, role) for each in self._answers)

    def grown(self, growth: Growth) -> bytes:
        """A token's text, once it is certain, and its log probability; or why that was the last."""
        index, delta, chunk = growth.answer.choice.index, growth.delta, b""
        logprobs = "null"
        if growth.logprobs is not None:
            entry = chat_entry(self._tokenizer, delta.token_id, growth.logprobs, self._num_top)
            logprobs = json.dumps({"content": [entry], "refusal": None})
        if delta.text or growth.logprobs is not None:
            chunk = self._chunk(index, f'{{"content":{json.dumps(delta.text)}}}', logprobs)
        if delta.finish_reason is not None:
            chunk += self._chunk(index, "{}", finish=f'"{delta.finish_reason}"')
        return chunk

    def end(self) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        return self._head.end("chat.completion.chunk", usage_of(self._answers))

    def failure(self, error: ApiError) -> bytes:
        """An error in mid-stream."""
        return failed_event(error)

    def _chunk(self, index: int, delta: str, logprobs: str = "null", finish: str = "null") -> bytes:
        return (
            f'{self._opened}[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]}}\n\n'
        ).encode()

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        choice = answer.choice
        if choice.logprobs is None:
            return None
        entries = [
            chat_entry(self._tokenizer, token_id, told, self._num_top)
            for token_id, told in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}
