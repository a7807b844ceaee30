"""Answers to the exercises of chapter 53."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from minigen.errors import GrammarError
from minigen_course.ch53_structured_output.automaton import (
    EMPTY,
    NOTHING,
    Bytes,
    Either,
    Star,
    StateMatcher,
    Then,
    either,
    may_end,
    star,
    then,
)
from tests.answers import Answers, typed_again

PAIRS = {"[": "]", "{": "}"}


def due_by_cases(due: str, character: str) -> str | None:
    """Right, case by case."""
    if due == "v":
        return {"x": "", "[": "]", "{": "}"}.get(character)
    if due.endswith(("]", "}")):
        if character == due[-1]:
            return due[:-1]
        return {"x": due, "[": due + "]", "{": due + "}"}.get(character)
    return None


def due_by_list(due: str, character: str) -> str | None:
    """Right, with a list for the stack."""
    stack = list(due)
    if not stack or character not in ("x", "[", "{", "]", "}"):
        return None
    if character in ("]", "}"):
        return "".join(stack) if stack.pop() == character else None
    if stack[-1] == "v":
        stack.pop()
    if character != "x":
        stack.append(PAIRS[character])
    return "".join(stack)


def wrong_due(name: str) -> Callable[[str, str], Any]:
    def part(due: str, character: str) -> Any:
        if not due and name != "goes on after the end":
            return "" if name == "an empty stack for an error" else None
        top, below = due[-1:], due[:-1]
        kept = below if top == "v" and name != "the value stays due" else due
        if character in PAIRS:
            closing = PAIRS[character]
            if name == "pushes what was opened":
                closing = character
            if name == "one kind of bracket":
                closing = "]"
            if name == "pushed at the bottom":
                return closing + kept
            return kept + closing
        if character == "x":
            return below if name == "x closes" else kept
        if name == "counts only" and character in "]}":
            return below
        if name == "any due bracket" and character in due:
            return due.replace(character, "", 1)
        if name == "other characters pass" and character not in "]}":
            return due
        if name == "False for an error" and character != top:
            return False
        if name == "the letter v is a value":
            return below if character == top else None
        if name == "closes an unopened one" and top == "v":
            return ""
        return below if character == top != "v" else None

    return part


WRONG_DUE = [
    *("goes on after the end", "an empty stack for an error", "the value stays due"),
    *("pushes what was opened", "one kind of bracket", "pushed at the bottom", "x closes"),
    *("counts only", "any due bracket", "other characters pass", "False for an error"),
    *("the letter v is a value", "closes an unopened one"),
]


def derivative_by_pairs(regex: Any, byte: int) -> Any:
    """Right, as Brzozowski wrote it: a sequence is a first part and a rest."""
    match regex:
        case Bytes(choices):
            return EMPTY if byte in choices else NOTHING
        case Then(()):
            return NOTHING
        case Then(parts):
            rest = then(*parts[1:])
            found = then(derivative_by_pairs(parts[0], byte), rest)
            if may_end(parts[0]):
                found = either(found, derivative_by_pairs(rest, byte))
            return found
        case Either(options):
            return either(*[derivative_by_pairs(each, byte) for each in options])
        case Star(inner):
            return then(derivative_by_pairs(inner, byte), star(inner))


def derivative_collected(regex: Any, byte: int) -> Any:
    """Right, with all ways in a list."""
    if isinstance(regex, Bytes):
        return [NOTHING, EMPTY][byte in regex.choices]
    if isinstance(regex, Star):
        return then(derivative_collected(regex.inner, byte), regex)
    ways: list[Any] = []
    if isinstance(regex, Either):
        ways = [derivative_collected(each, byte) for each in regex.options]
    else:
        for place, part in enumerate(regex.parts):
            if all(may_end(each) for each in regex.parts[:place]):
                ways.append(then(derivative_collected(part, byte), *regex.parts[place + 1 :]))
    return either(*ways)


def wrong_derivative(name: str) -> Callable[[Any, int], Any]:
    def part(regex: Any, byte: int) -> Any:
        match regex:
            case Bytes(choices):
                if name == "the byte itself stays":
                    return regex if byte in choices else NOTHING
                if name == "empty for a wrong byte":
                    return EMPTY
                if name == "None for nothing":
                    return EMPTY if byte in choices else None
                return EMPTY if byte in choices else NOTHING
            case Either(options):
                if name == "first option that fits":
                    for each in sorted(options, key=repr):
                        if (rest := part(each, byte)) != NOTHING:
                            return rest
                    return NOTHING
                if name == "options in a row":
                    return then(*(part(each, byte) for each in options))
                return either(*(part(each, byte) for each in options))
            case Star(inner):
                if name == "one round only":
                    return part(inner, byte)
                if name == "the rounds without the rest":
                    return star(part(inner, byte))
                if name == "the star first":
                    return then(regex, part(inner, byte))
                if name == "star may also stop":
                    return either(EMPTY, then(part(inner, byte), regex))
                return then(part(inner, byte), regex)
            case Then(parts):
                if name == "empty text goes on" and not parts:
                    return EMPTY
                found: Any = NOTHING
                for place, each in enumerate(parts):
                    rest = parts[place + 1 :]
                    if name == "the rest forgotten":
                        rest = ()
                    if name == "the part stays":
                        rest = parts[place:]
                    way = then(part(each, byte), *rest)
                    if name == "last way only":
                        found = way
                    elif name == "first way only" and found != NOTHING:
                        pass
                    else:
                        found = either(found, way)
                    if name == "first part only":
                        break
                    if name == "every part may be empty":
                        continue
                    if not may_end(each):
                        break
                    if name == "two parts at most" and place == 1:
                        break
                return found

    return part


WRONG_DERIVATIVES = [
    *("the byte itself stays", "empty for a wrong byte", "None for nothing"),
    *("first option that fits", "options in a row", "one round only", "the star first"),
    *("the rounds without the rest", "star may also stop", "empty text goes on"),
    *("the rest forgotten", "the part stays", "last way only", "first way only"),
    *("first part only", "every part may be empty", "two parts at most"),
]


def allowed_by_recursion(trie: Any, automaton: Any, state: int) -> list[int]:
    """Right, by recursion."""
    found = list(trie.token_ids)
    for byte, child in trie.children.items():
        after = automaton.moves[state].get(byte)
        if after is not None:
            found += allowed_by_recursion(child, automaton, after)
    return found


def allowed_by_moves(trie: Any, automaton: Any, state: int) -> set[int]:
    """Right: goes over the moves, level by level, and returns a set."""
    found: set[int] = set()
    level = [(trie, state)]
    while level:
        found.update(*(node.token_ids for node, _ in level))
        level = [
            (node.children[byte], after)
            for node, now in level
            for byte, after in automaton.moves[now].items()
            if byte in node.children
        ]
    return found


def wrong_allowed(name: str) -> Callable[[Any, Any, int], Any]:
    def part(trie: Any, automaton: Any, state: int) -> Any:
        found: list[int] = []
        paths = [(trie, 0 if name == "from the first state" else state)]
        while paths:
            node, now = paths.pop(0)
            ids = node.token_ids[:1] if name == "one token per spelling" else node.token_ids
            if not (name == "leaves only" and node.children) and not (
                name == "whole texts only" and now not in automaton.ends
            ):
                found += ids
            if name == "stops at a token" and node.token_ids:
                continue
            for byte, child in node.children.items():
                if byte in automaton.moves[now]:
                    after = automaton.moves[now][byte]
                    if name == "the state stays":
                        after = now
                    if name == "characters only" and byte > 127:
                        continue
                    paths.append((child, after))
                elif name == "looks into dead branches":
                    below = list(child.children.items())
                    while below:
                        _, deeper = below.pop()
                        below += list(deeper.children.items())
                elif name == "dead branches too":
                    paths.append((child, now))
            if name == "one level only":
                return [i for child, _ in paths for i in child.token_ids]
            if name == "one branch only":
                paths = paths[:1]
        if name == "a mask":
            return [True] * len(found)
        if name == "spelled as text":
            return ", ".join(map(str, found))
        return found

    return part


WRONG_ALLOWED = [
    *("from the first state", "one token per spelling", "leaves only", "whole texts only"),
    *("stops at a token", "the state stays", "characters only", "looks into dead branches"),
    *("dead branches too", "one level only", "one branch only", "a mask", "spelled as text"),
]


class ByBytes:
    """Right: keeps the tokens, and follows their bytes each time."""

    def __init__(self, masks: Any):
        self.masks, self.tokens = masks, list[int]()

    def _state(self) -> Any:
        spelled = (self.masks.spellings.get(each, b"") for each in self.tokens)
        return self.masks.automaton.after(b"".join(spelled))

    def allowed(self) -> Any:
        state = self._state()
        mask = np.array(self.masks[state])
        for end in self.masks.end_ids:
            mask[end] = state in self.masks.automaton.ends
        return mask

    def accept(self, token_id: int) -> None:
        if not self.allowed()[token_id]:
            raise GrammarError("no")
        self.tokens.append(token_id)

    def roll_back(self, count: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - count]

    def fork(self) -> Any:
        return copy.deepcopy(self)


class ByHistory:
    """Right: keeps the state, and a tuple of the earlier ones."""

    def __init__(self, masks: Any, state: int = 0, before: tuple[int, ...] = ()):
        self.masks, self.state, self.before = masks, state, before

    def allowed(self) -> Any:
        mask = self.masks[self.state].copy()
        mask[list(self.masks.end_ids)] = self.state in self.masks.automaton.ends
        return mask

    def accept(self, token_id: int) -> None:
        if not self.allowed()[token_id]:
            raise GrammarError("no")
        self.before += (self.state,)
        if token_id not in self.masks.end_ids:
            self.state = self.masks.automaton.after(self.masks.spellings[token_id], self.state)

    def roll_back(self, count: int) -> None:
        for _ in range(count):
            self.state, self.before = self.before[-1], self.before[:-1]

    def fork(self) -> Any:
        return ByHistory(self.masks, self.state, self.before)


Own: Any = typed_again(StateMatcher)


class EndAlways(Own):
    def allowed(self) -> Any:
        mask = super().allowed()
        mask[self.masks.end_ids] = True
        return mask


class EndOnlyAtLast(Own):
    def allowed(self) -> Any:
        mask = super().allowed()
        mask[self.masks.end_ids] = not self.masks.automaton.moves[self.states[-1]]
        return mask


class NeverEnds(Own):
    def allowed(self) -> Any:
        mask = super().allowed()
        mask[self.masks.end_ids] = False
        return mask


class EndWithoutCopy(Own):
    def allowed(self) -> Any:
        state = self.states[-1]
        mask = self.masks[state]
        mask[self.masks.end_ids] = state in self.masks.automaton.ends
        return mask


class AcceptsAll(Own):
    def accept(self, token_id: int) -> None:
        if token_id in self.masks.end_ids:
            self.states.append(self.states[-1])
            return
        after = self.masks.automaton.after(self.masks.spellings[token_id], self.states[-1])
        self.states.append(self.states[-1] if after is None else after)


class OneByte(Own):
    def accept(self, token_id: int) -> None:
        if not self.allowed()[token_id]:
            raise GrammarError("no")
        spelled = self.masks.spellings.get(token_id, b"")[:1]
        self.states.append(self.masks.automaton.after(spelled, self.states[-1]))


class FromTheStart(Own):
    def accept(self, token_id: int) -> None:
        if not self.allowed()[token_id]:
            raise GrammarError("no")
        spelled = self.masks.spellings.get(token_id, b"")
        self.states.append(self.masks.automaton.after(spelled))


class SlicedToNothing(Own):
    def roll_back(self, count: int) -> None:
        self.states[-count:] = []


class BackByOne(Own):
    def roll_back(self, count: int) -> None:
        if count:
            self.states.pop()


class BackToTheStart(Own):
    def roll_back(self, count: int) -> None:
        if count:
            self.states = [0]


class EndLeavesNoTrace(Own):
    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        if token_id in self.masks.end_ids:
            self.states.pop()


class SharedList(Own):
    def fork(self) -> Any:
        made = type(self)(self.masks)
        made.states = self.states
        return made


class ForkIsItself(Own):
    def fork(self) -> Any:
        return self


class ForkStartsAgain(Own):
    def fork(self) -> Any:
        return type(self)(self.masks)


class ForkForgets(Own):
    def fork(self) -> Any:
        made = type(self)(self.masks)
        made.states = self.states[-1:]
        return made


class ListOfIds(Own):
    def allowed(self) -> Any:
        return np.flatnonzero(super().allowed()).tolist()


WRONG_MATCHERS = {
    "an end is always allowed": EndAlways,
    "an end only where nothing follows": EndOnlyAtLast,
    "never an end": NeverEnds,
    "writes into the shared mask": EndWithoutCopy,
    "accepts everything": AcceptsAll,
    "follows one byte of a token": OneByte,
    "follows each token from the start": FromTheStart,
    "a roll back by 0 drops all": SlicedToNothing,
    "a roll back by one": BackByOne,
    "a roll back to the start": BackToTheStart,
    "an end cannot be taken back": EndLeavesNoTrace,
    "forks share their states": SharedList,
    "a fork is the same object": ForkIsItself,
    "a fork starts again": ForkStartsAgain,
    "a fork cannot go back": ForkForgets,
    "a list of ids": ListOfIds,
}


KEPT = {"enum", "type", "maxLength"}


def pattern_by_table(schema: Any) -> str:
    """Right, from a table of types."""
    types = {"integer": "(-?[1-9][0-9]{0,8}|0)", "boolean": "(false|true)", "null": "(null)"}
    fields = []
    for name, each in schema["properties"].items():
        if set(each) - KEPT:
            raise ValueError(name)
        if "enum" in each:
            choices = [re.escape(json.dumps(one, ensure_ascii=False)) for one in each["enum"]]
            value = f"({'|'.join(choices)})"
        elif each.get("type") == "string":
            character = r'(\\["/bfnrt\\]|[^\x00-\x1f\\"])'
            times = f"{{0,{each['maxLength']}}}" if "maxLength" in each else "*"
            value = f'"{character}{times}"'
        elif each.get("type") in types:
            value = types[each["type"]]
        else:
            raise ValueError(name)
        fields.append(f"{re.escape(json.dumps(name, ensure_ascii=False))}: {value}")
    return "\\{" + ", ".join(fields) + "\\}"


def pattern_with_choices_of_escapes(schema: Any) -> str:
    """Right, with longer regexes."""
    return pattern_by_table(schema).replace("[0-9]{0,8}", "[0-9]?" * 8).replace("-?", "(|-)")


def changed_pattern(old: str, new: str) -> Callable[[Any], str]:
    return lambda schema: pattern_by_table(schema).replace(old, new)


def without_a_refusal(schema: Any) -> str:
    try:
        return pattern_by_table(schema)
    except ValueError:
        return ".*"


def sorted_names(schema: Any) -> str:
    return pattern_by_table({"properties": dict(sorted(schema["properties"].items()))})


def raw_names(schema: Any) -> str:
    names = schema["properties"]
    found = pattern_by_table(schema)
    for name in names:
        found = found.replace(re.escape(json.dumps(name, ensure_ascii=False)), f'"{name}"')
    return found


def by_number(found: str) -> str:
    """Write é as an escape, as `json.dumps` does by itself."""
    return found.replace("é", r"\\u00e9")


def names_by_number(schema: Any) -> str:
    found = pattern_by_table(schema)
    for name in schema["properties"]:
        found = found.replace(f'"{name}": ', by_number(f'"{name}": '))
    return found


def values_by_number(schema: Any) -> str:
    values = {name: {"enum": [None]} for name in schema["properties"]}
    named = pattern_by_table({"properties": values})
    return pattern_by_table(schema) if "é" in named else by_number(pattern_by_table(schema))


def keywords_ignored(schema: Any) -> str:
    known = {
        name: {keyword: value for keyword, value in each.items() if keyword in KEPT}
        for name, each in schema["properties"].items()
    }
    return pattern_by_table({"properties": known})


def numbers_without_limits(schema: Any) -> str:
    """Wrong: refuses what it knows of strings, and ignores limits of numbers."""
    for each in schema["properties"].values():
        if {"minLength", "pattern"} & set(each):
            raise ValueError
    return keywords_ignored(schema)


def required_only(schema: Any) -> str:
    wanted = schema.get("required", [])
    names = {name: each for name, each in schema["properties"].items() if name in wanted}
    return pattern_by_table({"properties": names})


def enum_of_texts(schema: Any) -> str:
    properties = {
        name: {"enum": [str(one) for one in each["enum"]]} if "enum" in each else each
        for name, each in schema["properties"].items()
    }
    return pattern_by_table({"properties": properties})


def unescaped_enum(schema: Any) -> str:
    return pattern_by_table(schema).replace('"l\\."', '"l."')


def no_pattern(schema: Any) -> Any:
    return re.compile(pattern_by_table(schema))


WRONG_PATTERNS = {
    "compact separators": lambda schema: pattern_by_table(schema).replace(", ", ","),
    "no blank after a colon": lambda schema: pattern_by_table(schema).replace(": ", ":"),
    "sorted names": sorted_names,
    "names as regexes": raw_names,
    "required ones only": required_only,
    "zeros in front": changed_pattern("[1-9][0-9]{0,8}", "[0-9]{1,9}"),
    "minus zero": changed_pattern("(-?[1-9][0-9]{0,8}|0)", "-?([1-9][0-9]{0,8}|0)"),
    "no negative numbers": changed_pattern("-?", ""),
    "any number of digits": changed_pattern("{0,8}", "*"),
    "nine more digits": changed_pattern("{0,8}", "{0,9}"),
    "no zero": changed_pattern("|0)", ")"),
    "quotes inside of strings": changed_pattern(r"[^\x00-\x1f\\" + '"]', r"[^\x00-\x1f\\]"),
    "line ends inside of strings": changed_pattern(r"\x00-\x1f", ""),
    "any escape": changed_pattern(r'\\["/bfnrt\\]', r"\\[^\n]"),
    "no escapes": changed_pattern(r'\\["/bfnrt\\]|', ""),
    "ASCII only": changed_pattern(r'[^\x00-\x1f\\"]', r"[ !#-\[\]-~]"),
    "one character too few": changed_pattern("{0,3}", "{0,2}"),
    "exactly the largest length": changed_pattern("{0,3}", "{3}"),
    "alternatives without brackets": changed_pattern("(false|true)", "false|true"),
    "an enum of texts": enum_of_texts,
    "an enum as a regex": unescaped_enum,
    "nothing is refused": without_a_refusal,
    "other keywords are ignored": keywords_ignored,
    "limits of numbers are ignored": numbers_without_limits,
    "names in ASCII": names_by_number,
    "an enum in ASCII": values_by_number,
    "a compiled regex": no_pattern,
}


def forced_by_recursion(automaton: Any, state: int) -> bytes:
    """Right, by recursion."""
    moves = automaton.moves[state]
    if state in automaton.ends or len(moves) != 1:
        return b""
    byte = next(iter(moves))
    return bytes([byte]) + forced_by_recursion(automaton, moves[byte])


def forced_by_sets(automaton: Any, state: int) -> bytearray:
    """Right, with all choices in one list."""
    found = bytearray()
    while True:
        choices = [*automaton.moves[state]] + [None] * (state in automaton.ends)
        if len(choices) != 1 or choices[0] is None:
            return found
        found.append(choices[0])
        state = automaton.moves[state][choices[0]]


def wrong_forced(name: str) -> Callable[[Any, int], Any]:
    def part(automaton: Any, state: int) -> Any:
        found = bytearray()
        while True:
            if name == "from the first state" and not found:
                state = 0
            moves = automaton.moves[state]
            if name == "an end is no choice":
                if len(moves) != 1 or len(found) > 20:
                    break
            elif name == "ends only without moves":
                if not moves or len(moves) > 1 or len(found) > 20:
                    break
            elif name == "the first of several":
                if not moves or state in automaton.ends:
                    break
            elif name == "one next state":
                if len(set(moves.values())) != 1 or state in automaton.ends:
                    break
            elif len(moves) != 1 or state in automaton.ends:
                break
            byte = min(moves)
            found.append(byte)
            state = moves[byte]
            if name == "one byte":
                break
            if name == "two bytes at most" and len(found) == 2:
                break
        if name == "reversed":
            found.reverse()
        if name == "text":
            return found.decode(errors="replace")
        if name == "states":
            return [state]
        if name == "one too few":
            return bytes(found[:-1])
        if name == "the next one too":
            return bytes(found) + bytes(sorted(automaton.moves[state])[:1])
        if name == "whole characters only":
            return found.decode(errors="ignore").encode()
        return bytes(found)

    return part


WRONG_FORCED = [
    *("from the first state", "an end is no choice", "ends only without moves"),
    *("the first of several", "one next state", "one byte", "two bytes at most", "reversed"),
    *("text", "states", "one too few", "the next one too", "whole characters only"),
]


ANSWERS = {
    "still_due": Answers(
        right=(due_by_cases, due_by_list, wrong_due("nothing")),
        wrong={name: wrong_due(name) for name in WRONG_DUE},
        equivalent={},
    ),
    "derivative": Answers(
        right=(derivative_by_pairs, derivative_collected, wrong_derivative("nothing")),
        wrong={name: wrong_derivative(name) for name in WRONG_DERIVATIVES},
        equivalent={},
    ),
    "allowed_tokens": Answers(
        right=(allowed_by_recursion, allowed_by_moves, wrong_allowed("nothing")),
        wrong={name: wrong_allowed(name) for name in WRONG_ALLOWED},
        equivalent={},
    ),
    "StateMatcher": Answers(
        right=(ByBytes, ByHistory),
        wrong=WRONG_MATCHERS,
        equivalent={},
    ),
    "pattern_of_schema": Answers(
        right=(pattern_by_table, pattern_with_choices_of_escapes),
        wrong=WRONG_PATTERNS,
        equivalent={},
    ),
    "forced_text": Answers(
        right=(forced_by_recursion, forced_by_sets, wrong_forced("nothing")),
        wrong={name: wrong_forced(name) for name in WRONG_FORCED},
        equivalent={},
    ),
}
