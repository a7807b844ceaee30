"""Exercise encode_long of chapter 12 (stretch, 15 points, about 25 minutes).

Return what `encode_word` returns, and look pairs up in `ranks` at most three times per byte of
the word. A client may send a server one word of a million characters; rounds over all pairs
could then take an hour.

Check it:     minigen check exercises/12_tokenizer/encode_long.py
With a hint:  minigen check exercises/12_tokenizer/encode_long.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from collections import Counter
    from minigen_course.ch12_tokenizer.reference import split, train
    from minigen_course.lab.texts import ALICE

    merges = train(Counter(word.encode() for word in split(ALICE)), 300)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    print(len(mine(ALICE.encode() * 50, ranks)), "tokens, as one word of", 50 * len(ALICE), "bytes")

Harder: The heap costs a logarithm. GitHub's `bpe` crate needs only linear time: it keeps, for
each prefix of the text, the last token of that prefix's encoding. Why is one token per prefix
enough?
"""

# exercise: minigen_course.ch12_tokenizer.reference.encode_long
from collections.abc import Mapping

from minigen_course.ch12_tokenizer.reference import Pair


def encode_long(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return what `encode_word` returns, with at most 3 look-ups in `ranks` per byte of the word.

    Pairs wait in a heap, lowest rank and then leftmost first. A pair whose parts have changed
    meanwhile is skipped when its turn comes.
    """
    raise NotImplementedError  # your turn
