"""Exercise rms_norm of chapter 13 (warm-up, 5 points, about 10 minutes).

Write RMSNorm: divide each row (the last axis) by sqrt(mean square + `eps`), then multiply it by
`weight`. Compute in float32, whatever the dtype of `x`, and return the dtype of `x`.

Check it:     minigen check exercises/13_layers/rms_norm.py
With a hint:  minigen check exercises/13_layers/rms_norm.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with using(13, rms_norm=mine):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: If you know how models are trained, write the backward pass: given the gradient of the
result, what is the gradient of `x`? Compare with autograd.
"""

# exercise: minigen.model.layers.rms_norm
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "*rows hidden"]:
    """Scale each row to a root mean square of 1 (in float32), then multiply it by `weight`."""
    raise NotImplementedError  # your turn
