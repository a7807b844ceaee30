# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 53 · Answers of a given form
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/53_structured_output.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/53_structured_output.ipynb)
#
# A program that reads a model's answer wants more than good prose. It wants JSON with certain keys, a
# date, one word out of three. The model was never made to obey: it chooses a token at a time, and any
# token is possible. This chapter makes the engine obey instead. It computes, before every token, which
# tokens can still lead to an answer of the wanted form, and forbids all others with a **mask** over the
# [logits](../docs/glossary.md#logits). The literature calls this
# [constrained decoding](../docs/glossary.md#constrained-decoding) or **guided decoding** (as chapter 16
# did), and APIs call it **structured outputs**. Any description of the wanted form is called a
# **grammar** here: a regex, a list of choices, a JSON schema, or rules as in a textbook on languages.
#
# **Afterwards you can** turn a regex into an automaton with derivatives, turn the automaton into masks
# over a vocabulary of 49,152 tokens, say where an answer may end, turn a JSON schema into a regex and
# explain which schemas that cannot work for, count the steps that need no model, and say exactly what a
# grammar guarantees and what it does not.
#
# **You need** chapter 12 (tokens are bytes), chapter 16 (logits, softmax, minus infinity), and the
# regexes of any programming language. **Time:** about 60 minutes to read and try, about 115 for the
# [exercises](../exercises/53_structured_output.ipynb).
#
# **Where we are:** token ids → model → logits → **mask** → sampler → next token.
#
# <!-- card -->
#
# | problem | phase | what saturates | layer | knob | metric |
# |---|---|---|---|---|---|
# | serving | decode | host CPU | L3 engine | `--json-schema` | share of valid answers |
#
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import json
import re
import time

import numpy as np

from minigen import SamplingParams
from minigen_course import (
    Claim,
    chapter_map,
    check,
    holds,
    hunt,
    load_model,
    mark,
    predict,
    reveal,
    task,
    using,
    verdicts,
    within,
)
from minigen_course.ch53_structured_output import automaton as regexes
from minigen_course.ch53_structured_output import figures as draw
from minigen_course.ch53_structured_output import lesson
from minigen_course.figures.explore import picture, replay
from minigen_course.figures.show import best_seconds
from minigen_course.lab.inspect_model import read_along

fast = load_model(weights="int4")
end_ids = fast.tokenizer.eos_token_ids  # one here, the token <|im_end|>
backend = regexes.AutomatonBackend(fast.tokenizer, fast.config.vocab_size, end_ids)
llm = load_model(weights="int4", grammar_backend=backend)
guessing = load_model(weights="int4", speculative_config={"method": "grammar", "adaptive": False})
chapter_map("sampler")

# %% [markdown]
# Three engines are loaded, all with 4-bit weights and a compiled step (chapters 16 and 34). `fast` does
# the measuring, and its grammars are minigen's own. `llm` compiles its grammars by this chapter's code:
# its `grammar_backend` is an `AutomatonBackend`. `guessing` has its turn in the last measurement.
# A request carries its form in `structured_outputs={...}`, with one of five names: `regex`, `choice` (a
# list of texts), `json` (a JSON schema), `json_object` (any JSON object) or `grammar` (rules, further
# below). Texts stand in ⟨⟩, as measured numbers do, where another processor may write another one.
#
# ## A number that hurts: how many answers can a program read?
#
# A café takes orders by chat. The system prompt asks for JSON and shows an example. The customer
# writes, say, *two large lattes, please*. There are 24 such orders. An answer is useful if it is JSON,
# and if the JSON has the right keys with values of the right kind. The second condition is written down
# as a **JSON schema**, and the `jsonschema` library judges it:

# %%
print(lesson.ASKED)
print(json.dumps(lesson.SCHEMA["properties"]))
guess_valid = predict("Of 24 answers, how many are valid by the schema?", None, within=1.5)

# %%
orders = lesson.orders(24)
asked = [fast.chat_prompt(each.messages) for each in orders]
free_params = SamplingParams(temperature=0, max_tokens=48)  # twice what an ordinary answer needs
free = fast.generate(asked, free_params, progress=False)
free_json = sum(lesson.parsed(each.text) is not None for each in free)
free_valid = sum(lesson.validates(each.text) for each in free)
for order, answer in list(zip(orders, free, strict=True))[:4]:
    print(f"{order.text}\n   ⟨{answer.text!r}⟩")
print(f"\nof {len(free)} answers, ⟨{free_json}⟩ are JSON, and ⟨{free_valid}⟩ are valid")
guess_valid.compare(free_valid, measured=True)

# %% [markdown]
# Some answers have exactly the form. (Whether their content is right, we will see.) Others wrap the JSON in
# an explanation, or in a Markdown fence, or write a program that would make the JSON. Larger models do
# better, but nothing guarantees it: at temperature 0 another prompt may fail, and above it every token has
# some probability. A program that reads a million answers meets the exceptions every day.
#
# ### Retry until it parses
#
# The usual first remedy is a loop: ask again until `json.loads` succeeds. If a try succeeds with
# probability $p$, independently of the tries before it, then the expected number of tries is
#
# $$E = \sum_{k=1}^{\infty} k\,(1-p)^{k-1}\,p = \frac{1}{p}$$
#
# and after $k$ tries a share of $(1-p)^k$ of the answers is still missing. Each try costs a whole
# answer, and the slowest customer waits for the longest run of failures. To retry at all, the draw must
# be random (greedy decoding would repeat itself), here with temperature 0.5. The cell retries eight
# orders, up to four times each.

# %%
tries = lesson.retried(fast, asked[:8], rounds=4, max_tokens=48)
answered = tries.missing[0] - tries.missing[-1]
print(f"after 4 tries, ⟨{answered}⟩ of 8 orders have a valid answer")
print(f"a try succeeded in {mark(100 * tries.share, '%', 2)} of the cases")
print(f"{mark(tries.tokens / max(1, answered))} tokens were computed for each valid answer")
picture(
    draw.retry_curves(tries),
    "The share of orders that still have no valid answer after each try. Grey: what it would be if "
    "each try succeeded with the given probability, independently.",
    number="53.1",
)

# %% [markdown]
# $p$ also need not be the same for every order. The easy ones are answered first, the hard ones remain,
# and for them $p$ may be nearly 0; then the line flattens. Eight orders are too few to see that here, but retrying
# multiplies the cost in either case, and promises nothing.
#
# ## The smallest version that works, and why it is bad
#
# The engine could check the form *while* it generates: before each token, forbid what cannot follow. The
# obvious way thinks in characters. A reader of the form goes through the answer character by character and
# knows which **characters** may come next. So allow exactly the tokens that consist of a single allowed
# character, and give all other tokens a logit of minus infinity. No token of two characters is ever
# considered.
#
# The cell does this in the real engine, with four orders (`CharacterBackend` allows only tokens of one
# byte). Predict: how many tokens does such an answer have, if an ordinary one, such as
# `{"drink": "green tea", "size": "small", "quantity": 2}`, has about 20?

# %%
guess_spelled = predict("Tokens of an answer that is spelled byte by byte?", None, within=1.3)

# %%
pattern = lesson.pattern_of_schema(lesson.SCHEMA)
spelling = load_model(weights="int4", grammar_backend=lesson.CharacterBackend)
spelled_params = SamplingParams(
    temperature=0, max_tokens=100, structured_outputs={"regex": pattern}
)
spelled = spelling.generate(asked[:4], spelled_params, progress=False)
for each in spelled:
    print(f"⟨{each.text}⟩")
num_spelled = sum(len(each.token_ids) for each in spelled) / len(spelled)
guess_spelled.compare(num_spelled, measured=True)
opening = '{"drink": "'
as_words = llm.tokenizer.encode(opening, add_special_tokens=False)
as_bytes = [llm.tokenizer.encode(each, add_special_tokens=False)[0] for each in opening]
for name, first_ids in {"as usual": as_words, "byte by byte": as_bytes}.items():
    digits = [100 * share for share in lesson.digit_share(llm, asked[:4], first_ids)]
    print(
        f"after {opening} in {len(first_ids):>2} tokens ({name}), of the tokens of one byte, ",
        end="",
    )
    print(f"digits have {mark(sum(digits) / len(digits), '% of the probability', 2)}")

# %% [markdown]
# The form is right in every answer. But an answer takes more than twice as many steps, and every step
# reads all weights. And the drinks have become nonsense, because the model has rarely seen text that is
# split this way: in training it read *latte* as one or two tokens, hardly ever as five letters. The digits
# have a reason of their own. In this vocabulary each digit is a token by itself (chapter 12), so a number
# is the one thing that the model has always read as single characters. The last two lines show it: the same
# beginning, split into single bytes, makes a digit several times as likely. **A mask must allow every token
# that fits, also the long ones**, so that the model can write as it learnt to write.
#
# How does one find them? There are 49,152 tokens, and a token fits if *all* of its bytes can be read one
# after another. The rest of the chapter does this in three moves: regex → automaton → walk over the
# vocabulary.
#
# ## The idea, part one: what may follow?
#
# Take the regex `-?(0|[1-9][0-9]*)` for whole numbers. After reading `-`, what may still come? Exactly
# the texts of `0|[1-9][0-9]*`. After reading `4`: the texts of `[0-9]*`. Each answer is again a regex.
# This is Brzozowski's **derivative** ([1964](https://doi.org/10.1145/321239.321249)). The derivative of
# a regex $r$ by a byte $b$, written $\partial_b r$, matches what remains of each match of $r$ after a first
# byte $b$. It follows from the shape of the regex:
#
# $$\partial_b\, \{c, \dots\} = \begin{cases} \varepsilon & b \in \{c, \dots\} \\ \emptyset & \text{else}
# \end{cases} \qquad \partial_b\, \varepsilon = \emptyset$$
#
# $$\partial_b (r \mid s) = \partial_b r \mid \partial_b s \qquad \partial_b (r^*) = \partial_b r \; r^*$$
#
# $$\partial_b (r\,s) = \begin{cases} \partial_b r \; s \;\mid\; \partial_b s & \text{if } r \text{ matches
# the empty text} \\ \partial_b r \; s & \text{else} \end{cases}$$
#
# | symbol | meaning | in the code |
# |---|---|---|
# | $\{c, \dots\}$ | one byte of a set | `Bytes(choices)` |
# | $r\,s$ | first $r$, then $s$ | `Then(parts)`, built by `then` |
# | $r \mid s$ | one of both | `Either(options)`, built by `either` |
# | $r^*$ | any number of times | `Star(inner)`, built by `star` |
# | $\varepsilon$ | matches the empty text only | `EMPTY` |
# | $\emptyset$ | matches nothing at all | `NOTHING` |
# | $r$ matches the empty text ($r$ is **nullable**) | the answer may end here | `may_end(r)` |
#
# In the formula a sequence has two parts. `Then` may have more, as in *abc*: read them as a first part $r$,
# and a second part $s$ that is all the others.
#
# **By hand:** $\partial_x$ of `x*y`. The first part, `x*`, may be empty, so both cases count: from the
# star comes `x*` and then `y`, from `y` comes nothing, since `y` does not begin with *x*. So
# $\partial_x$ `x*y` = `x*y`: reading an *x* leads back to the same regex. And $\partial_y$ `x*y` =
# $\varepsilon$: the text is complete.
#
# The derivatives of a regex repeat: there are only finitely many, if equal ones are recognized (that is
# what the simplifications in `then`, `either` and `star` are for). So each different derivative becomes a
# **state**, each byte an arrow from one state to the next (a **transition**; `moves` in the code), and the
# whole is a **deterministic finite [automaton](../docs/glossary.md#automaton)** (DFA). *Deterministic*
# means that a state has at most one arrow for each byte, so the bytes that were read lead to one state. A
# state whose regex matches the empty text is an end (an **accepting state**). A byte whose derivative is
# $\emptyset$ has no arrow.
#
# For the whole numbers: the regex itself, the one after `-`, $\varepsilon$ after `0`, `[0-9]*` after `4`.
# Do others appear? Predict: how many states does the automaton of `-?(0|[1-9][0-9]*)` have?

# %%
guess_states = predict("States of the automaton of a whole number?", None)

# %%
number_form = regexes.automaton_of(regexes.parse("-?(0|[1-9][0-9]*)"))
guess_states.compare(len(number_form.moves))
for state, moves in enumerate(number_form.moves):
    ends = "may end" if state in number_form.ends else ""
    print(f"state {state}: {len(moves):>2} of 256 bytes allowed  {ends}")
picture(
    draw.state_diagram(number_form, now=0),
    "The automaton of -?(0|[1-9][0-9]*). The first state is amber, ends have two circles. Where a byte "
    "has no arrow, it is forbidden: after 0, nothing may follow.",
    number="53.2",
)

# %% [markdown]
# Everything is over bytes, not characters, because a token may end inside a character: *é* has the two
# bytes c3 a9, and the vocabulary has a token for the first one alone (chapter 12). An automaton over
# bytes simply has a state in between.
#
# ## Your turn: the derivative

# %%
task(53, "derivative")

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
my_derivative = check(53, derivative=derivative)
with using(53, derivative=my_derivative):  # the grammar backend derives with your part
    dated = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"regex": "19[0-9]{2}|20[0-2][0-9]"}
    )
    print(f"⟨{llm.generate('The Second World War ended in the year', dated).text}⟩")

# %% [markdown]
# ## The idea, part two: walk the vocabulary
#
# Trying all tokens one by one reads at least a byte of each, about 49,000, and about 330,000 inside a
# string, where nearly every token fits. But tokens share their beginnings. Put the vocabulary into a
# **[trie](../docs/glossary.md#trie)**: a tree in which each edge is a byte, and a token ends in the node to
# which its bytes lead. Now walk trie and automaton *together*: go down an edge only if the automaton has an
# arrow for its byte. Where it has none, everything below is forbidden at once, thousands of tokens in one
# comparison.
#
# The figure has a toy vocabulary of 18 tokens and the regex `"(small|medium)"`, after the opening quote.
# Before you look: which tokens are allowed? Below the figure, the cell counts for the real vocabulary and
# the café's schema: the bytes that are read one by one, and the nodes that the walk visits, one for each
# beginning of a token that the automaton allows.

# %%
WORDS = ["s", "sm", "small", "smile", "m", "med", "medium", "ed", "l", "large", "a", "all"]
WORDS += ['"', '",', '"s', '"sm', '"S', ' "']
toy = {token_id: each.encode() for token_id, each in enumerate(WORDS)}
size_form = regexes.automaton_of(regexes.parse('"(small|medium)"'))
after_quote = size_form.after(b'"')
picture(
    draw.token_trie(toy, size_form, after_quote),
    "A toy vocabulary as a trie. Squares are tokens. Blue branches can still become small or medium, "
    "and their tokens are allowed. The grey branches are dead at their first grey edge.",
    number="53.3",
)
started = time.perf_counter()
form = regexes.automaton_of(regexes.parse(pattern))
build_seconds = time.perf_counter() - started  # for the costs, at the end
spellings = backend.spellings.values()
beginnings = {each[:length] for each in spellings for length in range(len(each) + 1)}
for seen in (b"", b'{"drink": "'):
    # The nodes of the trie that the automaton can reach from here: those that a walk visits.
    alive = {each for each in beginnings if form.after(each, form.after(seen)) is not None}
    # Without a trie, every token is read up to and including its first forbidden byte.
    num_read = sum(each[:length] in alive for each in spellings for length in range(len(each)))
    print(f"after {seen.decode()!r}: one by one, {num_read:,} bytes are read; ", end="")
    print(f"the walk visits {len(alive):,} of {len(beginnings):,} nodes")

# %% [markdown]
# Six tokens are alive: *s*, *sm* and *small*, *m*, *med* and *medium*. *smile* shares two bytes with
# *small*, then its branch dies. A token that is only a beginning is allowed as well: *sm* leaves the
# automaton in a state from which *all* can follow.
#
# The lines under the figure say what the walk saves in the real vocabulary. At the start of an order it
# visits 3 of 100,298 nodes. Inside the drink it visits 99,503: nearly nothing dies there, and only the
# shared beginnings are saved.
#
# ## Your turn: the walk

# %%
task(53, "allowed_tokens")

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
my_walk = check(53, allowed_tokens=allowed_tokens)
with using(53, allowed_tokens=my_walk):
    chosen = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"choice": [" Vienna", " Rome", " Oslo"]}
    )
    print(f"⟨{llm.generate('The capital of Italy is', chosen).text}⟩")

# %% [markdown]
# A walk's result depends on the state alone. So it is computed once per state and kept, as
# [Willard and Louf](https://arxiv.org/abs/2307.09702) proposed in 2023: the answer moves from state to
# state, and each state has its mask ready.
#
# ## When may the answer end?
#
# The end token is a token like any other in the logits, but it has no bytes: it is never spelled by the
# automaton. Its rule is its own: it is legal **exactly in the ends** of the automaton.
#
# - If it were always legal, the model could stop in the middle: `{"drink": "tea"`. Valid until then, and
#   useless.
# - If it were legal only where nothing else can follow, then a number could never end: after `12` a `3`
#   may always come.
# - In an end that has arrows the model decides between ending and going on. That is a real choice, and
#   it belongs to the model. In an end without arrows only the end token is left.
#
# The same holds for all **special tokens**: the text `<|im_end|>` inside a string is ten ordinary
# characters, and the special token of that name must never stand for them. So special tokens are not in
# the trie.
#
# A matcher follows *one* answer. Engines keep several: `n=3` asks for three answers of one prompt, whose
# matchers must be separate (**fork**), and some engines speculate (speculation guesses several tokens at
# once, and takes wrong guesses back: **roll back**).
#
# ## Your turn: the matcher

# %%
task(53, "StateMatcher")

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
my_matcher = check(53, StateMatcher=StateMatcher)
with using(53, StateMatcher=my_matcher):  # the engine asks it before every token
    three = SamplingParams(
        temperature=0.8, n=3, seed=1, max_tokens=6, structured_outputs={"regex": "[A-Z][a-z]{2,8}"}
    )
    found = llm.generate("Her first name is", three, progress=False)
names = [each.text for each in found.choices]
print(all(len(each) >= 3 and each.isalpha() for each in names), f"⟨{names}⟩")

# %% [markdown]
# ## Watch it
#
# An order is answered under the schema's regex. At every step the figure shows the ten likeliest tokens of
# the model, and the one that is chosen, if it is not among them (grey), the mask as a strip below them, and
# what is left after the mask (blue). Go through the steps. Two kinds are worth finding: those where the
# mask changes nothing, because the model wants what the grammar wants, and those where it overrules the
# model. The picture stands at the first step, where the model would rather begin a sentence.

# %%
order = orders[4]
prompt_ids = list(llm.chat_prompt(order.messages))
schema_params = SamplingParams(temperature=0, max_tokens=64, structured_outputs={"regex": pattern})
answer = llm.generate(prompt_ids, schema_params)
reading = read_along(llm, [*prompt_ids, *answer.token_ids])
step_logits = reading.logits[0][len(prompt_ids) - 1 : -1]
matcher = backend.compile(schema_params.structured_outputs)
masks = []
for token_id in answer.token_ids:
    masks.append(matcher.allowed())
    matcher.accept(token_id)


def spell(token_id):
    return llm.tokenizer.decode([token_id])


def at_step(step):
    written = llm.tokenizer.decode(answer.token_ids[:step])
    return draw.mask_strip(step_logits[step], masks[step], spell, written)


print(order.text)
print(f"⟨{answer.text}⟩")
replay(
    at_step,
    len(answer.token_ids),
    "The likeliest next tokens, before and after the mask; the strip says which are allowed. The rest of "
    "the probability lies on tokens that are not drawn.",
    at=0,
    number="53.4",
)
overruled = sum(not mask[int(row.argmax())] for mask, row in zip(masks, step_logits, strict=True))
print(f"the mask overruled the model's first choice in ⟨{overruled} of {len(masks)}⟩ steps")

# %% [markdown]
# Most steps are not a fight. The mask overrules the model at the start, and then the text itself
# convinces the model that it is writing JSON. This is why constrained answers read naturally.
#
# ## An outside witness
#
# Is our mask right? The library **llguidance** was written by other people in another language (Rust),
# and serves OpenAI's API, vLLM, SGLang and llama.cpp among others, and minigen's own
# `structured_outputs`. For a regex it does what we do, with derivatives and a trie, and it adds a parser
# for nesting (below). So it witnesses against mistakes in our code, not against the method. Both follow
# random answers over the real vocabulary. Wherever there is a choice, the masks must be equal, token for
# token. In states where the next bytes are forced, llguidance may allow fewer tokens, but none that ours
# forbids. The patterns include text beyond ASCII, where tokens split characters.

# %%
from minigen.sampling.grammar import LLGuidanceBackend

witness = LLGuidanceBackend(llm.tokenizer, llm.config.vocab_size, end_ids)
equal = forced_states = 0
for each in (pattern, '"[^"\\\\]{0,8}"', "日本(語)?.*", "(é|è)+", "-?(0|[1-9][0-9]*)", "(a|b)*c"):
    wanted = SamplingParams(structured_outputs={"regex": each}).structured_outputs
    for seed in range(2):
        mine, other = backend.compile(wanted), witness.compile(wanted)
        for own, its in lesson.walk(mine, other, seed, steps=25):
            if lesson.forced_text(mine.masks.automaton, mine.states[-1]):
                assert its.any()
                assert not (its & ~own).any()
                forced_states += 1
            else:
                assert np.array_equal(own, its)
                equal += 1
print(f"{equal} masks of {len(own):,} tokens are equal, end tokens included")
print(f"in {forced_states} states with forced bytes, llguidance allows nothing that ours forbids")
wanted = schema_params.structured_outputs
for name, each in {"this chapter's automaton": backend, "llguidance": witness}.items():
    allowed = [spell(int(i)) for i in np.flatnonzero(each.compile(wanted).allowed())]
    print(f"{name} allows at the start: {allowed}")

# %% [markdown]
# The masks agree wherever there is a choice. They differ in one kind of state: where the next bytes are
# **forced**. The answer must begin with `{"drink": "`. Our mask allows `{` and also `{"`, because both
# can lead there. llguidance allows only the one token that the tokenizer itself would use for this text.
# That is stricter than the form demands, and better for the model, which has mostly seen text that is
# split in this way.
# We come back to forced text below.
#
# ## From a schema to a regex
#
# Clients do not send regexes. They send JSON schemas. For a **flat** object, each property is a name and a
# value of a simple type, so the regex of the object is a sequence: brace, name, colon, value, comma, and so
# on. A counted repetition is what makes automata large: `maxLength` 30 needs the states of one character
# (also of an escape, and of each beginning of a character of several bytes) thirty times over.
#
# Four decisions hide in such a translation, and a server must make all of them. **Blanks** (whitespace:
# spaces, tabs, line ends): JSON allows any number of them between its tokens, and a model that is not
# allowed to write what it would like to write may choose blanks for ever (the bug hunt below). **Order:**
# an object has no order in JSON, but a regex has one; engines take the order of the schema. **Optional
# properties:** each doubles the number of ways to write the object. In a fixed order an automaton needs
# only a few states for each, but the regex must say where a comma stands. OpenAI's strict mode
# (`"strict": true` beside the schema, which promises that every answer is valid by it) demands that all
# properties are required. **Limits:** a model may write digits for ever, just as it may write blanks, so our regex
# stops at nine; and it has no `\u` escapes.
#
# A regex may allow less than the schema, but never more. So what the translation cannot keep, such as
# `minimum` or `pattern`, it must refuse. Ours raises an error that names the keyword. No engine enforces
# every keyword of JSON Schema: minigen refuses the others by name, and some engines ignore them silently.
#
# ## Your turn: a schema as a regex
#
# The cell prints the regex of the café's schema, and what its automaton is like; then the task.

# %%
print(pattern)
inside = [state for state in range(len(form.moves)) if len(form.moves[state]) > 100]
single = [state for state in range(len(form.moves)) if lesson.forced_text(form, state)]
print(
    f"{len(form.moves)} states. {len(inside)} begin a character of the drink, and most bytes are allowed."
)
print(f"In {len(single)} states one byte only is allowed, and no end.")
task(53, "pattern_of_schema")

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
my_pattern = check(53, pattern_of_schema=pattern_of_schema)
city_schema = {"properties": {"city": {"enum": ["Oslo", "Rome"]}, "big": {"type": "boolean"}}}
as_regex = SamplingParams(
    temperature=0, max_tokens=24, structured_outputs={"regex": my_pattern(city_schema)}
)
print(f"⟨{llm.generate('Rome as a JSON object:', as_regex).text}⟩")

# %% [markdown]
# ## Where regexes end
#
# A comment may have replies, which are comments, which may have replies. Such a schema refers to itself
# (`$ref`), and its texts nest to any depth. To close brackets in the right order, one must remember all
# that are open: after `[{[` the answer must close them with `]`, then `}`, then `]`, whatever stands
# between. An automaton remembers nothing but its state. So it needs a state for every sequence of open
# brackets that there can be. Two kinds of brackets and depth $d$ give $2^{d+1} - 1$ sequences (and one
# state more for the complete value). How many is that for depth 6?

# %%
sizes = [
    len(regexes.automaton_of(regexes.parse(lesson.nested_pattern(depth))).moves)
    for depth in range(7)
]
print("states by depth 0 to 6:", *sizes)
picture(
    draw.states_by_depth(sizes),
    "An automaton for values nested up to a depth, against the stack of a parser: the automaton has a "
    "state for each content of the stack.",
    number="53.5",
)

# %% [markdown]
# For a fixed depth a regex exists, at an exponential price. Without a limit there is none: whatever the
# number of states, some deeper text needs one more. A **stack** needs one entry per open bracket, and has
# no limit. An automaton with a stack is a **pushdown automaton**. If it may also follow several
# possibilities at once, it reads exactly the **context-free** languages, those of grammars such as this
# one:
#
# ```
# root ::= "x" | "[" root* "]" | "{" root* "}"
# ```
#
# This is GBNF, llama.cpp's form, whose first rule is called `root`; `grammar` takes Lark's form as well.
#
# Production engines must follow all possibilities that are still open. XGrammar's
# [paper](https://arxiv.org/abs/2411.15100) keeps many stacks; Earley's parser
# ([1970](https://doi.org/10.1145/362007.362035)) keeps, for each position, the set of rules that may be
# under way, which does the work of all these stacks. llguidance uses it over **lexemes** (whole strings,
# numbers and brackets, each recognized by an automaton like ours), and today's XGrammar uses it byte by
# byte.
#
# ## Your turn: a stack

# %%
task(53, "still_due")


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
my_stack = check(53, still_due=still_due)
due = "v"
for character in "[x{[x]}]":
    due = my_stack(due, character)
    print(f"after {character}, still due: {due!r}")
nested = {"grammar": 'root ::= "x" | "[" root* "]" | "{" root* "}"'}
opened = {fast.tokenizer.encode(each)[0]: 1.0 for each in "[{"}  # a bias to open more
deep = SamplingParams(
    temperature=1, seed=54, max_tokens=40, logit_bias=opened, structured_outputs=nested
)
value = fast.generate("[[{[x]x}", deep).text
print(f"⟨{value}⟩ by llguidance's parser: ⟨{lesson.deepest(value)}⟩ brackets are open at once")

# %% [markdown]
# ## Forced text: tokens that need no model
#
# After `{"` nothing but `drink": "` can follow. There is no choice, so why ask the model? Text that is
# **forced** can be appended at once. The model must still *read* it, but reading many tokens is one step,
# as in a prefill (chapter 17), where writing them is one step each. SGLang called this
# [jump-forward decoding](../docs/glossary.md#jump-forward-decoding); it is speculation that is never wrong.
#
# One trap: the boundary. In many vocabularies a token joins a quote with the letters after it, as `"sm` does
# in the toy vocabulary above, and a model has learnt to expect the joined token there. (In this model's
# vocabulary a quote joins only other signs, as in `",`, but the rule must hold for any tokenizer.) So the last token
# of a forced run is left to the model, which may choose a longer one in its place. This is called **token
# healing**, and leaving out one token is a heuristic: a joined token may reach back further.
#
# ## Your turn: forced text

# %%
task(53, "forced_text")

# %%
# exercise: minigen_course.ch53_structured_output.lesson.forced_text
from minigen_course.ch53_structured_output.automaton import Automaton


def forced_text(automaton: Automaton, state: int) -> bytes:
    """Return the bytes that must come next: the longest run in which there is never a choice.

    A state in which the text may end is a choice, between an end and going on.
    """
    raise NotImplementedError  # your turn


# %%
my_forced = check(53, forced_text=forced_text)
print(my_forced(form, 0), my_forced(form, form.after(b'{"drink": "tea"')))
parts = lesson.pieces(answer.token_ids, form, llm.tokenizer, end_ids)
num_forced = sum(each.num_tokens for each in parts if each.forced)
num_tokens = sum(each.num_tokens for each in parts)
print(f"⟨{num_forced} of {num_tokens}⟩ tokens are forced")
picture(
    draw.forced_strip(parts),
    "An answer in its pieces. Amber is forced by the schema, and needs no choice; blue is the model's.",
    number="53.6",
)

# %% [markdown]
# With forced text, the model is asked only for the tokens of the *content*, and for the last token of each
# forced run. The longer the names of a schema, the larger the gain. minigen takes forced tokens as guesses
# and verifies several of them in one step, if `LLM.load` gets `speculative_config={"method": "grammar"}`:
# a form forces text, and the model may have other tokens for the same text.
#
# ## The package's version
#
# Each opens after your own has passed. The engine's own backend is some 500 lines around llguidance
# ([grammar.py](../minigen/sampling/grammar.py),
# [grammar_compiler.py](../minigen/sampling/grammar_compiler.py),
# [grammar_trial.py](../minigen/sampling/grammar_trial.py)), most of them against hostile grammars.
#
# A client of chapter 51's server asks in OpenAI's way: `response_format={"type": "json_schema",
# "json_schema": {"name": "order", "schema": {...}}}`, or by vLLM's names in `structured_outputs`. On the
# command line it is the knob of this chapter's card: `minigen generate --chat "two lattes"
# --json-schema order.json`.

# %%
reveal(
    53,
    derivative=my_derivative,
    allowed_tokens=my_walk,
    StateMatcher=my_matcher,
    pattern_of_schema=my_pattern,
    still_due=my_stack,
    forced_text=my_forced,
)
tried = range(0, len(form.moves), 40)
for state in tried:
    found = set(my_walk(backend.trie, form, state))
    assert found == {
        i for i, each in backend.spellings.items() if each and form.after(each, state) is not None
    }
own_form = regexes.automaton_of(regexes.parse(my_pattern(lesson.SCHEMA)))
assert own_form.matches(answer.text.encode())
print(f"in {len(tried)} of {len(form.moves)} states, the walk agrees with trying every token")

# %% [markdown]
# ## A bug hunt
#
# `object_pattern` below is a schema's regex with blanks (whitespace). **The report:** *Some answers run into
# `max_tokens`. They begin as valid JSON, then come blanks and line ends until the limit, and the JSON is
# never closed. It depends on the prompt: most answers are fine.* Every single token of such an answer was
# legal.
#
# Write a test that fails on this function and on its relatives, and passes on every correct one. Then
# mend the function. It has happened: vLLM's
# [issue 38696](https://github.com/vllm-project/vllm/issues/38696) describes it, and
# [another server](https://github.com/jundot/omlx/issues/2990) counted 60 of 262 calls in one night.

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
from minigen_course.ch53_structured_output.hunt import object_pattern as handed_out

mended = hunt(53, test=test_blanks, mended=object_pattern)
blanks = {llm.tokenizer.encode(each)[0]: 30.0 for each in (" ", "\n")}  # a model that likes blanks
for name, part in {"handed out": handed_out, "mended": mended}.items():
    asked_form = {"regex": part(["width", "height"])}
    endless = SamplingParams(
        temperature=1, seed=2, max_tokens=64, logit_bias=blanks, structured_outputs=asked_form
    )
    box = llm.generate("A box as JSON:", endless)
    num_blank = sum(spell(each).isspace() for each in box.token_ids)
    print(f"{name}: ⟨{num_blank} of {len(box.token_ids)}⟩ tokens are blank, ", end="")
    print(f"finish_reason ⟨{box.finish_reason!r}⟩, ⟨{box.text[:60]!r}⟩")

# %% [markdown]
# ## The measurement again
#
# The same 24 orders, with the schema as a grammar (llguidance, in the compiled engine). Two numbers this
# time. **Valid** asks for the form. **Right** asks whether the drink, the size and the quantity are those
# of the order. Predict the second.

# %%
guess_right = predict(
    "Of 24 answers with a grammar, how many have the right content?", None, within=2
)

# %%
grammar_params = SamplingParams(
    temperature=0, max_tokens=48, structured_outputs={"json": lesson.SCHEMA}
)
formed = fast.generate(asked, grammar_params, progress=False)
ended = [each for each in formed if each.finish_reason == "stop"]
formed_valid = sum(lesson.validates(each.text) for each in ended)
pairs = list(zip(formed, orders, strict=True))
formed_right = sum(lesson.is_right(each.text, order) for each, order in pairs)
free_right = sum(lesson.is_right(a.text, order) for a, order in zip(free, orders, strict=True))
guess_right.compare(formed_right, measured=True)
print("                   valid     right")
print(f"without a grammar  ⟨{free_valid} of {len(free)}⟩  ⟨{free_right} of {len(free)}⟩")
print(f"with a grammar     ⟨{formed_valid} of {len(ended)}⟩  ⟨{formed_right} of {len(formed)}⟩")
print(f"every answer that ended by itself is valid: {formed_valid == len(ended)}")
print(f"valid answers: {mark(formed_valid / max(1, free_valid), 'times as many', 2)}")
print(f"without a grammar, {mark(100 * (1 - free_valid / len(free)), '%', 2)} fail visibly")
for field in lesson.SCHEMA["required"]:
    same = sum(lesson.right_fields(each.text, order)[field] for each, order in pairs)
    values = [(lesson.parsed(each.text) or {}).get(field) for each in formed]
    common = max(values, key=values.count)
    print(f"{field} as ordered: ⟨{same} of {len(formed)}⟩; the commonest is ⟨{common}⟩")
for each, order in pairs[:4]:
    print(f"{order.text}\n   ⟨{each.text}⟩")
short = SamplingParams(temperature=0, max_tokens=10, structured_outputs={"json": lesson.SCHEMA})
cut = fast.generate(asked[0], short)
cut_valid = lesson.validates(cut.text)
print(f"finish_reason {cut.finish_reason!r}, valid: {cut_valid}, ⟨{cut.text}⟩")

# %% [markdown]
# All answers that ended by themselves are valid, and hardly any is right. **The form is guaranteed, the
# content is not.** The lines for each field say what this 135M model can do: it copies most of the sizes and
# few drinks, and its commonest quantity is the 1 of the example, which no order asks for. A grammar
# does not teach it. Worse: without a grammar, most failures are easy to see (the share is printed above).
# Now they are perfect JSON.
#
# A mask also shifts the probabilities. It asks only whether a token *can* lead to a valid answer, not how
# likely the rest then is, and it divides by the allowed probability step by step (a **local
# renormalization**). So a draw under a mask is not a draw from the model's valid answers in the model's own
# proportions; [Grammar-Aligned Decoding](https://arxiv.org/abs/2405.21047) shows the difference and a
# remedy. Does the form even harm the content?
# ["Let Me Speak Freely?"](https://arxiv.org/abs/2408.02442) found that reasoning became worse under it;
# a [reply](https://blog.dottxt.ai/say-what-you-mean.html) found no such loss with better prompts. Here the
# number of right answers hardly moves, because there are hardly any. The usual remedy is the order of the
# fields: a field for the reasoning comes before the field for the result, because a token can only depend on
# earlier ones.
#
# The condition *ended by itself* matters as well: the last line is an answer that ran into `max_tokens`.
# So check `finish_reason`, and set no `stop` strings: they cut JSON as well, and report `stop`. In bytes,
# every token keeps a way to an end open. In tokens this holds only if the vocabulary has the bytes on that
# way: this one lacks 21 (chapter 12), so a regex that needs one of them, such as `\x04`, allows no token, and
# the request ends with an error.
#
# ### Tool calling is a near relative
#
# A **tool call** is an answer of a certain form: the name of a function, and its arguments as JSON that is
# valid by that function's schema. The server describes the tools in the prompt, and turns the answer into
# the `tool_calls` of the API. With `tool_choice: "required"` or a named function, servers force the form
# with a grammar: a choice of names, and after each name the schema of its own arguments. That is one regex
# here. With `"auto"` it is another trick: the model may answer in prose, a parser looks for calls in what
# it wrote, and nothing is forced, unless the tool is `strict`: then a call that the model begins is held to
# its schema. minigen's own [tool_calling](../minigen/tool_calling) does all of this for a client that sends
# `tools`. Each family of models writes calls in a format of its own, and its marks are often special tokens,
# which a grammar must allow as tokens, not as text. Six requests, three tools, and the right one is obvious
# to a person:

# %%
choose = "Choose a tool. Tools: get_weather(city), set_timer(minutes), send_message(text)."
called = fast.generate(
    [
        fast.chat_prompt([{"role": "system", "content": choose}, {"role": "user", "content": each}])
        for each in lesson.REQUESTS
    ],
    SamplingParams(
        temperature=0, max_tokens=64, structured_outputs={"regex": lesson.tool_pattern()}
    ),
    progress=False,
)
calls = [lesson.parsed(each.text) for each in called if each.finish_reason == "stop"]
right_tools = 0
for (request, tool), each in zip(lesson.REQUESTS.items(), called, strict=True):
    found = lesson.parsed(each.text) or {}
    right_tools += found.get("tool") == tool
    print(f"{request:<42}⟨{each.text}⟩")
well_formed = all(each is not None for each in calls)
print(f"of the calls that ended, all are JSON: {well_formed}")
print(f"the right tool: ⟨{right_tools} of {len(called)}⟩")
first_tool = sum(f'"{next(iter(lesson.TOOLS))}"' in each.text for each in called)
print(f"the tool that is listed first: ⟨{first_tool} of {len(called)}⟩")

# %% [markdown]
# Every call is well formed, and the model mostly takes the tool that is listed first, whatever was asked. It
# does not understand the choice, and the grammar makes it choose. The arguments show the same: a request
# that does not fit is copied into the only field that there is, and an argument may break off in the middle
# of a word, because the schema says `maxLength: 20`. A mask can cut a text, but it cannot make the model plan
# a shorter one.
#
# ### What it costs
#
# First three masks, side by side: one by this chapter's walk in Python, in the worst state (inside a string,
# where nearly the whole vocabulary is allowed); the same mask once it is kept; a mask by llguidance along
# a whole answer, without keeping any. And a step of the model, which the mask must not delay. Then whole
# answers of 16 tokens, with and without a grammar, for one sequence and for 8 at once; and the time to
# compile the form, once, before the first token. Predict: how many per cent of a compiled step does
# llguidance's mask take?

# %%
guess_mask = predict("Per cent of a compiled step for a mask by llguidance?", None, within=3)

# %%
worst = inside[0]
walk_seconds = best_seconds(lambda: regexes.allowed_tokens(backend.trie, form, worst), repeats=2)
kept = backend.masks(pattern)
kept_seconds = best_seconds(lambda: kept[worst].copy())
started = time.perf_counter()
matcher = witness.compile(grammar_params.structured_outputs)  # a form that is new to it
compile_seconds = time.perf_counter() - started
mask_seconds = [lesson.seconds_per_mask(matcher, [each]) for each in formed[0].token_ids]
step_seconds = read_along(fast, formed[0].token_ids).step_seconds
share = 100 * sum(mask_seconds) / len(mask_seconds) / step_seconds
guess_mask.compare(share, "%", measured=True)
print(f"a mask by llguidance takes {mark(share, '% of a compiled step', 2)}")
middle, most = 1e6 * float(np.median(mask_seconds)), 1e6 * max(mask_seconds)
print(
    f"half of these masks take less than {mark(middle, 'µs', 2)}, and the longest {mark(most, 'µs', 2)}"
)
print(f"the walk in Python takes {mark(walk_seconds / step_seconds, 'steps', 2)}")
print(f"the same mask, kept, takes {mark(100 * kept_seconds / step_seconds, '% of a step', 2)}")
plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
formed_16 = SamplingParams(temperature=0, max_tokens=16, structured_outputs={"json": lesson.SCHEMA})
slower = {n: lesson.times_as_long(fast, asked[:n], plain, formed_16, repeats=3) for n in (1, 8)}
for num_sequences, times in slower.items():
    print(f"whole answers, {num_sequences} at once: {mark(times, 'times as long with a grammar')}")
print(f"compiling the form: {mark(1000 * compile_seconds, 'ms', 2)} by llguidance, ", end="")
print(f"{mark(1000 * build_seconds, 'ms', 2)} for this chapter's automaton, without masks")
steps = [lesson.num_steps(each, asked[0], grammar_params) for each in (fast, guessing)]
guessed = lesson.ratio_by_turns(
    lambda: fast.generate(asked[0], grammar_params),
    lambda: guessing.generate(asked[0], grammar_params),
    repeats=3,
)
print(f"steps of an answer: ⟨{steps[0]}⟩ one by one, ⟨{steps[1]}⟩ with forced tokens as guesses,")
print(f"which takes {mark(guessed, 'times as long', 2)}")

# %% [markdown]
# The walk in Python would dominate the step if it ran for every token. Kept per state it costs next to
# nothing, but a large schema has thousands of states, and a server sees a new schema with every client:
# computing all masks in advance is what made early engines wait for seconds before the first token.
# llguidance computes a mask in some tens of microseconds, and on a quiet machine in some hundreds at worst
# (the longest is above). And minigen computes it in a second thread *while* the model computes the logits,
# so that the step waits only if the mask takes longer than the model. Whole answers show what is left:
# starting the matcher, handing each mask to the sampler, and applying it to the logits of each sequence.
# llguidance builds no automaton in advance, so its compilation is short, though minigen tries out each new
# form in a process of its own first. (That process starts with an engine's first form, in about a quarter of
# a second, which is not counted here.)
#
# ## Claims
#
# What one often hears or reads about structured outputs, beside what this notebook computed.

# %% jupyter={"source_hidden": true}
verdicts(
    "53",
    Claim(
        "Constrained decoding guarantees valid JSON",
        f"⟨{formed_valid} of {len(ended)}⟩ answers that ended by themselves are valid; one that ran into "
        f"max_tokens is {'valid' if cut_valid else 'not'}",
        within(100 * formed_valid / len(ended), 100, 100),
        "its source names the exceptions, too: an answer that reaches `max_tokens`, and a refusal. Check "
        "`finish_reason`, and set no stop strings",
        "[OpenAI](https://openai.com/index/introducing-structured-outputs-in-the-api/)",
    ),
    Claim(
        "It makes a small model reliable",
        f"⟨{formed_valid} of {len(ended)}⟩ valid, and ⟨{formed_right} of {len(formed)}⟩ right; "
        f"⟨{right_tools} of {len(called)}⟩ tools right",
        holds(formed_right >= 0.9 * len(formed)),
        "of form, not of content: a wrong value in perfect JSON is harder to notice",
        measured=True,
    ),
    Claim(
        "Retrying until the JSON parses is good enough",
        f"{mark(100 * tries.share, '%', 2)} of the tries succeeded; "
        f"{mark(tries.tokens / max(1, answered))} tokens were paid per valid answer",
        holds(tries.missing[-1] == 0),
        "the cost is one over the share of good answers, and no number of tries promises one",
        measured=True,
    ),
    Claim(
        "Masking is free",
        f"whole answers take {mark(slower[1])} times as long for one sequence, {mark(slower[8])} for 8; a "
        f"mask alone is {mark(share, '%', 2)} of a step",
        holds(max(slower.values()) < 1.05),
        "judged by whole answers, at 5 %: the mask is computed beside the model, and still has to be handed "
        "over and applied",
        measured=True,
    ),
    Claim(
        "Any JSON schema can be turned into a regex",
        f"the flat one has {len(form.moves)} states; nested values need {sizes[3]}, {sizes[4]}, {sizes[5]} for "
        "depth 3, 4, 5, and no number is enough for all depths",
        holds(sizes[5] == sizes[4]),
        "a flat schema, yes; one that refers to itself needs a stack",
    ),
    Claim(
        "A grammar costs more time than it can save",
        f"{mark(slower[1], 'times', 2)} as long by the masks, and {mark(guessed, 'times', 2)} if forced "
        f"tokens are guessed: ⟨{steps[1]}⟩ steps for ⟨{steps[0]}⟩",
        holds(slower[1] * guessed >= 1),
        "blanks are free in this form, so only names are forced; and a step over several tokens takes longer",
        measured=True,
    ),
)

# %% [markdown]
# ## Summary
#
# - A model chooses any token, so a form that is asked for in the prompt is a wish. Retries cost $1/p$ and
#   promise nothing.
# - A mask sets the logits of all tokens that cannot lead to the wanted form to minus infinity, before
#   penalties, filters and the draw.
# - The derivative of a regex by a byte is the regex of what remains after it. Its finitely many derivatives are the
#   states of an automaton, over bytes, because tokens split characters.
# - Automaton and token trie are walked together, and a dead edge ends a whole branch. Tokens of many
#   bytes must stay allowed, or the model spells like a child.
# - The end token is legal exactly where the answer may end. Special tokens are never spelled.
# - A flat schema is a regex. Recursion needs a stack, because an automaton would need a state for each
#   content of the stack.
# - Where one continuation is left, no model is needed. Mind the last token of a forced run.
# - What a translation cannot keep of a schema, it must refuse by name.
# - The guarantee is of form, not of content, and only for answers that end by themselves, without stop
#   strings.
#
# **Check yourself** (click to see the answer).
#
# <details><summary>1. A matcher allows the end token in every state. All answers of a test with
# temperature 0 are valid. Is the matcher right?</summary>
# No. The model simply preferred to finish. At a higher temperature, or with another prompt, it will end
# in the middle of an object sooner or later.</details>
#
# <details><summary>2. A server compiles the client's regex `(a|b)*a(a|b){20}`. What happens?</summary>
# Its deterministic automaton needs a state for each content of the last 21 characters: two million
# states. That is why grammars from clients are compiled with limits, away from the event loop, and why
# states are better made when they are first reached.</details>
#
# <details><summary>3. A request for three answers (n = 3) with a grammar returns one good answer and two
# that break off with an error. What would you look for?</summary>
# A matcher that the three answers share. When one answer accepts its token, the state of the others moves
# along, and their own tokens are forbidden then. Each answer needs a fork.</details>
#
# ## What the production engines do beyond this
#
# - **[vLLM](https://docs.vllm.ai/en/latest/features/structured_outputs.html)** takes `structured_outputs`
#   (the names that minigen uses) and OpenAI's `response_format`, with XGrammar, llguidance or Outlines as
#   backends. It fills a **bitmask** (one bit per token of the vocabulary) per sequence on the CPU, and
#   applies it on the GPU.
# - **[SGLang](https://github.com/sgl-project/sglang)** introduced
#   [jump-forward decoding](https://lmsys.org/blog/2024-02-05-compressed-fsm/) in 2024 and
#   [removed it](https://github.com/sgl-project/sglang/pull/4032) in 2025, to keep the code simple. It overlaps
#   the masks with the step of the model, with XGrammar by default.
# - **[XGrammar](https://arxiv.org/abs/2411.15100)** splits the vocabulary: tokens whose validity depends
#   only on the top of the stack are computed before the first token, the few others at every step. It
#   serves TensorRT-LLM and MLC-LLM as well.
# - **[llguidance](https://github.com/guidance-ai/llguidance)** computes no masks of a grammar's
#   states in advance, only those of a few common sets of tokens (**slices**, such as all that may stand
#   inside a JSON string), once per tokenizer: an Earley parser over lexemes, derivatives like ours for the
#   lexemes, a trie like ours, in Rust.
# - **[llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)** has a grammar
#   format of its own, GBNF, and a converter from JSON schemas. It first draws a token and asks the
#   grammar about this one, and masks the whole vocabulary only if it was forbidden.
# - **[Outlines](https://github.com/dottxt-ai/outlines)** made the token-level automaton popular: regex and
#   schema to an index from state to allowed tokens.
# - **[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/)** calls it guided decoding, and combines it
#   with speculation, where the mask of each drafted token is needed, and rejected ones are rolled back.
#
# ## Further reading
#
# - [Derivatives of Regular Expressions](https://doi.org/10.1145/321239.321249), Brzozowski 1964:
#   fourteen pages; llguidance still computes with them.
# - [An Efficient Context-Free Parsing Algorithm](https://doi.org/10.1145/362007.362035), Earley 1970.
# - [Efficient Guided Generation for Large Language Models](https://arxiv.org/abs/2307.09702), Willard and
#   Louf 2023: automata over the vocabulary.
# - [XGrammar](https://arxiv.org/abs/2411.15100), Dong et al. 2024: tokens that do not depend on the stack.
# - [Grammar-Aligned Decoding](https://arxiv.org/abs/2405.21047), Park et al. 2024: what a mask does to the
#   model's own proportions.
# - [Let Me Speak Freely?](https://arxiv.org/abs/2408.02442), Tam et al. 2024, on form against reasoning.
# - [Regular-expression derivatives re-examined](https://doi.org/10.1017/S0956796808007090), Owens, Reppy
#   and Turon 2009: how to make the automaton small.
