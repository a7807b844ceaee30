"""Exercise accepted_tokens of chapter 36 (warm-up, 5 points, about 5 minutes).

Write the rule of sample and match. A step has verified some `drafts`, and the model's own token
was sampled at each place: `sampled[i]` after the first i drafts, so `sampled` has one token
more than `drafts`. A draft is right if it equals the model's own token at its place and all
drafts before it are right. Return the tokens that the step gives: the right drafts, and the
model's own token after the last right one.

Check it:     minigen check exercises/36_speculative/accepted_tokens.py
With a hint:  minigen check exercises/36_speculative/accepted_tokens.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    print(mine([5, 6, 7], [5, 6, 7, 8]), mine([5, 6, 7], [5, 9, 7, 8]), mine([5, 6, 7], [4, 6, 7, 8]))

Harder: An answer may end inside of the run: at a token of `stop_ids`, or after `max_tokens`.
Cut your result accordingly. How many drafts did the step accept then: those that are right, or
those that are in the answer?
"""

# exercise: minigen_course.ch36_speculative.reference.accepted_tokens
from collections.abc import Sequence


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that a step with drafts gives: the right drafts, and one token more.

    `sampled` has the model's own token at each place: `sampled[i]` was drawn after the first i
    drafts, so there is one more than drafts. A draft is right if it equals the model's own token
    and all drafts before it are right.
    """
    raise NotImplementedError  # your turn
