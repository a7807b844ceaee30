"""Byte-pair encoding in plain Python: how it is trained, how it is applied, and how a chat uses it.

A part of a text is written as its bytes, not as an id, so that every result can be read. Nothing
here is fast, except `encode_long`. It stays as the oracle of the `tokenizers` library.

Sources: Sennrich, Haddow and Birch 2016 (training and applying), Radford et al. 2019 (on bytes,
within words cut by a pattern).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

Pair = tuple[bytes, bytes]
Message = Mapping[str, str]

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRIVATE_USE = range(0xF0000, 0xFFFFE)  # code points to which Unicode gives no meaning


def most_common_pair(words: Sequence[tuple[Sequence[bytes], int]]) -> Pair | None:
    """Return the pair of neighbours that occurs most often in a text; None if there is no pair.

    Each word is given as its parts and the number of times that it occurs in the text. Of pairs
    that occur equally often, the one that is greatest in the order of bytes is returned.

    >>> most_common_pair([([b"h", b"e"], 5), ([b"t", b"h", b"e"], 4)])
    (b'h', b'e')
    """
    counts: Counter[Pair] = Counter()
    for parts, times in words:
        for pair in pairwise(parts):
            counts[pair] += times
    return max(counts, key=lambda pair: (counts[pair], pair), default=None)


def merge_pair(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Return the parts with every occurrence of a pair joined, from left to right.

    >>> merge_pair([b"t", b"h", b"e", b"n"], (b"h", b"e"))
    [b't', b'he', b'n']
    """
    merged: list[bytes] = []
    place = 0
    while place < len(parts):
        size = 2 if tuple(parts[place : place + 2]) == pair else 1
        merged.append(b"".join(parts[place : place + size]))
        place += size
    return merged


def train(counts: Mapping[bytes, int], num_merges: int) -> list[Pair]:
    """Learn merges from the words of a text, and return them in the order of learning.

    `counts` says how many times each word occurs. Each merge joins the most common pair of
    neighbours (see `most_common_pair`) in all words. Fewer merges are returned if no pair is left.

    >>> train({b"the": 4, b"then": 2, b"ten": 3, b"hen": 2}, 2)
    [(b'h', b'e'), (b't', b'he')]
    """
    words = [([bytes([byte]) for byte in word], times) for word, times in counts.items()]
    merges: list[Pair] = []
    while len(merges) < num_merges:
        best = most_common_pair(words)
        if best is None:
            break
        merges.append(best)
        words = [(merge_pair(parts, best), times) for parts, times in words]
    return merges


def encode_word(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return the parts of a word after all merges that fit, the earliest-learned first.

    `ranks` says for each merge how many were learned before it.

    >>> encode_word(b"then", {(b"h", b"e"): 0, (b"t", b"he"): 1, (b"e", b"n"): 2})
    [b'the', b'n']
    """
    parts = [bytes([byte]) for byte in word]
    while True:
        known = [pair for pair in pairwise(parts) if pair in ranks]
        if not known:
            return parts
        parts = merge_pair(parts, min(known, key=lambda pair: ranks[pair]))


def encode_long(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return what `encode_word` returns, with at most 3 look-ups in `ranks` per byte of the word.

    Pairs wait in a heap, lowest rank and then leftmost first. A pair whose parts have changed
    meanwhile is skipped when its turn comes.
    """
    parts = [bytes([byte]) for byte in word]
    before = [place - 1 for place in range(len(parts))]
    after = [place + 1 for place in range(len(parts))]

    def offer(left: int, right: int) -> list[tuple[int, int, Pair]]:
        rank = ranks.get((parts[left], parts[right]))
        return [] if rank is None else [(rank, left, (parts[left], parts[right]))]

    waiting = [entry for right in range(1, len(parts)) for entry in offer(right - 1, right)]
    heapify(waiting)
    while waiting:
        _, left, pair = heappop(waiting)
        right = after[left]
        if right == len(parts) or (parts[left], parts[right]) != pair:
            continue
        parts[left], parts[right] = b"".join(pair), b""
        after[left] = after[right]
        if before[left] >= 0:
            for entry in offer(before[left], left):
                heappush(waiting, entry)
        if after[left] < len(parts):
            before[after[left]] = left
            for entry in offer(left, after[left]):
                heappush(waiting, entry)
    return [part for part in parts if part]


def pieces_of(pattern: str, text: str) -> list[str]:
    r"""Cut a text at every match of a pattern; matches and the texts between them are pieces.

    The pattern is a regular expression with Unicode's classes, which Python's own `re` lacks:
    `\p{L}` is a letter of any script and `\p{N}` a number.

    >>> pieces_of(r"\p{N}", "in 42 días")
    ['in ', '4', '2', ' días']
    """
    return [piece for piece, _ in Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


def split(text: str) -> list[str]:
    """Cut a text into words, as the model's pre-tokenizer does; joined they are the text.

    >>> split("It's the 42nd time.")
    ['It', "'s", ' the', ' ', '4', '2', 'nd', ' time', '.']
    """
    words: list[str] = []
    for piece in pieces_of(r"\p{N}", text):
        words += pieces_of(GPT2_WORDS, piece)
    return words


def encode(text: str, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return the parts of a text: of each of its words, in order."""
    return [part for word in split(text) for part in encode_word(word.encode(), ranks)]


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
    said = {character for each in messages for value in each.values() for character in value}
    unused = (code for code in PRIVATE_USE if chr(code) not in said)
    marks = {ord(text[0]): next(unused) for text in special_ids}
    hidden = [{key: value.translate(marks) for key, value in each.items()} for each in messages]
    longest_first = sorted(special_ids, key=len, reverse=True)
    pattern = "|".join(re.escape(text) for text in longest_first)
    shown = {mark: character for character, mark in marks.items()}
    ids: list[int] = []
    for part in re.split(f"({pattern})", render(hidden)):
        ids += [special_ids[part]] if part in special_ids else encode_text(part.translate(shown))
    return ids
