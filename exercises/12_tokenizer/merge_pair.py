"""Exercise merge_pair of chapter 12 (warm-up, 5 points, about 10 minutes).

Join every occurrence of a pair, from left to right, and return the new list of parts. Parts
that are not the pair stay as they are, and the list that was passed in is not changed. In `a a
a`, the pair (`a`, `a`) is joined once, on the left.

Check it:     minigen check exercises/12_tokenizer/merge_pair.py
With a hint:  minigen check exercises/12_tokenizer/merge_pair.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    parts = [bytes([byte]) for byte in b"then the hen"]
    print(mine(mine(parts, (b"h", b"e")), (b"t", b"he")))

Harder: Do it on a NumPy array of ids without a loop in Python. Which runs of equal ids need
care?
"""

# exercise: minigen_course.ch12_tokenizer.reference.merge_pair
from collections.abc import Sequence

from minigen_course.ch12_tokenizer.reference import Pair


def merge_pair(parts: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Return the parts with every occurrence of a pair joined, from left to right.

    >>> merge_pair([b"t", b"h", b"e", b"n"], (b"h", b"e"))
    [b't', b'he', b'n']
    """
    raise NotImplementedError  # your turn
