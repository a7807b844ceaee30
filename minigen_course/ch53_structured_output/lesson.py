"""Orders to read, regexes for schemas, a stack for nested values, and the cost of a grammar.

Sources: JSON Schema 2020-12, Validation; RFC 8259 (JSON), sections 6 and 7.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import jsonschema
import numpy as np
import torch

from minigen import LLM, SamplingParams
from minigen.sampling.processors import TokenMatcher
from minigen.tokenizer.tokenizer import Tokenizer
from minigen_course.ch53_structured_output.automaton import Automaton, AutomatonBackend
from minigen_course.lab.inspect_model import read_at_once

NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}
DRINKS = ("green tea", "latte", "espresso", "hot chocolate")
SIZES = ("small", "medium", "large")
WORDINGS = (
    "{count} {size} {drink}s, please",
    "I'd like {count} {size} {drink}s to take away",
    "can I have {count} {size} {drink}s?",
    "{drink}s for our table: {count} {size} ones",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "drink": {"type": "string", "maxLength": 30},
        "size": {"enum": list(SIZES)},
        "quantity": {"type": "integer"},
    },
    "required": ["drink", "size", "quantity"],
    "additionalProperties": False,
}
ASKED = 'Reply only with JSON like {"drink": "...", "size": "small", "quantity": 1}.'
TOOLS = {  # name -> its argument and the argument's schema
    "get_weather": ("city", {"type": "string", "maxLength": 20}),
    "set_timer": ("minutes", {"type": "integer"}),
    "send_message": ("text", {"type": "string", "maxLength": 40}),
}
REQUESTS = {  # a request -> the tool that serves it
    "What is the weather in Oslo?": "get_weather",
    "Wake me in 20 minutes.": "set_timer",
    "Tell Anna that I am late.": "send_message",
    "Is it raining in Lima?": "get_weather",
    "Set a timer for 5 minutes for the eggs.": "set_timer",
    "Write to Tom: see you at six.": "send_message",
}


@dataclass(frozen=True)
class Order:
    """An order in words, and what it asks for."""

    text: str
    drink: str
    size: str
    quantity: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that asks for this order as JSON."""
        return [{"role": "system", "content": ASKED}, {"role": "user", "content": self.text}]


def orders(count: int) -> list[Order]:
    """Return this many different orders, spread over drinks, sizes, numbers and wordings."""
    every = list(product(WORDINGS, NUMBERS, DRINKS, SIZES))
    found = []
    for place in range(count):
        wording, number, drink, size = every[place * 25 % len(every)]
        text = wording.format(count=number, size=size, drink=drink)
        found.append(Order(text, drink, size, NUMBERS[number]))
    return found


def parsed(text: str) -> Any:
    """Return what a text means as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def validates(text: str, schema: Mapping[str, Any] = SCHEMA) -> bool:
    """Return whether a text is JSON that is valid by a schema, as the jsonschema library judges."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def right_fields(text: str, order: Order) -> dict[str, bool]:
    """Return for each field whether a text, as JSON, has in it what was ordered."""
    found = parsed(text)
    if not isinstance(found, dict):
        found = {}
    return {
        "drink": order.drink in str(found.get("drink", "")).lower(),
        "size": found.get("size") == order.size,
        "quantity": found.get("quantity") == order.quantity,
    }


def is_right(text: str, order: Order) -> bool:
    """Return whether a text is JSON with the order's drink, size and quantity."""
    return all(right_fields(text, order).values())


@dataclass(frozen=True)
class Tries:
    """Retries until an answer validates: the answers that were still missing after each round."""

    missing: list[int]
    tokens: int

    @property
    def share(self) -> float:
        """The share of all tries that validated."""
        tried = sum(self.missing[:-1])
        return (self.missing[0] - self.missing[-1]) / tried


def retried(llm: LLM, prompts: SequenceOf[Any], rounds: int, max_tokens: int) -> Tries:
    """Ask for each prompt, at temperature 0.5, until the answer validates or rounds are over."""
    waiting, missing, tokens = dict(enumerate(prompts)), [len(prompts)], 0
    for attempt in range(rounds):
        params = [  # a seed of its own for each try, or equal prompts would repeat one another
            SamplingParams(temperature=0.5, seed=rounds * place + attempt, max_tokens=max_tokens)
            for place in waiting
        ]
        asked = list(waiting.values())
        answers = llm.generate(asked, params, progress=False) if waiting else []
        tokens += sum(len(each.token_ids) for each in answers)
        waiting = {
            place: prompt
            for (place, prompt), answer in zip(waiting.items(), answers, strict=True)
            if not validates(answer.text)
        }
        missing.append(len(waiting))
    return Tries(missing, tokens)


# Schemas and recursion

_CHARACTER = r'([^"\\\x00-\x1f]|\\["\\/bfnrt])'


def pattern_of_schema(schema: Mapping[str, Any]) -> str:
    """Return a regex for the objects that a flat schema allows, in one way of writing each.

    All properties are written, in their order, with `": "` and `", "` between them, as
    `json.dumps(value, ensure_ascii=False)` does. A property is an `enum` of values, or has the
    `type` string (with `maxLength`, if that is given), integer (of at most nine digits), boolean or
    null. Raises `ValueError` for any other property, and for any other keyword of a property.
    """
    _refuse_others("The schema", schema, "type properties required additionalProperties")
    parts = []
    for name, each in schema["properties"].items():
        parts.append(f"{_literal(name)}: {_pattern_of_value(name, each)}")
    return r"\{" + ", ".join(parts) + r"\}"


def _pattern_of_value(name: str, schema: Mapping[str, Any]) -> str:
    kept = "enum" if "enum" in schema else "type maxLength"
    _refuse_others(f"The property {name!r}", schema, kept)
    if "enum" in schema:
        return "(" + "|".join(map(_literal, schema["enum"])) + ")"
    kind = schema.get("type")
    if kind == "string":
        most = schema.get("maxLength")
        return f'"{_CHARACTER}{"*" if most is None else f"{{0,{most}}}"}"'
    if kind == "integer":
        return "(0|-?[1-9][0-9]{0,8})"
    if kind == "boolean":
        return "(true|false)"
    if kind == "null":
        return "null"
    raise ValueError(f"The property {name!r} is neither flat nor an enum.")


def _literal(value: Any) -> str:
    return re.escape(json.dumps(value, ensure_ascii=False))


def _refuse_others(what: str, schema: Mapping[str, Any], kept: str) -> None:
    """Raise `ValueError` for keywords that the regex would not keep, with their names."""
    others = sorted(schema.keys() - kept.split())
    if others:
        raise ValueError(f"{what} has {', '.join(others)}, which this regex does not keep.")


def tool_pattern() -> str:
    """Return a regex for a call of one of `TOOLS`: its name, then its own arguments."""
    calls = []
    for name, (argument, schema) in TOOLS.items():
        arguments = pattern_of_schema({"properties": {argument: schema}})
        calls.append(rf'\{{"tool": "{name}", "arguments": {arguments}\}}')
    return "|".join(calls)


CLOSING = {"[": "]", "{": "}"}


def still_due(due: str, character: str) -> str | None:
    """Return what is due after one more character of a nested value; None if it is forbidden.

    A value is `x`, or any number of values between `[` and `]`, or between `{` and `}`. `due` is a
    stack, with its top at the end: at first "v" alone, since one value is due; then a closing
    bracket for each open one. When it is empty, the value is complete and nothing may follow.

    >>> still_due("v", "["), still_due("]", "{"), still_due("]}", "x"), still_due("]}", "]")
    (']', ']}', ']}', None)
    """
    if not due:
        return None
    below, top = due[:-1], due[-1]
    kept = below if top == "v" else due
    if character in CLOSING:
        return kept + CLOSING[character]
    if character == "x":
        return kept
    return below if character == top != "v" else None


def nested_pattern(depth: int) -> str:
    """Return a regex for the values of `still_due` with at most `depth` brackets open at once."""
    inner = "x"
    for _ in range(depth):
        inner = rf"(x|\[{inner}*\]|\{{{inner}*\}})"
    return inner


# Steps without the model


def forced_text(automaton: Automaton, state: int) -> bytes:
    """Return the bytes that must come next: the longest run in which there is never a choice.

    A state in which the text may end is a choice, between an end and going on.
    """
    found = bytearray()
    while len(automaton.moves[state]) == 1 and state not in automaton.ends:
        ((byte, state),) = automaton.moves[state].items()
        found.append(byte)
    return bytes(found)


@dataclass(frozen=True)
class Piece:
    """A part of an answer: forced bytes, or one token that the model chose."""

    text: bytes
    forced: bool
    num_tokens: int


def pieces(
    token_ids: SequenceOf[int], automaton: Automaton, tokenizer: Tokenizer, end_ids: Collection[int]
) -> list[Piece]:
    """Return an answer as forced and chosen pieces.

    Forced bytes are split by the tokenizer, and their last token is left to the model, since what
    follows could change it, where a token joins a quote with the letters after it.
    """
    answer = b"".join(tokenizer.token_bytes(each) for each in token_ids if each not in end_ids)
    at, found = 0, list[Piece]()
    while at < len(answer):
        forced = forced_text(automaton, _state(automaton, answer[:at]))
        split = tokenizer.encode(forced.decode(), add_special_tokens=False) if forced else []
        kept = split if at + len(forced) == len(answer) else split[:-1]
        known = b"".join(map(tokenizer.token_bytes, kept))
        if known:
            found.append(Piece(known, True, len(kept)))
        at += len(known)
        if at < len(answer):
            chosen = _next_token(token_ids, tokenizer, at)
            found.append(Piece(chosen, False, 1))
            at += len(chosen)
    return found


def _state(automaton: Automaton, seen: bytes) -> int:
    state = automaton.after(seen)
    assert state is not None, "an answer of this form"
    return state


def _next_token(token_ids: SequenceOf[int], tokenizer: Tokenizer, at: int) -> bytes:
    """Return the rest, from byte `at` on, of the answer's token in which that byte lies."""
    start = 0
    for each in token_ids:
        spelling = tokenizer.token_bytes(each)
        if at < start + len(spelling):
            return spelling[at - start :]
        start += len(spelling)
    raise AssertionError("a byte of the answer")


# Backends and costs


def digit_share(
    llm: LLM, prompts: Iterable[SequenceOf[int]], first_ids: SequenceOf[int]
) -> list[float]:
    """Return the digits' share of the probability of all tokens of one byte, after a beginning.

    The result has an element for each prompt; `first_ids` are the answer's first tokens.
    """
    texts = [[*prompt, *first_ids] for prompt in prompts]
    last = torch.stack([each[-1] for each in read_at_once(llm, *texts)]).softmax(-1)
    ids = [each for each in range(last.shape[-1]) if len(llm.tokenizer.token_bytes(each)) == 1]
    digits = [each for each in ids if llm.tokenizer.token_bytes(each).isdigit()]
    shares: list[float] = (last[:, digits].sum(-1) / last[:, ids].sum(-1)).tolist()
    return shares


class CharacterBackend(AutomatonBackend):
    """The naive way: it allows only tokens of a single byte, which need no walk."""

    most_bytes = 1


def walk(
    mine: TokenMatcher, other: TokenMatcher, seed: int, steps: int
) -> Iterator[tuple[Any, Any]]:
    """Yield both matchers' masks at each step of an answer drawn from those that both allow."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        masks = mine.allowed(), other.allowed()
        yield masks
        token_id = int(random.choice(np.flatnonzero(masks[0] & masks[1])))
        mine.accept(token_id)
        other.accept(token_id)
        if not mine.allowed().any() or token_id == 2:
            return


def deepest(text: str) -> int:
    """Return how many brackets are open at once in a nested value, at most."""
    depths = accumulate((each in CLOSING) - (each in CLOSING.values()) for each in text)
    return max(depths, default=0)


def times_as_long(
    llm: LLM, prompts: SequenceOf[Any], one: SamplingParams, other: SamplingParams, repeats: int
) -> float:
    """Return how many times as long the answers take under `other` as under `one`, by turns."""
    return ratio_by_turns(
        lambda: llm.generate(prompts, one, progress=False),
        lambda: llm.generate(prompts, other, progress=False),
        repeats,
    )


def ratio_by_turns(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> float:
    """Return how many times as long `other` takes as `one`.

    The two take turns, so that a busy machine slows both down; the median of their ratios counts.
    The prompts should be in the prefix cache already, or the first turn computes them.
    """

    def seconds(call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    pairs = [(seconds(one), seconds(other)) for _ in range(repeats)]
    return float(np.median([after / before for before, after in pairs]))


def num_steps(llm: LLM, prompt: SequenceOf[int], params: SamplingParams) -> int:
    """Return how many steps of the model an answer takes."""
    with llm.count_work() as work:
        llm.generate(prompt, params, progress=False)
    return work.steps


def seconds_per_mask(matcher: TokenMatcher, token_ids: SequenceOf[int]) -> float:
    """Return the mean seconds of a mask along an answer; its tokens are accepted in between."""
    spent = 0.0
    for token_id in token_ids:
        started = time.perf_counter()
        matcher.allowed()
        spent += time.perf_counter() - started
        matcher.accept(token_id)
    return spent / len(token_ids)
