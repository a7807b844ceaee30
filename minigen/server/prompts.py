"""What the requests of a load ask: words drawn by a seed, or the prompts of a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minigen.errors import LoadError
from minigen.server.arrivals import Arrival

# Frequent words, which most vocabularies have as one token with the space before it.
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
BLOCK_TOKENS = 512  # of a prompt for each of a trace's hash_ids

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Planned:
    """A request of a load: when it is to be sent, in seconds, and what it asks for.

    A prompt is text, or the messages of a chat.
    """

    at: float
    prompt: Prompt
    output_tokens: int


def draw_words(num_tokens: int, rng: np.random.Generator) -> str:
    """So many words, which are about as many tokens; what they are exactly, the server says."""
    return " ".join(WORDS[each] for each in rng.integers(len(WORDS), size=num_tokens))


def plan(arrivals: Sequence[Arrival], seed: int) -> list[Planned]:
    """A prompt of words for each arrival: no two begin alike but by their `hash_ids`."""
    rng = np.random.default_rng(seed)
    return [Planned(each.at, _words_of(each, seed, rng), each.output_tokens) for each in arrivals]


def plan_with(arrivals: Sequence[Arrival], prompts: Sequence[Prompt]) -> list[Planned]:
    """The prompts in turn, from the first again when they are used up."""
    return [
        Planned(each.at, prompts[number % len(prompts)], each.output_tokens)
        for number, each in enumerate(arrivals)
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: a line each; in a .jsonl file, {"prompt": ...} or {"messages": ...}.

    Raises `LoadError` that names the line for any other.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"The prompts {path} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise LoadError(f"The file {path} has no prompts: it needs one a line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_read_prompt(path, number, line) for number, line in numbered]


def _read_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise LoadError(f"{path}, line {number}: it is no JSON.") from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    messages = found.get("messages") if isinstance(found, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise LoadError(f'{path}, line {number}: it needs {{"prompt": text}} or {{"messages": [...]}}.')


def _words_of(arrival: Arrival, seed: int, rng: np.random.Generator) -> str:
    blocks = [
        draw_words(BLOCK_TOKENS, np.random.default_rng([seed, abs(each)]))
        for each in arrival.hash_ids
    ]
    missing = arrival.input_tokens - len(blocks) * BLOCK_TOKENS
    if missing > 0:
        blocks.append(draw_words(missing, rng))
    words = " ".join(blocks).split(" ")
    return " ".join(words[: arrival.input_tokens])
