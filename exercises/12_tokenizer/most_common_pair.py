"""Exercise most_common_pair of chapter 12 (warm-up, 5 points, about 10 minutes).

Find the pair of neighbours that occurs most often. `words` is a list of pairs: the parts of a
word, and the number of times that the word occurs in the text. Every two neighbours count, as
often as their word occurs; in `aaa` the pair (`a`, `a`) counts twice. Pairs never reach from
one word into the next. Of pairs that occur equally often, return the greatest, as Python orders
tuples of bytes. Return None if there is no pair.

Check it:     minigen check exercises/12_tokenizer/most_common_pair.py
With a hint:  minigen check exercises/12_tokenizer/most_common_pair.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from collections import Counter
    from minigen_course.ch12_tokenizer.reference import split
    from minigen_course.lab.texts import ALICE

    counts = Counter(word.encode() for word in split(ALICE))
    print(mine([([bytes([byte]) for byte in word], times) for word, times in counts.items()]))

Harder: Which single pass over the words would tell you the ten most common pairs, and why can a
trainer not simply merge all ten at once?
"""

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
