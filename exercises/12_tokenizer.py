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
# # Exercises of chapter 12
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/12_tokenizer.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/12_tokenizer.ipynb)
#
# The chapter: [Text to tokens and back](../notebooks/12_tokenizer.ipynb). Its exercises take about 150 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `most_common_pair` | warm-up | 5 | 10 min |
# | `merge_pair` | warm-up | 5 | 10 min |
# | `train` | core | 10 | 10 min |
# | `split` | core | 10 | 10 min |
# | `encode_word` | core | 10 | 15 min |
# | `encode_long` | stretch | 15 | 25 min |
# | `encode_chat` | stretch | 15 | 20 min |
# | `StreamDecoder` | core | 10 | 20 min |
# | `StopWatcher` | stretch | 15 | 30 min |
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
# ## most_common_pair
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Find the pair of neighbours that occurs most often. `words` is a list of pairs: the parts of a word, and the number of times that the word occurs in the text. Every two neighbours count, as often as their word occurs; in `aaa` the pair (`a`, `a`) counts twice. Pairs never reach from one word into the next. Of pairs that occur equally often, return the greatest, as Python orders tuples of bytes. Return None if there is no pair.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.most_common_pair
from collections.abc import Sequence

from minigen_course.ch12_tokenizer.reference import Pair


def most_common_pair(words: Sequence[tuple[Sequence[bytes], int]]) -> Pair | None:
    """Return the pair of neighbours that occurs most often in a text; None if there is no pair.

    Each word is given as its parts and the number of times that it occurs in the text. Of pairs
    that occur equally often, the one that is greatest in the order of bytes is returned.

    >>> most_common_pair([([b"h", b"e"], 5), ([b"t", b"h", b"e"], 4)])
    (b'h', b'e')
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, most_common_pair=most_common_pair)

# %% [markdown]
# Try it:

# %%
from collections import Counter
from minigen_course.ch12_tokenizer.reference import split
from minigen_course.lab.texts import ALICE

counts = Counter(word.encode() for word in split(ALICE))
print(mine([([bytes([byte]) for byte in word], times) for word, times in counts.items()]))

# %% [markdown]
# **Harder.** Which single pass over the words would tell you the ten most common pairs, and why can a trainer not simply merge all ten at once?

# %% [markdown]
# ## merge_pair
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Join every occurrence of a pair, from left to right, and return the new list of parts. Parts that are not the pair stay as they are, and the list that was passed in is not changed. In `a a a`, the pair (`a`, `a`) is joined once, on the left.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.merge_pair
from collections.abc import Sequence

from minigen_course.ch12_tokenizer.reference import Pair


def merge_pair(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Return the parts with every occurrence of a pair joined, from left to right.

    >>> merge_pair([b"t", b"h", b"e", b"n"], (b"h", b"e"))
    [b't', b'he', b'n']
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, merge_pair=merge_pair)

# %% [markdown]
# Try it:

# %%
parts = [bytes([byte]) for byte in b"then the hen"]
print(mine(mine(parts, (b"h", b"e")), (b"t", b"he")))

# %% [markdown]
# **Harder.** Do it on a NumPy array of ids without a loop in Python. Which runs of equal ids need care?

# %% [markdown]
# ## train
#
# *Core, 10 points, about 10 minutes.*
#
# Learn merges. `counts` says how often each word (bytes) occurs. Cut every word into single bytes. Then repeat `num_merges` times: find the most common pair of neighbours (as `most_common_pair` does, with its rule for equal counts), record it, and join it in all words. Return the recorded pairs in order. Stop early if no pair is left. `counts` is not changed. You can use your own two functions, or those of `minigen_course.ch12_tokenizer.reference`.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.train
from collections.abc import Mapping

from minigen_course.ch12_tokenizer.reference import Pair


def train(counts: Mapping[bytes, int], num_merges: int) -> list[Pair]:
    """Learn merges from the words of a text, and return them in the order of learning.

    `counts` says how many times each word occurs. Each merge joins the most common pair of
    neighbours (see `most_common_pair`) in all words. Fewer merges are returned if no pair is left.

    >>> train({b"the": 4, b"then": 2, b"ten": 3, b"hen": 2}, 2)
    [(b'h', b'e'), (b't', b'he')]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, train=train)

# %% [markdown]
# Try it:

# %%
from collections import Counter
from minigen_course.ch12_tokenizer.reference import split
from minigen_course.lab.texts import ALICE

merges = mine(Counter(word.encode() for word in split(ALICE)), 100)
print(*(b"".join(pair) for pair in merges))


# %% [markdown]
# **Harder.** Count only once. Keep the counts, and an index from each pair to the words that contain it; after a merge, visit only these words and correct the counts. The same check tells you whether it still learns the same merges. How many words do you visit in 300 merges of the page of Alice, instead of 300 times all of them?

# %% [markdown]
# ## split
#
# *Core, 10 points, about 10 minutes.*
#
# Cut a text into words, as the pre-tokenizer of this model does; joined, the words are the text. Every number character (Unicode class `\p{N}`: also ½ and ₂) is a word of its own. The texts between numbers are cut on their own, at each place by the first of these rules that fits:
#
# 1. `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`, in lower case;
#
# 2. a run of letters (`\p{L}`), with one space before it if there is one;
#
# 3. a run of characters that are neither letters nor numbers nor white space, with one space before it if there is one;
#
# 4. a run of white space: all of it at the end of such a text, else all but its last character, or that one character alone. So `a␣␣␣b` becomes `a`, `␣␣`, `␣b`, and `a␣␣3` becomes `a`, `␣␣`, `3`.
#
# `pieces_of(pattern, text)` of `minigen_course.ch12_tokenizer.reference` cuts a text at every match of a regular expression that may contain `\p{L}` and `\p{N}`; you may use it, or any other way.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.split
def split(text: str) -> list[str]:
    """Cut a text into words, as the model's pre-tokenizer does; joined they are the text.

    >>> split("It's the 42nd time.")
    ['It', "'s", ' the', ' ', '4', '2', 'nd', ' time', '.']
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, split=split)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen_course import load_model
from minigen_course.ch12_tokenizer.lesson import merging_encoder, tokenizing_by

llm = load_model()
encode_text = merging_encoder(read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata)
with using(12, split=mine), tokenizing_by(llm, encode_text):
    print(llm.generate("It's 1969, and", SamplingParams(temperature=0, max_tokens=16)).text)

# %% [markdown]
# **Harder.** Llama 3 cuts numbers into groups of up to three characters, ignores the case of contractions, and lets any one character that is no letter, number or line end (not only a space) begin a run of letters. Write that pattern. What does it change for code, and for long numbers?

# %% [markdown]
# ## encode_word
#
# *Core, 10 points, about 15 minutes.*
#
# Encode one word. Begin with its single bytes. Among all pairs of neighbours, find the one with the lowest rank (`ranks` says how many merges were learned before this one), and join it wherever it occurs, from left to right. Repeat until no pair is in `ranks`, and return the parts. What counts is the pair: two parts are not joined merely because their joined bytes are a token.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.encode_word
from collections.abc import Mapping

from minigen_course.ch12_tokenizer.reference import Pair


def encode_word(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return the parts of a word after all merges that fit, the earliest-learned first.

    `ranks` says for each merge how many were learned before it.

    >>> encode_word(b"then", {(b"h", b"e"): 0, (b"t", b"he"): 1, (b"e", b"n"): 2})
    [b'the', b'n']
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, encode_word=encode_word)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen_course import load_model
from minigen_course.ch12_tokenizer.lesson import merging_encoder, tokenizing_by

llm = load_model()
encode_text = merging_encoder(read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata)
with using(12, encode_word=mine), tokenizing_by(llm, encode_text):
    print(llm.generate("Why is the sky blue?", SamplingParams(temperature=0, max_tokens=16)).text)

# %% [markdown]
# **Harder.** A word of n bytes takes up to n rounds over n pairs. The exercise `encode_long` asks for the same result with three look-ups per byte, and its check counts them.

# %% [markdown]
# ## encode_long
#
# *Stretch, 15 points, about 25 minutes.*
#
# Return what `encode_word` returns, and look pairs up in `ranks` at most three times per byte of the word. A client may send a server one word of a million characters; rounds over all pairs could then take an hour.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.encode_long
from collections.abc import Mapping

from minigen_course.ch12_tokenizer.reference import Pair


def encode_long(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return what `encode_word` returns, with at most 3 look-ups in `ranks` per byte of the word.

    Pairs wait in a heap, lowest rank and then leftmost first. A pair whose parts have changed
    meanwhile is skipped when its turn comes.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, encode_long=encode_long)

# %% [markdown]
# Try it:

# %%
from collections import Counter
from minigen_course.ch12_tokenizer.reference import split, train
from minigen_course.lab.texts import ALICE

merges = train(Counter(word.encode() for word in split(ALICE)), 300)
ranks = {pair: rank for rank, pair in enumerate(merges)}
print(len(mine(ALICE.encode() * 50, ranks)), "tokens, as one word of", 50 * len(ALICE), "bytes")

# %% [markdown]
# **Harder.** The heap costs a logarithm. GitHub's `bpe` crate needs only linear time: it keeps, for each prefix of the text, the last token of that prefix's encoding. Why is one token per prefix enough?

# %% [markdown]
# ## encode_chat
#
# *Stretch, 15 points, about 20 minutes.*
#
# Encode a conversation so that no message can spell a special token. `messages` are dictionaries of strings; `render(messages)` is the chat template, which returns one text; `special_ids` maps the texts of the special tokens to their ids; `encode_text(text)` encodes plain text and knows no special token. Return the ids of the rendered text: the special tokens that the template wrote become their ids, and everything from a message stays text, unchanged. Text between two special tokens is encoded as one piece, so an ordinary chat gets the ids that it always had. Of several special tokens that begin at the same place, the longest counts. The messages are not changed.

# %%
# exercise: minigen_course.ch12_tokenizer.reference.encode_chat
from collections.abc import Callable, Mapping, Sequence

from minigen_course.ch12_tokenizer.reference import Message


def encode_chat(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    special_ids: Mapping[str, int],
    encode_text: Callable[[str], list[int]],
) -> list[int]:
    """Return the ids of a conversation in which only the template's own special tokens are special.

    `render` is the chat template, `special_ids` maps the special tokens' texts to their ids, and
    `encode_text` knows no special token. Text of the messages stays text, whatever it spells.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(12, encode_chat=encode_chat)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen_course import load_model
from minigen_course.ch12_tokenizer.lesson import merging_encoder, special_ids

llm = load_model()
metadata = read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata
messages = [{"role": "user", "content": "What is <|im_end|>?"}]
ids = mine(messages, llm.chat_template.render, special_ids(metadata), merging_encoder(metadata))
print(llm.generate(ids, SamplingParams(temperature=0, max_tokens=32)).text)

# %% [markdown]
# **Harder.** Some templates look into a message: they cut off everything before `</think>`, for example. Which of your replacements breaks them, and how could you keep such templates working without letting a message spell a special token?

# %% [markdown]
# ## StreamDecoder
#
# *Core, 10 points, about 20 minutes.*
#
# Write a decoder for token ids that come one at a time. `token_bytes(token_id)` returns the bytes of an id. `push(token_id)` returns the text that this id completes, and "" while a character is incomplete. `finish()` returns an incomplete rest as U+FFFD. Bytes that are not valid UTF-8 become U+FFFD at once. Ids in `skipped` give no text. With `drop_space`, the text loses one leading space (SentencePiece puts one before every text).

# %%
# exercise: minigen.tokenizer.tokenizer.StreamDecoder
from collections.abc import Callable, Collection


class StreamDecoder:
    """Decodes ids one by one, and never returns an incomplete character."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Collection[int], drop_space: bool
    ) -> None:
        raise NotImplementedError  # your turn

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        raise NotImplementedError  # your turn

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that stayed incomplete, or an empty string."""
        raise NotImplementedError  # your turn


# %%
mine = check(12, StreamDecoder=StreamDecoder)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model()
with using(12, StreamDecoder=mine):
    for piece in llm.stream("1. 🍎 2. 🍌 3.", SamplingParams(temperature=0, max_tokens=24)):
        print(piece, end="|")

# %% [markdown]
# **Harder.** One visible character may consist of several code points (a flag, a letter with an accent). Hold these back, too. Which text can then no longer be shown at once?

# %% [markdown]
# ## StopWatcher
#
# *Stretch, 15 points, about 30 minutes.*
#
# Write a watcher that ends an answer at a stop string. `push(text)` returns the text that can be shown now: it holds back text that could still become a stop string, and shows only the text before a complete stop string. `stopped` says whether a stop string was found. `finish()` returns the text that is still held. With `include`, the stop string is shown as well, so nothing needs to be held.

# %%
# exercise: minigen.tokenizer.stop_strings.StopWatcher
from collections.abc import Sequence


class StopWatcher:
    """Passes streamed text on, up to the first of several stop strings.

    The first stop string is the one that is complete first, because generation ends there. Of
    several that end at the same place it is the longest. So the result does not depend on how the
    text is split into pieces. With `include` the stop string itself is passed on too, and no text
    has to be held back.

    >>> watcher = StopWatcher(["\\n\\n"])
    >>> [watcher.push(piece) for piece in ("one\\n", "two\\n", "\\nthree")]
    ['one', '\\ntwo', '']
    >>> watcher.stopped
    True
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        raise NotImplementedError  # your turn

    def push(self, text: str) -> str:
        """Add `text`, and return the text that can be emitted now; always empty once stopped."""
        raise NotImplementedError  # your turn

    def finish(self) -> str:
        """Return the text that was held back; the stream has ended."""
        raise NotImplementedError  # your turn


# %%
mine = check(12, StopWatcher=StopWatcher)

# %% [markdown]
# In the running engine:

# %%
from minigen import SamplingParams
from minigen_course import load_model

llm = load_model()
with using(12, StopWatcher=mine):
    params = SamplingParams(temperature=0, stop=["10"], max_tokens=40)
    print(llm.generate("1, 2, 3, 4, 5, 6,", params).text)

# %% [markdown]
# **Harder.** With a thousand stop strings, how do you avoid searching for each of them in every piece? Aho and Corasick (1975) have an answer.
