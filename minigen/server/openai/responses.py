"""Responses in OpenAI's format, complete or in chunks: chats, completions, log probabilities.

There is a chunk for every token, so the constant parts of a chunk are serialized only once.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from minigen import __version__
from minigen.outputs import RequestState, TokenDelta
from minigen.sequence import Logprob
from minigen.server.errors import ApiError
from minigen.server.models import Served
from minigen.server.openai.schema import ChatRequest, CompletionRequest, Generation
from minigen.tokenizer.tokenizer import StreamDecoder, Tokenizer
from minigen.tool_calling.parser import AnswerParser, Part, parse
from minigen.tool_calling.tools import ToolCall

LEAST = -9999.0  # OpenAI's value for a probability of 0, since JSON has no infinity

TokenLogprobs = Mapping[int, Logprob]  # of one position, by token id


def chat_entry(
    tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs, num_top: int
) -> dict[str, Any]:
    """Return the entries of a sampled token and of the `num_top` most likely ones, with bytes."""
    return {
        **_entry(tokenizer, token_id, logprobs[token_id]),
        "top_logprobs": [_entry(tokenizer, *each) for each in _likeliest(logprobs)[:num_top]],
    }


class Columns:
    """The log probabilities of a completion as lists with an entry per token, with text offsets.

    A token that is part of a character has the offset of that character. `offset` is the offset of
    the first token.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: StreamDecoder, offset: int = 0):
        self._tokenizer, self._decoder, self._offset = tokenizer, decoder, offset

    def of(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """Return the lists for the next tokens; a prompt's first token has no log probabilities."""
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, logprobs in tokens:
            columns["text_offset"].append(self._offset)
            columns["tokens"].append(_text(self._tokenizer.token_bytes(token_id), "bytes:"))
            columns["token_logprobs"].append(logprobs and _number(logprobs[token_id]))
            columns["top_logprobs"].append(logprobs and self._top(logprobs))
            self._offset += len(self._decoder.push(token_id))
        return columns

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in _likeliest(logprobs):  # of equal texts, the most likely one wins
            text = _text(self._tokenizer.token_bytes(token_id), "bytes:")
            top.setdefault(text, _number(logprob))
        return top


def _entry(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": _text(raw), "logprob": _number(logprob), "bytes": list(raw)}


def _likeliest(logprobs: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda each: -each[1].logprob)


def _text(raw: bytes, prefix: str = "") -> str:
    """Return the token's text; part of a character is written as its bytes, like `\\xe2\\x80`.

    >>> _text(b" caf"), _text("é".encode()[:1], "bytes:")
    (' caf', 'bytes:\\\\xc3')
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)


EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"minigen-{__version__}"


class ResponseWriter(Protocol):
    """Writes the response in the format of one API, complete or as a stream of bytes."""

    media_type: str

    @property
    def needs_engine(self) -> bool:
        """Whether the response needs more than the prompt's text."""

    def whole(self) -> bytes: ...

    def on_start(self) -> bytes: ...

    def on_token(self, delta: TokenDelta) -> bytes: ...

    def end(self) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...


class Head:
    """The fields that all chunks of a response share: its id, its time, the model."""

    def __init__(self, prefix: str, model: str, request: Generation):
        self.facts = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        options = request.stream_options
        self.includes_usage = options is not None and bool(options.include_usage)

    def opened(self, kind: str) -> str:
        """Return the start of a chunk, up to its choices."""
        usage = {"usage": None} if self.includes_usage else {}
        text = json.dumps({"object": kind, **self.facts, **usage}, separators=(",", ":"))
        return f'data: {text[:-1]},"choices":'

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        """Return the JSON of a complete response, or of a chunk."""
        return json.dumps(
            {"object": kind, **self.facts, "choices": choices, "usage": usage}
        ).encode()

    def end(self, kind: str, usage: dict[str, Any]) -> bytes:
        """Return the last chunks of a stream."""
        if not self.includes_usage:
            return DONE
        return b"data: " + self.whole(kind, [], usage) + b"\n\n" + DONE


def usage_of(answers: SequenceOf[RequestState], without_output: bool = False) -> dict[str, Any]:
    """Count the prompt tokens, cached prompt tokens and output tokens; each prompt counts once.

    If the client predicted the answer, also count the drafted tokens that were right and wrong.
    """
    firsts = [answer.sequence for answer in answers if answer.choice.index == 0]
    prompt = sum(len(sequence.prompt_ids) for sequence in firsts)
    output = 0 if without_output else sum(len(answer.choice.token_ids) for answer in answers)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(sequence.num_cached or 0 for sequence in firsts)
        },
    }
    sequences = [answer.sequence for answer in answers]
    if any(each.predicted_ids for each in sequences):
        accepted = sum(each.num_accepted for each in sequences)
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.num_drafted for each in sequences) - accepted,
        }
    return usage


def failed_event(error: ApiError) -> bytes:
    """Return an error in the middle of a stream, in the format that OpenAI's client expects."""
    return b"data: " + error.body() + b"\n\n"


class ChatResponseWriter:
    """Writes `chat.completion` objects and their chunks."""

    media_type = EVENT_STREAM
    needs_engine = True

    def __init__(
        self,
        served: Served,
        answers: SequenceOf[RequestState],
        request: ChatRequest,
        new_parser: Callable[[], AnswerParser] | None = None,
    ):
        self._answers, self._tokenizer = answers, served.llm.tokenizer
        self._new_parser = new_parser
        self._parsers = [] if new_parser is None else [new_parser() for _ in answers]
        self._called: set[int] = set()  # the choices with calls
        self._num_top = request.top_logprobs or 0
        self._head = Head("chatcmpl", served.name, request)
        self._opened = self._head.opened("chat.completion.chunk")

    def whole(self) -> bytes:
        """Return the JSON of all choices."""
        choices = [
            {
                "index": answer.choice.index,
                **self._message(answer),
                "logprobs": self._logprobs(answer),
            }
            for answer in self._answers
        ]
        return self._head.whole("chat.completion", choices, usage_of(self._answers))

    def on_start(self) -> bytes:
        """Return a chunk with the role of each choice."""
        role = '{"role":"assistant","content":"","refusal":null}'
        return b"".join(self._chunk(each.choice.index, role) for each in self._answers)

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return chunks with the final text and log probabilities, and one for a finish reason."""
        chunk, logprobs = b"", "null"
        if delta.logprobs is not None:
            entry = chat_entry(self._tokenizer, delta.token_id, delta.logprobs, self._num_top)
            logprobs = json.dumps({"content": [entry], "refusal": None})
        if self._parsers:
            return self._parts(delta, logprobs)
        if delta.text or delta.logprobs is not None:
            chunk = self._chunk(delta.choice, f'{{"content":{json.dumps(delta.text)}}}', logprobs)
        if delta.finish_reason is not None:
            chunk += self._chunk(delta.choice, "{}", finish=f'"{delta.finish_reason}"')
        return chunk

    def end(self) -> bytes:
        """Return the usage, if requested, and the end mark."""
        return self._head.end("chat.completion.chunk", usage_of(self._answers))

    def failure(self, error: ApiError) -> bytes:
        """Return an error in the middle of a stream."""
        return failed_event(error)

    def _message(self, answer: RequestState) -> dict[str, Any]:
        """Return the message of a choice and its finish reason."""
        text, reason = answer.choice.text, answer.choice.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._new_parser is not None:
            parser = self._new_parser()
            parsed = parse(parser, text, answer.is_cut_off)
            message["content"] = parsed.content or (None if parsed.calls else "")
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
            if parsed.calls:
                message["tool_calls"] = [_call(each) for each in parsed.calls]
                if reason == "stop" and not parser.is_within_call:
                    reason = "tool_calls"
        return {"message": message, "finish_reason": reason}

    def _parts(self, delta: TokenDelta, logprobs: str) -> bytes:
        """Return the chunks of a token where text has parts; the first has its probabilities."""
        parser, ended = self._parsers[delta.choice], delta.finish_reason
        parts = parser.push(delta.text)
        if ended is not None:
            parts += parser.finish(self._answers[delta.choice].is_cut_off)
        deltas = [_delta_of(part) for part in parts]
        if not deltas and logprobs != "null":
            deltas = ["{}"]
        chunks = [
            self._chunk(delta.choice, each, "null" if place else logprobs)
            for place, each in enumerate(deltas)
        ]
        self._called |= {delta.choice for part in parts if part.kind == "call"}
        if ended is not None:
            called = delta.choice in self._called and not parser.is_within_call
            reason = "tool_calls" if ended == "stop" and called else ended
            chunks.append(self._chunk(delta.choice, "{}", finish=f'"{reason}"'))
        return b"".join(chunks)

    def _chunk(self, index: int, delta: str, logprobs: str = "null", finish: str = "null") -> bytes:
        return (
            f'{self._opened}[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]}}\n\n'
        ).encode()

    def _logprobs(self, answer: RequestState) -> dict[str, Any] | None:
        choice = answer.choice
        if choice.logprobs is None:
            return None
        entries = [
            chat_entry(self._tokenizer, token_id, logprobs, self._num_top)
            for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _delta_of(part: Part) -> str:
    """Return a part of an answer as the delta of a chunk."""
    if part.kind == "content":
        return f'{{"content":{json.dumps(part.text)}}}'
    if part.kind == "reasoning":
        return f'{{"reasoning_content":{json.dumps(part.text)}}}'
    call: dict[str, Any] = {"index": part.index}
    if part.kind == "call":
        call |= _call(ToolCall(part.call_id, part.text, ""))
    else:
        call["function"] = {"arguments": part.text}
    return json.dumps({"tool_calls": [call]}, separators=(",", ":"))


class CompletionResponseWriter:
    """Writes `text_completion` objects and their chunks; with echo, the prompt comes first."""

    media_type = EVENT_STREAM

    def __init__(
        self, served: Served, answers: SequenceOf[RequestState], request: CompletionRequest
    ):
        self._answers, self._tokenizer = answers, served.llm.tokenizer
        self._n, self._echo = request.n or 1, bool(request.echo)
        self._prompts = request.prompt
        self._skips = request.skip_special_tokens is not False
        self._only_echo = request.max_tokens == 0
        self._head = Head("cmpl", served.name, request)
        self._opened = self._head.opened("text_completion")
        self._columns: dict[int, Columns] = {}  # by choice, if log probabilities are requested
        self._not_echoed: set[int] = set()  # choices whose echo comes with their first token

    @property
    def needs_engine(self) -> bool:
        """Whether the response needs more than the prompt's text."""
        return not self._only_echo or self._answers[0].choice.logprobs is not None

    def whole(self) -> bytes:
        """Return the JSON of all choices."""
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

    def on_start(self) -> bytes:
        """Return the echoed prompts; nothing without echo.

        With log probabilities each waits for its first token: a later prompt may not be computed.
        """
        if not self._echo:
            return b""
        if self._answers[0].choice.logprobs is not None:
            self._not_echoed = {self._index(answer) for answer in self._answers}
            return b""
        return b"".join(self._echo_chunk(answer) for answer in self._answers)

    def on_token(self, delta: TokenDelta) -> bytes:
        """Return a chunk with the final text, the log probabilities and the finish reason."""
        index, before = delta.prompt * self._n + delta.choice, b""
        answer, columns = self._answers[index], None
        if index in self._not_echoed:
            self._not_echoed.remove(index)
            before = self._echo_chunk(answer)
        if self._only_echo or not (delta.text or delta.finish_reason or delta.logprobs):
            return before
        if delta.logprobs is not None:
            columns = self._columns_of(answer).of([(delta.token_id, delta.logprobs)])
        finish = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return before + self._chunk(answer, delta.text, columns, finish)

    def end(self) -> bytes:
        """Return the usage, if requested, and the end mark."""
        return self._head.end("text_completion", self._usage())

    def failure(self, error: ApiError) -> bytes:
        """Return an error in the middle of a stream."""
        return failed_event(error)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._answers, without_output=self._only_echo)

    def _index(self, answer: RequestState) -> int:
        return answer.prompt * self._n + answer.choice.index

    def _echo_chunk(self, answer: RequestState) -> bytes:
        finish = '"length"' if self._only_echo else "null"
        return self._chunk(answer, self._echoed(answer), self._prompt_columns(answer), finish)

    def _echoed(self, answer: RequestState) -> str:
        """Return the prompt to echo: the given text, or the decoded tokens; "" without echo."""
        prompt = self._prompts[answer.prompt]
        if not self._echo:
            return ""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, self._skips)

    def _chunk(
        self, answer: RequestState, text: str, columns: dict[str, Any] | None, finish: str
    ) -> bytes:
        logprobs = "null" if columns is None else json.dumps(columns)
        return (
            f'{self._opened}[{{"index":{self._index(answer)},"text":{json.dumps(text)},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]}}\n\n'
        ).encode()

    def _logprobs(self, answer: RequestState) -> dict[str, list[Any]] | None:
        choice = answer.choice
        if choice.logprobs is None:
            return None
        before = self._prompt_columns(answer)
        if self._only_echo:
            return before
        own = self._columns_of(answer).of(zip(choice.token_ids, choice.logprobs, strict=True))
        return own if before is None else {name: before[name] + own[name] for name in own}

    def _prompt_columns(self, answer: RequestState) -> dict[str, list[Any]] | None:
        if not self._echo or answer.choice.logprobs is None:
            return None
        first = self._answers[answer.prompt * self._n].sequence  # stores them for all n answers
        decoder = self._tokenizer.stream(self._skips, continues=False)
        columns = Columns(self._tokenizer, decoder)
        return columns.of(zip(first.prompt_ids, first.prompt_logprobs, strict=True))

    def _columns_of(self, answer: RequestState) -> Columns:
        index = self._index(answer)
        if index not in self._columns:
            decoder = self._tokenizer.stream(self._skips)
            self._columns[index] = Columns(self._tokenizer, decoder, len(self._echoed(answer)))
        return self._columns[index]
