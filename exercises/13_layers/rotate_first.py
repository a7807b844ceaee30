"""Exercise rotate_first of chapter 13 (stretch, 15 points, about 15 minutes).

Rotate only the first numbers of each head, two for each cosine, and leave the others unchanged,
as GPT-NeoX-20B does with a quarter of each head. With `half` cosines for a token, number i
forms a pair with number i + half. Compute in float32, and return the dtype of `x`.

Check it:     minigen check exercises/13_layers/rotate_first.py
With a hint:  minigen check exercises/13_layers/rotate_first.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    from minigen.model.layers import rotary_frequencies, rotary_tables

    x, positions = torch.randn(5, 2, 64), torch.arange(5)
    rotated = mine(x, *rotary_tables(rotary_frequencies(16, 10_000.0), positions))
    print("numbers that changed:", (rotated != x).any(dim=(0, 1)).nonzero().flatten().tolist())

Harder: Why might a model leave numbers unrotated? Which scores between two tokens do not depend
on their distance then?
"""

# exercise: minigen_course.ch13_layers.lesson.rotate_first
from jaxtyping import Float
from torch import Tensor


def rotate_first(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first numbers of each head, two for each cosine; leave the others as they are.

    Number i forms a pair with number i + half. GPT-NeoX-20B rotates the first quarter.
    """
    raise NotImplementedError  # your turn
