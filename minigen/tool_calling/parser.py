"""Split an answer, as it comes, into reasoning, text and tool calls.

The work is linear in the answer's length, whatever the model writes: a call's head is looked for
in a bounded text, and arguments are scanned once.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from minigen.tool_calling.formats import ToolFormat
from minigen.tool_calling.tools import ToolCall

THINK, END_OF_THINK = "<think>", "</think>"
MOST_HEAD = 4096  # characters of a call before its arguments, or of a call in another order
_MARKS = re.compile(r'["\\{}\[\]]')
_FIRST_KEY = re.compile(r'\s*+\[?+\s*+\{\s*+"(?P<key>[^"\\]*+)"')
_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}

Reasoning = Literal["none", "possible", "open"]


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of its reasoning, of its text, or of the call with this index.

    `text` is the whole name where the kind is "call", which begins a call; then its arguments
    come in pieces, as they were written.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0
    call_id: str = ""


@dataclass
class ParsedAnswer:
    """An answer in its parts; `arguments` of an answer that was cut off may be no whole JSON."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerParser:
    """Reads one answer of a model.

    A call of a tool that is not in `names` stays text, and without `style` there are no calls.
    Text is held back only while it may be the beginning of a mark, or blanks beside a call: these
    are not part of the text.
    """

    def __init__(
        self,
        style: ToolFormat | None,
        names: Collection[str] = (),
        reasoning: Reasoning = "none",
    ):
        self._style, self._names = style, names
        self._rest = ""  # what is not yet understood
        self._mark = ""  # what the rest is part of, if it turns out to be no call
        self._blanks = ""  # at the end of the text so far
        self._num_calls = 0
        self._depth, self._in_string, self._escaped = 0, False, False  # within arguments
        starts = {
            "none": self._at_start,
            "possible": self._before_thinking,
            "open": self._thinking,
        }
        self._step = starts[reasoning]

    def push(self, text: str) -> list[Part]:
        """Read more of the answer; return the parts that are certain now."""
        self._rest += text
        parts: list[Part] = []
        while self._rest and self._step(parts):
            pass
        return parts

    def finish(self, cut_off: bool = False) -> list[Part]:
        """Return what was held back, once the answer has ended.

        The beginning of a call that was `cut_off`, by the limit of tokens or by a stop string, is
        dropped, and after a call also the beginning of a mark.
        """
        parts: list[Part] = []
        if cut_off and self._step == self._text and self._num_calls:
            self._rest = self._blanks = ""  # `_text` holds back nothing else
        while self._step == self._head:
            if cut_off and (self._mark or self._num_calls):
                self._rest = self._blanks = ""
                break
            if not self._whole_call(self._rest, parts):
                self._give_up(parts)
                parts += self.push("")
                continue
            self._rest = ""
            break
        if self._step == self._thinking:
            parts += [Part("reasoning", self._rest)] if self._rest else []
        elif self._step not in (self._arguments, self._after_call):
            self._say(self._rest, parts)
        if self._blanks and not self._num_calls:
            parts.append(Part("content", self._blanks))
        return parts

    @property
    def is_within_call(self) -> bool:
        """Whether what came so far ends within a call's arguments."""
        return self._step == self._arguments

    def _before_thinking(self, parts: list[Part]) -> bool:
        start = self._rest.lstrip()
        if start.startswith(THINK):
            self._rest, self._step = start.removeprefix(THINK), self._thinking
        elif THINK.startswith(start):
            return False
        else:
            self._step = self._at_start
        return True

    def _thinking(self, parts: list[Part]) -> bool:
        thought, end, rest = self._rest.partition(END_OF_THINK)
        held = 0 if end else _length_of_start(thought, END_OF_THINK)
        if len(thought) > held:
            parts.append(Part("reasoning", thought[: len(thought) - held]))
        if not end:
            self._rest = thought[len(thought) - held :]
            return False
        self._rest, self._step = rest, self._after_thinking
        return True

    def _after_thinking(self, parts: list[Part]) -> bool:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._step = self._at_start
        return bool(self._rest)

    def _at_start(self, parts: list[Part]) -> bool:
        """Decide whether the answer begins with a call that has no mark before it."""
        if self._style is None or self._style.begin:
            self._step = self._text
            return True
        first = self._rest.lstrip()[:1]
        if first:
            self._mark = ""
            self._step = self._head if first == "{" else self._text
        return bool(first)

    def _text(self, parts: list[Part]) -> bool:
        begin = "" if self._style is None else self._style.begin
        text, mark, rest = self._rest.partition(begin) if begin else (self._rest, "", "")
        held = _length_of_start(text, begin) if begin and not mark else 0
        self._say(text[: len(text) - held], parts)
        self._rest = rest if mark else text[len(text) - held :]
        if mark:
            self._mark, self._step = mark, self._head
        return bool(mark)

    def _head(self, parts: list[Part]) -> bool:
        """Look for a call's name; `_rest` is all that follows the mark, and has no name yet."""
        assert self._style is not None
        near = self._rest[:MOST_HEAD]
        found = self._style.head.match(near)
        end = near.find(self._style.end) if self._style.end else -1
        if found is not None and found["name"] in self._names:
            self._open(found["name"], parts)
            self._rest, self._step = self._rest[found.end() :], self._arguments
        elif end >= 0 and self._whole_call(near[:end], parts):
            self._rest, self._step = self._rest[end:], self._after_call
        elif end >= 0 or found is not None or not _may_be_call(near, self._style):
            self._give_up(parts)
        else:
            return False
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """Take the mark for text; what follows it may still have another."""
        self._say(self._mark, parts)
        self._step = self._text

    def _whole_call(self, text: str, parts: list[Part]) -> bool:
        """Read a call whose parts are all there, in any order; return whether it is one."""
        try:
            call: Any = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if isinstance(call, list) and len(call) == 1:
            call = call[0]
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return False
        self._open(call["name"], parts)
        written = json.dumps(arguments, ensure_ascii=False)
        parts.append(Part("arguments", written, self._num_calls - 1))
        return True

    def _open(self, name: str, parts: list[Part]) -> None:
        assert self._style is not None
        parts.append(Part("call", name, self._num_calls, self._style.make_id()))
        self._num_calls += 1
        self._blanks = ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def _arguments(self, parts: list[Part]) -> bool:
        end = self._end_of_arguments()
        parts.append(Part("arguments", self._rest[:end], self._num_calls - 1))
        self._rest = self._rest[end:]
        if not self._depth:
            self._step = self._after_call
        return True

    def _end_of_arguments(self) -> int:
        """Return where the JSON object in `_rest` ends, or its length if it goes on."""
        place = int(self._escaped)
        self._escaped = False
        while (found := _MARKS.search(self._rest, place)) is not None:
            mark, place = found[0], found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = place == len(self._rest)
                place += 1
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return place
        return len(self._rest)

    def _after_call(self, parts: list[Part]) -> bool:
        assert self._style is not None
        self._rest = self._rest.lstrip(self._style.fillers)
        end = self._style.end
        if not self._rest or (end.startswith(self._rest) and self._rest != end):
            return False
        if not end and self._rest[0] == "{":
            self._mark, self._step = "", self._head
        else:
            self._rest = self._rest.removeprefix(end) if end else self._rest
            self._step = self._text
        return True

    def _say(self, text: str, parts: list[Part]) -> None:
        """Add text, but hold the blanks at its end back where a call may follow."""
        text = self._blanks + text
        kept = text if self._style is None else text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            parts.append(Part("content", kept))


def _may_be_call(text: str, style: ToolFormat) -> bool:
    """Return whether a text, in which no call's head was found, may still become a call."""
    if len(text) >= MOST_HEAD:
        return False
    if style.names_come_bare:
        return re.fullmatch(r"\s*+[\w.-]*+(\[[\w\]\[]*+)?\s*+", text) is not None
    start = text.strip(" \t\r\n[")
    key = _FIRST_KEY.match(text)
    if key is not None:
        return key["key"] in _KEYS
    return not start or (start[0] == "{" and start[1:].lstrip()[:1] in ("", '"'))


def _length_of_start(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


def parse(parser: AnswerParser, text: str, cut_off: bool = False) -> ParsedAnswer:
    """Read a whole answer with a fresh parser."""
    return joined([*parser.push(text), *parser.finish(cut_off)])


def joined(parts: Iterable[Part]) -> ParsedAnswer:
    """Put the parts of one answer together."""
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    heads: list[Part] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            heads.append(part)
            arguments.append([])
        elif part.kind == "arguments":
            arguments[part.index].append(part.text)
        else:
            texts[part.kind].append(part.text)
    calls = [
        ToolCall(head.call_id, head.text, "".join(own))
        for head, own in zip(heads, arguments, strict=True)
    ]
    return ParsedAnswer("".join(texts["reasoning"]), "".join(texts["content"]), calls)
