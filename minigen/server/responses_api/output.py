"""The output of a response, item by item as it comes: reasoning, messages and calls.

Items stand in the order in which the model wrote them, so text between two calls is a message
between them. Each change is an event of OpenAI's stream, a kind and its fields.
"""

import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Literal

from minigen.tool_calling.parser import Part

Entry = dict[str, Any]  # the log probabilities of one token
Event = tuple[str, dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call"}


@dataclass
class OutputItem:
    """An item of the output; `pieces` are those of its text, or of a call's arguments."""

    kind: str
    place: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{secrets.token_hex(12)}"

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.pieces)

    def shown(self, status: Status) -> dict[str, Any]:
        """Return the item as clients see it; one in progress has no content yet."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name}
            return head | call | {"arguments": self.text}
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "message":
            return head | {"role": "assistant", "content": content}
        return head | {"summary": [], "content": content}

    def part(self) -> dict[str, Any]:
        """Return the only part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        own = {"annotations": [], "logprobs": list(self.logprobs)}
        return {"type": "output_text", "text": self.text, **own}

    def opened(self) -> Iterator[Event]:
        """Yield the events of a new item."""
        place = {"output_index": self.place}
        yield "response.output_item.added", place | {"item": self.shown("in_progress")}
        if self.kind != "function_call":
            yield "response.content_part.added", self._place | {"part": self.part()}

    def grown(self, text: str, logprobs: SequenceOf[Entry]) -> Event:
        """Add text; return the event."""
        if text:
            self.pieces.append(text)
        delta: dict[str, Any] = {"delta": text}
        if self.kind == "message":
            self.logprobs.extend(logprobs)
            delta["logprobs"] = list(logprobs)
        return f"{_DELTAS[self.kind]}.delta", self._place | delta

    def closed(self, status: Status) -> Iterator[Event]:
        """Yield the events of an item that is complete, or cut off."""
        place = {"output_index": self.place}
        done: dict[str, Any] = {"text": self.text}
        if self.kind == "function_call":
            done = {"name": self.name, "arguments": self.text}
        elif self.kind == "message":
            done["logprobs"] = list(self.logprobs)
        yield f"{_DELTAS[self.kind]}.done", self._place | done
        if self.kind != "function_call":
            yield "response.content_part.done", self._place | {"part": self.part()}
        yield "response.output_item.done", place | {"item": self.shown(status)}

    @property
    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.place}
        return place if self.kind == "function_call" else place | {"content_index": 0}


class Output:
    """Puts the items of one answer together.

    A token whose text is held back, or that has none, belongs to the item whose text comes next,
    or to the last item if none comes.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []  # the closed ones
        self.num_reasoning_tokens = 0
        self._open: OutputItem | None = None
        self._waiting: list[Entry] = []
        self._num_waiting = 0

    def add(self, parts: Iterable[Part], logprobs: Entry | None) -> Iterator[Event]:
        """Add what one token brought; yield the events."""
        self._num_waiting += 1
        if logprobs is not None:
            self._waiting.append(logprobs)
        yield from self._grow(parts)

    def finish(self, parts: Iterable[Part], cut_off: bool) -> Iterator[Event]:
        """Add what was held back and close the last item; an empty answer has an empty message."""
        yield from self._grow(parts)
        if self._open is None:
            yield from self._begin(OutputItem("message", 0))
        assert self._open is not None
        if self._waiting and self._open.kind == "message":
            yield self._open.grown("", self._taken(self._open))
        self._taken(self._open)
        yield from self._close("incomplete" if cut_off else "completed")

    def shown(self) -> list[dict[str, Any]]:
        """Return all items; one that is still open is incomplete."""
        return self.items + ([] if self._open is None else [self._open.shown("incomplete")])

    def _grow(self, parts: Iterable[Part]) -> Iterator[Event]:
        for part in parts:
            kind = _KINDS.get(part.kind, "function_call")
            if self._open is None or self._open.kind != kind or part.kind == "call":
                yield from self._close("completed")
                call = (part.text, part.call_id) if part.kind == "call" else ("", "")
                yield from self._begin(OutputItem(kind, len(self.items), *call))
            assert self._open is not None
            logprobs = self._taken(self._open)
            if part.kind != "call":
                yield self._open.grown(part.text, logprobs)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self._open = item
        yield from item.opened()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.closed(status)
            self.items.append(self._open.shown(status))
            self._open = None

    def _taken(self, item: OutputItem) -> list[Entry]:
        """Assign the waiting tokens to an item; return their log probabilities."""
        if item.kind == "reasoning":
            self.num_reasoning_tokens += self._num_waiting
        logprobs, self._waiting, self._num_waiting = self._waiting, [], 0
        return logprobs
