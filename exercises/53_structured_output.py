# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 53
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/53_structured_output.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/53_structured_output.ipynb)
#
# The chapter: [Answers of a given form](../notebooks/53_structured_output.ipynb). Its exercises take about 115 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `still_due` | warm-up | 5 | 10 min |
# | `derivative` | core | 10 | 20 min |
# | `allowed_tokens` | core | 10 | 15 min |
# | `StateMatcher` | core | 10 | 20 min |
# | `pattern_of_schema` | core | 10 | 20 min |
# | `forced_text` | core | 10 | 10 min |
# | bug hunt: `object_pattern` | core | 10 | 20 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using


# %% [markdown]
# ## still_due
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Follow a nested value through one character. A value is `x`, or any number of values between `[` and `]`, or any number of values between `{` and `}`. `due` is a stack in a text, with its top at the end: "v" as long as the first value is due, then one closing bracket for each bracket that is open. Return the new stack, or None if the character is forbidden. When nothing is due any more, the value is complete, and every character is forbidden.

# %%
# exercise: minigen_course.ch53_structured_output.lesson.still_due
def still_due(due: str, character: str) -> str | None:
    """Return what is due after one more character of a nested value; None if it is forbidden.

    A value is `x`, or any number of values between `[` and `]`, or between `{` and `}`. `due` is a
    stack, with its top at the end: at first "v" alone, since one value is due; then a closing
    bracket for each open one. When it is empty, the value is complete and nothing may follow.

    >>> still_due("v", "["), still_due("]", "{"), still_due("]}", "x"), still_due("]}", "]")
    (']', ']}', ']}', None)
    """
    raise NotImplementedError  # your turn


# %%
mine = check(53, still_due=still_due)

# %% [markdown]
# Try it:

# %%
due = "v"
for character in "[x{x}[]]":
    due = mine(due, character)
    print(character, "now due:", repr(due))

# %% [markdown]
# **Harder.** Add a comma that must stand between two values, as in JSON, and must not stand before a bracket that closes. What else must the stack remember?

# %% [markdown]
# ## derivative
#
# *Core, 10 points, about 20 minutes.*
#
# Write Brzozowski's derivative of a regex by a byte: the regex of what may still follow once that byte was read. A regex is one of four classes: `Bytes` with the set `choices`, `Then` with the tuple `parts`, `Either` with the set `options`, `Star` with `inner`. Build your result with `then(...)`, `either(...)` and `star(...)`, which simplify it, and with the constants EMPTY (matches the empty text only) and NOTHING (matches no text).

# %%
# exercise: minigen_course.ch53_structured_output.automaton.derivative
from minigen_course.ch53_structured_output.automaton import (
    EMPTY,
    NOTHING,
    Bytes,
    Either,
    Regex,
    Star,
    Then,
    either,
    may_end,
    star,
    then,
)


def derivative(regex: Regex, byte: int) -> Regex:
    """Return the regex of what may follow `byte`: what remains after it of each match.

    A regex is `Bytes` (`choices`), `Then` (`parts`), `Either` (`options`) or `Star` (`inner`).
    Build the result with `then`, `either` and `star`, which simplify it; NOTHING matches no text,
    and EMPTY the empty one. `may_end` says whether a regex matches the empty text.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(53, derivative=derivative)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams
from minigen_course.ch53_structured_output.automaton import AutomatonBackend

llm = LLM.load(grammar_backend=AutomatonBackend)
params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[0-9]{2}-[0-9]{2}"})
with using(53, derivative=mine):
    print(llm.generate("The date is", params).text)

# %% [markdown]
# **Harder.** Brzozowski's regexes also have "and" and "not", whose derivatives are one line each. Add a class for "not", and build the texts that have three letters and are not "yes". Which of the simplifications does the walk over the trie need, so that a branch still counts as dead?

# %% [markdown]
# ## allowed_tokens
#
# *Core, 10 points, about 15 minutes.*
#
# Walk the trie of the vocabulary and the automaton together, and return the ids of all tokens that the automaton allows from `state` on. A node of the trie has `children` (a dict from a byte to a node) and `token_ids`, the tokens that end there. `automaton.moves[state]` is a dict from a byte to the next state, and a byte without an entry is forbidden. The ids may be in any order. Never look into a branch that begins with a forbidden byte: the checks count the nodes that you visit.

# %%
# exercise: minigen_course.ch53_structured_output.automaton.allowed_tokens
from minigen_course.ch53_structured_output.automaton import Automaton, Trie


def allowed_tokens(trie: Trie, automaton: Automaton, state: int) -> list[int]:
    """Return the ids of the tokens all of whose bytes the automaton allows from a state on.

    Walk the trie and the automaton together: a node of the trie is visited only if the automaton
    has a move for every byte on the way to it. The ids may be in any order.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(53, allowed_tokens=allowed_tokens)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams
from minigen_course.ch53_structured_output.automaton import AutomatonBackend

llm = LLM.load(grammar_backend=AutomatonBackend)
params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"choice": ["Paris", "Rome"]})
with using(53, allowed_tokens=mine):
    print(llm.generate("The capital of Italy is", params).text)

# %% [markdown]
# **Harder.** In a state inside of a string, nearly all tokens are allowed, and the walk is slow. Find out in how many of an automaton's states that is so, and store for each of them only what is forbidden.

# %% [markdown]
# ## StateMatcher
#
# *Core, 10 points, about 20 minutes.*
#
# Write the matcher that follows one answer. `masks[state]` is an array with one bool per token of the vocabulary, and all answers share it, so copy it before you change it. `masks.automaton.ends` are the states in which the answer may end, `masks.automaton.after(some_bytes, state)` follows bytes, `masks.spellings[token_id]` are a token's bytes, `masks.end_ids` the end tokens (they have no spelling). `accept` raises GrammarError for a token that is not allowed. `roll_back(count)` undoes the last tokens; none, if count is 0. `fork` returns a matcher for another answer of the same form: what one accepts must not move the other.

# %%
# exercise: minigen_course.ch53_structured_output.automaton.StateMatcher
import numpy as np
from jaxtyping import Bool

from minigen.errors import GrammarError
from minigen_course.ch53_structured_output.automaton import Masks


class StateMatcher:
    """Follows one answer through an automaton, as the engine's `TokenMatcher`.

    `masks.automaton` is the automaton, `masks[state]` the tokens that may come next in a state (a
    fresh copy is needed before a change), `masks.spellings[token_id]` a token's bytes, and
    `masks.end_ids` the end tokens.
    """

    def __init__(self, masks: Masks):
        raise NotImplementedError  # your turn

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token may come next; an end token only where the answer may end."""
        raise NotImplementedError  # your turn

    def accept(self, token_id: int) -> None:
        """Follow the answer by one token; an end token changes no state, but counts as a token.

        Raises `GrammarError`, and changes nothing, if the token is not allowed.
        """
        raise NotImplementedError  # your turn

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens, as if they had not been accepted."""
        raise NotImplementedError  # your turn

    def fork(self) -> "StateMatcher":
        """Return a copy that continues from the same place, for another answer."""
        raise NotImplementedError  # your turn


# %%
mine = check(53, StateMatcher=StateMatcher)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams
from minigen_course.ch53_structured_output.automaton import AutomatonBackend

llm = LLM.load(grammar_backend=AutomatonBackend)
params = SamplingParams(n=3, seed=1, max_tokens=9, structured_outputs={"regex": "[a-z]{4,9}"})
with using(53, StateMatcher=mine):
    print([each.text for each in llm.generate("My password is", params, progress=False).choices])

# %% [markdown]
# **Harder.** An answer of a thousand tokens keeps a thousand states, and each of its forks copies them. Keep only as many as a roll back can need, when speculation takes back at most eight tokens, and raise an error beyond that.

# %% [markdown]
# ## pattern_of_schema
#
# *Core, 10 points, about 20 minutes.*
#
# Turn a flat JSON schema into a regex. The object has all properties of `schema["properties"]`, in their order, written as `json.dumps(value, ensure_ascii=False)` writes them: `": "` after a name, `", "` between properties. A property has an `enum` (a list of values of any type), or the `type` string, integer, boolean or null. A string has at most `maxLength` characters, if that is given; a backslash begins one of the escapes `\"`, `\\`, `\/`, `\b`, `\f`, `\n`, `\r`, `\t`, which count as one character, and no control character (below U+0020) may stand in it. An integer has one to nine digits, without zeros in front, and may be negative. Any other property raises ValueError, and so does any other keyword of a property, such as `minimum`: the regex would not keep it. Use literal characters, groups, `|`, `*`, `?`, `{m,n}`, and classes such as `[0-9]` and `[^"\\\x00-\x1f]`.

# %%
# exercise: minigen_course.ch53_structured_output.lesson.pattern_of_schema
from collections.abc import Mapping
from typing import Any


def pattern_of_schema(schema: Mapping[str, Any]) -> str:
    """Return a regex for the objects that a flat schema allows, in one way of writing each.

    All properties are written, in their order, with `": "` and `", "` between them, as
    `json.dumps(value, ensure_ascii=False)` does. A property is an `enum` of values, or has the
    `type` string (with `maxLength`, if that is given), integer (of at most nine digits), boolean or
    null. Raises `ValueError` for any other property, and for any other keyword of a property.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(53, pattern_of_schema=pattern_of_schema)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

schema = {"properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}}}
llm = LLM.load()
params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": mine(schema)})
print(llm.generate("A city as JSON:", params).text)

# %% [markdown]
# **Harder.** Let a property be an object in its turn, and an array of at most three values. Then give every property a chance to be absent: how does the length of the regex grow with their number?

# %% [markdown]
# ## forced_text
#
# *Core, 10 points, about 10 minutes.*
#
# Return the bytes that must come next, from a state on: go on as long as the automaton leaves exactly one byte, and stop where there is a choice. A state in which the text may end is a choice as well, between an end and going on. `automaton.moves[state]` is a dict from a byte to the next state, and `automaton.ends` are the states in which a text may end.

# %%
# exercise: minigen_course.ch53_structured_output.lesson.forced_text
from minigen_course.ch53_structured_output.automaton import Automaton


def forced_text(automaton: Automaton, state: int) -> bytes:
    """Return the bytes that must come next: the longest run in which there is never a choice.

    A state in which the text may end is a choice, between an end and going on.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(53, forced_text=forced_text)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch53_structured_output import automaton, lesson

form = automaton.automaton_of(automaton.parse(lesson.pattern_of_schema(lesson.SCHEMA)))
print(mine(form, 0), mine(form, form.after(b'{"drink": "tea"')))

# %% [markdown]
# **Harder.** Count, for one of the chapter's answers, how many steps of the model forced text saves if each run of it goes through the model in one step, as a prompt does. Speculative decoding verifies such guesses in one step.

# %% [markdown]
# ## A bug hunt: object_pattern
#
# *Core, 10 points, about 20 minutes.*
#
# **The report.** *Some answers run into `max_tokens`. They begin as valid JSON, then come blanks and line ends until the limit, and the JSON is never closed. It depends on the prompt: most answers are fine.* The grammar allowed any number of blanks between two tokens of JSON, so a model that would rather write something else could write blanks for ever, and each of them was legal (vLLM's issue 38696; oMLX's issue 2990 counted 60 of 262 calls in a night).
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch53_structured_output.hunt
import re

from minigen_course.ch53_structured_output.hunt import ObjectPattern


def object_pattern(names: list[str]) -> str:
    """Return a regex for a JSON object that has a whole number for each name, in this order.

    A space is allowed after each colon and comma, and the compact text without any blank as well.
    At most 16 blanks (spaces or line ends) in a row may stand anywhere.
    """
    blanks = r"[ \n]*"
    fields = (f'"{re.escape(name)}"{blanks}:{blanks}(0|[1-9][0-9]{{0,5}})' for name in names)
    return rf"\{{{blanks}" + f"{blanks},{blanks}".join(fields) + rf"{blanks}\}}"


def test_blanks(object_pattern: ObjectPattern) -> None:
    """Assert what every correct `object_pattern` does, and the one above does not."""
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(53, test=test_blanks, mended=object_pattern)
