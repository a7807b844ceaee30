"""Exercise swiglu of chapter 13 (warm-up, 5 points, about 5 minutes).

Write the middle of SwiGLU: SiLU of `gate`, times `up`, element by element. It must be correct
for gates of any size.

Check it:     minigen check exercises/13_layers/swiglu.py
With a hint:  minigen check exercises/13_layers/swiglu.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with using(13, swiglu=mine):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Allocate no tensor except the result. Which of torch's functions take `out`?
"""

# exercise: minigen.model.layers.swiglu
from jaxtyping import Float
from torch import Tensor


def swiglu(
    gate: Float[Tensor, "tokens ffn"], up: Float[Tensor, "tokens ffn"]
) -> Float[Tensor, "tokens ffn"]:
    """Return SiLU(gate) * up: the gate decides how much of each hidden unit of `up` passes."""
    raise NotImplementedError  # your turn
