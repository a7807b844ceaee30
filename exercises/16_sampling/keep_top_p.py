"""Exercise keep_top_p of chapter 16 (core, 10 points, about 15 minutes).

Write the filter of top-p (nucleus) sampling for a whole batch. Each row of `logits` keeps its
most likely tokens: as few as are needed for the sum of their probabilities to reach the row's
own `top_p`. Of equally likely tokens, those with lower ids come first. All other logits become
minus infinity. Return new logits, and leave the given ones unchanged.

Check it:     minigen check exercises/16_sampling/keep_top_p.py
With a hint:  minigen check exercises/16_sampling/keep_top_p.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(16, keep_top_p=mine):
        params = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=24)
        print(llm.generate("The old lighthouse", params).text)

Harder: Do it without sorting all 49,152 tokens. Which tokens can be left out before sorting,
and how do you know that none of them would be kept? `numbers_sorted` of
`minigen_course.ch16_sampling.lesson` counts how many numbers your version sorts.
"""

# exercise: minigen.sampling.sampler.keep_top_p
from jaxtyping import Float
from torch import Tensor

from minigen.sampling.sampler import Logits


def keep_top_p(logits: Logits, top_p: Float[Tensor, " rows"]) -> Logits:
    """Keep the fewest most likely tokens of each row whose probabilities reach `top_p`."""
    raise NotImplementedError  # your turn
