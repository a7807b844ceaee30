"""Exercise apply_penalties of chapter 16 (core, 10 points, about 15 minutes).

Write the three penalties for a whole batch. First, `repetition` divides a positive logit and
multiplies a negative one, for tokens of the prompt or the output; a token that is in both is
penalized once. Then, for tokens of the output only, subtract `presence` once, and `frequency`
once per occurrence. Tokens of the prompt do not count for presence and frequency. Each row has
its own three values. Return new logits, and leave the given ones unchanged.

Check it:     minigen check exercises/16_sampling/apply_penalties.py
With a hint:  minigen check exercises/16_sampling/apply_penalties.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32")
    with using(16, apply_penalties=mine):
        params = SamplingParams(temperature=0, frequency_penalty=0.8, max_tokens=40)
        print(llm.generate("I like tea. I like tea. I", params).text)

Harder: llama.cpp penalizes only what occurred among the last 64 tokens (`repeat_last_n`). Which
of the arguments must change for that, and who computes it? Write the function that computes it
from `output_ids` and a window.
"""

# exercise: minigen.sampling.sampler.apply_penalties
from jaxtyping import Bool, Float
from torch import Tensor

from minigen.sampling.sampler import Logits


def apply_penalties(
    logits: Logits,
    in_prompt: Bool[Tensor, "rows vocab"],
    output_counts: Float[Tensor, "rows vocab"],
    repetition: Float[Tensor, " rows"],
    presence: Float[Tensor, " rows"],
    frequency: Float[Tensor, " rows"],
) -> Logits:
    """Make tokens less likely that occurred before.

    `repetition` divides the positive logits, and multiplies the negative ones, of tokens in the
    prompt or the output. For tokens in the output, `presence` is subtracted once, and `frequency`
    once per occurrence.
    """
    raise NotImplementedError  # your turn
