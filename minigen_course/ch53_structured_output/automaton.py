"""From a regex to the tokens that may come next: derivatives, an automaton, the vocabulary's trie.

Everything is over bytes, because a token may end inside a character. Sources: Brzozowski 1964,
"Derivatives of Regular Expressions"; Owens, Reppy and Turon 2009, for the simplifications; Willard
and Louf 2023, for masks by state.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool

from minigen.errors import GrammarError, ParamsError
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Bytes:
    """One byte out of a set; the empty set matches nothing at all."""

    choices: frozenset[int]


@dataclass(frozen=True)
class Then:
    """First one regex, then another; `Then()` of no parts matches the empty text."""

    parts: tuple["Regex", ...] = ()


@dataclass(frozen=True)
class Either:
    """One of several regexes."""

    options: frozenset["Regex"]


@dataclass(frozen=True)
class Star:
    """A regex any number of times, also never."""

    inner: "Regex"


Regex = Bytes | Then | Either | Star
NOTHING = Bytes(frozenset())  # matches no text
EMPTY = Then()  # matches the empty text only


def then(*parts: Regex) -> Regex:
    """Return the parts one after another, simplified: NOTHING anywhere makes all of it NOTHING."""
    flat: list[Regex] = []
    for each in parts:
        flat += each.parts if isinstance(each, Then) else [each]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Then(tuple(flat))


def either(*options: Regex) -> Regex:
    """Return a choice between the options, simplified: without NOTHING, and none twice."""
    flat: set[Regex] = set()
    for each in options:
        flat |= each.options if isinstance(each, Either) else {each}
    flat.discard(NOTHING)
    if len(flat) > 1:
        return Either(frozenset(flat))
    return flat.pop() if flat else NOTHING


def star(inner: Regex) -> Regex:
    """Return a repetition, simplified: a star of a star is one star."""
    if inner in (NOTHING, EMPTY):
        return EMPTY
    return inner if isinstance(inner, Star) else Star(inner)


@cache
def may_end(regex: Regex) -> bool:
    """Return whether the regex matches the empty text."""
    match regex:
        case Bytes():
            return False
        case Then(parts):
            return all(map(may_end, parts))
        case Either(options):
            return any(map(may_end, options))
        case Star():
            return True


def derivative(regex: Regex, byte: int) -> Regex:
    """Return the regex of what may follow `byte`: what remains after it of each match.

    A regex is `Bytes` (`choices`), `Then` (`parts`), `Either` (`options`) or `Star` (`inner`).
    Build the result with `then`, `either` and `star`, which simplify it; NOTHING matches no text,
    and EMPTY the empty one. `may_end` says whether a regex matches the empty text.
    """
    if isinstance(regex, Bytes):
        return EMPTY if byte in regex.choices else NOTHING
    if isinstance(regex, Either):
        return either(*(derivative(each, byte) for each in regex.options))
    if isinstance(regex, Star):
        return then(derivative(regex.inner, byte), regex)
    found: Regex = NOTHING
    for place, part in enumerate(regex.parts):
        found = either(found, then(derivative(part, byte), *regex.parts[place + 1 :]))
        if not may_end(part):
            break
    return found


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton: each state's moves by byte, and the states where a text may end.

    State 0 is the first. A byte without a move is forbidden, and every state can still reach an
    end, because a regex that matches nothing is never a state.
    """

    moves: tuple[Mapping[int, int], ...]
    ends: frozenset[int]
    regexes: tuple[Regex, ...]

    def after(self, text: bytes, state: int = 0) -> int | None:
        """Return the state after some bytes; None if one of them is forbidden."""
        now: int | None = state
        for byte in text:
            if now is None:
                return None
            now = self.moves[now].get(byte)
        return now

    def matches(self, text: bytes) -> bool:
        """Return whether the whole text matches."""
        return self.after(text) in self.ends


MOST_STATES = 5_000
MOST_ROUNDS = 300  # each optional round of a regex lies within the one before it


def automaton_of(regex: Regex) -> Automaton:
    """Return the automaton whose states are a regex and all of its derivatives.

    Bytes that no part of the regex tells apart are derived once. Raises `ValueError` beyond
    `MOST_STATES` states.
    """
    groups = byte_groups(regex)
    numbers: dict[Regex, int] = {regex: 0}
    moves: list[dict[int, int]] = []
    for state in (found := [regex]):  # it grows while it is read
        moves.append({})
        for group in groups:
            rest = derivative(state, group[0])
            if rest == NOTHING:
                continue
            if rest not in numbers:
                numbers[rest] = len(found)
                found.append(rest)
            moves[-1] |= dict.fromkeys(group, numbers[rest])
        if len(found) > MOST_STATES:
            raise ValueError(f"The regex has more than {MOST_STATES:,} states.")
    ends = frozenset(number for regex, number in numbers.items() if may_end(regex))
    return Automaton(tuple(moves), ends, tuple(found))


def byte_groups(regex: Regex) -> list[list[int]]:
    """Return the 256 bytes in groups: no set of bytes in the regex divides one."""
    sets = sorted({each.choices for each in _leaves(regex)}, key=sorted)
    groups: dict[tuple[bool, ...], list[int]] = {}
    for byte in range(256):
        groups.setdefault(tuple(byte in each for each in sets), []).append(byte)
    return list(groups.values())


def _leaves(regex: Regex) -> Iterable[Bytes]:
    match regex:
        case Bytes():
            yield regex
        case Then(parts):
            for each in parts:
                yield from _leaves(each)
        case Either(options):
            for each in options:
                yield from _leaves(each)
        case Star(inner):
            yield from _leaves(inner)


# A regex as text


def text(written: str) -> Regex:
    """Return the regex of one text, literally."""
    return then(*(Bytes(frozenset({byte})) for byte in written.encode()))


def _one_of(first: int, last: int) -> Regex:
    return Bytes(frozenset(range(first, last + 1)))


_TAIL = _one_of(0x80, 0xBF)
BEYOND_ASCII = either(  # one character of two to four bytes in UTF-8 (RFC 3629, section 4)
    then(_one_of(0xC2, 0xDF), _TAIL),
    then(_one_of(0xE0, 0xE0), _one_of(0xA0, 0xBF), _TAIL),
    then(either(_one_of(0xE1, 0xEC), _one_of(0xEE, 0xEF)), _TAIL, _TAIL),
    then(_one_of(0xED, 0xED), _one_of(0x80, 0x9F), _TAIL),
    then(_one_of(0xF0, 0xF0), _one_of(0x90, 0xBF), _TAIL, _TAIL),
    then(_one_of(0xF1, 0xF3), _TAIL, _TAIL, _TAIL),
    then(_one_of(0xF4, 0xF4), _one_of(0x80, 0x8F), _TAIL, _TAIL),
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def parse(pattern: str) -> Regex:
    r"""Return the regex that a pattern means, in a small part of Python's syntax.

    It knows literal characters, `.`, `|`, `( )`, `*`, `+`, `?`, `{m}`, `{m,n}`, `[...]` and
    `[^...]` with ASCII characters and ranges, and the escapes `\n`, `\t`, `\r`, `\xHH` and of
    punctuation. Raises `ValueError` for anything else, also for `\d`, which in some libraries
    means the digits of all scripts.
    """
    rest = list(pattern)
    found = _alternatives(rest)
    if rest:
        raise ValueError(f"In the regex {pattern!r}, {''.join(rest)!r} has no meaning here.")
    return found


def _alternatives(rest: list[str]) -> Regex:
    options = [_sequence(rest)]
    while rest and rest[0] == "|":
        rest.pop(0)
        options.append(_sequence(rest))
    return either(*options)


def _sequence(rest: list[str]) -> Regex:
    parts: list[Regex] = []
    while rest and rest[0] not in "|)":
        parts.append(_repeated(_atom(rest), rest))
    return then(*parts)


def _repeated(inner: Regex, rest: list[str]) -> Regex:
    while rest and rest[0] in "*+?{":
        sign = rest.pop(0)
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, 0)}[sign]
        if sign == "{":
            found = re.match(r"(\d+)(,(\d*))?\}", "".join(rest))
            if found is None:
                raise ValueError("A { must be followed by a count, as in {2} or {2,5}.")
            del rest[: found.end()]
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
        inner = repeated(inner, least, most)
    return inner


def repeated(inner: Regex, least: int, most: int | None) -> Regex:
    """Return a regex `least` to `most` times; None stands for any number."""
    if most is not None and most < least:
        raise ValueError(f"A count from {least} to {most} is upside down.")
    if max(least, most or 0) > MOST_ROUNDS:
        raise ValueError(f"A count may be {MOST_ROUNDS} here at most, not {max(least, most or 0)}.")
    optional: Regex = star(inner) if most is None else EMPTY
    for _ in range(0 if most is None else most - least):
        optional = either(EMPTY, then(inner, optional))
    return then(*[inner] * least, optional)


def _atom(rest: list[str]) -> Regex:
    sign = rest.pop(0)
    if sign == "(":
        inner = _alternatives(rest)
        if not rest:
            raise ValueError("A ( has no ).")
        rest.pop(0)
        return inner
    if sign == ".":
        return either(Bytes(frozenset(range(128)) - {10}), BEYOND_ASCII)
    if sign == "[":
        return _class(rest)
    if sign == "\\":
        return Bytes(_escape(rest))
    if sign in "*+?{":
        raise ValueError(f"The sign {sign} has nothing to repeat.")
    if sign in "^$":
        raise ValueError(f"The sign {sign} is not needed: a regex matches the whole text.")
    return text(sign)


def _class(rest: list[str]) -> Regex:
    negated = bool(rest) and rest[0] == "^"
    del rest[: int(negated)]
    chosen: set[int] = set()
    while rest and rest[0] != "]":
        first = _member(rest)
        if len(rest) > 1 and rest[0] == "-" and rest[1] != "]":
            rest.pop(0)
            chosen |= set(range(max(first), max(_member(rest)) + 1))
        else:
            chosen |= first
    if not rest:
        raise ValueError("A [ has no ].")
    rest.pop(0)
    if negated:
        return either(Bytes(frozenset(range(128)) - chosen), BEYOND_ASCII)
    return Bytes(frozenset(chosen))


def _member(rest: list[str]) -> frozenset[int]:
    sign = rest.pop(0)
    if sign == "\\":
        return _escape(rest)
    if not sign.isascii():
        raise ValueError(f"A class such as [{sign}] may have ASCII characters only.")
    return frozenset({ord(sign)})


def _escape(rest: list[str]) -> frozenset[int]:
    sign = rest.pop(0) if rest else ""
    if sign == "x":
        digits = "".join(rest[:2])
        del rest[:2]
        if not re.fullmatch("[0-9a-fA-F]{2}", digits):
            raise ValueError("A \\x needs two hexadecimal digits.")
        return frozenset({int(digits, 16)})
    if sign in _ESCAPED:
        return frozenset({ord(_ESCAPED[sign])})
    if not sign or sign.isalnum() or not sign.isascii():
        raise ValueError(f"The escape \\{sign} is not known here.")
    return frozenset({ord(sign)})


# Tokens


@dataclass
class Trie:
    """A vocabulary as a tree of bytes: tokens that begin alike share the path from the root."""

    children: dict[int, "Trie"] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)  # of the tokens that end here

    def insert(self, spelling: bytes, token_id: int) -> None:
        """Add a token."""
        node = self
        for byte in spelling:
            if byte not in node.children:
                node.children[byte] = Trie()
            node = node.children[byte]
        node.token_ids.append(token_id)


def trie_of(spellings: Mapping[int, bytes]) -> Trie:
    """Return the trie of a vocabulary; tokens without bytes are left out."""
    root = Trie()
    for token_id, spelling in spellings.items():
        if spelling:
            root.insert(spelling, token_id)
    return root


def allowed_tokens(trie: Trie, automaton: Automaton, state: int) -> list[int]:
    """Return the ids of the tokens all of whose bytes the automaton allows from a state on.

    Walk the trie and the automaton together: a node of the trie is visited only if the automaton
    has a move for every byte on the way to it. The ids may be in any order.
    """
    found: list[int] = []
    paths = [(trie, state)]
    while paths:
        node, now = paths.pop()
        found += node.token_ids
        moves = automaton.moves[now]
        for byte, child in node.children.items():
            if byte in moves:
                paths.append((child, moves[byte]))
    return found


class Masks:
    """The mask of each state of an automaton, computed when it is first needed and then kept."""

    def __init__(
        self,
        automaton: Automaton,
        trie: Trie,
        spellings: Mapping[int, bytes],
        end_ids: Collection[int],
        vocab_size: int,
    ):
        self.automaton, self.spellings, self.end_ids = automaton, spellings, sorted(end_ids)
        self._trie, self._vocab_size = trie, vocab_size
        self._kept: dict[int, Bool[np.ndarray, " vocab"]] = {}

    def __getitem__(self, state: int) -> Bool[np.ndarray, " vocab"]:
        """Return which tokens may come next in a state, without end tokens."""
        if state not in self._kept:
            mask = np.zeros(self._vocab_size, bool)
            mask[allowed_tokens(self._trie, self.automaton, state)] = True
            self._kept[state] = mask
        return self._kept[state]


class StateMatcher:
    """Follows one answer through an automaton, as the engine's `TokenMatcher`.

    `masks.automaton` is the automaton, `masks[state]` the tokens that may come next in a state (a
    fresh copy is needed before a change), `masks.spellings[token_id]` a token's bytes, and
    `masks.end_ids` the end tokens.
    """

    def __init__(self, masks: Masks):
        self.masks = masks
        self.states = [0]

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token may come next; an end token only where the answer may end."""
        state = self.states[-1]
        mask = self.masks[state].copy()
        mask[self.masks.end_ids] = state in self.masks.automaton.ends
        return mask

    def accept(self, token_id: int) -> None:
        """Follow the answer by one token; an end token changes no state, but counts as a token.

        Raises `GrammarError`, and changes nothing, if the token is not allowed.
        """
        if not self.allowed()[token_id]:
            raise GrammarError(f"The token {token_id} is not allowed here.")
        spelling = b"" if token_id in self.masks.end_ids else self.masks.spellings[token_id]
        state = self.masks.automaton.after(spelling, self.states[-1])
        assert state is not None, "the mask allows the token"
        self.states.append(state)

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens, as if they had not been accepted."""
        del self.states[len(self.states) - count :]

    def fork(self) -> "StateMatcher":
        """Return a copy that continues from the same place, for another answer."""
        made = StateMatcher(self.masks)
        made.states = list(self.states)
        return made


class AutomatonBackend:
    """A `GrammarBackend` for regexes and lists of choices, by automata over the vocabulary's trie.

    `compiled` holds the masks of each pattern that was asked for. The trie has the tokens of at
    most `most_bytes` bytes.
    """

    most_bytes: ClassVar[float] = math.inf

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]):
        self.spellings = {
            token_id: tokenizer.token_bytes(token_id)
            for token_id in range(vocab_size)
            if token_id not in tokenizer.special_ids
        }
        allowed = {i: each for i, each in self.spellings.items() if len(each) <= self.most_bytes}
        self.trie = trie_of(allowed)
        self.vocab_size, self.end_ids = vocab_size, end_ids
        self.compiled: dict[str, Masks] = {}

    def masks(self, pattern: str) -> Masks:
        """Return the masks of a regex. Raises `ValueError` if it cannot be used."""
        if pattern not in self.compiled:
            automaton = automaton_of(parse(pattern))
            self.compiled[pattern] = Masks(
                automaton, self.trie, self.spellings, self.end_ids, self.vocab_size
            )
        return self.compiled[pattern]

    def compile(self, params: StructuredOutputsParams) -> Any:
        """Return a matcher at the start of a regex. Raises `ParamsError` if it cannot be used."""
        if params.kind == "choice":
            pattern = "|".join(map(re.escape, params.choice or ()))
        elif params.kind == "regex":
            pattern = params.source
        else:
            raise ParamsError(f"An automaton cannot follow {params.kind}: that needs a stack.")
        try:
            return StateMatcher(self.masks(pattern))
        except ValueError as error:
            raise ParamsError(str(error)) from None
