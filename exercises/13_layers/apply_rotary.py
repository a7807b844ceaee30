"""Exercise apply_rotary of chapter 13 (core, 10 points, about 15 minutes).

Write the rotary embedding. Numbers i and i + head_dim/2 of a head are the coordinates of a
point. Rotate this point by the angle whose cosine and sine are given for its token and pair.
All heads of a token use the same angles. Compute in float32, and return the dtype of `x`.

Check it:     minigen check exercises/13_layers/apply_rotary.py
With a hint:  minigen check exercises/13_layers/apply_rotary.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with using(13, apply_rotary=mine):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Some models rotate only a part of each head. Write `rotate_first`: `task(13,
"rotate_first")` prints the exercise, and `check(13, rotate_first=mine)` checks it.
"""

# exercise: minigen.model.layers.apply_rotary
from jaxtyping import Float
from torch import Tensor


def apply_rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim/2) by its angle: the pairing of Llama in transformers."""
    raise NotImplementedError  # your turn
