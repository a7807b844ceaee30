"""Exercise causal_mask of chapter 14 (warm-up, 5 points, about 10 minutes).

Write the causal mask: True where a query may attend to a key. The keys are at positions 0 to
`num_keys` - 1, and the queries are at the last `num_queries` of them. A query sees its own
position and those before it; with a window, it sees at most `window` positions, including its
own.

Check it:     minigen check exercises/14_attention/causal_mask.py
With a hint:  minigen check exercises/14_attention/causal_mask.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    # small chunks
    llm = load_model(weights="float32", enable_prefix_caching=False, max_num_batched_tokens=16)
    prompt = "The old lighthouse keeper lost his lamp, so the young sailor gave him a lamp. The keeper"
    with using(14, causal_mask=mine):
        print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Write the mask for two texts that are put one after another into one sequence, so that
neither sees the other.
"""

# exercise: minigen.model.attention.causal_mask
from jaxtyping import Bool
from torch import Tensor


def causal_mask(
    num_queries: int, num_keys: int, window: int | None = None
) -> Bool[Tensor, "queries keys"]:
    """Return True where a query may attend to a key.

    The queries are the last of the keys' positions. A query attends to its own position and
    earlier ones, at most `window` positions in total.

    >>> causal_mask(2, 4, window=2).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    raise NotImplementedError  # your turn
