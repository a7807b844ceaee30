"""Exercise train of chapter 12 (core, 10 points, about 10 minutes).

Learn merges. `counts` says how often each word (bytes) occurs. Cut every word into single
bytes. Then repeat `num_merges` times: find the most common pair of neighbours (as
`most_common_pair` does, with its rule for equal counts), record it, and join it in all words.
Return the recorded pairs in order. Stop early if no pair is left. `counts` is not changed. You
can use your own two functions, or those of `minigen_course.ch12_tokenizer.reference`.

Check it:     minigen check exercises/12_tokenizer/train.py
With a hint:  minigen check exercises/12_tokenizer/train.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from collections import Counter
    from minigen_course.ch12_tokenizer.reference import split
    from minigen_course.lab.texts import ALICE

    merges = mine(Counter(word.encode() for word in split(ALICE)), 100)
    print(*(b"".join(pair) for pair in merges))

Harder: Count only once. Keep the counts, and an index from each pair to the words that contain
it; after a merge, visit only these words and correct the counts. The same check tells you
whether it still learns the same merges. How many words do you visit in 300 merges of the page
of Alice, instead of 300 times all of them?
"""

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
