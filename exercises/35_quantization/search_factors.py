"""Exercise search_factors of chapter 35 (core, 10 points, about 20 minutes).

Write AWQ's search. The columns of a matrix are multiplied by factors, the result is rounded,
and the factors are divided out again: `rounded(weight * factors) / factors`. The factors are
the mean magnitude of each input channel to the power of an exponent. Try the exponents 0.00,
0.05, ... 0.95 and return the one with the smallest error: the sum of the squared changes of the
outputs `x @ weight.T` over all tokens. `weight` is [rows, columns], `x` are the inputs,
[tokens, columns], and `rounded` takes a matrix and returns it on its grid. Of equal errors the
smallest exponent wins.

Check it:     minigen check exercises/35_quantization/search_factors.py
With a hint:  minigen check exercises/35_quantization/search_factors.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen_course.ch35_quantization.reference import round_by_groups

    weight, x = torch.randn(64, 128), torch.randn(256, 128)
    x[:, [3, 77]] *= 50
    print(f"two large inputs: exponent {mine(weight, x, lambda w: round_by_groups(w, 3, 64)):.2f}")
    print(f"none: {mine(weight, torch.randn(256, 128), lambda w: round_by_groups(w, 3, 64)):.2f}")

Harder: The error of the outputs needs X^T X only: it is the trace of D (X^T X) D^T for a change
D. Use it instead of `x`. From how many tokens on is that cheaper? And why must Q, K and V have
the same factors, if these are to be folded into the norm before them?
"""

# exercise: minigen_course.ch35_quantization.reference.search_factors
from jaxtyping import Float
from torch import Tensor

from minigen_course.ch35_quantization.reference import Round


def search_factors(
    weight: Float[Tensor, "rows columns"], x: Float[Tensor, "tokens columns"], rounded: Round
) -> float:
    """Return AWQ's exponent: of 0.00, 0.05 to 0.95, the one with the smallest error of outputs.

    An exponent makes the factors mean|x| ** exponent, one per column. The matrix is multiplied by
    them, rounded, and divided by them again. The error is the sum of the squares of the changes of
    x @ weight.T; of equal errors the smallest exponent wins.
    """
    raise NotImplementedError  # your turn
