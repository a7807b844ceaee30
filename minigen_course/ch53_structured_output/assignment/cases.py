"""Cases of chapter 53's exercises, drawn by a seed."""

from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from minigen_course.ch53_structured_output.automaton import (
    Automaton,
    Masks,
    automaton_of,
    may_end,
    parse,
    trie_of,
)
from minigen_course.ch53_structured_output.lesson import still_due
from minigen_course.grading.varied import Varied, outcome

PIECES = ("a", "b", "c", "(a|b)", "a*", "(ab)*", "b?", "[ab]{1,2}", "(a|bc)*", "c?")
LETTERS = "abc"


def _pattern(random: Random) -> str:
    """Return a regex over a, b and c that does not match everything."""
    return "".join(random.choices(PIECES, k=random.randint(2, 5)))


def _words(random: Random, count: int, longest: int) -> list[str]:
    return ["".join(random.choices(LETTERS, k=random.randint(1, longest))) for _ in range(count)]


def _still_due(random: Random) -> dict[str, Any]:
    due = "v" if random.random() < 0.2 else "".join(random.choices("]}", k=random.randint(1, 4)))
    return {"due": due, "characters": "".join(random.choices("x[]{}", k=6))}


def _read(part: Any, due: str, characters: str) -> list[str | None]:
    """Read each character with the stack `due`, and go on with the result if it is allowed."""
    found = []
    for each in characters:
        after = part(due, each)
        found.append(after)
        due = due if still_due(due, each) is None else after
    return found


def _derivative(random: Random) -> dict[str, Any]:
    return {"pattern": _pattern(random), "texts": ["", *_words(random, 8, 5)]}


def _matched(part: Any, pattern: str, texts: list[str]) -> dict[str, bool]:
    """Derive the pattern's regex by the bytes of each text, which matches if the rest may end."""
    found = {}
    for each in texts:
        rest = parse(pattern)
        for byte in each.encode():
            rest = part(rest, byte)
        found[each] = may_end(rest)
    return found


def _allowed_tokens(random: Random) -> dict[str, Any]:
    return {
        "words": _words(random, 12, 4),
        "pattern": _pattern(random),
        "state": random.randrange(4),
    }


def _walked(part: Any, words: list[str], pattern: str, state: int) -> list[int]:
    """Walk the trie of the words (a word's place is its id) with the pattern's automaton.

    The walk begins in `state`, modulo the number of states, and the ids are sorted.
    """
    automaton = automaton_of(parse(pattern))
    trie = trie_of({place: each.encode() for place, each in enumerate(words)})
    return sorted(part(trie, automaton, state % len(automaton.moves)))


def _state_matcher(random: Random) -> dict[str, Any]:
    return {
        "pattern": _pattern(random),
        "words": sorted({*LETTERS, *_words(random, 4, 3)}),
        "choices": [random.randrange(12) for _ in range(5)],
        "back": random.randrange(3),
    }


def _followed(
    part: Any, pattern: str, words: list[str], choices: list[int], back: int
) -> list[list[int]]:
    """Follow an answer of the pattern (token 0 ends it, the words are the tokens from 1 on).

    Each choice accepts one of the allowed tokens. Then a fork takes `back` tokens back, and both
    masks are read.
    """
    spellings = {place: each.encode() for place, each in enumerate(words, 1)}
    masks = Masks(automaton_of(parse(pattern)), trie_of(spellings), spellings, [0], len(words) + 1)
    matcher = part(masks)
    found = [np.flatnonzero(matcher.allowed()).tolist()]
    for each in choices:
        if not found[-1]:
            break
        matcher.accept(found[-1][each % len(found[-1])])
        found.append(np.flatnonzero(matcher.allowed()).tolist())
    fork = matcher.fork()
    fork.roll_back(min(back, len(found) - 1))
    return [*found, *(np.flatnonzero(each.allowed()).tolist() for each in (fork, matcher))]


def _pattern_of_schema(random: Random) -> dict[str, Any]:
    most = random.randint(1, 4)
    kinds: list[dict[str, Any]] = [
        {"type": "integer"},
        {"type": "boolean"},
        {"enum": random.sample(["red", "green", 1, 2, None], 2)},
        {"type": "string", "maxLength": most},
        {"type": "array"},
    ]
    wanted = random.sample(kinds[:4], 2) + random.choices(kinds, (9, 9, 9, 9, 4))
    names = random.sample(["size", "n.m", "colour", "a b"], 3)
    return {"properties": dict(zip(names, wanted, strict=True)), "longest": most}


@lru_cache(maxsize=32)  # two parts that build the same regex, as right ones do, share it
def _automaton(pattern: str) -> Automaton:
    return automaton_of(parse(pattern))


def _decided(part: Any, properties: dict[str, Any], longest: int) -> Any:
    """Build the regex, and say which of some objects it matches."""
    pattern = outcome(lambda: part({"properties": properties}))
    if pattern.startswith("raises"):
        return pattern
    automaton = _automaton(pattern)
    values = (
        "0",
        "-7",
        "01",
        "1234567890",
        "true",
        "null",
        '"red"',
        "1",
        '"1"',
        '"' + "é" * longest,
    )
    found = []
    for each in values:
        closed = each + '"' if each.startswith('"é') else each
        fields = [f'"{name}": {_first(one, closed)}' for name, one in properties.items()]
        for text in ("{" + ", ".join(fields) + "}", "{" + ",".join(fields) + "}"):
            found.append(automaton.matches(text.encode()))
    return found


def _first(schema: dict[str, Any], value: str) -> str:
    """Return the value for a property of the type integer or string, and a valid one otherwise."""
    if "enum" in schema:
        one = schema["enum"][0]
        return "null" if one is None else f'"{one}"' if isinstance(one, str) else str(one)
    if schema["type"] == "boolean":
        return "true"
    if (schema["type"] == "string") != value.startswith('"'):
        return '""' if schema["type"] == "string" else "5"
    return value


def _forced_text(random: Random) -> dict[str, Any]:
    word = "".join(random.choices("abcdef", k=random.randint(2, 5)))
    tail = random.choice(("", "(x|y)", "x?", "(gh)*", "[0-9]", "z"))
    return {
        "pattern": f"{word}{tail}{random.choice(('', '!', 'ok'))}",
        "seen": word[: len(word) // 2],
    }


def _forced(part: Any, pattern: str, seen: str) -> list[int]:
    """Ask for the forced bytes of the pattern's automaton after `seen`, as numbers."""
    automaton = automaton_of(parse(pattern))
    state = automaton.after(seen.encode())
    assert state is not None
    return list(part(automaton, state))


VARIED = {
    "still_due": Varied("the stack, and the characters that are read", _still_due, _read),
    "derivative": Varied("the regex, and the texts", _derivative, _matched),
    "allowed_tokens": Varied("the vocabulary, the regex and the state", _allowed_tokens, _walked),
    "StateMatcher": Varied(
        "the regex, the tokens, the choices, and how many are taken back",
        _state_matcher,
        _followed,
    ),
    "pattern_of_schema": Varied(
        "names and kinds of the properties, the longest string", _pattern_of_schema, _decided
    ),
    "forced_text": Varied("the regex, and what was read", _forced_text, _forced),
}
