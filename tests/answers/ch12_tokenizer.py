"""Answers to the exercises of chapter 12."""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tests.answers import Answers


class DecoderOfABuffer:
    """Right: bytes are kept, and the library says how many of them it could use."""

    def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
        self.token_bytes, self.skipped, self.drop_space = token_bytes, skipped, drop_space
        self.held = b""

    def push(self, token_id: int) -> str:
        if token_id in self.skipped:
            return ""
        self.held += self.token_bytes(token_id)
        return self.taken(final=False)

    def finish(self) -> str:
        return self.taken(final=True)

    def taken(self, final: bool) -> str:
        text, used = codecs.utf_8_decode(self.held, "replace", final)
        self.held = self.held[used:]
        if text and self.drop_space:
            self.drop_space = False
            text = text[1:] if text[0] == " " else text
        return text


class DecoderByLeadingBytes:
    """Right: counts by hand how many bytes the last character still needs."""

    INCOMPLETE = re.compile(
        rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
        rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf]{1,2})?"
        rb"|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
    )

    def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
        self.token_bytes, self.skipped, self.first = token_bytes, skipped, drop_space
        self.held = b""

    def push(self, token_id: int) -> str:
        data = self.held + (b"" if token_id in self.skipped else self.token_bytes(token_id))
        tail = self.INCOMPLETE.search(data)
        end = tail.start() if tail else len(data)
        self.held = data[end:]
        return self.said(data[:end].decode(errors="replace"))

    def finish(self) -> str:
        return self.said(self.held.decode(errors="replace"))

    def said(self, text: str) -> str:
        if self.first and text:
            self.first = False
            return text.removeprefix(" ")
        return text


SHARED = codecs.getincrementaldecoder("utf-8")(errors="replace")


def wrong_decoder(name: str) -> type:
    class Wrong:
        def __init__(self, token_bytes: Any, skipped: Collection[int], drop_space: bool) -> None:
            self.token_bytes, self.skipped, self.drop_space = token_bytes, skipped, drop_space
            errors = {"ignores errors": "ignore", "strict": "strict"}.get(name, "replace")
            self.utf8 = codecs.getincrementaldecoder("utf-8")(errors=errors)
            if name == "shared":
                self.utf8 = SHARED
            self.ids: list[int] = []
            self.said = ""

        def push(self, token_id: int) -> Any:
            if token_id in self.skipped and name != "shows special tokens":
                if name == "a special token ends a character":
                    return self.utf8.decode(b"", final=True)
                if name == "a special token forgets":
                    self.utf8.reset()
                return ""
            data = self.token_bytes(token_id)
            match name:
                case "each alone":
                    return data.decode(errors="replace")
                case "latin-1":
                    return data.decode("latin-1")
                case "waits for no replacement":
                    self.ids.append(token_id)
                    joined = b"".join(map(self.token_bytes, self.ids)).decode(errors="replace")
                    if joined.endswith("\ufffd"):
                        return ""
                    new, self.said = joined.removeprefix(self.said), joined
                    return new
                case "all so far":
                    self.said += self.utf8.decode(data)
                    return self.said
                case "nothing for incomplete":
                    return self.utf8.decode(data) or None
            text = self.utf8.decode(data)
            if name == "loses what precedes a half" and self.utf8.getstate()[0]:
                return ""
            return self.dropped(text)

        def dropped(self, text: str) -> str:
            if not self.drop_space or name == "keeps the space":
                return text
            if name == "drops every space":
                return text.removeprefix(" ")
            if name == "drops by an empty text" or text:
                self.drop_space = False
            if name == "drops all spaces":
                return text.lstrip(" ")
            return text.removeprefix(" ")

        def finish(self) -> str:
            if name == "finish gives nothing":
                return ""
            if name == "waits for no replacement":
                joined = b"".join(map(self.token_bytes, self.ids)).decode(errors="replace")
                return joined.removeprefix(self.said)
            return self.dropped(self.utf8.decode(b"", final=True))

    return Wrong


WRONG_DECODERS = [
    *("each alone", "latin-1", "ignores errors", "strict", "waits for no replacement"),
    *("shows special tokens", "a special token ends a character", "a special token forgets"),
    *("all so far", "nothing for incomplete", "loses what precedes a half", "keeps the space"),
    *("drops every space", "drops by an empty text", "drops all spaces", "finish gives nothing"),
    "shared",
]


class WatcherOfTheWhole:
    """Right: looks at the whole text again for each piece."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include, self.stopped = list(stops), include, False
        self.text, self.shown = "", 0

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self.text += text
        for end in range(1, len(self.text) + 1):
            ending = [stop for stop in self.stops if self.text[:end].endswith(stop)]
            if ending:
                self.stopped = True
                start = end - max(map(len, ending))
                return self.up_to(end if self.include else start)
        if self.include:
            return self.up_to(len(self.text))
        for start in range(len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return self.up_to(start)
        return self.up_to(len(self.text))

    def up_to(self, end: int) -> str:
        new = self.text[self.shown : end]
        self.shown = max(end, self.shown)
        return new

    def finish(self) -> str:
        return "" if self.stopped else self.up_to(len(self.text))


class WatcherByLetters:
    """Right: takes one letter after another."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include, self.stopped, self.held = tuple(stops), include, False, ""

    def push(self, text: str) -> str:
        return "".join(self.letter(each) for each in text)

    def letter(self, letter: str) -> str:
        if self.stopped:
            return ""
        text = self.held + letter
        found = sorted((stop for stop in self.stops if text.endswith(stop)), key=len)
        if found:
            self.stopped, self.held = True, ""
            return letter if self.include else text.removesuffix(found[-1])
        started = [i for i in range(len(text)) if any(s.startswith(text[i:]) for s in self.stops)]
        cut = started[0] if started else len(text)
        self.held = text[cut:]
        return letter if self.include else text[:cut]

    def finish(self) -> str:
        held, self.held = self.held, ""
        return "" if self.include else held


def wrong_watcher(name: str) -> Callable[..., Any]:
    class Wrong:
        kept: list[str] = [""]  # noqa: RUF012 - shared by mistake

        def __init__(self, stops: Sequence[str], include: bool = False) -> None:
            self.stops, self.include, self.stopped = stops, include, False
            if name != "shared":
                self.kept = [""]

        def push(self, text: str) -> str:
            if self.stopped and name != "goes on after the stop":
                return ""
            shown = len(self.kept[0]) if self.include else 0
            text = ("" if name == "each piece alone" else self.kept[0]) + text
            found = [(text.find(stop), stop) for stop in self.stops if stop in text]
            if found:
                self.stopped = name != "never says so"
                self.kept[0] = ""
                start, stop = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
                if name == "first in the list":
                    start, stop = found[0]
                if name == "starts first":
                    start, stop = min(found)
                if name == "shortest of equals":
                    start, stop = min(found, key=lambda e: (e[0] + len(e[1]), -e[0]))
                if self.include and name == "include shows the held again":
                    shown = 0
                include = self.include and name != "include forgotten"
                return text[shown : start + len(stop) if include else start]
            longest = max((len(stop) for stop in self.stops), default=1) - 1
            lengths = range(min(longest, len(text)), 0, -1)
            if name == "shortest beginning":
                lengths = range(1, min(longest, len(text)) + 1)
            if name == "holds one letter":
                lengths = range(min(1, longest, len(text)), 0, -1)
            if name == "first stop's beginning only":
                lengths = range(min(len(self.stops[0]) - 1, len(text)), 0, -1) if self.stops else []
            held = next((n for n in lengths if any(s.startswith(text[-n:]) for s in self.stops)), 0)
            if name == "holds as many as the longest":
                held = min(longest, len(text))
            if name == "holds nothing":
                held = 0
            certain = len(text) - held
            self.kept[0] = text[certain:]
            if self.include and name != "include holds back":
                return text[shown:]
            return text[:certain]

        def finish(self) -> str:
            if name == "finish gives nothing":
                return ""
            held, self.kept[0] = self.kept[0], ""
            return "" if self.include and name != "finish gives again" else held

    return Wrong


WRONG_WATCHERS = [
    *("shared", "goes on after the stop", "each piece alone", "never says so"),
    *("first in the list", "starts first", "shortest of equals", "include shows the held again"),
    *("include forgotten", "shortest beginning", "holds one letter", "holds nothing"),
    *("first stop's beginning only", "holds as many as the longest", "include holds back"),
    *("finish gives nothing", "finish gives again"),
]


_LENGTH = "max((len(stop) for stop in self.stops), default=1)"
LONGER = f"{_LENGTH} - 1 -> {_LENGTH} + 1"

ANSWERS = {
    "StreamDecoder": Answers(
        right=(DecoderOfABuffer, DecoderByLeadingBytes),
        wrong={name: wrong_decoder(name) for name in WRONG_DECODERS},
        equivalent={},
    ),
    "StopWatcher": Answers(
        right=(WatcherOfTheWhole, WatcherByLetters),
        wrong={name: wrong_watcher(name) for name in WRONG_WATCHERS},
        equivalent={
            "1 -> 2 #3": "the default counts without stop strings only, where nothing can begin",
            LONGER: "a stop string that is whole has been found before its beginnings are sought",
        },
    ),
}
