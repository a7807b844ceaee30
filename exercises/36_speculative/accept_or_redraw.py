"""Exercise accept_or_redraw of chapter 36 (core, 10 points, about 20 minutes).

Write the classical rule at one place. The token `drafted` was drawn from the drafter's
probabilities q (`draft`), and the result must be distributed as the model's probabilities p
(`target`). Accept the drafted token if `accept_draw` is below min(1, p / q) of that token.
Otherwise draw a token from max(0, p - q), divided by its sum: the first one at which the
cumulated probability exceeds `redraw`. Both draws are uniform in [0, 1), so that 1 - 2^-53 is
the largest. q may be 0 where p is not, and p and q may be equal. Rounding may keep the sum
below 1; the last token with a chance is returned even then.

Check it:     minigen check exercises/36_speculative/accept_or_redraw.py
With a hint:  minigen check exercises/36_speculative/accept_or_redraw.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import numpy as np

    target, draft = np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.7, 0.1])
    draws, found = np.random.default_rng(1), np.zeros(3)
    for _ in range(20_000):
        found[mine(target, draft, int(draws.choice(3, p=draft)), draws.random(), draws.random())] += 1
    print("wanted:", target, "found:", found / found.sum())

Harder: With the temperature 0, p is 1 for one token. And a drafter such as prompt lookup
proposes one token with q = 1. What does the rule say in each of the two cases? Show that in the
second case the chance of acceptance is the same as with sample and match, and find a pair p, q
for which sample and match accepts less.
"""

# exercise: minigen_course.ch36_speculative.reference.accept_or_redraw
import numpy as np
from jaxtyping import Float64


def accept_or_redraw(
    target: Float64[np.ndarray, " vocab"],
    draft: Float64[np.ndarray, " vocab"],
    drafted: int,
    accept_draw: float,
    redraw: float,
) -> int:
    """Return a token that is distributed as `target` if `drafted` was drawn from `draft`.

    Both are probabilities p and q over the vocabulary. The drafted token is accepted if
    `accept_draw` is below min(1, p / q) of that token. Otherwise the token is drawn from
    max(0, p - q), divided by its sum: it is the first one at which the cumulated probability
    exceeds `redraw`. Both draws are uniform in [0, 1), so 1 - 2^-53 is the largest.
    """
    raise NotImplementedError  # your turn
