"""Exercise draw of chapter 16 (stretch, 15 points, about 20 minutes).

Draw one token per row by inverse CDF. Row r gets the first token, in the order of the ids, at
which the cumulative probability exceeds `uniform[r]`. A token whose logit is minus infinity
must never be drawn, neither for `uniform` 0 nor for the largest float64 below 1, in any
vocabulary: mind what rounding does to the last cumulative sum. Compute the cumulative sum in
float64. Return token ids of dtype int64, and leave the logits unchanged.

Check it:     minigen check exercises/16_sampling/draw.py
With a hint:  minigen check exercises/16_sampling/draw.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(16, draw=mine):
        params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=24)
        print(llm.generate("The old lighthouse", params).text)

Harder: Draw by the Gumbel trick instead: the argmax of logits + g, where each token has its own
g = -log(-log u). Show with 10,000 draws that both follow the same probabilities. What does the
trick not need that your version needs, and what does it need that yours does not?
"""

# exercise: minigen.sampling.sampler.draw
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.sampling.sampler import Logits


def draw(logits: Logits, uniform: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """Return the token at which the cumulative probability exceeds `uniform`: no dropped one."""
    raise NotImplementedError  # your turn
