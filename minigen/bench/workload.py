"""The requests of a load: their arrival times, lengths and prompts.

They are drawn with a seed, or read from a trace or a file of prompts. Sources: Poisson arrivals,
the open-loop model of Schroeder et al. 2006 ("Open Versus Closed: A Cautionary Tale"); the trace's
fields are those of Mooncake (Qin et al. 2024).
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minigen.errors import LoadError, OptionError

MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Span:
    """A range of integers from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, name: str, text: str) -> "Span":
        """Parse "64" or "32-256". Raises `OptionError` with the option's name for anything else.

        >>> Span.parse("input-tokens", "32-256")
        Span(least=32, most=256)
        """
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        span = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if not 1 <= span.least <= span.most <= MOST_TOKENS:
            raise OptionError(
                f"--{name} must be a number of tokens, as in 64 or 32-256, not {text!r}."
            )
        return span

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one of the numbers; all are equally likely."""
        return int(rng.integers(self.least, self.most, endpoint=True))


@dataclass(frozen=True)
class Arrival:
    """The time of a request, in seconds after the start of the load, and its lengths in tokens.

    `hash_ids` identify the blocks of 512 tokens in its prompt, if the trace contains them: requests
    whose first ids are equal share a prefix.
    """

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def poisson(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Draw `count` independent arrival times in seconds, `rate` per second; the first is 0."""
    gaps = rng.exponential(1 / rate, max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def constant(rate: float, count: int) -> list[float]:
    """Return `count` evenly spaced arrival times in seconds, `rate` per second.

    >>> constant(4, 3)
    [0.0, 0.25, 0.5]
    """
    return [number / rate for number in range(count)]


def burst(count: int) -> list[float]:
    """Return `count` arrival times that are all 0."""
    return [0.0] * count


def read_trace(path: Path) -> list[Arrival]:
    """Read arrivals from a file with one JSON object per line, in order of time; the first is at 0.

    An object has `timestamp` (milliseconds), `input_length` and `output_length` (tokens), and
    optionally `hash_ids`. Raises `LoadError` with the number of an invalid line.
    """
    arrivals = list(_parse(path, _lines_of("trace", path)))
    if not arrivals:
        raise LoadError(f"The trace {path} has no requests: it needs one JSON object per line.")
    for number, (before, after) in enumerate(pairwise(arrivals), start=2):
        if after.at < before.at:
            raise LoadError(
                f"{path}: request {number} has an earlier timestamp than the one above it."
            )
    started = arrivals[0].at
    return [
        Arrival(each.at - started, each.input_tokens, each.output_tokens, each.hash_ids)
        for each in arrivals
    ]


def _lines_of(what: str, path: Path) -> list[str]:
    """Return the lines of a file; separators such as U+2028 may be within one, as in JSON."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"The {what} {path} cannot be read: {error}.") from error


def _parse(path: Path, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _arrival(_from_json(line))
            except ValueError as error:
                reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else error
                raise LoadError(f"{path}, line {number}: {reason}.") from error


def _from_json(line: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _arrival(fields: Any) -> Arrival:
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    if unknown := fields.keys() - {"timestamp", "input_length", "output_length", "hash_ids"}:
        raise ValueError(f"{min(unknown)!r} is not a field of a trace")
    timestamp: Any = fields.get("timestamp")
    hash_ids: Any = fields.get("hash_ids", [])
    if not _is_number(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise ValueError(f"timestamp must be milliseconds, at least 0, not {timestamp!r}")
    for name in ("input_length", "output_length"):
        length: Any = fields.get(name)
        if not _is_number(length, int) or not 1 <= length <= MOST_TOKENS:
            raise ValueError(f"{name} must be a number of tokens, at least 1, not {length!r}")
    if not isinstance(hash_ids, list) or not all(_is_number(each, int) for each in hash_ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, not {hash_ids!r}")
    return Arrival(
        timestamp / 1e3, fields["input_length"], fields["output_length"], tuple(hash_ids)
    )


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# Frequent words: in most vocabularies each is a single token together with the space before it.
WORDS = tuple(
    """the of and to in is that for it was on are as with his they at be this from have or by one
    had not but what all were when we there can an your which their said if do will each about how
    up out them then she many some so these would other into has more her two like him see time
    could no make than first been its who now people my made over did down only way find use may
    water long little very after words called just where most know get through back much before
    go good new write our used me man too any day same right look think also around another came
    come work three word must because does part even place well such here take why things help put
    years different away again off went old number great tell men say small every found still
    between name should home big give air line set own under read last never us left end along
    while might next sound below saw something thought both few those always looked show large
    often together asked house world going want school important until form food keep
    children""".split()
)
BLOCK_TOKENS = 512  # tokens of a prompt for each of a trace's hash_ids

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Planned:
    """A request of a load: the time to send it, in seconds, its prompt and its output length.

    A prompt is text, or the messages of a chat.
    """

    at: float
    prompt: Prompt
    output_tokens: int


def draw_words(num_tokens: int, rng: np.random.Generator) -> str:
    """Draw `num_tokens` words, which are about as many tokens; the server has the exact count."""
    return " ".join(WORDS[each] for each in rng.integers(len(WORDS), size=num_tokens))


def plan(arrivals: Sequence[Arrival], seed: int) -> list[Planned]:
    """Plan a prompt of words for each arrival; prompts share prefixes only through `hash_ids`."""
    rng = np.random.default_rng(seed)
    return [Planned(each.at, _words_of(each, seed, rng), each.output_tokens) for each in arrivals]


def plan_with(arrivals: Sequence[Arrival], prompts: Sequence[Prompt]) -> list[Planned]:
    """Plan the given prompts in turn, starting again from the first when they are used up."""
    return [
        Planned(each.at, prompts[number % len(prompts)], each.output_tokens)
        for number, each in enumerate(arrivals)
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file: one per line.

    A line of a .jsonl file is {"prompt": ...} or {"messages": ...}. Raises `LoadError` with the
    number of an invalid line.
    """
    lines = _lines_of("prompts", path)
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise LoadError(f"The file {path} has no prompts: it needs one per line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_read_prompt(path, number, line) for number, line in numbered]


def _read_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        found = _from_json(line)
    except ValueError as error:
        reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else error
        raise LoadError(f"{path}, line {number}: {reason}.") from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    messages = found.get("messages") if isinstance(found, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise LoadError(f'{path}, line {number}: it needs {{"prompt": text}} or {{"messages": [...]}}.')


def _words_of(arrival: Arrival, seed: int, rng: np.random.Generator) -> str:
    blocks = [
        draw_words(BLOCK_TOKENS, np.random.default_rng([seed, abs(each), int(each < 0)]))
        for each in arrival.hash_ids
    ]
    missing = arrival.input_tokens - len(blocks) * BLOCK_TOKENS
    if missing > 0:
        blocks.append(draw_words(missing, rng))
    words = " ".join(blocks).split(" ")
    return " ".join(words[: arrival.input_tokens])
